"""Calibration never spends more than the target, and hardly less (rules 16, 17)."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from dpmixmin.privacy.accounting import LEAST_NOISE, Composition, calibrate
from dpmixmin.privacy.events import (
    ADD_REMOVE,
    ADJACENCIES,
    REPLACE_ONE,
    ZERO_OUT,
    GaussianEvent,
    PureEvent,
    RepeatSelectEvent,
)
from dpmixmin.privacy.gaussian import gaussian_epsilon

TARGETS = [  # epsilon, delta, q, steps
    (0.01, 1e-5, 1.0, 1),
    (0.01, 1e-12, 1.0, 36_000),
    (1.0, 1e-5, 1.0, 50),
    (50.0, 1e-12, 1.0, 10),
    (0.01, 1e-12, 0.5, 10),
    (0.01, 1e-5, 0.01, 1000),
    (0.01, 1e-12, 200 / 80726, 36_000),
    (1.0, 1e-5, 0.1, 100),
    (1.0, 1e-5, 0.03, 30),
    (2.0, 1e-12, 1e-2, 300),
    (8.0, 1e-5, 0.02, 60),
    (50.0, 1e-5, 0.5, 1),
    (50.0, 1e-12, 0.01, 10),
    (50.0, 1e-5, 0.01, 1000),
    (50.0, 1e-5, 1e-4, 36_000),
    (0.01, 1e-3, 0.9, 36_000),
]


@pytest.mark.parametrize(("epsilon", "delta", "q", "steps"), TARGETS)
def test_rule_16_calibration_spends_at_most_the_target_and_at_least_99_7_percent(epsilon, delta, q, steps):
    sigma = calibrate(epsilon, delta, q, steps)
    spent = Composition([GaussianEvent(sigma, q, steps)]).epsilon(delta)
    assert 0.997 * epsilon <= spent <= epsilon


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("q", "steps"), [(1.0, 20), (0.05, 40)])
def test_rule_16_calibration_in_every_adjacency(adjacency, q, steps):
    sigma = calibrate(1.5, 1e-6, q, steps, adjacency=adjacency)
    spent = Composition([GaussianEvent(sigma, q, steps)], adjacency=adjacency).epsilon(1e-6)
    assert 0.997 * 1.5 <= spent <= 1.5
    for other in ADJACENCIES:
        same = {adjacency, other} <= {ADD_REMOVE, ZERO_OUT} or adjacency == other
        assert (calibrate(1.5, 1e-6, q, steps, adjacency=other) == sigma) == same


def test_replace_one_needs_its_factor_more_noise_in_full_batches():
    base = calibrate(1.0, 1e-5, 1.0, 9)
    for factor in (2.0, math.sqrt(2)):
        found = calibrate(1.0, 1e-5, 1.0, 9, adjacency=REPLACE_ONE, replace_factor=factor)
        assert found == pytest.approx(factor * base, rel=1e-12)


@pytest.mark.parametrize("q", [1.0, 0.03])
@pytest.mark.parametrize(
    "alongside",
    [
        (GaussianEvent(8.0, 1.0, 1),),
        (PureEvent(0.3, 0.6),),
        (GaussianEvent(3.0, 0.1, 20), PureEvent(0.1, 0.2)),
        (RepeatSelectEvent((GaussianEvent(20.0, 1.0, 1),), 5.0, 1.0, 1e-6),),
    ],
)
def test_rule_21_the_target_holds_for_the_whole_composition(q, alongside):
    sigma = calibrate(2.0, 1e-5, q, 30, alongside=alongside)
    spent = Composition([GaussianEvent(sigma, q, 30), *alongside]).epsilon(1e-5)
    assert 0.997 * 2.0 <= spent <= 2.0
    assert sigma > calibrate(2.0, 1e-5, q, 30)


def test_alongside_a_full_batch_mu_is_shared_in_squares():
    sigma = calibrate(1.0, 1e-5, 1.0, 10, alongside=(GaussianEvent(7.0, 1.0, 1),))
    assert gaussian_epsilon(math.sqrt(10 / sigma**2 + 1 / 49), 1e-5) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("alongside", [(PureEvent(1.0, 2.0),), (GaussianEvent(1.0, 1.0, 1),)])
def test_what_is_spent_alongside_already_is_refused_in_one_line(alongside):
    with pytest.raises(ValueError, match="alongside") as caught:
        calibrate(0.99, 1e-5, 0.03, 30, alongside=alongside)
    assert "\n" not in str(caught.value)


def test_alongside_that_leaves_almost_nothing_is_refused_or_met():
    """Where less is left than the grid's excess, there is no number to stand by."""
    alongside = (PureEvent(0.3, 0.6),)
    sigma = calibrate(0.302, 1e-5, 0.03, 30, alongside=alongside)
    assert 0.3 < Composition([GaussianEvent(sigma, 0.03, 30), *alongside]).epsilon(1e-5) <= 0.302
    with pytest.raises(ValueError, match="too little"):
        calibrate(0.299985, 1e-5, 0.03, 30, alongside=alongside)


def test_rule_16_calibration_of_the_nih_experiment():
    """q = 200 / 80726, 36,000 steps, epsilon 1: sigma about 1.894."""
    sigma = calibrate(1.0, 1e-5, 200 / 80726, 36_000)
    assert sigma == pytest.approx(1.894, abs=0.003)


def test_calibration_where_delta_alone_pays_returns_some_noise():
    """A unit is sampled less often than delta, so any noise meets the target."""
    sigma = calibrate(0.01, 0.05, 0.04, 1)
    assert sigma == pytest.approx(LEAST_NOISE)
    assert Composition([GaussianEvent(sigma, 0.04, 1)]).epsilon(0.05) <= 0.01


@pytest.mark.parametrize(
    ("epsilon", "delta", "q", "steps"),
    [
        (0.0, 1e-5, 1.0, 1),
        (-1.0, 1e-5, 1.0, 1),
        (math.nan, 1e-5, 1.0, 1),
        (math.inf, 1e-5, 1.0, 1),
        (1.0, 0.0, 1.0, 1),
        (1.0, 1.0, 1.0, 1),
        (1.0, 1e-5, 0.0, 1),
        (1.0, 1e-5, 1.1, 1),
        (1.0, 1e-5, math.nan, 1),
        (1.0, 1e-5, 1.0, 0),
    ],
)
def test_rule_17_calibration_refuses_what_is_no_target(epsilon, delta, q, steps):
    with pytest.raises(ValueError, match="calibrate needs"):
        calibrate(epsilon, delta, q, steps)


def test_calibration_refuses_an_unknown_adjacency():
    with pytest.raises(ValueError, match="unknown adjacency"):
        calibrate(1.0, 1e-5, 1.0, 1, adjacency="swap")


@pytest.mark.slow
def test_rule_16_the_table_in_the_documentation_is_what_the_code_computes():
    """docs/privacy.md holds the output of benchmarks/accounting.py."""
    checkout = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, checkout / "benchmarks" / "accounting.py", "--check", checkout / "docs" / "privacy.md"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
