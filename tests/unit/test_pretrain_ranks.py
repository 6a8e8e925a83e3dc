"""Several processes pretrain one model: two real processes, joined by gloo as torchrun would join them.

This file is also what they run: each writes what it saw to a file, and the tests look at both files.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dpmixmin import artifacts, interrupt
from dpmixmin import ranks as ranks_module
from dpmixmin.models import language, networks
from dpmixmin.paths import Paths
from dpmixmin.pretrain import language as texts
from dpmixmin.pretrain import loop
from dpmixmin.pretrain import train as labels
from dpmixmin.pretrain.durable import Work
from dpmixmin.pretrain.packing import MixtureSampler
from dpmixmin.privacy.access import Progress
from dpmixmin.ranks import Ranks
from dpmixmin.sections import Network
from dpmixmin.text_sections import LanguageModel

WORLD, CONTEXT, VOCABULARY, STEPS = 2, 8, 30, 12


def weights_of(model) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def label_training(ranks, batch, state=None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(50, 10)).astype(np.float32), rng.random(size=(50, 2)).astype(np.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = networks.mlp(10, 16, 2)
    chosen = Network(steps=STEPS, batch=batch, learning_rate=1e-2)
    losses = labels.train_public(model, x, y, chosen, 5, state=state, ranks=ranks)
    return {"weights": weights_of(model), "losses": np.asarray(losses)}


def text_training(ranks, **changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    blocks = {name: rng.integers(0, VOCABULARY, size=(20, CONTEXT + 1)).astype(np.int32) for name in "ab"}
    heldout = {name: rng.integers(0, VOCABULARY, size=(7, CONTEXT + 1)).astype(np.int32) for name in "ab"}
    values = {"layers": 1, "width": 16, "heads": 2, "batch": 4, "tokens": STEPS * 4 * CONTEXT, "learning_rate": 1e-2,
              "evaluations": 3, "precision": "float32"}  # fmt: skip
    chosen = LanguageModel(**values | changes)
    model = language.build(chosen, VOCABULARY, CONTEXT, 0, 0)
    sampler = MixtureSampler(blocks, [0.3, 0.7], chosen.batch, 0, chosen.max_epochs)
    curve = texts.train(model, sampler, heldout, chosen, ranks=ranks)
    rows = [[row[key] for key in ("step", "tokens", "train_loss", "heldout_loss")] for row in curve.rows]
    return {"weights": weights_of(model), "rows": np.asarray(rows)}


TRAININGS = {
    "labels": lambda ranks: label_training(ranks, 16),
    "labels, batch of 7": lambda ranks: label_training(ranks, 7),
    "labels, batch of 1": lambda ranks: label_training(ranks, 1),
    "texts": text_training,
    "texts, batch of 5": lambda ranks: text_training(ranks, batch=5),
    "texts, accumulated": lambda ranks: text_training(ranks, batch=6, accumulate=3),
    # The last batch has one row.
    "texts, exhausted": lambda ranks: text_training(ranks, max_epochs=0.25, batch=3),
    "texts, patience": lambda ranks: text_training(ranks, patience=1, evaluations=6),
}


def stopped_at(ranks: Ranks, step: int, state: Progress) -> np.ndarray:
    """Rank 1 gets SIGTERM in a step; return the exit status of this rank."""
    advance = labels._Training.advance

    def with_signal(self):
        advance(self)
        if ranks.rank == 1 and self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    labels._Training.advance = with_signal
    try:
        label_training(ranks, 16, state)
    except interrupt.Interrupted as error:
        return np.asarray(error.code)
    finally:
        labels._Training.advance = advance
    return np.asarray(0)


def made(ranks: Ranks, folder: str) -> np.ndarray:
    """Make an artefact together, while another process of rank 0's machine still makes it; return how often."""
    os.chdir(folder)
    ranks_module._ASK_SECONDS = 0.2
    trained, paths = [], Paths("run")
    place = paths.cell("public", "pretrained", method="uniform", seed=0)
    if ranks.leads:
        other = subprocess.Popen([sys.executable, "-c", f"""
import time
from pathlib import Path
from dpmixmin.privacy.access import Progress
with Progress(Path({paths.state(place)!r})).lease():
    Path("taken").write_text("")
    time.sleep(1)
"""])  # fmt: skip
        while not Path("taken").exists():
            time.sleep(0.02)

    def train(state):
        trained.append(1)
        return {"model": ranks.broadcast(b"of the leader" if ranks.leads else None)}

    threads = threading.active_count()
    for _ in range(2):
        with Work(paths, ranks) as work:
            work.make(place, {"stage": "test"}, train)
    if ranks.leads:
        assert other.wait(timeout=10) == 0
        assert artifacts.verify(place)["stage"] == "test"
        assert threading.active_count() == threads
    return np.asarray(len(trained))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    interrupt.install()
    with Ranks.of_environment() as ranks:
        found = {name: train(ranks) for name, train in TRAININGS.items()}
        found["stopped"] = {"status": stopped_at(ranks, 5, Progress(Path(folder, "state")))}
        found["made"] = {"count": made(ranks, folder)}
        np.savez(
            f"{folder}/{ranks.rank}.npz", **{f"{name}/{key}": v for name, vs in found.items() for key, v in vs.items()}
        )
        # Last: rank 1 dies in the middle of a step, and rank 0 is not left waiting.
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        label_training(ranks, 16)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of the two processes, and what each of them saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(WORLD):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, __file__, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [143, -9], "\n".join(said)
    return folder, [dict(np.load(Path(folder, f"{rank}.npz"))) for rank in range(WORLD)], said


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_train_the_model_that_one_trains(name, two):
    single = TRAININGS[name](Ranks.single())
    for key, expected in single.items():
        assert two[1][0][f"{name}/{key}"].tobytes() == two[1][1][f"{name}/{key}"].tobytes(), "the ranks agree exactly"
        found = two[1][0][f"{name}/{key}"]
        assert found.shape == expected.shape
        # Adam divides by the root of tiny second moments, which magnifies rounding.
        assert np.abs(found - expected).max() <= 2e-4, key
    start = "losses" if "losses" in single else "rows"
    assert np.abs(two[1][0][f"{name}/{start}"] - single[start]).max() <= 1e-5


