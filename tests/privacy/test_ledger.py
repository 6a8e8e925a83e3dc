"""The ledger: one charge per release whatever dies, and the only door to private tables (rules 18, 19, 21, 26)."""

import dataclasses
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from dpmixmin import artifacts
from dpmixmin.errors import UserError
from dpmixmin.privacy.access import Access
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.gaussian import gaussian_epsilon
from dpmixmin.privacy.ledger import Derive, Ledger, Mechanism, Study
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import NoiseSource

DELTA = 1e-5
MIX_SPEC = GridGaussian.for_target(
    epsilon=1.0, delta=DELTA, clip=13.0, steps=50, sampling_rate=1.0, nominal_units=100, unit="patient"
)
TUNE_SPEC = ModelGaussian.for_target(
    epsilon=0.8, delta=DELTA, clip=1.0, steps=20, sampling_rate=0.1, nominal_units=700, unit="patient"
)
CELL = {"task": "odd", "method": "dp_mixmin", "epsilon": 1.0, "seed": 0}
MIX = Mechanism(MIX_SPEC, CELL, {"proxy": "aa"}, {"rows": 3}, "code1")
TUNE = Mechanism(TUNE_SPEC, {**CELL, "mechanism": "dp_sgd"}, {"model": "bb"}, {"rows": 3}, "code1")
SPLIT = "seed=0"


class CountingNoise(NoiseSource):
    """The operating system's generator, counted."""

    def __init__(self):
        self.draws = 0

    def random_bytes(self, count):
        self.draws += 1
        return super().random_bytes(count)


def release(ledger, noise, folder=None, purpose=MIX, parts=("mixing",), split=SPLIT) -> tuple[bytes, str]:
    """What a stage does: draw and commit unless it is committed, then publish from the store."""
    with ledger.open(parts, purpose, split) as opened:
        if not opened.committed:
            opened.commit({"weights": noise.random_bytes(16)}, {"stage": "mix"})
        if folder is not None:
            opened.publish(folder, {"privacy.json": b"{}"})
        return opened.stored("weights"), opened.entry


def states(ledger) -> list[str]:
    return sorted(entry.state for entry in ledger.entries())


def event_files(ledger) -> list[Path]:
    return sorted((ledger.root / "entries").iterdir())


# -- one charge per release (rule 18) -------------------------------------------------------------------------


def test_rule_18_a_committed_release_is_published_again_without_noise_and_without_an_entry(ledger, run_folder):
    noise, folder = CountingNoise(), run_folder / "released" / "mixtures"
    first, entry = release(ledger, noise, folder)
    events = len(event_files(ledger))
    for path in folder.iterdir():
        path.unlink()
    artifacts.unrestrict_for_tests()
    again, same_entry = release(ledger, noise, folder)
    assert noise.draws == 1
    assert (again, same_entry) == (first, entry)
    assert (folder / "weights").read_bytes() == first
    assert states(ledger) == ["committed"]
    assert len(event_files(ledger)) == events == 2
    artifacts.verify(folder)


OTHERS = {
    "cell": dataclasses.replace(MIX, cell={**CELL, "seed": 1}),
    "spec": dataclasses.replace(MIX, spec=dataclasses.replace(MIX_SPEC, clip=12.0)),
    "inputs": dataclasses.replace(MIX, inputs={"proxy": "ab"}),
    "how private inputs were made": dataclasses.replace(MIX, made={"rows": 4}),
    "code": dataclasses.replace(MIX, code="code2"),
    "randomness": dataclasses.replace(MIX, private_randomness=False),
}


@pytest.mark.parametrize("what", OTHERS)
def test_rule_18_another_cell_spec_or_input_is_another_release(what, ledger):
    noise = CountingNoise()
    first, entry = release(ledger, noise)
    second, other = release(ledger, noise, purpose=OTHERS[what])
    assert first != second
    assert entry != other
    assert noise.draws == 2
    assert states(ledger) == ["committed"] * 2


def test_rule_18_other_parts_split_key_or_label_are_other_releases(ledger):
    noise = CountingNoise()
    release(ledger, noise)
    release(ledger, noise, parts=("mixing", "finetune"))
    release(ledger, noise, parts=("finetune", "mixing"))
    release(ledger, noise, split="seed=1")
    relabelled = Ledger(ledger.root.parent, "clinic", label="second")
    release(relabelled, noise)
    release(relabelled, noise)
    assert noise.draws == 4, "the order of parts is no difference"
    assert states(ledger) == ["committed"] * 4


