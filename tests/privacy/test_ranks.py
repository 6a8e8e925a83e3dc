"""Several processes train one model (rules 4, 5, 24): two real processes, joined by gloo as torchrun would join them.

This file is also what they run: each writes what it saw to a file, and the tests look at both files.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from dpmixmin.data.records import Records
from dpmixmin.errors import UserError
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.interrupt import STATUS, Interrupted
from dpmixmin.models import networks
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource
from dpmixmin.ranks import Ranks

WORLD, WIDTH, UNITS = 2, 10, 7
NOISE_STEPS = 60
FALSE_ALARM = 1e-9


class Silent(NoiseSource):
    """Real coins, no noise."""

    def gaussian(self, std, size):
        return np.zeros(size)


@dataclass(frozen=True)
class Taped(ModelGaussian):
    """Records coins and released shares; given coins, hands those out."""

    def __post_init__(self):
        for name in ("batches", "shares", "coins"):
            object.__setattr__(self, name, [])

    def sample(self, count, noise):
        batch = self.coins[len(self.batches)] if self.coins else super().sample(count, noise)
        self.batches.append(batch)
        return batch

    def release_sum(self, total, noise, *, shares=1):
        self.shares.append(super().release_sum(total, noise, shares=shares))
        return self.shares[-1]


class Unchecked(Ranks):
    """Control: ranks that do not compare their sources."""

    def check(self, *, same, different):
        pass


def spec_of(steps=4, rate=1.0) -> Taped:
    return Taped(0.5, 3.0, steps, rate, 20.0, 1.0, 1e-5)


def table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and units of 1 to 4 records."""
    rng = np.random.default_rng(4)
    unit = np.repeat(np.arange(UNITS), [1, 2, 1, 4, 3, 1, 2])
    x = rng.normal(size=(len(unit), WIDTH)).astype(np.float32)
    return x, rng.integers(0, 2, size=len(unit)).astype(np.float32), unit


def sums_of(ranks: Ranks, units: int = UNITS, seed: int = 3, physical: int = 512) -> ClippedSum:
    """Return this rank's sums over the first units of the table."""
    x, y, unit = table()
    x, y, unit = (part[unit < units] for part in (x, y, unit))
    rows, index, own = ranks.share(unit, units)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = networks.mlp(WIDTH, 16, 1)
    return ClippedSum(model, x[rows], y[rows], index, own, physical)


def trained(ranks: Ranks, spec: Taped, noise: NoiseSource, **options) -> dict[str, np.ndarray]:
    """Return the weights after training, the coins and the released shares."""
    sums = sums_of(ranks, **options)
    fine_tune(sums, spec, 0.3, noise, ranks)
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in sums.parameters])
    return {"weights": weights.numpy(), "batches": np.stack(spec.batches), "shares": np.stack(spec.shares)}


def refused(action) -> np.ndarray:
    """Return a UserError's text as an array (empty when nothing was raised)."""
    try:
        action()
    except UserError as error:
        return np.asarray(str(error))
    return np.asarray("")


def exchanged(ranks: Ranks) -> dict[str, np.ndarray]:
    """Return what each process got from the leader, and how the others end where it fails."""
    sent = {"text": "grüße".encode(), "nothing": b"", "large": bytes(range(256)) * 5000}
    found = {name: np.frombuffer(ranks.broadcast(one if ranks.leads else None), "u1") for name, one in sent.items()}
    made = []
    found["led"] = np.frombuffer(ranks.led(lambda: made.append(1) or b"by the leader"), "u1")
    found["made"] = np.asarray(len(made))
    for name, error in (("failed", UserError("no")), ("interrupted", Interrupted()), ("Ctrl-C", KeyboardInterrupt())):

        def fail(error=error):
            raise error

        try:
            ranks.led(fail)
        except BaseException as seen:
            found[name] = np.asarray(f"{type(seen).__name__} {getattr(seen, 'code', '')}")
    return found


def experiments(ranks: Ranks) -> dict[str, dict[str, np.ndarray]]:
    """Everything that two processes are needed for."""
    r = ranks.rank
    unchecked = Unchecked(ranks.world, ranks.rank, ranks.device)
    return {
        "silent": trained(ranks, spec_of(), Silent()),
        "silent in chunks": trained(ranks, spec_of(), Silent(), physical=1),
        "silent sampled": trained(ranks, spec_of(rate=0.5), Silent()),
        "noisy": trained(ranks, spec_of(steps=3), NoiseSource()),
        "nobody": trained(ranks, spec_of(NOISE_STEPS), NoiseSource(), units=0),
        "one unit": trained(ranks, spec_of(steps=5), NoiseSource(), units=1),
        "own purposes": trained(ranks, spec_of(NOISE_STEPS), InsecureNoise(1, f"cell, rank {r}"), units=0),
        "shared seed": trained(unchecked, spec_of(NOISE_STEPS), InsecureNoise(1, "cell"), units=0),
        "exchanged": exchanged(ranks),
        "texts": {
            "shared seed": refused(lambda: trained(ranks, spec_of(), InsecureNoise(1, "cell"))),
            "other weights": refused(lambda: trained(ranks, spec_of(), NoiseSource(), seed=r)),
            "other settings": refused(lambda: trained(ranks, spec_of(steps=r + 1), NoiseSource())),
        },
    }


