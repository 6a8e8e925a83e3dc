"""Loaders of records with features and labels: one function per format, and the ids that texts have too.

Every transformation here is a function of ONE row and public constants (rule 25): pooling, scaling, clamping, ids.
For PUBLIC data a bad value or an empty table is an error. For PRIVATE data only the schema is one: a value that is
not finite stays NaN and contributes zero later (rule 6), and an empty table is a table (rule 5).
"""

from __future__ import annotations

import csv
import hashlib
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dpmixmin.data import fetch
from dpmixmin.data.records import Records
from dpmixmin.data.text_records import TextRecords
from dpmixmin.errors import UserError
from dpmixmin.sections import Inputs, Private
from dpmixmin.table_sections import IdxTable, ImageTable, LabelTable, ParquetTable

if TYPE_CHECKING:
    import pyarrow as pa

_Table = TypeVar("_Table", Records, TextRecords)
_LONGEST_FIELD = 2**31 - 1
"""Characters of a CSV field; the standard library's own limit would make a long private text an error."""


@dataclass
class Raw:
    """What a format's reader gives: raw values, and per row the bytes that identify its content."""

    features: np.ndarray
    labels: dict[str, np.ndarray]
    content: list[bytes]
    record_id: list | None = None
    unit: list | None = None


def load_public(table: LabelTable, inputs: Inputs) -> Records:
    """Load a public table; ids are row numbers.

    Raises:
        UserError: unreadable, empty, or holding NaN or infinity.
    """
    raw = _read(table, None, None)
    where = _place(table)
    if not len(raw.features):
        raise UserError(f"{where}: no rows; a public source must have some")
    for name, values in {"features": raw.features, **raw.labels}.items():
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():
            raise UserError(f"{where}: row {int(np.flatnonzero(bad)[0])} has NaN or infinity in {name}; clean it")
    ids = np.asarray([f"{row:09d}" for row in range(len(raw.features))], dtype=np.str_)
    return Records(ids, ids, _scale(raw.features, inputs), raw.labels).sorted()


def load_private(private: Private, inputs: Inputs, key: bytes, width: int, access: object) -> Records:
    """Load the sensitive table, with ids of :func:`identify`, within the limits of :func:`within_limits`.

    Args:
        private: the dataset's config.
        inputs: public input constants.
        key: HMAC key of the ids.
        width: number of features, from the public sources; a row of another length is all NaN and contributes zero.
        access: an open ``ledger.Access`` (rule 26).

    Raises:
        UserError: the schema is wrong (file, columns, types); never about a value.
    """
    if not getattr(access, "is_open", False):
        raise PermissionError("the sensitive source is opened through ledger.open only")
    unit_column = None if private.unit == "record" else private.unit
    raw = _read(private.table, unit_column, width)
    units = raw.unit if raw.unit is not None else [None] * len(raw.features)
    record, unit = identify(units, raw.record_id, raw.content, key)
    return within_limits(Records(record, unit, _scale(raw.features, inputs), raw.labels), private)


# -- ids and limits, for texts too ----------------------------------------------------------------------------


