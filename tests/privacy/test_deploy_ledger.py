"""The ledger of a deployment: a cap, no second release by accident, keys of its own (rules 11, 18, 21, 26)."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpmixmin.errors import UserError
from dpmixmin.privacy.ledger import Cap, Derive, Ledger, Mechanism, Study
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.totals import total

DELTA = 1e-5
SPEC = GridGaussian.for_target(epsilon=1.0, delta=DELTA, clip=2.0, steps=5, sampling_rate=1.0, nominal_units=100)
CELL = {"stage": "mixture", "task": "odd", "method": "dp_mixmin", "epsilon": 1.0, "seed": 0}
PURPOSE = Mechanism(SPEC, CELL, {"proxy": "aa"}, {"config": {"a": 1}, "code": {"records": "x"}}, "code1")


def deployment(folder: Path, epsilon=1.5, **options) -> Ledger:
    return Ledger(folder / "ledger", "clinic", cap=Cap(epsilon, DELTA), **options)


def release(ledger: Ledger, purpose=PURPOSE, parts=("mixing",), split="key=a") -> bytes:
    with ledger.open(parts, purpose, split) as opened:
        if not opened.committed:
            opened.commit({"weights": os.urandom(8)}, {"stage": "mix"})
        return opened.stored("weights")


def states(ledger: Ledger) -> list[str]:
    return [entry.state for entry in ledger.entries()]


# -- the cap --------------------------------------------------------------------------------------------------


def test_rule_18_a_release_over_the_cap_is_refused_before_it_is_reserved_and_says_what_used_it(tmp_path):
    ledger = deployment(tmp_path, epsilon=1.2)
    release(ledger)
    other = dataclasses.replace(PURPOSE, cell={**CELL, "task": "even"})
    together = total([entry.touch() for entry in ledger.entries()] * 2, DELTA)[0]
    with pytest.raises(UserError) as caught:
        release(ledger, other)
    text = str(caught.value)
    assert f"{together:.4g}" in text
    assert "above the cap of 1.2" in text
    assert "spent so far: stage=mixture task=odd" in text
    assert "\n" not in text
    assert states(ledger) == ["committed"]
    raised = deployment(tmp_path, epsilon=together * 1.001)
    release(raised, other)
    assert states(raised) == ["committed"] * 2


def test_rule_21_disjoint_parts_share_the_cap_and_a_second_split_key_does_not(tmp_path):
    ledger = deployment(tmp_path, epsilon=1.0)
    release(ledger)
    release(ledger, parts=("finetune",))
    with pytest.raises(UserError, match="above the cap"):
        release(ledger, dataclasses.replace(PURPOSE, cell={**CELL, "seed": 1}), split="key=b")


def test_running_entries_count_and_aborted_ones_where_they_are_charged(tmp_path):
    ledger = deployment(tmp_path, epsilon=1.2)
    other = dataclasses.replace(PURPOSE, cell={**CELL, "task": "even"})
    with ledger.open(("mixing",), PURPOSE, "key=a") as opened:
        with pytest.raises(UserError, match="above the cap"):
            release(deployment(tmp_path, epsilon=1.2), other)
        opened.commit({"weights": b"1"}, {})
    strict = deployment(tmp_path / "strict", epsilon=1.2, charge_aborted=True)
    for _ in range(2):
        with pytest.raises((ValueError, UserError)), strict.open(("mixing",), PURPOSE, "key=a"):
            raise ValueError("died")
    assert states(strict) == ["void"], "the second attempt was refused: the first one is charged"


RACER = """
import sys, time
from pathlib import Path
from tests_privacy import PURPOSE, deployment, release
import dataclasses
folder, task, go = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
ledger = deployment(folder, epsilon=1.2)
go.with_suffix("." + task).touch()
while not go.exists():
    time.sleep(0.001)
try:
    release(ledger, dataclasses.replace(PURPOSE, cell={**PURPOSE.cell, "task": task}))
    print("released")
except Exception as error:
    print(type(error).__name__)
