"""Membership inference: the numbers against scikit-learn, the intervals by simulation."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from sklearn.metrics import roc_auc_score, roc_curve

from dpmixmin.audit.membership import attack, auc_interval, by_unit, label_losses, statistics, text_losses
from dpmixmin.data.records import Records


def one(members, others, **options):
    return attack({"loss": np.asarray(members)}, {"loss": np.asarray(others)}, **options)["loss"]


def both(members, others):
    return np.r_[np.ones(len(members)), np.zeros(len(others))], np.r_[members, others]


def test_auc_and_true_positive_rates_are_those_of_scikit_learn(rng):
    for decimals in (15, 1, 0):  # with many ties too
        members, others = rng.normal(0.5, 1, 800).round(decimals), rng.normal(size=3000).round(decimals)
        found = one(members, others)
        assert found.auc == pytest.approx(roc_auc_score(*both(members, others)), abs=1e-12)
        assert (found.members, found.others) == (800, 3000)
        fpr, tpr, _ = roc_curve(*both(members, others), drop_intermediate=False)
        for rate, at in found.tpr.items():
            assert at.value == tpr[fpr <= rate].max()


def test_the_ends_of_a_rate_are_clopper_pearson(rng):
    members, others = rng.normal(1.0, 1, 500), rng.normal(size=1000)
    at = one(members, others).tpr[0.01]
    k, n = round(at.value * 500), 500
    assert 0 < k < n
    assert at.low == pytest.approx(beta.ppf(0.025, k, n - k + 1))
    assert at.high == pytest.approx(beta.ppf(0.975, k + 1, n - k))
    assert one(others + 100, others).tpr[0.01].value == 1
    assert one(others + 100, others).tpr[0.01].high == 1
    assert one(others - 100, others).tpr[0.01].low == 0


def test_a_rate_that_too_few_others_can_show_is_none():
    scores = np.arange(999.0)
    assert one(scores, scores[:99]).tpr == {0.01: None, 0.001: None}
    assert one(scores, scores[:100]).tpr[0.01] is not None
    assert one(scores, scores).tpr[0.001] is None
    assert one(scores, np.arange(1000.0)).tpr[0.001] is not None
    empty = one([], scores)
    assert (empty.auc, empty.auc_low, empty.auc_high) == (0.5, 0.0, 1.0)
    assert empty.tpr == {0.01: None, 0.001: None}


LAWS = {
    "no signal": (300, 300, 0.0, 1.0),
    "weak": (1000, 200, 0.3, 1.0),
    "members spread more": (600, 100, 0.8, 2.0),
    "members spread less": (600, 100, 0.8, 0.5),
    "strong": (100, 100, 2.5, 1.0),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_interval_covers_the_true_auc(law, rng):
    """400 intervals of 95 %: at least 364 cover (binomial, below with probability 2e-4 if the coverage is 95 %)."""
    m, n, mean, spread = LAWS[law]
    truth = norm.cdf(mean / math.hypot(1, spread))
    covered = 0
    for _ in range(400):
        low, high = auc_interval(rng.normal(mean, spread, m), rng.normal(size=n))
        covered += low <= truth <= high
    assert covered >= 364
    assert covered < 400


def test_the_interval_is_delongs_on_the_logit_scale(rng):
    """Against the definition: variances over placements by double loop."""
    members, others = rng.normal(0.7, 1, 30).round(1), rng.normal(size=20).round(1)
    wins = np.array([[float(a > b) + 0.5 * (a == b) for b in others] for a in members])
    area = wins.mean()
    error = math.sqrt(wins.mean(axis=1).var(ddof=1) / 30 + wins.mean(axis=0).var(ddof=1) / 20)
    centre, reach = math.log(area / (1 - area)), norm.ppf(0.975) * error / (area * (1 - area))
    expected = [1 / (1 + math.exp(-(centre + sign * reach))) for sign in (-1, 1)]
    assert auc_interval(members, others) == pytest.approx(expected, rel=1e-9)


def test_the_interval_of_perfect_separation_is_that_of_independent_pairs():
    low, high = auc_interval(np.arange(10.0) + 100, np.arange(50.0))
    assert (low**10, high) == (pytest.approx(0.025), 1.0)
    assert auc_interval(np.arange(10.0), np.arange(50.0) + 100) == (0.0, pytest.approx(1 - low))
    assert auc_interval(np.ones(10), np.ones(20)) == (0.5, 0.5)
    assert auc_interval(np.ones(1), np.zeros(20)) == (0.0, 1.0)


def test_scores_point_to_members():
    released, pretrained = np.array([0.1, 2.0]), np.array([1.0, 1.0])
    found = statistics(released, pretrained)
    assert found["loss"].tolist() == [-0.1, -2.0]
    assert found["likelihood_ratio"].tolist() == [0.9, -1.0]


def test_losses_are_those_of_the_training(rng):
    logits, labels = rng.normal(0, 30, 50), rng.integers(0, 2, 50).astype(np.float32)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(labels).double(), reduction="none"
    )
    np.testing.assert_allclose(label_losses(logits, labels), expected.numpy(), atol=1e-12)
    labels[3] = np.nan
    assert np.flatnonzero(np.isnan(label_losses(logits, labels))).tolist() == [3]
    scores = [np.array([-1.0, -2.0], dtype=np.float32), np.zeros(0, dtype=np.float32)]
    np.testing.assert_array_equal(text_losses(scores), [1.5, np.nan])


def test_a_unit_counts_once_and_bad_values_are_left_out():
    records = Records(np.array(list("abcde")), np.array(["x", "x", "y", "z", "z"]), np.zeros((5, 1)), {})
    values = np.array([1.0, 3.0, np.nan, np.inf, 7.0])
    np.testing.assert_array_equal(by_unit(values, records.units()), [2.0, np.nan, 7.0])
    found = one([2.0, np.nan, 7.0], [1.0, -np.inf])
    assert (found.members, found.others, found.auc) == (2, 1, 1.0)
