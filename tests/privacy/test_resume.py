"""A killed mechanism goes on from its state and stops hard at T: the same steps, charged once (rules 18, 23)."""

from dataclasses import replace

import numpy as np
import pytest

from dpmixmin.audit.replay import Taped
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.models import networks
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Mechanism
from dpmixmin.privacy.mechanisms import ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise, NoiseSource

STEPS = 9
SPEC = ModelGaussian(1.0, 2.0, STEPS, 0.5, 20.0, 1.0, 1e-5)
PURPOSE = Mechanism(SPEC, {"stage": "finetuned", "task": "odd"}, {}, {"config": {}}, "code")


class Killed(BaseException):
    """What SIGKILL is to a process: nothing after it runs."""


class Dying(Taped):
    """Dies instead of making its n-th release."""

    def __init__(self, spec, releases):
        super().__init__(spec)
        self.left = releases

    def release_sum(self, *args, **options):
        self.left -= 1
        if self.left < 0:
            raise Killed
        return super().release_sum(*args, **options)


def sums_of() -> ClippedSum:
    import torch

    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(20, 6)).astype(np.float32), rng.integers(0, 2, size=20).astype(np.float32)
    return ClippedSum(networks.mlp(6, 8, 1), x, y, np.arange(20), 20)


def flat(sums) -> np.ndarray:
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in sums.parameters])


def test_rule_23_resumed_twice_makes_exactly_the_spec_s_steps(tmp_path):
    """The final weights are the start plus the T recorded updates: none is lost, none is made twice."""
    progress, recorded = Progress(tmp_path / "state", seconds=0), []
    start = flat(sums_of())
    for releases in (4, 3):
        dying = Dying(SPEC, releases)
        with pytest.raises(Killed):
            fine_tune(sums_of(), dying, 0.1, NoiseSource(), progress=progress)
        recorded += dying.recorded
        assert progress.load()[0] == len(recorded)
    last, sums = Taped(SPEC), sums_of()
    fine_tune(sums, last, 0.1, NoiseSource(), progress=progress)
    recorded += last.recorded
    assert len(recorded) == STEPS
    assert np.allclose(flat(sums), start - 0.1 * np.sum(recorded, axis=0) / SPEC.expected_batch, atol=1e-5)
    again = Taped(SPEC)
    fine_tune(sums_of(), again, 0.1, NoiseSource(), progress=progress)
    assert again.recorded == [], "after T steps there is nothing left to do"


def test_rule_23_steps_after_the_saved_state_are_made_again_with_fresh_noise(tmp_path):
    """Saved only once, after step 1: the resumed run makes T - 1 steps."""
    progress = Progress(tmp_path / "state", seconds=1000)
    with pytest.raises(Killed):
        fine_tune(sums_of(), Dying(SPEC, 5), 0.1, NoiseSource(), progress=progress)
    assert progress.load()[0] == 1
    taped = Taped(SPEC)
    fine_tune(sums_of(), taped, 0.1, NoiseSource(), progress=progress)
    assert len(taped.recorded) == STEPS - 1


def test_an_uninterrupted_run_is_the_same_with_and_without_progress(tmp_path):
    one, two = sums_of(), sums_of()
    fine_tune(one, SPEC, 0.1, InsecureNoise(3))
    fine_tune(two, SPEC, 0.1, InsecureNoise(3), progress=Progress(tmp_path / "state", seconds=0))
    assert np.array_equal(flat(one), flat(two))


def train(ledger, spec) -> str:
    with ledger.open(("finetune",), PURPOSE, "seed=0") as release:
        if not release.committed:
            sums = sums_of()
            fine_tune(sums, spec, 0.1, NoiseSource(), progress=Progress(release.progress.folder, seconds=0))
            release.commit({"model": networks.state_bytes(sums.model)}, {"stage": "finetune"})
        return release.entry


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_rule_23_an_interrupted_mechanism_keeps_its_entry(end, ledger):
    """Ctrl-C in the middle, then the same command: one entry, committed once, no aborted attempt, no state left."""

    class Interrupted(Dying):
        def release_sum(self, *args, **options):
            try:
                return super().release_sum(*args, **options)
            except Killed:
                raise end from None

    with pytest.raises(end):
        train(ledger, Interrupted(SPEC, 4))
    (entry,) = ledger.entries()
    assert entry.state == "reserved"
    state = ledger.progress(entry.id).folder
    assert state.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in state.iterdir())
    last = Taped(SPEC)
    assert train(ledger, last) == entry.id
    assert len(last.recorded) == STEPS - 4
    assert [each.state for each in ledger.entries()] == ["committed"]
    assert not state.exists()
    assert train(ledger, Dying(SPEC, 0)) == entry.id, "committed: nothing runs"


def test_rule_18_a_failed_mechanism_is_void_and_its_state_is_gone(ledger):
    class Failing(Dying):
        def release_sum(self, *args, **options):
            try:
                return super().release_sum(*args, **options)
            except Killed:
                raise ValueError("a bug") from None

    with pytest.raises(ValueError, match="a bug"):
        train(ledger, Failing(SPEC, 4))
    assert [each.state for each in ledger.entries()] == ["void"]
    assert list((ledger.root / "tmp").iterdir()) == []
    fresh = Taped(SPEC)
    train(ledger, fresh)
    assert len(fresh.recorded) == STEPS


def test_rule_2_progress_tells_the_epsilon_of_the_steps_so_far(tmp_path, capsys):
    """Of public parameters alone; only where something is charged, never for a trial on public records."""
    spec = ModelGaussian.for_target(epsilon=1.0, delta=1e-5, clip=1.0, steps=100, sampling_rate=0.2, nominal_units=100)
    fine_tune(sums_of(), spec, 0.1, NoiseSource(), progress=Progress(tmp_path / "state"))
    lines = capsys.readouterr().err.splitlines()
    expected = {steps: replace(spec, steps=steps).spent() for steps in range(10, 101, 10)}
    assert lines == [f"  step {n}/100, epsilon of the steps so far {spent:.3g}" for n, spent in expected.items()]
    assert 0.99 < expected[100] <= 1
    fine_tune(sums_of(), spec, 0.1, NoiseSource())
    assert "epsilon" not in capsys.readouterr().err
