"""Several processes fine-tune through the ledger, are killed, and are gone on with (rules 4, 18, 23, 24).

This file is also what they run. One Python imports torch once, and forks the processes of every scenario as torchrun
would start them, each with the stage's own command line. There is no noise and no sampling here, so every scenario
that ends must end at the model that one undisturbed process makes: a step lost, or made twice, would show. Of noise
and coins: test_ranks.py.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deployment import checkout, make_settings, manifest, raw_config

from dpmixmin import artifacts, interrupt, ranks
from dpmixmin.__main__ import main
from dpmixmin.cells import cells_of
from dpmixmin.config import validate
from dpmixmin.data.records import Records
from dpmixmin.finetune import dp_sgd
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.stages import finetune, records, split

STEPS, MIDDLE, UNITS, WIDTH = 10, 5, 40, 6
STATUS = interrupt.STATUS

SCENARIOS = {
    "alone": ("made", 1, {}),
    "two": ("made", 2, {}),
    "again": ("two", 2, {}),
    "a follower killed": ("made", 2, {1: signal.SIGKILL}),
    "then one": ("a follower killed", 1, {}),
    "then two": ("a follower killed", 2, {}),
    "all stopped": ("made", 2, {0: signal.SIGTERM, 1: signal.SIGTERM}),
    "all go on": ("all stopped", 2, {}),
    "one stopped": ("made", 1, {0: signal.SIGTERM}),
    "two go on": ("one stopped", 2, {}),
    "a follower stopped": ("made", 2, {1: signal.SIGTERM}),
    "the leader killed": ("made", 2, {0: signal.SIGKILL}),
    "a follower leads": ("the leader killed", 1, {}),
    "refused": ("two", 2, {}),
    "another table": ("made", 2, {}),
    "waits": ("all stopped", 2, {}),
}
"""Whose folder is copied; how many processes; who gets which signal in the middle of step MIDDLE."""


def config_of(home: Path, delta: float) -> dict:
    changes = {
        "methods": ["none"],
        "private__nominal_units": UNITS,
        "private__parts": {"mixing": 0.3, "finetune": 0.5, "test": 0.2},
        "privacy__delta": delta,
        "finetune__settings": {"learning_rate": 0.5, "steps": STEPS, "batch": UNITS // 2, "clip": 1.0},
        "ledger__cap": {"epsilon": 2.5, "delta": 2e-3},
    }
    return raw_config(home, **changes)


def make(home: Path) -> None:
    """Make everything that the stage reads, below ``home``; the sensitive tables by their stages."""
    rng = np.random.default_rng(3)
    unit = np.repeat([f"patient {i}" for i in range(UNITS)], rng.integers(1, 4, UNITS))
    x = rng.normal(size=(len(unit), WIDTH)).astype(np.float32)
    table = pa.table({"x": list(x), "label": (x[:, 0] > 0).astype(float), "patient": unit})
    pq.write_table(table, home / "patients-table.parquet")
    raw = config_of(home, 1e-3)
    for name, values in {"config": raw, "other": config_of(home, 5e-4)}.items():
        (home / f"{name}.yaml").write_text(yaml.safe_dump(values))
    config = validate(raw)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    public = Records(np.array(["a"]), np.array(["a"]), x[:1], {"label": np.ones(1, np.float32)})
    artifacts.publish(
        paths.source("sources"), {"records.parquet": artifacts.parquet_bytes(public.to_arrow())}, manifest({}, [])
    )
    statement = artifacts.json_bytes(ledger.statement([], delta=config.privacy.delta, tuning="none"))
    (cell,) = (cell for cell in cells_of(config) if cell.stage == "pretrained")
    model = networks.state_bytes(networks.build(config.inputs, WIDTH, config.pretrain, 1, 0))
    files = {"model.safetensors": model, "privacy.json": statement}
    artifacts.publish(cell.folder(paths), files, manifest(cell.coordinates(), []))
    make_settings(paths.finetune_settings("none"), raw["finetune"]["settings"], "user_declared")
    for stage in (records, split):
        stage.run(config, type("Arguments", (), {"seeds": None}))
        artifacts.unrestrict_for_tests()


def renamed(home: Path) -> None:
    """Give the table of records the name of one that was made again."""
    (path,) = home.glob("results/*/private/records/manifest.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"artifact": "0" * 32}))


def work(home: Path, rank: int, at: signal.Signals | None, config: str) -> int:
    """Run the stage in this process, without noise and coins; what it did is told in a file."""
    seen = {"steps": 0, "units": None, "written": []}

    def release_sum(spec, total, noise, *, shares=1):
        seen["steps"] += 1
        if seen["steps"] == MIDDLE and at is not None:
            os.kill(os.getpid(), at)
        return total

    class Seen(dp_sgd.ClippedSum):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            seen["units"] = self.units

    def watch(event: str, arguments: tuple) -> None:
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if opened or event in ("os.rename", "os.link", "os.remove"):
            seen["written"].append(str(arguments[0]))

    ModelGaussian.sample = lambda spec, count, noise: np.ones(count, dtype=bool)
    ModelGaussian.release_sum, finetune.label_sums.__defaults__ = release_sum, (Seen,)
    if rank:
        sys.addaudithook(watch)
    try:
        return main(["finetune", "--config", config, "--method", "none", "--task", "ill"])
    finally:
        Path(home.parent, f"seen {rank}").write_text(json.dumps(seen))


def fork(home: Path, rank: int, world: int, port: int, at: signal.Signals | None, config: str) -> int:
    """Start one process as torchrun would; return its id."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        if world > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if rank and home.parent.joinpath("another table").exists():
            home = Path(shutil.copytree(home, home.with_name("node 2")))
            renamed(home)
        os.chdir(home)
        said = os.open(home.parent / f"said {rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1), os.dup2(said, 2)
        try:
            status = work(home, rank, at, config)
        except SystemExit as error:
            status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def warm() -> None:
    """Import what the stage imports late, so that every process has it when it is forked."""
    x = np.zeros((2, WIDTH), np.float32)
    spec = ModelGaussian.for_target(epsilon=1.0, delta=1e-3, clip=1.0, steps=1, sampling_rate=0.5, nominal_units=4)
    sums = dp_sgd.ClippedSum(networks.mlp(WIDTH, 2, 1), x, np.ones(2, np.float32), np.arange(2), 2)
    dp_sgd.fine_tune(sums, spec, 0.1, NoiseSource())


@contextlib.contextmanager
def leased(stage: Path):
    """Work on the release for longer than ranks have patience, as a job that outlived its Snakemake does."""
    usual = ranks.PATIENCE, ranks._ASK_SECONDS
    ranks.PATIENCE, ranks._ASK_SECONDS = timedelta(seconds=6), 0.5
    (lock,) = stage.glob("vault/clinic/leases/*.lock")
    with open(lock, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
        time.sleep(9)
        # The children have this handle too, and a lease ends when it is given back, not when one of them closes it.
        fcntl.flock(handle, fcntl.LOCK_UN)
    ranks.PATIENCE, ranks._ASK_SECONDS = usual


def serve(folder: Path) -> None:
    """Play every scenario, one after the other."""
    (folder / "made").mkdir()
    home = checkout(folder / "made")
    # Configs hold absolute paths, so all scenarios are played at one place, and then moved to theirs.
    stage = folder / "stage"
    (folder / "made").rename(stage)
    home = stage / "home"
    with contextlib.chdir(home):
        make(home)
    warm()
    shutil.copytree(stage, folder / "made")
    for name, (start, world, signals) in SCENARIOS.items():
        shutil.rmtree(stage)
        shutil.copytree(folder / start, stage)
        for path in [*stage.glob("seen *"), *stage.glob("said *")]:
            path.unlink()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = "other.yaml" if name == "refused" else "config.yaml"
        if name == "another table":
            (stage / name).touch()
        with leased(stage) if name == "waits" else contextlib.nullcontext():
            children = [fork(home, rank, world, port, signals.get(rank), config) for rank in range(world)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        (stage / "statuses").write_text(json.dumps(statuses))
        shutil.copytree(stage, folder / name)


class Played:
    """What a scenario left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.statuses = json.loads((folder / "statuses").read_text())
        self.said = [(folder / f"said {rank}").read_text() for rank in range(len(self.statuses))]
        paths = [folder / f"seen {rank}" for rank in range(len(self.statuses))]
        self.seen = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        self.events = [
            json.loads(path.read_text()) for path in sorted((folder / "vault/clinic/entries").glob("*.json"))
        ]

    @property
    def history(self) -> list[str]:
        return [event["event"] for event in self.events if "entry" in event]

    @property
    def entries(self) -> set[str]:
        return {event["entry"] for event in self.events if "entry" in event}

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("vault/clinic/tmp/*.state/*"))

    def weights(self, room: str = "released/finetuned") -> np.ndarray:
        (path,) = self.folder.glob(f"home/results/*/{room}/**/model.safetensors")
        return np.concatenate([values.ravel() for _, values in sorted(load_file(path).items())])


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return what a scenario left, by its name."""
    folder = tmp_path_factory.mktemp("played")
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return lambda name: Played(folder / name)


def test_rule_4_two_processes_make_the_model_of_one_through_the_stage(played):
    alone, two = played("alone"), played("two")
    assert (alone.statuses, two.statuses) == ([0], [0, 0])
    assert np.abs(alone.weights() - two.weights()).max() <= 1e-6
    assert np.abs(alone.weights() - alone.weights("public/pretrained")).max() > 1e-2
    assert [seen["steps"] for seen in (*alone.seen, *two.seen)] == [STEPS] * 3


def test_rule_12_a_process_builds_its_sums_over_its_own_units(played):
    everyone = played("alone").seen[0]["units"]
    assert 20 < everyone < UNITS
    assert [seen["units"] for seen in played("two").seen] == [everyone - everyone // 2, everyone // 2]


@pytest.mark.parametrize("name", ["two", "again", "then two", "all go on", "two go on", "a follower stopped"])
def test_rule_18_two_processes_have_one_entry_that_is_committed_once(name, played):
    assert played(name).history == ["reserved", "committed"]
    assert len(played(name).entries) == 1
    assert played(name).saved == []


@pytest.mark.parametrize("name", ["two", "again", "then two", "all stopped", "a follower stopped", "refused"])
def test_rule_18_only_the_leader_writes(name, played):
    """Nothing in the ledger's folders, nothing in the run's; what a look at the ledger leaves beside them aside."""
    written = played(name).seen[1]["written"]
    assert not [path for path in written if re.search(r"clinic/(entries|store|tmp|leases)/|results/", path)]


def test_rule_18_what_is_committed_is_published_again_and_nobody_reads(played):
    again = played("again")
    assert again.statuses == [0, 0]
    assert [(seen["steps"], seen["units"]) for seen in again.seen] == [(0, None)] * 2
    assert again.weights().tobytes() == played("two").weights().tobytes()


@pytest.mark.parametrize(
    ("name", "statuses", "saved"),
    [
        ("a follower killed", [STATUS, -signal.SIGKILL], MIDDLE - 1),
        ("all stopped", [STATUS, STATUS], MIDDLE),
        ("one stopped", [STATUS], MIDDLE),
        ("the leader killed", [-signal.SIGKILL, STATUS], 1),
    ],
)
def test_rule_23_a_run_that_ends_in_the_middle_keeps_its_entry_and_its_steps(name, statuses, saved, played):
    """The last state of a leader that is killed is the one of its first step: the next is due a minute later."""
    left = played(name)
    assert left.statuses == statuses
    assert left.history == ["reserved"]
    assert left.saved == [f"step={saved}"]
    assert "Traceback" not in "".join(left.said)
    assert all(text.count("\n") <= 1 for text in left.said)


@pytest.mark.parametrize(
    ("name", "begun", "left"),
    [
        ("then one", "a follower killed", STEPS - MIDDLE + 1),
        ("then two", "a follower killed", STEPS - MIDDLE + 1),
        ("all go on", "all stopped", STEPS - MIDDLE),
        ("two go on", "one stopped", STEPS - MIDDLE),
        ("a follower leads", "the leader killed", STEPS - 1),
    ],
)
def test_rule_23_any_number_of_processes_goes_on_with_exactly_the_steps_that_are_left(name, begun, left, played):
    """At the model of one undisturbed process, so no step is lost and none is made twice."""
    done = played(name)
    assert done.statuses == [0] * len(done.statuses)
    assert [seen["steps"] for seen in done.seen] == [left] * len(done.seen)
    assert done.history == ["reserved", "committed"]
    assert done.entries == played(begun).entries
    assert np.abs(done.weights() - played("alone").weights()).max() <= 1e-6


def test_a_process_that_does_not_lead_never_stops_by_itself(played):
    """Told to stop, it makes every step with the others, and ends after them."""
    left = played("a follower stopped")
    assert left.statuses == [0, STATUS]
    assert [seen["steps"] for seen in left.seen] == [STEPS, STEPS]
    assert np.abs(left.weights() - played("alone").weights()).max() <= 1e-6


def test_rule_18_a_refused_reservation_ends_all_processes_with_one_line(played):
    refused = played("refused")
    assert refused.statuses == [1, 1]
    assert "was released already, from other settings or inputs" in refused.said[0]
    assert [text.count("\n") for text in refused.said] == [1, 0]
    assert refused.events == played("two").events
    assert [seen["units"] for seen in refused.seen] == [None, None]


def test_rule_12_processes_that_see_different_tables_do_not_train(played):
    """Whose unit is whose follows from the order of the table, so one unit could be trained on twice."""
    refused = played("another table")
    assert refused.statuses == [1, 1]
    assert "give all the same inputs" in refused.said[0]
    assert [seen["steps"] for seen in refused.seen] == [0, 0]
    assert refused.history == ["reserved", "void"]


def test_processes_wait_for_another_job_longer_than_they_would_for_each_other(played):
    waited = played("waits")
    assert waited.statuses == [0, 0], waited.said
    assert "waiting for another job" in waited.said[0]
    assert [seen["steps"] for seen in waited.seen] == [STEPS - MIDDLE] * 2
    assert waited.history == ["reserved", "committed"]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
