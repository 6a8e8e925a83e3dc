"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One way to break one rule of docs/rules.md.

    Attributes:
        rule: the rule's number.
        name: what is broken, in a few words.
        file: the edited file, under ``src/``.
        old: text that is in the file exactly once.
        new: text that takes its place.
        tests: pytest node ids (or files) of which at least one must fail.
    """

    rule: int
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
