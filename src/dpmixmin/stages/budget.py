"""Print what was spent on the config's dataset, and what everything in its ledger would cost together.

Reads: the ledger's log. Writes nothing and spends nothing.
"""

from __future__ import annotations

import json

from dpmixmin.config import Config
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.release import budget


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(config: Config, args) -> None:
    """Print the budget on standard output."""
    found = budget.report(Ledger.of(config), config.privacy.delta)
    print(json.dumps(found, indent=2) if args.json else budget.text(found), end="\n" if args.json else "", flush=True)
