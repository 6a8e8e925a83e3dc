"""Image files as records: a folder with a CSV of labels, or with one sub-folder per class.

Each image is decoded alone and resized; its pixels become values from 0 to 255, channel by channel, row by row.
Nothing but the file and the config decides about them. A PUBLIC image that cannot be read is an error that names it; a
PRIVATE one is a row of NaN, which contributes zero later (docs/rules.md, rule 6), and no decoder may tell (rule 20).

A record without an id column is identified by the bytes of its file, its labels and its unit: the version of the
decoder, the size and the file's name deal nobody anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from dpmixmin.data import fetch
from dpmixmin.data.loaders import Raw, csv_rows, owned
from dpmixmin.errors import UserError
from dpmixmin.table_sections import ImageTable

_SIXTEEN_BIT = 257.0
"""65,535 / 255: images of 16 bits, as in medicine, become 0 to 255 like others; Pillow would cut them off at 255."""


def read(table: ImageTable, unit_column: str | None, *, public: bool) -> Raw:
    """Read all images of a table.

    Args:
        table: the config.
        unit_column: column of the CSV that names the unit, if any.
        public: whether a bad image is an error.

    Raises:
        UserError: no such folder, no such column; for public data, a missing or broken image.
    """
    folder = Path(table.path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{table.path}: no such folder of images; correct the path in the config")
    rows = list(_listed(table, unit_column) if table.table else _sorted_by_class(table, folder, unit_column, public))
    with np.errstate(over="ignore"):  # a numpy warning would tell of a wild value
        labels = {name: np.asarray([_number(row[name]) for row in rows]).astype(np.float32) for name in table.labels}
    features = np.full((len(rows), _channels(table) * table.size[0] * table.size[1]), np.nan, dtype=np.float32)
    units = [(row[unit_column] or None) if unit_column else None for row in rows]
    content = []
    for i, row in enumerate(rows):
        data = _bytes(folder, row[table.file])
        with contextlib.nullcontext() if public else _no_standard_error():
            pixels = _pixels(data, table)
        if pixels is not None:
            features[i] = pixels
        elif public:
            raise UserError(
                f"{folder / (row[table.file] or '')}: missing, or no image that can be read; clean the table"
            )
        shown = b"".join(labels[name][i].tobytes() for name in table.labels)
        content.append(owned(hashlib.sha256(data).digest() + shown, units[i]))
    record_id = [row[table.record_id] for row in rows] if table.record_id else None
    return Raw(features, labels, content, record_id, units if unit_column else None)


def _listed(table: ImageTable, unit_column: str | None) -> Iterator[dict[str, Any]]:
    wanted = [table.file, *table.labels, *(name for name in (table.record_id, unit_column) if name)]
    return csv_rows(fetch.resolve(table.table), wanted)


def _sorted_by_class(
    table: ImageTable, folder: Path, unit_column: str | None, public: bool
) -> Iterator[dict[str, Any]]:
    """Go through the sub-folders; a private class without a folder has no images: nobody may have any (rule 10)."""
    if unit_column:
        raise UserError(
            f"private.unit: folders of images have no column `{unit_column}`; use `record`, or list them in a CSV"
        )
    for label, name in enumerate(table.classes):
        if (folder / name).is_dir():
            for path in sorted((folder / name).iterdir()):
                if not path.name.startswith("."):
                    yield {table.file: f"{name}/{path.name}", table.labels[0]: label}
        elif public:
            raise UserError(f"{folder / name}: no such folder, though `classes` names it; correct the config")


def _channels(table: ImageTable) -> int:
    return 1 if table.colour == "grey" else 3


def _number(value: object) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return np.nan


def _bytes(folder: Path, name: str | None) -> bytes:
    """Return a file's bytes; none if it is missing, or not below the folder."""
    place = PurePosixPath(name or "")
    if not name or place.is_absolute() or ".." in place.parts:
        return b""
    try:
        return (folder / place).read_bytes()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return b""


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    """Send the process's standard error to nowhere: decoders in C (libtiff) write there what they think of a file."""
    kept = os.dup(2)
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _pixels(data: bytes, table: ImageTable) -> np.ndarray | None:
    """Decode and resize one image: float32 of shape (channels * height * width,) in [0, 255], or None."""
    try:
        # Pillow warns of large images, and raises many kinds of errors about broken ones.
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data)) as image:
            if image.mode.startswith("I"):
                deep = np.asarray(image, dtype=np.float32) / _SIXTEEN_BIT
                image = Image.fromarray(np.clip(np.rint(deep), 0, 255).astype(np.uint8))
            height, width = table.size
            small = image.convert("L" if table.colour == "grey" else "RGB").resize(
                (width, height), Image.Resampling.BILINEAR
            )
            values = np.asarray(small, dtype=np.float32).reshape(height, width, _channels(table))
    except Exception:
        return None
    return values.transpose(2, 0, 1).reshape(-1)
