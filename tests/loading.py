"""Load a private table as a stage would: through an open access, with the width that public sources would give."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from dpmixmin.data import loaders
from dpmixmin.privacy.ledger import PARTS, Access


def load_private(private, inputs, key, width=None):
    """Call ``loaders.load_private``; the width is read off the file where a test names none."""
    if width is None:
        width = _width(private.table)
    return loaders.load_private(private, inputs, key, width, Access(frozenset(PARTS)))


def _width(table) -> int:
    try:
        if table.kind == "idx":
            with open(table.images, "rb") as handle:
                header = handle.read(16)
            height, columns = (int.from_bytes(header[i : i + 4], "big") for i in (8, 12))
            return (height // table.pool) * (columns // table.pool)
        schema = pq.read_schema(table.path)
        kinds = [schema.field(name).type for name in table.features]
        return sum(kind.list_size if pa.types.is_fixed_size_list(kind) else 1 for kind in kinds)
    except (OSError, KeyError, pa.ArrowInvalid):
        return 1