"""


def test_rule_18_of_releases_that_race_for_the_last_budget_one_wins(tmp_path):
    """Six processes at once, room for one: the cap is checked against exactly the log that is appended to."""
    (tmp_path / "tests_privacy.py").write_text(Path(__file__).read_text())
    go = tmp_path / "go"
    names = [f"task{i}" for i in range(6)]
    deployment(tmp_path)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), name, str(go)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    while not all(go.with_suffix(f".{name}").exists() for name in names):
        pass
    go.touch()
    printed = [run.communicate(timeout=120)[0].strip() for run in runs]
    assert sorted(printed) == ["UserError"] * 5 + ["released"]
    assert states(deployment(tmp_path)) == ["committed"]


# -- no second release by accident ----------------------------------------------------------------------------


def test_rule_18_in_deploy_an_edit_of_code_publishes_the_old_output(tmp_path):
    ledger = deployment(tmp_path)
    first = release(ledger)
    edited = dataclasses.replace(PURPOSE, code="code2", made={"config": {"a": 1}, "code": {"records": "y"}})
    assert release(ledger, edited) == first
    assert states(ledger) == ["committed"]
    assert ledger.entries()[0].facts["code"] == "code1", "the log says which code made it"


CHANGES = {
    "spec": {"spec": dataclasses.replace(SPEC, clip=3.0)},
    "inputs": {"inputs": {"proxy": "bb"}},
    "how private inputs were made": {"made": {"config": {"a": 2}, "code": {"records": "x"}}},
}


@pytest.mark.parametrize("what", CHANGES)
def test_rule_18_in_deploy_changed_inputs_need_a_new_label(what, tmp_path):
    ledger = deployment(tmp_path, epsilon=3)
    first = release(ledger)
    changed = dataclasses.replace(PURPOSE, **CHANGES[what])
    with pytest.raises(UserError, match="to a new label"):
        release(ledger, changed)
    assert states(ledger) == ["committed"]
    assert release(deployment(tmp_path, epsilon=3, label="second"), changed) != first
    assert states(ledger) == ["committed"] * 2


# -- nothing uncharged ----------------------------------------------------------------------------------------


def test_rule_26_a_deployment_measures_nothing_without_charge(tmp_path):
    ledger = deployment(tmp_path)
    with pytest.raises(PermissionError, match="without charge"), ledger.open(("test",), Study("a look")):
        pass
    with ledger.open(("test",), Derive()):
        pass
    assert ledger.uncharged() == []


def test_an_uncharged_look_is_noted_once_for_every_kind(ledger):
    for what in ("test metrics of odd", "test metrics of odd", "exact weights"):
        with ledger.open(("test", "mixing"), Study(what)):
            pass
    assert ledger.uncharged() == ["test metrics of odd on mixing, test", "exact weights on mixing, test"]
    assert deployment(ledger.root.parent.parent).uncharged() == ledger.uncharged(), "a later deployment knows"


# -- keys -----------------------------------------------------------------------------------------------------


def test_rule_11_a_deployment_draws_its_keys_once_and_a_study_derives_them(tmp_path, ledger):
    one, again = deployment(tmp_path / "one"), deployment(tmp_path / "one")
    other = deployment(tmp_path / "other")
    assert one.keys.of_ids() == again.keys.of_ids() != other.keys.of_ids()
    assert one.keys.of_split(0) == again.keys.of_split(0) == one.keys.of_split(5), "a seed does not re-partition"
    assert one.keys.of_split(0)[1] != other.keys.of_split(0)[1]
    assert len(one.keys.of_ids()[1]) == len(one.keys.of_split(0)[1]) == 32
    assert one.keys.of_ids()[1] != one.keys.of_split(0)[1]
    assert one.keys.of_split(0)[1].hex() not in one.keys.of_split(0)[0]
    assert (one.root / "keys.json").stat().st_mode & 0o777 == 0o600
    assert ledger.keys.of_split(0) != ledger.keys.of_split(1)
    assert ledger.keys.of_ids() == Ledger(tmp_path / "elsewhere", "clinic").keys.of_ids()


# -- the log's end --------------------------------------------------------------------------------------------


def test_rule_18_altering_or_losing_the_last_event_is_seen(tmp_path):
    for damage in ("altered", "lost"):
        ledger = deployment(tmp_path / damage)
        release(ledger)
        last = sorted((ledger.root / "entries").iterdir())[-1]
        if damage == "altered":
            last.write_text(last.read_text().replace("committed", "void"))
        else:
            last.unlink()
        with pytest.raises(UserError, match=r"altered since|missing from the ledger"):
            deployment(tmp_path / damage).entries()


def test_an_event_that_is_no_json_is_one_line(tmp_path):
    ledger = deployment(tmp_path)
    release(ledger)
    first = sorted((ledger.root / "entries").iterdir())[0]
    first.write_text("{")
    with pytest.raises(UserError, match="hash chain is broken"):
        deployment(tmp_path).entries()
