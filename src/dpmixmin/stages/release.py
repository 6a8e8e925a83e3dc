"""Bundle a deployment's one chain for release.

Reads: the chain's released and public artefacts, the chosen settings, the ledger's log (public parameters of its
entries). Writes: ``released/bundle/``. Touches no private table and spends nothing: it states what was charged.
"""

from __future__ import annotations

from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import bundle
from dpmixmin.release.chain import refuse_study


def add_arguments(parser) -> None:
    """Nothing to add: a deployment has one chain."""


def run(config: Config, args) -> None:
    """Write the bundle, unless the same one lies there."""
    refuse_study(config)  # before a ledger is made for it
    folder, written = bundle.release(config, Ledger.of(config))
    say(f"{folder}: {'written and verified' if written else 'unchanged'}; check a copy anywhere with")
    say("  python -m dpmixmin verify FOLDER")