def test_rule_18_a_second_clone_sees_the_same_entries_and_another_dataset_none(ledger):
    noise = CountingNoise()
    first, entry = release(ledger, noise)
    clone = Ledger(ledger.root.parent, "clinic")
    assert clone.dataset_id == ledger.dataset_id
    assert [e.id for e in clone.entries()] == [entry]
    assert release(clone, noise) == (first, entry)
    release(clone, noise, purpose=TUNE, parts=("finetune",))
    assert len(ledger.entries()) == 2, "the first object reads what the second wrote"
    stranger = Ledger(ledger.root.parent, "bank")
    assert stranger.entries() == []
    assert stranger.dataset_id != ledger.dataset_id


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_rule_18_an_exception_inside_voids_the_entry_and_a_retry_draws_afresh(error, ledger):
    def interrupted():
        with ledger.open(("mixing",), MIX, SPLIT):
            raise error("died")

    with pytest.raises(error, match="died"):
        interrupted()
    assert states(ledger) == ["void"]
    noise = CountingNoise()
    _, entry = release(ledger, noise)
    assert noise.draws == 1
    assert states(ledger) == ["committed", "void"]
    assert ledger.statement([entry], delta=DELTA, tuning="public_standin")["aborted_attempts"] == 1


def test_rule_18_an_exception_after_the_commit_keeps_it(ledger):
    def interrupted():
        with ledger.open(("mixing",), MIX, SPLIT) as opened:
            opened.commit({"weights": b"0123"}, {"stage": "mix"})
            raise ValueError("died")

    with pytest.raises(ValueError, match="died"):
        interrupted()
    assert states(ledger) == ["committed"]
    assert release(ledger, CountingNoise())[0] == b"0123"


def test_a_mechanism_that_never_commits_is_an_error_and_void(ledger):
    def forgetful():
        with ledger.open(("mixing",), MIX, SPLIT):
            pass

    with pytest.raises(RuntimeError, match="never committed"):
        forgetful()
    assert states(ledger) == ["void"]


def test_a_release_commits_once_and_publishes_only_what_is_committed(ledger, run_folder):
    with ledger.open(("mixing",), MIX, SPLIT) as opened:
        with pytest.raises(RuntimeError, match="commit first"):
            opened.publish(run_folder / "released" / "x", {})
        opened.commit({"weights": b"1"}, {"stage": "mix"})
        with pytest.raises(RuntimeError, match="committed already"):
            opened.commit({"weights": b"2"}, {"stage": "mix"})
        assert opened.stored("weights") == b"1"
    with pytest.raises(PermissionError, match="closed"):
        opened.commit({"weights": b"3"}, {"stage": "mix"})
    assert states(ledger) == ["committed"]


def test_a_mechanism_needs_its_split_key_and_known_parts(ledger):
    for parts, split in ((("mixing",), ""), (("everything",), SPLIT), ((), SPLIT)):
        with pytest.raises(ValueError, match=r"its partition|parts must be"), ledger.open(parts, MIX, split):
            pass
    assert ledger.entries() == []


# -- tampering and modes --------------------------------------------------------------------------------------


def three_releases(ledger):
    for seed in range(3):
        release(ledger, CountingNoise(), purpose=dataclasses.replace(MIX, cell={"seed": seed}))


@pytest.mark.parametrize("number", [1, 3, 5])
def test_an_altered_event_breaks_the_hash_chain_and_is_refused(number, ledger):
    three_releases(ledger)
    path = event_files(ledger)[number - 1]
    event = json.loads(path.read_text())
    event["parts"] = ["test"]
    path.write_text(json.dumps(event))
    with pytest.raises(UserError, match="hash chain is broken") as caught:
        Ledger(ledger.root.parent, "clinic").entries()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_missing_event_is_refused_for_reading_and_writing(number, ledger):
    three_releases(ledger)
    event_files(ledger)[number - 1].unlink()
    reopened = Ledger(ledger.root.parent, "clinic")
    with pytest.raises(UserError, match="missing from the ledger"):
        reopened.entries()
    with pytest.raises(UserError, match="missing from the ledger"):
        release(reopened, CountingNoise(), purpose=TUNE)
    assert len(event_files(ledger)) == 5


def test_rule_19_ledger_folders_are_0700_and_events_0600_whatever_the_umask(tmp_path):
    before = os.umask(0o000)
    try:
        ledger = Ledger(tmp_path / "ledger", "clinic")
        release(ledger, CountingNoise())
    finally:
        os.umask(before)
    folders = [tmp_path / "ledger", ledger.root, *(ledger.root / n for n in ("entries", "leases", "store", "tmp"))]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}
    files = [*event_files(ledger), ledger.root / "dataset.json"]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}


