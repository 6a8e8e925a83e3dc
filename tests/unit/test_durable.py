"""Public trainings that are killed, stopped and doubled: each artefact is made once, with the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from dpmixmin import artifacts, interrupt, jobs
from dpmixmin.config import load, validate
from dpmixmin.data.records import Records
from dpmixmin.interrupt import Interrupted
from dpmixmin.models import networks
from dpmixmin.paths import Paths
from dpmixmin.pretrain import train
from dpmixmin.pretrain.durable import Work
from dpmixmin.privacy.access import Progress
from dpmixmin.sections import Network
from dpmixmin.stages import pretrain, proxy

ROOT = Path(__file__).resolve().parents[2]

FOLDER = "results/run/public/pretrained/seed=0"
MANIFEST = {"stage": "pretrain", "cell": {"seed": 0}}


def files(state: Progress | None) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 10)).astype(np.float32), rng.random(size=(90, 1)).astype(np.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = networks.mlp(10, 16, 1)
    losses = train.train_public(model, x, y, Network(steps=40, batch=32), 3, state=state)
    return {"model.safetensors": networks.state_bytes(model), "losses": np.asarray(losses).tobytes()}


def main(pause: float, seconds: float) -> None:
    """What the tests run as a process of its own, and kill.

    Args:
        pause: of every step.
        seconds: between two states.
    """
    torch.set_num_threads(1)
    interrupt.install()
    advance = train._Training.advance

    def slow(self):
        advance(self)
        print(self.step, flush=True)
        time.sleep(pause)

    train._Training.advance = slow
    Progress.__init__.__defaults__ = (seconds,)
    with Work(Paths("run")) as work:
        work.make(FOLDER, MANIFEST, files)


def start(folder: Path, pause: float, seconds: float) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(pause), str(seconds)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_killed_and_a_stopped_training_end_with_the_bytes_of_one_that_was_left_alone(tmp_path):
    """SIGKILL after 5 steps, each of them saved; SIGTERM 5 steps later, where none was due to be saved."""
    for number, seconds, first in ((signal.SIGKILL, 0, "1"), (signal.SIGTERM, 60, "")):
        process = start(tmp_path, 0.1, seconds)
        steps = [process.stdout.readline().strip() for _ in range(5)]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (-9 if number == signal.SIGKILL else 143), said
        assert steps[0] == first or int(steps[0]) >= 5, "the killed one's steps are not done again"
    process = start(tmp_path, 0, 60)
    steps, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "going on after step" in said
    assert 10 <= int(steps.split()[0]) < 15
    assert steps.split()[-1] == "40"
    # Nothing but the result is left.
    expected = files(None)
    found = content(tmp_path)
    assert {Path(name).name for name in found} == {*expected, "manifest.json"}
    assert {name: found[f"{FOLDER}/{name}"] for name in expected} == expected


# -- the stages -------------------------------------------------------------------------------------------------


class Counted:
    """A function that counts its calls, and is interrupted before one of them."""

    def __init__(self, function):
        self.function, self.calls, self.last = function, 0, 10**9

    def __call__(self, *args, **options):
        if self.calls >= self.last:
            raise Interrupted
        self.calls += 1
        return self.function(*args, **options)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """An experiment of three seeds whose public table and uniform weights are made up."""
    monkeypatch.chdir(tmp_path)
    whole = load(ROOT / "config/test.yaml").dump()
    whole["seeds"], whole["ledger"]["path"] = [0, 1, 2], str(tmp_path / "ledger")
    config = validate(whole, "config")
    rng = np.random.default_rng(1)
    ids = np.asarray([f"{i:05d}" for i in range(300)])
    table = Records(ids, ids, rng.normal(size=(300, 49)).astype(np.float32), {"digit": rng.integers(0, 10, 300)})
    weights = {"weights": dict.fromkeys(config.axes, 1 / len(config.axes))}
    statement = {"guarantee": None, "entries": []}
    mixture = {"weights.json": artifacts.json_bytes(weights), "privacy.json": artifacts.json_bytes(statement)}
    for folder, files in (
        (Paths("mini").source("sources"), {"records.parquet": artifacts.parquet_bytes(table.to_arrow())}),
        (Paths("mini").cell("public", "mixture", method="uniform"), mixture),
    ):
        artifacts.publish(folder, files, artifacts.manifest("made up", config={}, code="", parents=[]))
    return config


@pytest.fixture
def training(monkeypatch) -> Counted:
    found = Counted(pretrain.train_public)
    monkeypatch.setattr(pretrain, "train_public", found)
    return found


ARGUMENTS = Namespace(task="", method="uniform", part=(1, 1))


def models() -> Path:
    return Path(Paths("mini").base, "public/pretrained")


def test_finished_cells_of_a_killed_job_are_not_trained_again(config, training):
    pretrain.run(config, ARGUMENTS)
    expected = content(models())
    assert training.calls == len(jobs.own(config, "pretrained", ARGUMENTS)) == 3
    assert not Path(Paths("mini").base, "public/states").exists()

    shutil.rmtree(models())
    training.calls, training.last = 0, 2
    with pytest.raises(Interrupted):
        pretrain.run(config, ARGUMENTS)
    # What Snakemake does with the outputs of a job that failed, and before it starts a job.
    shutil.rmtree(models())
    training.calls, training.last = 0, 10**9
    pretrain.run(config, ARGUMENTS)
    assert training.calls == 1
    assert content(models()) == expected
    assert not Path(Paths("mini").base, "public/states").exists()


def test_what_was_kept_of_other_inputs_or_was_damaged_is_trained_again(config, training):
    training.last = 2
    with pytest.raises(Interrupted):
        pretrain.run(config, ARGUMENTS)
    shutil.rmtree(models())
    training.calls, training.last = 0, 10**9
    kept = Path(Paths("mini").state(Paths("mini").cell("public", "pretrained", method="uniform", seed=1)))
    model = kept.with_name("seed=1.finished") / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    pretrain.run(config, ARGUMENTS)
    assert training.calls == 2

    changed = config.dump()
    changed["pretrain"]["steps"] += 1
    training.calls = 0
    pretrain.run(validate(changed, "config"), ARGUMENTS)
    assert training.calls == 3


def test_a_whole_artefact_of_the_same_inputs_is_kept_and_its_statement_renewed(config, training):
    pretrain.run(config, ARGUMENTS)
    training.calls = 0
    expected, times = content(models()), {path: path.stat().st_mtime_ns for path in models().rglob("*.safetensors")}
    pretrain.run(config, ARGUMENTS)
    assert training.calls == 0
    assert times == {path: path.stat().st_mtime_ns for path in times}
    # The ledger's view is not part of the content: it is written again.
    folder = Path(jobs.own(config, "pretrained", ARGUMENTS)[0].folder(Paths("mini")))
    manifest = artifacts.read_json(folder / "manifest.json")
    files = {name: (folder / name).read_bytes() for name in manifest.pop("files")}
    artifacts.publish(folder, files | {"privacy.json": b"{}\n"}, manifest)
    pretrain.run(config, ARGUMENTS)
    assert training.calls == 0
    assert content(models()) == expected


def test_parts_of_a_job_make_their_own_cells(config, training):
    whole = config.dump()
    whole["compute"]["cells_per_job"] = 2
    config = validate(whole, "config")
    for number in (1, 2):
        job = Namespace(task="", method="uniform", part=(number, 2))
        training.calls = 0
        pretrain.run(config, job)
        cells = jobs.own(config, "pretrained", job)
        assert 0 < training.calls == len(cells) < 3
        assert all(Path(cell.folder(Paths("mini")), "manifest.json").exists() for cell in cells)


def test_the_proxy_goes_on(config, monkeypatch):
    """Stopped in its middle, it is saved and ends with the same bytes."""
    proxy.run(config, Namespace())
    folder = Path(Paths("mini").proxy())
    expected = content(folder)
    shutil.rmtree(folder)
    advance, steps = train._Training.advance, []

    def stopping(self):
        advance(self)
        steps.append(self.step)
        if len(steps) == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train._Training, "advance", stopping)
    with pytest.raises(Interrupted):
        proxy.run(config, Namespace())
    assert not folder.exists()
    proxy.run(config, Namespace())
    assert steps == list(range(1, config.proxy.steps + 1))
    assert content(folder) == expected


# -- doubles ----------------------------------------------------------------------------------------------------


def test_a_second_job_waits_and_keeps_what_the_first_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    second = []

    def slowly(state):
        second.append(start(tmp_path, 0, 60))
        assert "waiting for another job" in second[0].stderr.readline()
        return {"model": b"of the first"}

    with Work(Paths("run")) as work:
        work.make(FOLDER, MANIFEST, slowly)
    steps, said = second[0].communicate(timeout=60)
    assert (second[0].returncode, steps) == (0, ""), said
    assert Path(FOLDER, "model").read_bytes() == b"of the first"
    assert {Path(name).name for name in content(tmp_path)} == {"model", "manifest.json"}


def test_a_job_that_waited_for_one_that_failed_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = []

    def fails(state):
        raise ZeroDivisionError

    def works(state):
        trained.append(state.folder.parent)
        return {"model": b"m"}

    for make in (fails, works, works):
        with pytest.raises(ZeroDivisionError) if make is fails else nullcontext(), Work(Paths("run")) as work:
            work.make(FOLDER, MANIFEST, make)
    assert trained == [Path("results/run/public/states/pretrained/seed=0")]


def test_without_links_the_second_name_is_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    # A job that never came to its end.
    Work(Paths("run")).make(FOLDER, MANIFEST, lambda state: {"model": b"m"})
    shutil.rmtree(FOLDER)
    with Work(Paths("run")) as work:
        work.make(FOLDER, MANIFEST, lambda state: {"model": b"trained again"})
    assert Path(FOLDER, "model").read_bytes() == b"m"


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))


def test_a_state_of_other_code_is_not_gone_on_from(tmp_path, monkeypatch):
    """The manifest says what decides the content: code, versions, device, parents."""
    monkeypatch.chdir(tmp_path)
    loaded = []

    def stopped(state):
        state.save(3, lambda: b"state", now=True)
        raise ZeroDivisionError

    def goes_on(state):
        loaded.append(state.load())
        return {"model": b"m"}

    for manifest in (MANIFEST, {**MANIFEST, "code": "new"}):
        with pytest.raises(ZeroDivisionError), Work(Paths("run")) as work:
            work.make(FOLDER, MANIFEST, stopped)
        with Work(Paths("run")) as work:
            work.make(FOLDER, manifest, goes_on)
        shutil.rmtree(FOLDER)
    assert loaded == [(3, b"state"), None]
    assert not Path("results/run/public/states").exists()