def identify(
    units: list, record_ids: list | None, contents: Iterable[bytes], key: bytes
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of records and of their units, text of shape (n,) each.

    A record's id is the HMAC of its id column (and its unit), or of its content with an occurrence number, so
    equal rows get different ids and removing one row changes no other's (rule 11). A unit's id is the HMAC of its
    column; a row without one is a unit of its own.

    Args:
        units: each row's value of the unit column, or None.
        record_ids: each row's value of the id column, if there is one.
        contents: without it, the bytes that identify each row; they hold the unit, so that equal rows of two units
            stay apart.
        key: HMAC key of the ids.
    """
    if record_ids is None:
        record = content_ids(contents, key)
    else:
        pairs = zip(units, record_ids, strict=True)
        record = [_hmac(key, b"record", value_bytes(unit) + b"\0" + value_bytes(value)) for unit, value in pairs]
    unit = [
        _hmac(key, b"unit", value_bytes(value)) if value is not None and value == value else identity
        for value, identity in zip(units, record, strict=True)
    ]
    return np.asarray(record, dtype=np.str_), np.asarray(unit, dtype=np.str_)


def within_limits(records: _Table, private: Private) -> _Table:
    """Sort by (unit, record), and keep what a public rule about each unit alone keeps (rules 13 and 25).

    A unit with fewer than ``min_records_per_unit`` records is left out; of any other, at most
    ``max_records_per_unit`` records stay, those with the smallest ids.
    """
    records = records.sorted()
    _, index = records.units()
    sizes = np.bincount(index)
    rank = np.arange(len(index)) - (np.cumsum(sizes) - sizes)[index]
    enough = sizes[index] >= private.min_records_per_unit
    records, rank = records.take(enough), rank[enough]
    return records.take(rank < private.max_records_per_unit)


def content_ids(contents: Iterable[bytes], key: bytes) -> list[str]:
    """Return HMAC ids of row contents; the j-th of several equal rows is numbered j."""
    seen: dict[bytes, int] = {}
    ids = []
    for content in contents:
        identity = hmac.digest(key, content, "sha256")
        occurrence = seen.get(identity, 0)
        seen[identity] = occurrence + 1
        ids.append(_hmac(key, b"occurrence", identity + occurrence.to_bytes(8, "big")))
    return ids


def _hmac(key: bytes, purpose: bytes, value: bytes) -> str:
    return hmac.new(key, purpose + b"\0" + value, hashlib.sha256).hexdigest()[:32]


def value_bytes(value) -> bytes:
    """Return the bytes that stand for a value of an id or unit column, its type included."""
    return f"{type(value).__name__}:{value!r}".encode()


def owned(content: bytes, unit) -> bytes:
    """Return the bytes that identify a record of this content and unit; those of another unit never equal them."""
    return len(content).to_bytes(8, "big") + content + value_bytes(unit)


def _scale(features: np.ndarray, inputs: Inputs) -> np.ndarray:
    """Scale by public constants and clamp; infinities become the bound, NaN stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):  # a numpy warning would tell of a wild value
        scaled = (features.astype(np.float64) - inputs.offset) / inputs.scale
    return np.clip(scaled, -inputs.bound, inputs.bound).astype(np.float32)


def _place(table: LabelTable) -> str:
    return table.images if isinstance(table, IdxTable) else table.path


def _read(table: LabelTable, unit_column: str | None, width: int | None) -> Raw:
    """Read a table; ``width`` is None for public tables, whose own rows say how many features there are."""
    if isinstance(table, IdxTable):
        if unit_column is not None:
            raise UserError(f"private.unit: idx files have no column `{unit_column}`; use `record` or a Parquet table")
        raw = _read_idx(table)
    elif isinstance(table, ImageTable):
        from dpmixmin.data import images  # it needs Pillow, and this module

        raw = images.read(table, unit_column, public=width is None)
    else:
        return _read_parquet(table, unit_column, width)
    if width is not None and raw.features.shape[1] != width:
        raise UserError(
            f"{_place(table)}: {raw.features.shape[1]} features a record, the public sources have {width}; "
            "they must agree"
        )
    return raw


# -- idx ------------------------------------------------------------------------------------------------------


