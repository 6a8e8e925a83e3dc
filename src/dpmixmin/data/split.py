"""Assigning units to parts by a keyed hash of their id (rules 11 and 12).

A unit's part depends on its id, the key and public fractions alone: removing a unit moves no other, which is what
makes parallel composition true for add/remove neighbours.
"""

from __future__ import annotations

import hmac

import numpy as np

from dpmixmin.data.records import Records, strings
from dpmixmin.paths import Paths
from dpmixmin.privacy.access import Access
from dpmixmin.privacy.ledger import PARTS
from dpmixmin.sections import Parts


def split_id(key_name: str, parts: Parts) -> str:
    """Name a partition: the key and the fractions, since either alone does not define the parts."""
    fractions = "-".join(repr(getattr(parts, part)) for part in PARTS)
    return f"{key_name}/fractions={fractions}"


def assign(units: np.ndarray, key: bytes, parts: Parts) -> np.ndarray:
    """Return the part of each row's unit.

    Args:
        units: unit ids, text, shape (n,).
        key: the split key.
        parts: public fractions.

    Returns:
        Part names, shape (n,).
    """
    edges = np.cumsum([getattr(parts, part) for part in PARTS])
    edges[-1] = np.inf
    cache: dict[str, int] = {}
    for unit in set(units.tolist()):
        number = int.from_bytes(hmac.digest(key, unit.encode(), "sha256")[:8], "big") / 2**64
        cache[unit] = int(np.searchsorted(edges, number, side="right"))
    names = np.asarray(PARTS)
    return names[[cache[unit] for unit in units.tolist()]] if len(units) else names[:0]


def open_part(access: Access, paths: Paths, seed: int) -> Records:
    """Return the sensitive records of the parts that an access may see, in the order of (unit, record)."""
    # By unit: a part is a property of the unit, and record ids need be unique within a unit only.
    members = strings(access.table(paths.split(seed), "split")["unit"])
    records = Records.from_arrow(access.table(paths.records(), "records"))
    return records.take(np.isin(records.unit, members))