# -- what a purpose may do (rule 26) --------------------------------------------------------------------------


def write_private(run_folder) -> Path:
    folder = run_folder / "private" / "predictions"
    table = pa.table({"unit": ["a", "b", "c"], "part": ["mixing", "test", "finetune"], "value": [1.0, 2.0, 3.0]})
    manifest = artifacts.manifest("predict", config={}, code="c", parents=[], private=True)
    artifacts.publish(folder, {"p.parquet": artifacts.parquet_bytes(table)}, manifest)
    return folder


ALLOWED = {"derive": {"private"}, "study": {"private", "study"}, "mechanism": set()}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("room", ["public", "private", "released", "study"])
def test_rule_26_each_purpose_may_write_only_to_its_rooms(name, room, ledger, run_folder):
    purpose = {"derive": Derive(), "study": Study("a look"), "mechanism": MIX}[name]
    artifacts.publish(run_folder / room / "before", {"x": b"1"}, {"stage": "test"})

    def attempt():
        with ledger.open(("mixing",), purpose, SPLIT) as opened:
            if name == "mechanism":
                opened.commit({"weights": b"1"}, {"stage": "mix"})
            artifacts.publish(run_folder / room / "inside", {"x": b"1"}, {"stage": "test"})

    if room in ALLOWED[name]:
        attempt()
        artifacts.verify(run_folder / room / "inside")
        return
    with pytest.raises(PermissionError, match=f"may not write to {room}/"):
        attempt()
    with pytest.raises(PermissionError, match="may not write"):
        artifacts.write_json(run_folder / room / "after.json", 1)
    assert not (run_folder / room / "inside").exists()


def test_rule_26_a_mechanism_publishes_from_the_store_to_released(ledger, run_folder):
    with ledger.open(("mixing",), MIX, SPLIT) as opened:
        opened.commit({"weights": b"1"}, {"stage": "mix"})
        opened.publish(run_folder / "released" / "m", {"privacy.json": b"{}"})
    assert artifacts.verify(run_folder / "released" / "m")["stage"] == "mix"
    assert (run_folder / "released" / "m" / "privacy.json").read_bytes() == b"{}"


def test_rule_26_opening_never_widens_what_a_process_may_write(ledger, run_folder):
    with ledger.open(("mixing",), Derive()):
        pass
    with ledger.open(("mixing",), Study("a look")):
        pass
    artifacts.write_json(run_folder / "private" / "x.json", 1)
    with pytest.raises(PermissionError):
        artifacts.write_json(run_folder / "study" / "x.json", 1)


def test_rule_26_private_tables_are_read_through_an_open_access_only(ledger, run_folder):
    folder = write_private(run_folder)
    path = folder / "p.parquet"
    with pytest.raises(PermissionError, match=r"ledger\.open"):
        artifacts.read_table(path)
    with ledger.open(("mixing",), Derive()) as access:
        assert access.table(folder, "p")["unit"].to_pylist() == ["a"]
        assert artifacts.read_table(path, access=access).num_rows == 3
    with pytest.raises(PermissionError, match=r"ledger\.open"):
        artifacts.read_table(path, access=access)
    with pytest.raises(PermissionError, match="closed"):
        access.table(folder, "p")
    with pytest.raises(PermissionError, match="closed"):
        access.parent(folder)


def test_rule_26_an_access_filters_out_the_other_parts(ledger, run_folder):
    folder = write_private(run_folder)
    with ledger.open(("mixing", "finetune"), MIX, SPLIT) as opened:
        assert opened.table(folder, "p")["unit"].to_pylist() == ["a", "c"]
        opened.commit({"weights": b"1"}, {"stage": "mix"})
    with pytest.raises(PermissionError, match="closed"):
        opened.table(folder, "p")


def test_rule_19_private_artefacts_are_0600_in_0700_and_named_by_a_random_id(ledger, run_folder):
    folder = write_private(run_folder)
    assert {oct(p.stat().st_mode & 0o777) for p in (folder, folder.parent)} == {"0o700"}
    assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {"0o600"}
    first = artifacts.verify(folder)["artifact"]
    with ledger.open(("mixing",), Derive()) as access:
        assert access.parent(folder) == {"path": str(folder), "artifact": first}
    with pytest.raises(PermissionError, match=r"ledger\.open"):
        artifacts.parent(folder)
    artifacts.unrestrict_for_tests()
    write_private(run_folder)
    assert artifacts.verify(folder)["artifact"] != first, "the same content under another id"


