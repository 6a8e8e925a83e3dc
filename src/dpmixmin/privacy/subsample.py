"""Which of a unit's records enter a step: at most G_ULS, anew for each step (DP-MixMin paper, Algorithm 2; rule 13).

A step draws ONE secret. A record's rank is a mixer's value of the secret and the record's name, and a unit's records
of the smallest ranks are chosen. The draw is made whether or not any unit is above the limit, so the number of draws
is public.

Why this is private: for every fixed secret, a unit's subset is a function of that unit's records alone (rule 25), so
adding or removing another unit changes no subset, and the step is the same clipped sum as without subsampling. The
secret does not depend on the data, so the step is a mixture, with the same shares on D and D', of mechanisms with one
sensitivity. That holds for any mixer, and even for a secret that is known: what the mixer's quality decides is only
how uniform the subsets are. NO amplification is claimed: a unit that is sampled counts as fully present.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

SECRET_BYTES = 32
"""Length of a step's secret, drawn from the ``NoiseSource``."""

_ROUNDS = 3
"""Keyed rounds of the mixer; one already spreads a flipped bit over the whole word."""


def names(record_ids: Iterable[str]) -> np.ndarray:
    """Return 64-bit names of record ids: uint64 of shape (n,), a hash of each id alone.

    Two records of one unit whose names collide (2**-64 a pair) are ranked by their order within the unit.
    """
    digests = (hashlib.blake2b(str(each).encode("utf-8", "surrogatepass"), digest_size=8) for each in record_ids)
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<u8").astype(np.uint64)


def chosen(secret: bytes, record: np.ndarray, unit: np.ndarray, limit: int) -> np.ndarray:
    """Choose at most ``limit`` records of each unit; every subset of that size is equally likely.

    Args:
        secret: this step's :data:`SECRET_BYTES` fresh bytes.
        record: names of the records, uint64 of shape (n,), from :func:`names`.
        unit: unit of each record, integers from 0, shape (n,), in any order.
        limit: most records of a unit, at least 1.

    Returns:
        Boolean array of shape (n,). A unit's part of it depends on the secret and that unit's records alone, not on
        other units or on where its records are in the table.
    """
    if limit < 1:
        raise ValueError("limit must be at least 1")
    mask = np.ones(len(unit), dtype=bool)
    # Units within the limit are not ranked: a matter of speed.
    large = np.flatnonzero(np.bincount(unit)[unit] > limit) if len(unit) else np.zeros(0, dtype=int)
    if not len(large):
        return mask
    order = large[np.lexsort((_ranks(secret, record[large]), unit[large]))]
    owner = unit[order]
    starts = np.flatnonzero(np.r_[True, owner[1:] != owner[:-1]])
    place = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    mask[order] = place < limit
    return mask


def _ranks(secret: bytes, record: np.ndarray) -> np.ndarray:
    """Return a keyed permutation of the 64-bit words, applied to each name: distinct names have distinct ranks."""
    keys = np.frombuffer(hashlib.shake_256(secret).digest(8 * (_ROUNDS + 1)), dtype="<u8")
    words = record.astype(np.uint64) ^ keys[0]
    for key in keys[1:]:
        # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a permutation.
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words = (words ^ (words >> np.uint64(31))) ^ key
    return words