def main(folder: str) -> None:
    torch.set_num_threads(1)
    with Ranks.of_environment() as ranks:
        found = experiments(ranks)
        if ranks.leads:
            # The other one is gone after this block, and this one is left alone in an exchange.
            try:
                while True:
                    ranks.sum(torch.zeros(1))
            except Interrupted as error:
                found["alone"] = {"status": np.asarray(error.code)}
    flat = {f"{name}/{key}": value for name, values in found.items() for key, value in values.items()}
    np.savez(f"{folder}/{ranks.rank}.npz", **flat)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    """What each of the two processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(WORLD):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, str(folder)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        texts = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    return [dict(np.load(Path(folder, f"{rank}.npz"))) for rank in range(WORLD)]


def released(two, name: str) -> np.ndarray:
    """Return the sums that the ranks released together, shape (steps, size)."""
    return two[0][f"{name}/shares"] + two[1][f"{name}/shares"]


def has_spec_variance(noise: np.ndarray, std: float) -> bool:
    """Say whether the sum of squares of independent Gaussians is plausible, with false-alarm rate 1e-9."""
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.size)
    return low < np.square(noise / std).sum() < high


def are_independent(one: np.ndarray, other: np.ndarray) -> bool:
    """Say whether two samples are uncorrelated, with false-alarm rate 1e-9 (normal approximation)."""
    z = np.sum(one * other) / (one.std() * other.std() * np.sqrt(one.size))
    return abs(z) < norm.isf(FALSE_ALARM / 2)


# -- the same model as one process trains (rules 4 and 24) ----------------------------------------------------


@pytest.mark.parametrize("name", ["silent", "silent in chunks"])
def test_rule_4_without_noise_two_processes_train_the_model_that_one_trains(name, two):
    single = trained(Ranks.single(), spec_of(), Silent())
    start = torch.cat([parameter.detach().reshape(-1) for parameter in sums_of(Ranks.single()).parameters]).numpy()
    assert np.abs(single["weights"] - start).max() > 1e-3
    assert np.abs(two[0][f"{name}/weights"] - single["weights"]).max() <= 1e-6
    assert np.abs(released(two, name) - single["shares"]).max() <= 1e-6
    assert [one[f"{name}/batches"].shape for one in two] == [(4, 4), (4, 3)], "units 0, 2, 4, 6 and 1, 3, 5"


def test_rule_4_each_process_draws_the_coins_of_its_own_units(two):
    """One process, given the coins of both, trains the same model."""
    spec = spec_of(rate=0.5)
    coins = np.empty((4, UNITS), dtype=bool)
    for rank in range(WORLD):
        coins[:, rank::WORLD] = two[rank]["silent sampled/batches"]
    spec.coins.extend(coins)
    single = trained(Ranks.single(), spec, Silent())
    assert np.abs(released(two, "silent sampled") - single["shares"]).max() <= 1e-6


@pytest.mark.parametrize("name", ["silent", "silent sampled", "noisy", "nobody", "one unit"])
def test_rule_24_all_processes_hold_the_same_weights_to_the_last_bit(name, two):
    assert two[0][f"{name}/weights"].tobytes() == two[1][f"{name}/weights"].tobytes()
    assert two[0][f"{name}/shares"].tobytes() != two[1][f"{name}/shares"].tobytes()


# -- one noise, in shares (rules 5 and 24) --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nobody", "own purposes"])
def test_rule_24_the_shares_add_up_to_the_noise_of_one_process(name, two):
    """Nobody is there, so what is released is noise: 60 x 209 draws, false-alarm rate 1e-9 for each statement."""
    std = spec_of().noise_std
    total = released(two, name)
    assert total.shape == (NOISE_STEPS, 10 * 16 + 3 * 16 + 16 + 1)
    single = trained(Ranks.single(), spec_of(NOISE_STEPS), NoiseSource(), units=0)["shares"]
    for noise in (total, single):
        assert has_spec_variance(noise, std)
        assert not has_spec_variance(noise * 1.06, std), "6 % more noise would be seen"
    for one in two:
        assert has_spec_variance(one[f"{name}/shares"], std / np.sqrt(WORLD))
    assert are_independent(two[0][f"{name}/shares"], two[1][f"{name}/shares"])


def test_rule_24_the_weights_got_that_noise_and_no_other(two):
    """After T steps of noise alone the weights are off by the sum of all updates."""
    start = torch.cat([parameter.detach().reshape(-1) for parameter in sums_of(Ranks.single()).parameters]).numpy()
    expected = -0.3 * released(two, "nobody").sum(axis=0) / spec_of().expected_batch
    assert np.abs(two[0]["nobody/weights"] - start - expected).max() <= 1e-5


def test_rule_24_the_check_fails_for_processes_that_share_a_seed(two):
    """Control: equal shares double the variance."""
    std = spec_of().noise_std
    total = released(two, "shared seed")
    assert not has_spec_variance(total, std)
    assert has_spec_variance(total, std * np.sqrt(WORLD))
    assert not are_independent(two[0]["shared seed/shares"], two[1]["shared seed/shares"])


def test_rule_5_a_process_without_units_adds_its_share_all_the_same(two):
    """The only unit is at rank 0."""
    assert [one["one unit/batches"].shape for one in two] == [(5, 1), (5, 0)]
    assert has_spec_variance(two[1]["one unit/shares"], spec_of().noise_std / np.sqrt(WORLD))


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [("shared seed", "draw the same noise"), ("other weights", "different models"), ("other settings", "settings")],
)
def test_rule_24_processes_that_do_not_fit_together_are_refused_by_all(name, text, two):
    for one in two:
        assert text in str(one[f"texts/{name}"])
        assert "\n" not in str(one[f"texts/{name}"])


def test_a_process_that_torchrun_did_not_start_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="start several processes with torchrun"), Ranks.joined():
        pass
    with pytest.raises(ValueError, match="rank"):
        Ranks(2, 2)


# -- what they exchange ---------------------------------------------------------------------------------------


def test_every_process_gets_the_leaders_bytes(two):
    for one in two:
        assert one["exchanged/text"].tobytes() == "grüße".encode()
        assert one["exchanged/nothing"].tobytes() == b""
        assert one["exchanged/large"].tobytes() == bytes(range(256)) * 5000
        assert one["exchanged/led"].tobytes() == b"by the leader"
    assert [int(one["exchanged/made"]) for one in two] == [1, 0], "only the leader makes"


def test_where_the_leader_fails_the_others_end_with_its_status_and_say_nothing(two):
    seen = {name: [str(one[f"exchanged/{name}"]) for one in two] for name in ("failed", "interrupted", "Ctrl-C")}
    assert seen == {
        "failed": ["UserError ", "SystemExit 1"],
        "interrupted": [f"Interrupted {STATUS}", f"Interrupted {STATUS}"],
        "Ctrl-C": ["KeyboardInterrupt ", f"Interrupted {STATUS}"],
    }


def test_a_process_that_is_left_alone_is_interrupted(two):
    assert int(two[0]["alone/status"]) == STATUS


def test_processes_that_do_not_find_each_other_are_told_so_in_one_line(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("dpmixmin.ranks.PATIENCE", timedelta(seconds=1))
    with pytest.raises(UserError, match=f"do not find each other at 127.0.0.1:{port}: ") as refused, Ranks.joined():
        pass
    assert "\n" not in str(refused.value)


# -- who owns what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rule_12_every_unit_belongs_to_one_rank_with_all_its_records(world, rng):
    unit = np.repeat(np.arange(6), rng.integers(1, 5, size=6))
    seen = []
    for rank in range(world):
        rows, index, own = Ranks(world, rank).share(unit, 6)
        assert own == len(np.unique(index)) == len(np.unique(unit[rows]))
        assert index.tolist() == np.unique(unit[rows], return_inverse=True)[1].tolist()
        assert (unit[rows] == index * world + rank).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(unit)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rule_12_a_process_keeps_the_whole_units_of_a_table_and_their_names(world):
    unit = np.repeat([f"person {i}" for i in range(7)], [1, 2, 1, 4, 3, 1, 2])
    record = np.asarray([f"r{i}" for i in range(len(unit))])
    table = Records(record, unit, np.arange(len(unit), dtype=np.float32)[:, None], {"y": np.ones(len(unit))})
    parts = [Ranks(world, rank).own(table) for rank in range(world)]
    owners = [set(part.unit.tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 7
    assert sorted(name for part in parts for name in part.record) == sorted(record)
    names = dict(zip(record, table.names(), strict=True))
    for part in parts:
        assert [names[one] for one in part.record] == part.names().tolist()
        assert part.units()[0] == len(set(part.unit))


def test_one_process_needs_no_torch_distributed(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with Ranks.of_environment() as ranks:
        assert ranks == Ranks.single()
        assert ranks.leads
        values = torch.arange(3.0)
        assert ranks.sum(values) is values
        assert ranks.broadcast(b"x") == ranks.led(lambda: b"x") == b"x"
        ranks.check(same=b"", different=b"")
        assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    main(sys.argv[1])
