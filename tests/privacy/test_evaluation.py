"""The charged evaluation: unit vectors of norm at most 1, and metrics that only the noise separates from the truth."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dpmixmin import evaluation
from dpmixmin.audit.replay import replay
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource

BOUND, BINS = 5.0, 10
SPEC = GridGaussian(1.0, 2.0, 1, 1.0, 100.0, 1.0, 1e-5)


def each_its_own(n: int) -> tuple[int, np.ndarray]:
    return n, np.arange(n)


UNITS = {
    "sure and right": ([40.0], [1]),
    "sure and wrong": ([-1e30], [1]),
    "wrong by far": ([3e38], [0]),
    "on the fence": ([0.0], [1]),
    "no label": ([3.0], [np.nan]),
    "no prediction": ([np.nan], [1]),
    "infinite": ([np.inf], [0]),
    "1000 records": ([2.0] * 1000, [1] * 1000),
    "records of all kinds": (np.linspace(-50, 50, 40), np.arange(40) % 2),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", UNITS)
def test_rule_3_one_unit_moves_the_evaluation_by_at_most_the_sensitivity(name, rng):
    logits, labels = rng.normal(size=30), rng.integers(0, 2, size=30).astype(float)
    extra = UNITS[name]

    def run(data, taped, noise):
        z, y, units = data
        return taped.release_sum(evaluation.unit_vectors(z, y, units, BOUND, BINS), noise)

    index = np.r_[np.arange(30), np.full(len(extra[0]), 30)]
    larger = (np.r_[logits, extra[0]], np.r_[labels, extra[1]], (31, index))
    found = replay(run, SPEC, (logits, labels, each_its_own(30)), larger)
    assert found.holds, found.worst
    assert (found.worst == 0) == (name in ("no label", "no prediction", "infinite"))
    if name == "sure and wrong":
        assert found.worst == pytest.approx((2 / 3) ** 0.5, abs=1e-3)


def test_without_noise_the_metrics_are_the_true_ones(rng):
    """Accuracy exactly, loss below the bound exactly, AUC up to what 10 bins can tell."""
    labels = rng.integers(0, 2, size=4000).astype(float)
    logits = rng.normal(size=4000) + 1.5 * labels
    total = evaluation.unit_vectors(logits, labels, each_its_own(4000), BOUND, BINS).sum(axis=0)
    found = evaluation.metrics(total, 1e-9, BOUND, draws=2)
    losses = np.logaddexp(0, np.where(labels == 1, -logits, logits))
    assert found["accuracy"]["value"] == pytest.approx(np.mean((logits > 0) == labels))
    assert found["loss"]["value"] == pytest.approx(np.minimum(losses, BOUND).mean())
    assert found["auc"]["value"] == pytest.approx(roc_auc_score(labels, logits), abs=0.01)


def test_the_stated_standard_error_is_that_of_the_noise(rng):
    """200 releases: the spread of each metric is within a factor 1.3 of what is stated (4 standard deviations)."""
    labels = rng.integers(0, 2, size=2000).astype(float)
    logits = rng.normal(size=2000) + labels
    vectors = evaluation.unit_vectors(logits, labels, each_its_own(2000), BOUND, BINS)
    runs = [
        evaluation.metrics(SPEC.release_sum(vectors, NoiseSource()), SPEC.noise_std, BOUND, draws=300)
        for _ in range(200)
    ]
    for name in ("loss", "accuracy", "auc"):
        spread = np.std([run[name]["value"] for run in runs])
        stated = np.mean([run[name]["noise_standard_error"] for run in runs])
        assert 1 / 1.3 < spread / stated < 1.3, name


def test_rule_5_an_empty_part_gives_numbers_too():
    vectors = evaluation.unit_vectors(np.zeros(0), np.zeros(0), (0, np.zeros(0, dtype=int)), BOUND, BINS)
    found = evaluation.metrics(SPEC.release_sum(vectors, NoiseSource()), SPEC.noise_std, BOUND, draws=50)
    assert all(np.isfinite(list(each.values())).all() for each in found.values())
    assert 0 <= found["auc"]["value"] <= 1


def test_rule_13_a_unit_counts_once_however_many_records_it_has(rng):
    logits = np.r_[np.full(50, 2.0), [-1.0]]
    labels = np.r_[np.ones(50), [1.0]]
    unit = np.r_[np.zeros(50, dtype=int), [1]]
    total = evaluation.unit_vectors(logits, labels, (2, unit), BOUND, BINS).sum(axis=0)
    assert evaluation.metrics(total, 1e-9, BOUND, draws=2)["accuracy"]["value"] == pytest.approx(0.5)
