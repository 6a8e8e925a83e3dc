"""A reserved release between two runs, and between the processes of one run: who may go on with it, who may read."""

import dataclasses
import os
import threading

import pytest
from test_ledger import MIX, SPLIT, states, write_private

from dpmixmin import artifacts, interrupt
from dpmixmin.errors import UserError
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Cap, Ledger

# -- going on ---------------------------------------------------------------------------------------------------


def deployed(folder) -> Ledger:
    """A deployment's ledger, opened anew as the next process does."""
    return Ledger(folder, "clinic", cap=Cap(8.0, 1e-5))


MADE = dataclasses.replace(MIX, made={"config": {}})


def stopped(folder) -> tuple[str, Progress]:
    """Stop a deployment's mechanism after its third step; returns its entry and its state."""
    entries = []

    def attempt():
        with deployed(folder).open(("mixing",), MADE, SPLIT) as release:
            release.progress.save(3, lambda: b"of the old", now=True)
            entries.append((release.entry, release.progress))
            raise interrupt.Interrupted

    with pytest.raises(interrupt.Interrupted):
        attempt()
    return entries[0]


CHANGES = {"inputs": {"inputs": {"proxy": "ab"}}, "code": {"code": "code2"}}


@pytest.mark.parametrize("what", CHANGES)
def test_rules_18_and_23_an_interrupted_release_of_other_code_or_inputs_is_begun_anew(what, tmp_path):
    """Deploy: one label, one charge. A state of other code would make one release of two mechanisms."""
    entry, _ = stopped(tmp_path / "same")
    with deployed(tmp_path / "same").open(("mixing",), MADE, SPLIT) as again:
        assert (again.entry, again.progress.load()) == (entry, (3, b"of the old"))
        again.commit({"weights": b"1"}, {"stage": "mix"})
    assert states(deployed(tmp_path / "same")) == ["committed"]

    entry, progress = stopped(tmp_path / "other")
    with deployed(tmp_path / "other").open(("mixing",), dataclasses.replace(MADE, **CHANGES[what]), SPLIT) as again:
        assert again.entry != entry
        assert again.progress.load() is None
        assert not progress.exists()
        again.commit({"weights": b"1"}, {"stage": "mix"})
    ledger = deployed(tmp_path / "other")
    assert sorted(states(ledger)) == ["committed", "void"]
    assert [entry.state for entry in ledger.charged()] == ["committed"]


# -- several processes of one training --------------------------------------------------------------------------


def test_rule_26_who_joins_reads_its_parts_and_writes_nothing(ledger, run_folder):
    folder = write_private(run_folder)
    with ledger.open(("mixing", "finetune"), MIX, SPLIT) as release:
        artifacts.unrestrict_for_tests()
        other = Ledger(ledger.root.parent, "clinic")
        with other.join(release.entry, ("finetune", "mixing"), MIX, SPLIT) as joined:
            assert joined.table(folder, "p")["unit"].to_pylist() == ["a", "c"]
            assert joined.partition == SPLIT
            assert not hasattr(joined, "commit")
            assert not hasattr(joined, "publish")
            for room in ("public", "private", "released", "study"):
                with pytest.raises(PermissionError, match="may not write"):
                    artifacts.write_json(run_folder / room / "x.json", 1)
        with pytest.raises(PermissionError, match="closed"):
            joined.table(folder, "p")
        release.commit({"weights": b"1"}, {"stage": "mix"})
    assert states(ledger) == ["committed"], "who joins adds nothing to the ledger"


JOINERS = {
    "inputs": (dataclasses.replace(MADE, inputs={"proxy": "ab"}), ("mixing",), SPLIT),
    "code": (dataclasses.replace(MADE, code="code2"), ("mixing",), SPLIT),
    "spec": (dataclasses.replace(MADE, spec=dataclasses.replace(MIX.spec, clip=12.0)), ("mixing",), SPLIT),
    "parts": (MADE, ("mixing", "finetune"), SPLIT),
    "partition": (MADE, ("mixing",), "seed=1"),
}


@pytest.mark.parametrize("what", JOINERS)
@pytest.mark.parametrize("mode", ["study", "deploy"])
def test_rule_18_a_process_joins_only_the_release_it_was_started_for(mode, what, ledger, tmp_path):
    """In deploy the key does not tell code and inputs apart."""
    purpose, parts, split = JOINERS[what]
    if mode == "deploy":
        ledger = deployed(tmp_path / "deployed")
    with ledger.open(("mixing",), MADE, SPLIT) as release:
        with (
            pytest.raises(UserError, match="different configs, inputs or code"),
            ledger.join(release.entry, parts, purpose, split),
        ):
            pytest.fail("joined")
        release.commit({"weights": b"1"}, {"stage": "mix"})


def test_rule_18_nobody_joins_a_release_that_is_over(ledger):
    with ledger.open(("mixing",), MIX, SPLIT) as release:
        release.commit({"weights": b"1"}, {"stage": "mix"})
        with (
            pytest.raises(PermissionError, match="is committed"),
            ledger.join(release.entry, ("mixing",), MIX, SPLIT),
        ):
            pytest.fail("joined")
    with pytest.raises(ValueError, match="died"), ledger.open(("finetune",), MIX, SPLIT) as release:
        raise ValueError("died")
    with pytest.raises(PermissionError, match="is void"), ledger.join(release.entry, ("finetune",), MIX, SPLIT):
        pytest.fail("joined")


def test_who_joins_waits_for_an_entry_that_is_seen_late_but_not_for_ever(ledger):
    with (
        pytest.raises(UserError, match=r"lacks the entry .* ledger\.path"),
        ledger.join("no such entry", ("mixing",), MIX, SPLIT, seconds=0.05),
    ):
        pytest.fail("joined")
    with ledger.open(("mixing",), MIX, SPLIT) as release:
        number = len(list((ledger.root / "entries").iterdir()))
        path = ledger.root / "entries" / f"{number:06d}.json"
        os.rename(ledger.root / "head.json", ledger.root / "late head")
        os.rename(path, ledger.root / "late")
        timer = threading.Timer(0.3, os.rename, (ledger.root / "late", path))
        timer.start()
        other = Ledger(ledger.root.parent, "clinic")
        with other.join(release.entry, ("mixing",), MIX, SPLIT, seconds=30) as joined:
            assert joined.parts == {"mixing"}
        timer.join()
        release.commit({"weights": b"1"}, {"stage": "mix"})
