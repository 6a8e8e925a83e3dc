"""The charged evaluation: unit vectors of norm at most 1, and metrics that only the noise separates from the truth."""

import math
from fractions import Fraction

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dpmixmin import evaluation
from dpmixmin.audit.replay import replay
from dpmixmin.data.text_records import TextRecords
from dpmixmin.metrics import perplexities
from dpmixmin.models import language
from dpmixmin.models.scoring import score_by_unit
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.text_sections import LanguageModel, Text

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


# -- texts ------------------------------------------------------------------------------------------------------

TEXT_BOUND = 8.0

WILD = {
    "certain": [[0.0, 0.0]],
    "hopeless": [[-1e30] * 3],
    "hopeless in float32": [np.full(100, -3e38, dtype=np.float32)],
    "at the bound": [[-8.0]],
    "one token": [[-0.1]],
    "a probability above 1": [[1e30, 1e30]],
    "1000 records": [[-9.0] * 7] * 1000,
    "one of them empty": [[], [-2.0]],
    "no token": [[], []],
    "not a number": [[-1.0], [-2.0, np.nan]],
    "impossible": [[-1.0, -np.inf]],
    "both infinities": [[np.inf], [-np.inf]],
}
SILENT = ("no token", "not a number", "impossible", "both infinities")
"""Units that contribute zero."""


def of_users(users: list) -> tuple[list[np.ndarray], tuple[int, np.ndarray]]:
    """Return scores and units of users, each a list of records."""
    scores = [np.asarray(record) for user in users for record in user]
    return scores, (len(users), np.repeat(np.arange(len(users)), [len(user) for user in users]))


@pytest.fixture
def users(rng) -> list:
    """30 users of one to five records of one to forty tokens."""
    return [[-rng.exponential(4, size=rng.integers(1, 41)) for _ in range(rng.integers(1, 6))] for _ in range(30)]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", WILD)
def test_rule_3_a_users_vector_has_a_norm_of_at_most_one_whatever_the_model_says(name):
    vector = evaluation.text_vectors(*of_users([WILD[name]]), TEXT_BOUND)
    assert vector.shape == (1, 2)
    assert np.isfinite(vector).all()
    integers = SPEC.to_grid(vector)[0].tolist()
    assert sum(Fraction(value, 2**SPEC.grid_bits) ** 2 for value in integers) <= 1
    assert np.linalg.norm(vector) <= 1 + 1e-12
    assert (vector == 0).all() == (name in SILENT)
    if name == "1000 records":
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-12)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("place", [0, 17, 30])
def test_rule_3_one_user_moves_the_evaluation_of_texts_by_at_most_one(name, place, users):
    def run(data, taped, noise):
        return taped.release_sum(evaluation.text_vectors(*of_users(data), TEXT_BOUND), noise)

    found = replay(run, SPEC, users, [*users[:place], WILD[name], *users[place:]])
    assert found.holds, found.worst
    assert (found.worst == 0) == (name in SILENT)


def test_without_noise_the_loss_is_the_mean_over_users_of_their_loss_per_token(users):
    scores, units = of_users([*users, WILD["not a number"], WILD["no token"]])
    total = evaluation.text_vectors(scores, units, 100.0).sum(axis=0)
    found = evaluation.text_metrics(total, 1e-9, 100.0, draws=2)
    each = [-sum(map(math.fsum, user)) / sum(map(len, user)) for user in users]
    assert found["loss"]["value"] == pytest.approx(sum(each) / len(each))
    assert found["perplexity_user"]["value"] == pytest.approx(math.exp(sum(each) / len(each)))
    # The same number as a study's.
    assert found["perplexity_user"]["value"] == pytest.approx(perplexities(*of_users(users))["perplexity_user"])


def test_a_users_loss_is_clipped_to_the_bound():
    total = evaluation.text_vectors(*of_users([[np.full(5, -20.0)], [np.full(50, -1.0)]]), TEXT_BOUND).sum(axis=0)
    found = evaluation.text_metrics(total, 1e-9, TEXT_BOUND, draws=2)
    assert found["loss"]["value"] == pytest.approx((TEXT_BOUND + 1) / 2)


def test_the_stated_standard_errors_of_texts_are_those_of_the_noise(rng):
    """400 releases: each spread is within a factor 1.25 of what is stated (6 deviations)."""
    users = [[-rng.exponential(4, size=20)] for _ in range(400)]
    vectors = evaluation.text_vectors(*of_users(users), TEXT_BOUND)
    runs = [
        evaluation.text_metrics(SPEC.release_sum(vectors, NoiseSource()), SPEC.noise_std, TEXT_BOUND, draws=300)
        for _ in range(400)
    ]
    for name in ("loss", "perplexity_user"):
        spread = np.std([run[name]["value"] for run in runs])
        stated = np.mean([run[name]["noise_standard_error"] for run in runs])
        assert 1 / 1.25 < spread / stated < 1.25, name


def test_rule_5_an_empty_part_of_texts_gives_numbers_too():
    vectors = evaluation.text_vectors(*of_users([]), TEXT_BOUND)
    assert vectors.shape == (0, 2)
    found = evaluation.text_metrics(SPEC.release_sum(vectors, NoiseSource()), SPEC.noise_std, TEXT_BOUND, draws=50)
    assert all(np.isfinite(list(each.values())).all() for each in found.values())
    assert 1 <= found["perplexity_user"]["value"] <= math.exp(TEXT_BOUND)


def test_rule_13_a_user_counts_once_however_many_records_it_has():
    total = evaluation.text_vectors(*of_users([[[-1.0] * 9] * 50, [[-3.0]]]), TEXT_BOUND).sum(axis=0)
    assert evaluation.text_metrics(total, 1e-9, TEXT_BOUND, draws=2)["loss"]["value"] == pytest.approx(2.0)


def test_rule_25_the_last_bits_of_a_users_scores_depend_on_that_user_alone(rng):
    """Scored together, 40 users of very different lengths would share padded batches."""
    text = Text(context=16, pretrain=LanguageModel(layers=1, width=16, heads=2))
    model = language.build(text.pretrain, 300, text.context, 0, 0)
    unit = np.sort(rng.integers(0, 40, size=120))
    tokens = [rng.integers(1, 300, size=size).astype(np.int32) for size in rng.integers(0, 50, size=120)]
    names = np.array([f"user{i:02d}" for i in unit])
    records = TextRecords(np.array([f"{i:03d}" for i in range(120)]), names, [""] * 120, tokens)
    together = score_by_unit(model, records, text)
    assert [len(values) for values in together] == [len(values) for values in tokens]
    for gone in np.unique(names)[[0, 7, -1]]:
        kept = np.flatnonzero(names != gone)
        for place, values in zip(kept.tolist(), score_by_unit(model, records.take(kept), text), strict=True):
            np.testing.assert_array_equal(together[place], values)
