"""The table of sensitive texts: what every text loader gives and every text stage reads.

Arrow schema, fixed::

    record  string         fixed id of the record
    unit    string         id of the unit it belongs to (the record itself, or a person)
    text    string         the text; empty where the source has none that can be read
    tokens  list<int32>    its tokens, without end-of-text marks; none for the empty text

Tables are sorted by (unit, record), so their order says nothing about the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dpmixmin.data.records import OfUnits, strings

SCHEMA = pa.schema(
    [("record", pa.string()), ("unit", pa.string()), ("text", pa.string()), ("tokens", pa.list_(pa.int32()))]
)
_QUANTILES = (0, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True)
class RawTexts:
    """What a format's reader gives, one entry per record.

    Attributes:
        text: texts, None where the source holds none that can be read.
        unit: values of the unit column; None (or an entry None): the record is a unit of its own.
        record_id: values of the id column, if there is one.
        content: bytes that identify a record where its text does not.
    """

    text: list[str | None]
    unit: list | None = None
    record_id: list | None = None
    content: list[bytes] | None = None


@dataclass(frozen=True)
class TextRecords(OfUnits):
    """A table of texts in memory.

    Attributes:
        record: record ids, shape (n,), text.
        unit: unit ids, shape (n,), text.
        text: n texts.
        tokens: n int32 arrays.
    """

    record: np.ndarray
    unit: np.ndarray
    text: list[str]
    tokens: list[np.ndarray]

    def take(self, index: np.ndarray) -> TextRecords:
        """Return the rows that an index array or a mask selects."""
        index = np.asarray(index)
        rows = np.flatnonzero(index) if index.dtype == bool else index
        chosen = rows.tolist()
        return TextRecords(
            self.record[rows], self.unit[rows], [self.text[i] for i in chosen], [self.tokens[i] for i in chosen]
        )

    def counts(self, max_records_per_unit: int) -> dict[str, int | dict[str, int]]:
        """Count what an owner wants to know of the table: raw private data, for ``private/`` only.

        Equal texts of different units are counted, never removed: a record must not depend on another unit's.
        """
        units, index = self.units()
        sizes = np.bincount(index, minlength=units)
        lengths = np.asarray([len(tokens) for tokens in self.tokens] or [0])
        owners: dict[str, set[int]] = {}
        for text, owner in zip(self.text, index.tolist(), strict=True):
            if text:
                owners.setdefault(text, set()).add(owner)
        return {
            "records": len(self),
            "units": units,
            "units_at_the_record_limit": int((sizes >= max_records_per_unit).sum()) if max_records_per_unit > 1 else 0,
            "empty_texts": sum(not text for text in self.text),
            "tokens": int(lengths.sum()),
            "tokens_per_record": {
                f"{share}%": int(np.percentile(lengths, share, method="lower")) for share in _QUANTILES
            },
            "contents_shared_by_several_units": sum(len(who) > 1 for who in owners.values()),
        }

    def to_arrow(self) -> pa.Table:
        """Return the table in its fixed Arrow schema."""
        flat = np.concatenate([np.zeros(0, dtype=np.int32), *self.tokens]).astype(np.int32)
        offsets = pa.array(np.cumsum([0, *(len(tokens) for tokens in self.tokens)]), pa.int32())
        tokens = pa.ListArray.from_arrays(offsets, pa.array(flat))
        return pa.table([self.record.tolist(), self.unit.tolist(), self.text, tokens], schema=SCHEMA)

    @classmethod
    def from_arrow(cls, table: pa.Table) -> TextRecords:
        """Read a table of :meth:`to_arrow`; extra columns are ignored."""
        return cls(
            strings(table["record"]), strings(table["unit"]), table["text"].to_pylist(), _arrays(table["tokens"])
        )


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Return a column of integer lists as arrays that may be written, as torch wants them."""
    found: list[np.ndarray] = []
    for chunk in column.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int32)
        edges = chunk.offsets.to_numpy() - chunk.offsets[0].as_py()
        found += [flat[start:stop] for start, stop in pairwise(edges)]
    return found
