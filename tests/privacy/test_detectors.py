"""Every deliberately broken mechanism is noticed, and no sound one is (tests/mutations/detectors.py)."""

from pathlib import Path

import pytest

MUTATIONS = Path(__file__).resolve().parents[1] / "mutations"


@pytest.mark.slow
def test_every_broken_mechanism_is_noticed_and_no_sound_one(monkeypatch):
    """About three minutes of a core. Seeded, so one verdict; a new seed flags a sound case with probability 0.1 %."""
    monkeypatch.syspath_prepend(MUTATIONS)
    import detectors

    rows = detectors.examine(detectors.BROKEN)
    assert not detectors.sound(rows)
    by_audit = {row.broken.name for row in rows if row.audit}
    assert {"noise x 0.5", "noise forgotten", "sampling without noise", "clip forgotten"} <= by_audit
    by_replay = {row.broken.name for row in rows if row.replay}
    assert {"clip forgotten", "clipped to 2 C", "records counted as units"} <= by_replay
    # Each test that is named notices its error.
    assert all(row.test for row in rows if row.broken.test)
