"""Releases as the ledger's log tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpmixmin.privacy import statement
from dpmixmin.privacy.composition import Touch


@dataclass
class Entry:
    """One release as the log tells it.

    Attributes:
        id: random id.
        key: store key.
        state: reserved, committed or void.
        facts: the reserve event (cell, parts, split, spec, label, …).
    """

    id: str
    key: str
    state: str
    facts: dict[str, Any]

    def touch(self) -> Touch:
        """Return what the composition needs."""
        return statement.touch(self.facts)

    def public(self) -> dict[str, Any]:
        """Return what a statement shows."""
        return statement.public_facts(self.facts, self.id)

    def name(self) -> str:
        """Return a short name for messages."""
        cell = {key: value for key, value in self.facts["cell"].items() if value not in ("", None)}
        wanted = ("stage", "task", "method", "mechanism", "epsilon", "seed")
        words = " ".join(f"{key}={cell[key]}" for key in wanted if key in cell)
        return f"{words} (release {self.facts['label']})"


def entries_of(events: list[dict[str, Any]]) -> list[Entry]:
    """Return the entries that a log's events tell of, in the order of reservation."""
    entries: dict[str, Entry] = {}
    for event in events:
        if event["event"] == "reserved":
            entries[event["entry"]] = Entry(event["entry"], event["key"], "reserved", event)
        elif "entry" in event:
            entries[event["entry"]].state = event["event"]
    return list(entries.values())
