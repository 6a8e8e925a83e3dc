"""Assigning units to parts by a keyed hash of their id (rules 11 and 12).

A unit's part depends on its id, the key and public fractions alone: removing a unit moves no other, which is what
makes parallel composition true for add/remove neighbours.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpmixmin.data.corpora import made_with
from dpmixmin.data.records import Records, strings
from dpmixmin.data.text_records import TextRecords
from dpmixmin.paths import Paths
from dpmixmin.privacy.access import Access
from dpmixmin.privacy.keys import Keys
from dpmixmin.privacy.ledger import PARTS
from dpmixmin.sections import Parts, Private


@dataclass(frozen=True)
class Partition:
    """Which unit is in which part: everything that it depends on besides the units themselves.

    Attributes:
        ids: name of the ids: their key, the unit, and the rule that makes them.
        name: name of the partition: the split key, the unit, the rule of the ids, the fractions. Entries of the ledger
            carry it; different names are different partitions of the same people, so they compose sequentially.
        key: the split key.
    """

    ids: str
    name: str
    key: bytes


def partition(keys: Keys, private: Private, seed: int) -> Partition:
    """Return the partition that a config, a dataset's keys and a seed define."""
    (ids_key, _), (split_key, secret) = keys.of_ids(), keys.of_split(seed)
    return Partition(f"{ids_key}/{_rule(private)}", partition_name(split_key, private), secret)


def partition_name(split_key: str, private: Private) -> str:
    """Name the partition that a split key of this name makes."""
    fractions = "-".join(repr(getattr(private.parts, part)) for part in PARTS)
    return f"{split_key}/{_rule(private)}/fractions={fractions}"


def _rule(private: Private) -> str:
    return f"unit={private.unit}/ids={id_rule(private)}"


_TEXT_IDS = {"jsonl": "json-v2", "json": "json-v2"}
"""JSON lines, whose values count as text (data/texts.py); in version 1 their JSON types were part of an id."""


def id_rule(private: Private) -> str:
    """Name the rule that makes ids: another column, or content of other columns, deals every unit anew.

    So does another format, which reads the same value as another type. The version of mail's ids changes with what
    they are made of (data/mail.py), not with the cleaning of texts.
    """
    table = private.table
    if table.kind == "idx":
        return "image-content"
    if table.kind in ("maildir", "spam_assassin"):
        return f"mail-v1/{table.kind}"
    form = "" if table.kind == "parquet" else f"/{table.kind}"
    if table.kind == "text":
        suffix = Path(table.path).suffix.removeprefix(".")
        form = f"/{_TEXT_IDS.get(suffix, suffix)}"
    if table.record_id is not None:
        return f"column-{table.record_id}{form}"
    if table.kind in ("text", "hub"):
        return f"content-text/{table.column}{form}"
    columns = [*table.labels, "", *table.classes] if table.kind == "images" else [*table.features, "", *table.labels]
    digest = hashlib.sha256("\0".join(columns).encode()).hexdigest()
    return f"content-{digest[:8]}{form}"


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


def open_part(access: Access, paths: Paths, wanted: Partition, seed: int) -> Records | TextRecords:
    """Return the sensitive records, or texts, of the parts that an access may see, in the order of (unit, record).

    Raises:
        UserError: the tables on disk belong to other ids, another partition or another tokenizer.
    """
    # By unit: a part is a property of the unit, and record ids need be unique within a unit only.
    members = strings(access.table(paths.split(seed), "split", ids=wanted.ids, partition=wanted.name)["unit"])
    table = access.table(paths.records(), "records", ids=wanted.ids, **made_with(paths))
    records = (TextRecords if "tokens" in table.column_names else Records).from_arrow(table)
    return records.take(np.isin(records.unit, members))
