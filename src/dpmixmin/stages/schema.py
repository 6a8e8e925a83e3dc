"""Print the JSON schema of the config: ``python -m dpmixmin schema > config/schema.json``."""

from __future__ import annotations

import json

from dpmixmin import config as config_module


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config, args) -> None:
    """Print the schema."""
    print(json.dumps(config_module.schema(), indent=2))