def test_a_signal_at_any_rank_stops_all_after_the_same_step_and_one_process_goes_on(two):
    folder, ranks, _ = two
    assert [int(one["stopped/status"]) for one in ranks] == [143, 143]
    state = Progress(folder / "state")
    assert state.load()[0] == 5
    resumed = label_training(Ranks.single(), 16, state)
    assert len(resumed["losses"]) == STEPS
    assert np.abs(resumed["losses"] - label_training(Ranks.single(), 16)["losses"]).max() <= 1e-5


def test_ranks_make_an_artefact_once_after_a_job_that_makes_it(two):
    """Trained once by each: the second time it is there. The leader alone said that it waits."""
    _, ranks, said = two
    assert [int(one["made/count"]) for one in ranks] == [1, 1]
    assert "waiting for another job" in said[0]
    assert said[1] == ""


def test_the_slices_of_all_ranks_are_the_batch():
    batch = np.arange(5)
    for world in (1, 2, 3, 8):
        for parts in (1, 2, 5):
            found = [loop.slices(batch, parts, Ranks(world, rank)) for rank in range(world)]
            rows = [int(row) for own in found for part, weight in own for row in part if weight > 0]
            assert rows == batch.tolist()
            assert sum(weight for own in found for _, weight in own) == pytest.approx(1)
            sizes = [len(part) for own in found for part, _ in own]
            assert max(sizes) <= max(1, -(-len(batch) // parts)), "accumulation saves as much memory as in one process"
    assert [len(part) for part, _ in loop.slices(batch, 2, Ranks.single())] == [3, 2]


if __name__ == "__main__":
    main(sys.argv[1])