def _read_idx(table: IdxTable) -> Raw:
    images = _idx(fetch.resolve(table.images), 3)
    labels = _idx(fetch.resolve(table.labels), 1)
    if len(images) != len(labels):
        raise UserError(f"{table.images} and {table.labels}: different numbers of records; they must be one pair")
    if table.rows:
        images, labels = images[slice(*table.rows)], labels[slice(*table.rows)]
    height, width = images.shape[1:]
    if height % table.pool or width % table.pool:
        raise UserError(f"{table.images}: {height}x{width} pixels cannot be pooled by {table.pool}; use a divisor")
    content = [image.tobytes() + bytes([label]) for image, label in zip(images, labels, strict=True)]
    pool = table.pool
    pooled = images.reshape(len(images), height // pool, pool, width // pool, pool).mean(axis=(2, 4))
    flat = pooled.reshape(len(images), (height // pool) * (width // pool))
    return Raw(flat, {table.label: labels.astype(np.float32)}, content)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes: magic 0 0 8 D, D big-endian sizes, data."""
    data = path.read_bytes()
    start = 4 + 4 * dimensions
    if len(data) < start or data[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(f"{path}: not an idx file with {dimensions} dimension(s) of bytes; check the path")
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    if len(data) != start + int(np.prod(shape)):
        raise UserError(f"{path}: truncated or too long for its header; fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


# -- CSV ------------------------------------------------------------------------------------------------------


def csv_rows(path: Path, wanted: Iterable[str]) -> Iterator[dict[str, str | None]]:
    """Read a CSV with a header, row by row: the wanted columns, None where a row is short.

    Bytes that are not UTF-8 become lone surrogates, so that one bad row does not stop the others.

    Raises:
        UserError: no readable header, or a column is missing.
    """
    wanted = list(wanted)
    csv.field_size_limit(_LONGEST_FIELD)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows = csv.reader(lines)
        header = next(rows, [])
        require_columns(path, header, wanted)
        places = {name: header.index(name) for name in wanted}
        for row in rows:
            if row:  # a blank line is no row
                yield {name: row[place] if place < len(row) else None for name, place in places.items()}


def require_columns(path: Path | str, names: Iterable[str], wanted: Iterable[str]) -> None:
    """Check a schema.

    Raises:
        UserError: it lacks a wanted column.
    """
    names = list(names)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UserError(f"{path}: no column `{missing[0]}`; it has: {', '.join(names[:20])}")


# -- Parquet --------------------------------------------------------------------------------------------------


def parquet_table(path: Path, wanted: Iterable[str]) -> pa.Table:
    """Read a Parquet file that must have the wanted columns.

    Raises:
        UserError: not a Parquet file, or a column is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        require_columns(path, pq.read_schema(path).names, wanted)
        return pq.read_table(path, partitioning=None)
    except (pa.ArrowInvalid, OSError):
        raise UserError(f"{path}: not a readable Parquet file; check or rewrite it") from None


def _read_parquet(table: ParquetTable, unit_column: str | None, width: int | None) -> Raw:
    path = fetch.resolve(table.path)
    wanted = [*table.features, *table.labels]
    wanted += [name for name in (table.record_id, unit_column) if name]
    data = parquet_table(path, wanted)
    features = _features(data, table.features, path, width)
    with np.errstate(over="ignore"):  # a numpy warning would tell of a wild value
        labels = {name: _scalars(data[name], name, path).astype(np.float32) for name in table.labels}
    units = column_values(data[unit_column]) if unit_column else None
    content = []
    if table.record_id is None:
        # The configured columns, as the numbers they are read as: a new column, or another type of the same numbers,
        # must not deal every record anew.
        numbers = np.concatenate([features, *(labels[name][:, None] for name in table.labels)], axis=1)
        owners = units or [None] * len(numbers)
        content = [row.tobytes() + value_bytes(owner) for row, owner in zip(numbers, owners, strict=True)]
    record_id = column_values(data[table.record_id]) if table.record_id else None
    return Raw(features, labels, content, record_id, units)


def _features(data, names: tuple[str, ...], path: Path, width: int | None) -> np.ndarray:
    """Return the feature columns side by side, float64 of shape (n, d)."""
    import pyarrow as pa

    columns = []
    for name in names:
        kind = data[name].type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            # The length is not in the schema: for private data it comes from the public sources.
            columns.append(_lists(data[name], name, path, width, alone=len(names) == 1))
        elif pa.types.is_fixed_size_list(kind):
            columns.append(_lists(data[name], name, path, kind.list_size, alone=True))
        else:
            columns.append(_scalars(data[name], name, path).reshape(-1, 1))
    features = np.concatenate(columns, axis=1)
    if width is not None and features.shape[1] != width:
        raise UserError(f"{path}: {features.shape[1]} features a record, the public sources have {width}")
    return features


def _require_numbers(kind, name: str, path: Path) -> None:
    import pyarrow as pa

    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise UserError(f"{path}: column `{name}` holds {kind}; it must hold numbers (or lists of numbers)")


def _scalars(column, name: str, path: Path) -> np.ndarray:
    """Return a column of numbers as float64 of shape (n,); nulls become NaN."""
    import pyarrow as pa

    _require_numbers(column.type, name, path)
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _lists(column, name: str, path: Path, width: int | None, *, alone: bool) -> np.ndarray:
    """Return a column of number lists as float64 of shape (n, width); a row of another length is all NaN.

    With ``width`` None (public data) the first row decides, and another length is an error.
    """
    _require_numbers(column.type.value_type, name, path)
    rows = column_values(column)
    if width is None:
        width = len(rows[0]) if rows and rows[0] is not None else 0
        odd = next((i for i, row in enumerate(rows) if row is None or len(row) != width), None)
        if odd is not None:
            raise UserError(f"{path}: row {odd} of column `{name}` has another length than the first; clean it")
    elif not alone:
        raise UserError(f"{path}: column `{name}` is one of several features; store it as a fixed-size list")
    out = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        if row is not None and len(row) == width:
            out[i] = [np.nan if value is None else value for value in row]
    return out


def column_values(column) -> list:
    """Return a column's values as Python objects; one that cannot be read does not stop the others."""
    try:
        return column.to_pylist()
    except Exception:
        return [_value(scalar) for scalar in column]


def _value(scalar):
    try:
        return scalar.as_py()
    except Exception:
        return "unreadable"