def test_rule_26_whoever_holds_a_bare_access_object_of_a_closed_door_reads_nothing(run_folder):
    folder = write_private(run_folder)
    access = Access(frozenset({"mixing"}))
    access.is_open = False
    with pytest.raises(PermissionError):
        artifacts.read_table(folder / "p.parquet", access=access)


# -- statements (rule 21) -------------------------------------------------------------------------------------


def test_rule_21_a_chain_of_mixing_and_finetuning_costs_the_larger_of_the_two(ledger):
    _, mixed = release(ledger, CountingNoise())
    _, tuned = release(ledger, CountingNoise(), purpose=TUNE, parts=("finetune",))
    stated = ledger.statement([mixed, tuned], delta=DELTA, tuning="public_standin")
    singles = [
        ledger.statement([entry], delta=DELTA, tuning="public_standin")["guarantee"]["epsilon"]
        for entry in (mixed, tuned)
    ]
    assert singles == [MIX_SPEC.spent(), TUNE_SPEC.spent()]
    assert stated["guarantee"] == {
        "epsilon": max(singles),
        "delta": DELTA,
        "unit": "patient",
        "adjacency": "add_remove",
        "calibrated_to": "add_remove",
        "no_dp_for_parts": [],
        "composition": stated["guarantee"]["composition"],
    }
    assert stated["guarantee"]["composition"].startswith("parallel")
    assert 0.99 <= stated["guarantee"]["epsilon"] <= 1.0
    assert stated["stamp"] == "private"
    assert stated["tuning"] == "public_standin"
    assert [entry["parts"] for entry in stated["entries"]] == [["mixing"], ["finetune"]]
    assert [entry["mechanism"] for entry in stated["entries"]] == ["GridGaussian", "ModelGaussian"]
    assert json.loads(artifacts.json_bytes(stated)) == stated


def test_rule_21_a_chain_that_touches_the_same_part_twice_composes(ledger):
    """Uniform fine-tuning on mixing + finetune after a mixture: both events meet the mixing part."""
    _, mixed = release(ledger, CountingNoise())
    _, tuned = release(ledger, CountingNoise(), purpose=TUNE, parts=("mixing", "finetune"))
    stated = ledger.statement([mixed, tuned], delta=DELTA, tuning="user_declared")
    both = Composition([*MIX_SPEC.events(), *TUNE_SPEC.events()]).epsilon(DELTA)
    assert stated["guarantee"]["epsilon"] == both > 1.2
    assert not stated["guarantee"]["composition"].startswith("parallel")


def test_rule_21_aborted_attempts_are_listed_and_charged_where_asked(ledger):
    for _ in range(2):
        with pytest.raises(ValueError, match="died"), ledger.open(("mixing",), MIX, SPLIT):
            raise ValueError("died")
    _, entry = release(ledger, CountingNoise())
    lenient = ledger.statement([entry], delta=DELTA, tuning="public_standin")
    assert lenient["aborted_attempts"] == 2
    assert not lenient["aborted_attempts_charged"]
    assert lenient["guarantee"]["epsilon"] == MIX_SPEC.spent()
    strict = Ledger(ledger.root.parent, "clinic", charge_aborted=True)
    charged = strict.statement([entry], delta=DELTA, tuning="public_standin")
    mu = (3 * 50) ** 0.5 / MIX_SPEC.noise_multiplier
    assert charged["aborted_attempts_charged"]
    assert charged["guarantee"]["epsilon"] == pytest.approx(gaussian_epsilon(mu, DELTA))
    assert charged["guarantee"]["epsilon"] > 1.7


def test_rule_14_a_test_seed_anywhere_in_the_chain_stamps_the_statement(ledger):
    _, mixed = release(ledger, CountingNoise(), purpose=dataclasses.replace(MIX, private_randomness=False))
    _, tuned = release(ledger, CountingNoise(), purpose=TUNE, parts=("finetune",))
    stated = ledger.statement([mixed, tuned], delta=DELTA, tuning="public_standin")
    assert stated["stamp"].startswith("NOT PRIVATE")


def test_a_statement_about_unknown_entries_is_refused(ledger):
    with pytest.raises(UserError, match="lacks an entry"):
        ledger.statement(["no such entry"], delta=DELTA, tuning="public_standin")


def test_a_chain_without_private_data_costs_nothing(ledger):
    stated = ledger.statement([], delta=DELTA, tuning="public_standin")
    assert stated["guarantee"]["epsilon"] == 0.0
    assert stated["entries"] == []
