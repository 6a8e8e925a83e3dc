"""Trade-off curves of claims against likelihood-ratio tests and closed forms."""

import itertools
import math

import numpy as np
import pytest
from scipy.spatial import ConvexHull
from scipy.stats import norm

from dpmixmin.audit.tradeoff import Tradeoff, scaled_family
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import GaussianEvent, PureEvent
from dpmixmin.privacy.gaussian import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
RATES = np.concatenate([[0.0, 1e-12, 1e-6], np.linspace(1e-3, 1 - 1e-3, 101), [1 - 1e-6, 1.0]])


def curves():
    epsilons = np.linspace(0, 9, 300)
    return {
        "pure": Tradeoff.pure(1.3),
        "one pair": Tradeoff.pure(0.7, 0.02),
        "gaussian": Tradeoff.gaussian(1.1),
        "grid": Tradeoff(epsilons, [gaussian_delta(1.1, each) for each in epsilons]),
        "sampled": Tradeoff.of(Composition([GaussianEvent(1.0, 0.2, 5)])),
    }


def best_test(one: np.ndarray, other: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Neyman-Pearson: the least second error at each first error, for two laws on a finite set."""
    order = np.argsort(-other / one)
    return np.interp(rates, np.r_[0, np.cumsum(one[order])], 1 - np.r_[0, np.cumsum(other[order])])


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("delta", [0.0, 0.01])
def test_one_pair_has_the_curve_of_randomised_response_that_sometimes_betrays(epsilon, delta):
    right = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    wrong = (1 - delta) / (1 + math.exp(epsilon))
    tiny = 1e-300  # an output that betrays has no probability on the other side
    out, inside = np.array([delta + tiny, right, wrong, tiny]), np.array([tiny, wrong, right, delta + tiny])
    expected = best_test(out, inside, RATES[1:])
    np.testing.assert_allclose(Tradeoff.pure(epsilon, delta).beta(RATES[1:]), expected, atol=1e-12)
    assert Tradeoff.pure(epsilon, delta).beta(0.0) == pytest.approx(1 - delta)


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_a_finite_grid_is_a_weaker_claim_than_the_gaussian_and_comes_near_to_it(mu):
    exact = Tradeoff.gaussian(mu)
    gaps = {}
    for points in (12, 400):
        epsilons = np.linspace(0, gaussian_epsilon(mu, 1e-10), points)
        grid = Tradeoff(epsilons, [gaussian_delta(mu, each) for each in epsilons])
        assert (grid.beta(RATES) <= exact.beta(RATES) * (1 + 1e-9) + 1e-12).all()
        assert (grid.most(RATES) >= exact.most(RATES) * (1 - 1e-9)).all()
        assert (grid.inverse(RATES) <= exact.inverse(RATES) * (1 + 1e-9) + 1e-12).all()
        assert grid.epsilon(DELTA) >= gaussian_epsilon(mu, DELTA) * (1 - 1e-12)
        gaps[points] = np.abs(grid.beta(RATES) - exact.beta(RATES)).max()
    assert gaps[400] < 1e-4 < gaps[12]


def test_the_gaussian_curve_is_that_of_two_normal_laws():
    thresholds = np.linspace(-3, 4, 50)
    alpha, beta = norm.sf(thresholds), norm.cdf(thresholds, loc=1.5)
    np.testing.assert_allclose(Tradeoff.gaussian(1.5).beta(alpha), beta, rtol=1e-9)
    np.testing.assert_allclose(Tradeoff.gaussian(1.5).most(alpha), 1 - beta, rtol=1e-9)


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.3), (0.7, 0.05), (2.0, 0.8)])
def test_the_curve_of_a_composition_lies_just_below_the_best_test_of_both_directions(sigma, q):
    """One Poisson step: N(0, s²) against (1 - q) N(0, s²) + q N(1, s²), whose likelihood ratio rises with the output.

    A claim for both directions is the largest convex curve below both (Dong et al. 1905.02383, on subsampling).
    """
    claimed = Tradeoff.of(Composition([GaussianEvent(sigma, q, 1)]))
    thresholds = np.linspace(-6 * sigma, 1 + 6 * sigma, 2000)
    out = norm.sf(thresholds, scale=sigma)
    inside = (1 - q) * norm.cdf(thresholds, scale=sigma) + q * norm.cdf(thresholds, loc=1, scale=sigma)
    assert (claimed.beta(out) <= inside + 1e-12).all()
    assert (claimed.beta(inside) <= out + 1e-12).all()
    points = np.concatenate([np.c_[out, inside], np.c_[inside, out]])
    hull = ConvexHull(points)
    lower = points[hull.vertices]
    lower = lower[lower.sum(axis=1) < 1 - 1e-6]
    lower = lower[np.argsort(lower[:, 0])]
    middle = (lower[1:] + lower[:-1]) / 2  # also between the vertices: a chord belongs to the hull
    for alpha, beta in (lower.T, middle.T):
        np.testing.assert_allclose(claimed.beta(alpha), beta, atol=2e-3)


def test_the_curve_of_a_composition_without_sampling_is_exact():
    event = GaussianEvent(5.0, 1.0, 10)
    np.testing.assert_array_equal(
        Tradeoff.of(Composition([event])).beta(RATES), Tradeoff.gaussian(math.sqrt(10) / 5).beta(RATES)
    )
    pure = Tradeoff.of(Composition([PureEvent(0.8, 1.6)]))
    np.testing.assert_allclose(pure.beta(RATES), Tradeoff.pure(0.8).beta(RATES), atol=1e-9)
    assert pure.epsilon(DELTA) == Composition([PureEvent(0.8, 1.6)]).epsilon(DELTA)


@pytest.mark.parametrize("name", curves())
def test_most_and_inverse_belong_together(name):
    curve = curves()[name]
    most = curve.most(RATES)
    np.testing.assert_allclose(most, 1 - curve.beta(RATES), atol=1e-12)
    assert (np.diff(most) >= 0).all()
    assert most.max() <= 1
    found = curve.inverse(RATES)
    assert ((found >= 0) & (found <= 1)).all()
    assert (np.diff(found) >= 0).all()
    # The least x that reaches the rate: it does, and less does not.
    np.testing.assert_array_less(RATES - 1e-12, curve.most(found) + 1e-11)
    below = found > 1e-9
    assert (curve.most(found[below] * (1 - 1e-6)) < RATES[below]).all()


def test_small_rates_keep_their_digits():
    assert Tradeoff.pure(2.0).inverse(1e-30) == pytest.approx(1e-30 * math.exp(-2), rel=1e-12)
    assert Tradeoff.pure(2.0).most(1e-30) == pytest.approx(1e-30 * math.exp(2), rel=1e-12)
    assert Tradeoff.pure(2.0, 1e-6).inverse(1e-7) == 0


@pytest.mark.parametrize("name", curves())
def test_shapes_follow_the_argument(name):
    curve = curves()[name]
    for method in (curve.beta, curve.most, curve.inverse):
        whole = method(np.full((2, 3), 0.25))
        assert whole.shape == (2, 3)
        assert np.ndim(method(0.25)) == 0
        assert method(0.25) == whole[0, 0]
        assert method([]).shape == (0,)


def test_epsilon_of_a_list_is_what_the_list_implies():
    curve = Tradeoff([0.5, 2.0, 1.0], [0.1, 0.0, 0.04])  # in any order
    assert curve.epsilon(0.2) == curve.epsilon(0.1) == 0.5
    assert curve.epsilon(0.04) == pytest.approx(1.0)
    assert curve.epsilon(0.0) == 2.0
    # Between two pairs: the largest delta that the curve allows there, by its definition max of most(x) - e^epsilon x.
    found = curve.epsilon(0.07)
    x = np.linspace(0, 1, 200_001)
    assert (curve.most(x) - math.exp(found) * x).max() == pytest.approx(0.07, abs=1e-5)
    assert Tradeoff.pure(1.0, 0.01).epsilon(0.001) == math.inf
    # What holds at 1 holds at 2, whatever the list says there.
    assert Tradeoff([1.0, 2.0, 3.0], [0.1, 0.3, 0.0]).epsilon(0.05) == Tradeoff([2.0, 3.0], [0.1, 0.0]).epsilon(0.05)


def test_the_family_of_an_event_scales_its_noise():
    event = GaussianEvent(1.2, 0.1, 20)
    family = scaled_family(event)
    assert family(1.0).epsilon(DELTA) == Composition([event]).epsilon(DELTA)
    assert family(2.0).epsilon(DELTA) == Composition([GaussianEvent(0.6, 0.1, 20)]).epsilon(DELTA)
    assert family(2.0) is family(2.0)
    inner = RATES[(RATES > 1e-3) & (RATES < 0.99)]
    values = [family(theta).beta(inner) for theta in (0.25, 0.5, 1.0, 2.0, 4.0)]
    assert all((later <= earlier).all() for earlier, later in itertools.pairwise(values))
    np.testing.assert_array_equal(
        scaled_family(GaussianEvent(4.0, 1.0, 9))(2.0).beta(RATES), Tradeoff.gaussian(1.5).beta(RATES)
    )


def test_impossible_claims_are_refused():
    for epsilons, deltas in [([], []), ([1.0], [0.1, 0.2]), ([-1.0], [0.0]), ([1.0], [1.5]), ([math.inf], [0.0])]:
        with pytest.raises(ValueError, match="epsilons"):
            Tradeoff(epsilons, deltas)
    for mu in (-1.0, math.nan):
        with pytest.raises(ValueError, match="mu"):
            Tradeoff.gaussian(mu)
