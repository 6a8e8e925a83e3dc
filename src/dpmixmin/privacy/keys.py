"""Keys of ids and partitions of one dataset, and what a deployment fixes once for all.

A study derives its keys from public constants and its seeds, so that a run is reproducible. A deployment draws them
once; they stay beside its ledger (mode 0600). Their NAMES are public: they say which ids and which partition an entry
is about, and entries about different partitions compose sequentially, because their parts overlap.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path

from dpmixmin.errors import UserError
from dpmixmin.privacy.log import link_new


class Keys:
    """The keys of one dataset.

    Args:
        root: the dataset's ledger folder; its name is the dataset's.
        deploy: draw the keys once, instead of deriving them.
    """

    def __init__(self, root: Path, deploy: bool):
        self._root, self._deploy = root, deploy

    def of_ids(self) -> tuple[str, bytes]:
        """Return name and bytes of the HMAC key of record and unit ids."""
        if not self._deploy:
            return "key=public", hashlib.sha256(f"dpmixmin record ids {self._root.name}".encode()).digest()
        kept = self._kept()
        return f"key={kept['id']}", bytes.fromhex(kept["records"])

    def of_split(self, seed: int) -> tuple[str, bytes]:
        """Return name and bytes of a partition's key.

        The seed of a deployment does not re-partition: a second partition of the same units would compose.
        """
        if not self._deploy:
            return f"seed={seed}", hashlib.sha256(b"dpmixmin split key %d" % seed).digest()
        kept = self._kept()
        return f"key={kept['id']}", bytes.fromhex(kept["split"])

    def _kept(self) -> dict[str, str]:
        path = self._root / "keys.json"
        if not path.exists():
            link_new(path, {"id": uuid.uuid4().hex, "records": os.urandom(32).hex(), "split": os.urandom(32).hex()})
        return json.loads(path.read_text())


def bind(root: Path, *, deploy: bool, unit: str) -> None:
    """Hold a deployment to what it began with: its mode and what it protects.

    Args:
        root: the dataset's ledger folder.
        deploy: whether this is a deployment; a study binds nothing, but may not use a deployment's ledger.
        unit: what is protected. Entries that protect different units have no common guarantee.

    Raises:
        UserError: the ledger belongs to a deployment, and this is a study, or protects something else.
    """
    path = root / "deployment.json"
    if deploy:
        link_new(path, {"unit": unit})
    if not path.exists():
        return
    kept = json.loads(path.read_text())["unit"]
    if not deploy:
        raise UserError(
            f"{root}: this ledger belongs to a deployment, whose cap a study would not keep; "
            "study other data, or under another private.name"
        )
    if kept != unit:
        raise UserError(
            f"private.unit: this dataset's ledger protects `{kept}`, not `{unit}`, and the two have no common "
            "guarantee; keep the unit, or use another private.name and add both guarantees up for a person"
        )
