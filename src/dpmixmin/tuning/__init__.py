"""Choosing settings on public stand-ins, so that no private score is ever used (rule 9)."""

from __future__ import annotations

from dpmixmin.config import Config


def chosen_by(config: Config, declared: bool) -> str:
    """Say how settings came about, for every statement downstream.

    Args:
        config: says whether private scores, uncharged, helped any choice in it.
        declared: whether these settings stand in the config.
    """
    if config.privacy.settings_from == "private_uncharged":
        return "private_uncharged"
    return "user_declared" if declared else "public_standin"
