"""The record table: what every loader gives and every stage reads.

Arrow schema, fixed::

    record    string                       fixed id of the record
    unit      string                       id of the unit it belongs to (the record itself, or a person)
    features  fixed_size_list<float>[d]    model inputs, scaled by public constants
    labels    struct<NAME: float, ...>     raw label columns

Tables are sorted by (unit, record), so their order says nothing about the source file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from dpmixmin.artifacts import read_table
from dpmixmin.errors import UserError
from dpmixmin.privacy import subsample
from dpmixmin.sections import LabelRule


class OfUnits:
    """What tables of records share, labelled or text: order, units, names."""

    record: np.ndarray
    unit: np.ndarray

    def __len__(self) -> int:
        return len(self.record)

    def sorted(self) -> Self:
        """Return the rows in the order of (unit, record)."""
        return self.take(np.lexsort((self.record, self.unit)))

    def units(self) -> tuple[int, np.ndarray]:
        """Return the number of units and each row's unit index, shape (n,), in the order of sorted unit ids."""
        names, index = np.unique(self.unit, return_inverse=True)
        return len(names), index

    def names(self) -> np.ndarray:
        """Return a 64-bit name of each record (uint64): of its unit and id, since ids need be unique within a unit."""
        return record_names(self.unit, self.record)


@dataclass(frozen=True)
class Records(OfUnits):
    """A record table in memory.

    Attributes:
        record: record ids, shape (n,), text.
        unit: unit ids, shape (n,), text.
        features: float32 of shape (n, d).
        labels: name to float32 of shape (n,); NaN where the source has no value.
    """

    record: np.ndarray
    unit: np.ndarray
    features: np.ndarray
    labels: dict[str, np.ndarray]

    def take(self, index: np.ndarray) -> Records:
        """Return the rows that an index array or a mask selects."""
        return Records(
            self.record[index],
            self.unit[index],
            self.features[index],
            {name: values[index] for name, values in self.labels.items()},
        )

    def counts(self, max_records_per_unit: int) -> dict[str, int | dict[str, int]]:
        """Count what an owner wants to know of the table: raw private data, for ``private/`` only.

        Equal records of different units are counted, never removed: a record must not depend on another unit's.
        """
        units, index = self.units()
        sizes = np.bincount(index, minlength=units)
        columns = [self.features, *(self.labels[name][:, None] for name in sorted(self.labels))]
        owners: dict[bytes, set[int]] = {}
        for row, owner in zip(np.concatenate(columns, axis=1).astype(np.float32), index.tolist(), strict=True):
            owners.setdefault(row.tobytes(), set()).add(owner)
        return {
            "records": len(self),
            "units": units,
            "units_at_the_record_limit": int((sizes >= max_records_per_unit).sum()) if max_records_per_unit > 1 else 0,
            "records_with_nan_or_infinity": int((~np.isfinite(self.features).all(axis=1)).sum()),
            "records_without_label": {name: int(np.isnan(v).sum()) for name, v in self.labels.items()},
            "contents_shared_by_several_units": sum(len(who) > 1 for who in owners.values()),
        }

    def label(self, rule: LabelRule) -> np.ndarray:
        """Return a binary label as float32 of shape (n,): 1, 0, or NaN where the column has no value.

        Raises:
            UserError: the column does not exist.
        """
        return binary_label(self.labels, rule)

    @classmethod
    def read_public(cls, folder: str) -> Records:
        """Read the record table of a public artefact."""
        return cls.from_arrow(read_table(f"{folder}/records.parquet"))

    def to_arrow(self) -> pa.Table:
        """Return the table in its fixed Arrow schema."""
        names = sorted(self.labels)
        flat = pa.array(np.ascontiguousarray(self.features, dtype=np.float32).reshape(-1))
        return pa.table(
            {
                "record": pa.array(self.record, pa.string()),
                "unit": pa.array(self.unit, pa.string()),
                "features": pa.FixedSizeListArray.from_arrays(flat, self.features.shape[1]),
                "labels": labels_to_arrow({name: self.labels[name] for name in names}),
            }
        )

    @classmethod
    def from_arrow(cls, table: pa.Table) -> Records:
        """Read a table of :meth:`to_arrow`; extra columns are ignored."""
        width = table.schema.field("features").type.list_size
        features = table["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return cls(
            strings(table["record"]),
            strings(table["unit"]),
            # A copy, because torch wants arrays that may be written.
            features.reshape(-1, width).astype(np.float32),
            labels_from_arrow(table["labels"]),
        )


def binary_label(labels: dict[str, np.ndarray], rule: LabelRule) -> np.ndarray:
    """Apply a label rule to label columns: float32 of 1, 0, or NaN where there is no value.

    Raises:
        UserError: the column does not exist.
    """
    if rule.column not in labels:
        known = ", ".join(sorted(labels))
        raise UserError(f"label column `{rule.column}` is not in the table; it has: {known}")
    values = labels[rule.column]
    positive = np.isin(values, np.asarray(rule.positive, dtype=values.dtype))
    return np.where(np.isnan(values), np.nan, positive).astype(np.float32)


def record_names(unit: np.ndarray, record: np.ndarray) -> np.ndarray:
    """Return the 64-bit names by which records are subsampled, from their unit ids and record ids."""
    return subsample.names([f"{one} {other}" for one, other in zip(unit.tolist(), record.tolist(), strict=True)])


def strings(column) -> np.ndarray:
    """Return an Arrow text column as a numpy array of ``str``."""
    return np.asarray(column.to_pylist(), dtype=np.str_)


def labels_to_arrow(labels: dict[str, np.ndarray]) -> pa.StructArray:
    """Return label columns as one struct column."""
    arrays = [pa.array(np.asarray(values, dtype=np.float32)) for values in labels.values()]
    return pa.StructArray.from_arrays(arrays, names=list(labels))


def labels_from_arrow(column) -> dict[str, np.ndarray]:
    """Invert :func:`labels_to_arrow`; missing values become NaN."""
    struct = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return {
        field.name: struct.field(i).to_numpy(zero_copy_only=False).astype(np.float32)
        for i, field in enumerate(struct.type)
    }
