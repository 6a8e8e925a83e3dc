"""Derive a statement again from nothing but its own entries and declarations, as somebody who tampers well would."""

from __future__ import annotations

from dpmixmin.privacy import statement


def rebuilt(stated: dict) -> dict:
    """Return what ``statement.build`` makes of a statement's entries."""
    known = (*statement.STUDY_OPEN, *statement.ALWAYS_OPEN)
    return statement.build(
        stated["entries"],
        delta=max((entry["delta"] for entry in stated["entries"]), default=0.0),
        tuning=stated["tuning"],
        aborted=stated["aborted"],
        charge_aborted=stated["aborted_attempts_charged"],
        others=stated.get("other_entries"),
        caveats=[point for point in stated["not_covered"] if point not in known],
    )
