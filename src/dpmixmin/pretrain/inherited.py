"""The privacy statement that a pretrained model inherits: pretraining post-processes its weights."""

from __future__ import annotations

from dpmixmin import artifacts
from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger


def statement_of(config: Config, ledger: Ledger, paths: Paths, mixture: Cell | None) -> dict:
    """Return the privacy statement that a model inherits from its weights."""
    if mixture is None:
        return ledger.statement([], delta=config.privacy.delta, tuning="none")
    upstream = artifacts.read_json(f"{mixture.folder(paths)}/privacy.json")
    if upstream["guarantee"] is None:
        return upstream
    entries = [entry["entry"] for entry in upstream["entries"]]
    return ledger.statement(entries, delta=config.privacy.delta, tuning=upstream["tuning"])
