"""Auditing in one run: many canaries, each in the data or not by its own fair coin, guessed from one output.

The number of right guesses is the statistic. Two tests of a claim are here:

* of (epsilon, delta)-DP alone: Steinke et al. 2305.08846;
* of a whole trade-off curve: Mahloujifar et al. 2410.22235, which is stronger where the curve says more than one pair
  (epsilon, delta) does, as a Gaussian's. (The first test at all pairs of a Gaussian's curve was tried, and is weaker.)

Both hold for every mechanism, for every attack that makes a fixed number of guesses, and whatever the canaries do to
one another. ONLY the coins must be fair and independent, and the mechanism's output the only thing that the attack
knows of them. Which canaries are guessed may depend on the output. A canary is a unit; neighbours are add/remove.

The second test, derived. Of m canaries c are guessed, W guesses are right, p_i = P[W = i]. Fix a canary j and the
other coins. Let E be the event, over outputs, that j is guessed to be IN and that i - 1 of the other guesses are
right for an i in a set T. If j is in, E says that W = i and that j's guess is right; if j is out, that W = i - 1 and
that j's guess is wrong. The claim is P[E | j in] <= most(P[E | j out]), with the concave ``most`` = 1 - f, and the
same for guesses OUT with the roles exchanged. Averaged over both, over j and over all coins (Jensen), as W = i has i
right guesses and c - i wrong ones:

    sum_{i in T} (i / m) p_i  <=  most( sum_{i in T} ((c - i + 1) / m) p_{i-1} ).

The divisor is m and not c: a mechanism may betray a canary outright with probability delta, so one of a thousand
canaries much more often, and an attack that abstains elsewhere would break the inequality with c.

For T = {i, i + 1, ...} write r_i = sum_{l >= i} (l / m) p_l (right guesses), h_i = sum_{l >= i} ((c - l) / m) p_l
(wrong ones). Then

    r_{i+1} <= most(h_i),   which is   h_i >= inverse(r_{i+1}),   and   r_0 + h_0 = c / m.

Suppose that P[W >= v] = tau. Moving probability from a level i to i - 1 raises h_l and lowers r_l for every l < i, so
it harms no constraint but that on h_i; and for i >= v we use none. So a law with this tail, if there is one, can be
changed into one that has all of tau at v and at each level below only what the constraint there needs, from v - 1
downwards. If that takes more than r_0 + h_0 = c / m, tau is impossible. A smaller tau is possible whenever a larger
one is (move the difference from v to v - 1). The p-value is the least impossible tau.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, expit
from scipy.stats import binom

from dpmixmin.audit.bounds import LARGEST_EPSILON, largest_theta
from dpmixmin.audit.tradeoff import Tradeoff
from dpmixmin.privacy.gaussian import gaussian_epsilon

FRACTIONS = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries that are guessed; fixed before the scores are seen."""

LEAST_P = 1e-30
"""Smallest p-value that the test of a trade-off curve returns."""

_SLACK = 1 + 1e-9
"""Float64 error of the recursion, by which a tail must be impossible."""


def guesses(scores: np.ndarray, included: np.ndarray, k: int) -> tuple[int, int]:
    """Guess the k / 2 canaries of highest score to be in and the k / 2 of lowest score to be out.

    Args:
        scores: shape (m,), larger for "in"; not NaN. Equal scores are ordered by index, which knows nothing.
        included: bool of shape (m,), the coins.
        k: number of guesses, even, in [2, m].

    Returns:
        (made, correct): k and how many of them are right.

    Raises:
        ValueError: wrong shapes, a NaN, or an impossible k.
    """
    scores, included = _checked(scores, included)
    if k % 2 or not 2 <= k <= scores.size:
        raise ValueError(f"the number of guesses must be even and in [2, {scores.size}], got {k}")
    return k, int(_correct(scores[None], included[None], [k])[0, 0])


def p_value_dp(m: int, made: int, correct: int, epsilon: float, delta: float) -> float:
    """Return a bound on the probability of so many right guesses if the mechanism is (epsilon, delta)-DP.

    Steinke et al. 2305.08846, the theorem for approximate DP: with X binomial of ``made`` trials of probability
    e^epsilon / (1 + e^epsilon), it is P[X >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= X < v] / i. No p-value is
    below about 2 delta m / v, however good the attack.

    Args:
        m: canaries, each in by a fair coin.
        made: guesses, fixed in advance, in [0, m].
        correct: v, the right ones.
        epsilon: >= 0.
        delta: in [0, 1].
    """
    _check(m, made, correct)
    if correct == 0:
        return 1.0
    rate = float(expit(epsilon))
    # The windows are differences of probabilities, wrong by 1e-16: nothing, as they only enter times 2 m delta.
    below = bdtr(np.arange(correct - 1, -1, -1), made, rate)
    windows = below[0] - np.append(below[1:], 0.0)
    worst = float((windows / np.arange(1, correct + 1)).max())
    return min(1.0, float(binom.sf(correct - 1, made, rate)) + 2 * m * delta * max(worst, 0.0))


def p_value_tradeoff(m: int, made: int, correct: int, tradeoff: Tradeoff) -> float:
    """Return a bound on the probability of so many right guesses if the mechanism's curve is on or above this one.

    The recursion of the module's docstring (Mahloujifar et al. 2410.22235 for guesses of one bit), inverted within
    0.3 %, upwards.

    Args:
        m: canaries.
        made: guesses, fixed in advance.
        correct: the right ones.
        tradeoff: the claim.

    Returns:
        In [LEAST_P, 1].
    """
    _check(m, made, correct)
    low, high = math.log(LEAST_P), 0.0
    if not _impossible(m, made, correct, tradeoff, np.ones(1))[0]:
        return 1.0
    for _ in range(3):
        points = np.linspace(low, high, 33)
        impossible = _impossible(m, made, correct, tradeoff, np.exp(points))
        first = int(np.argmax(impossible))
        if first == 0:
            return math.exp(points[0])
        low, high = points[first - 1], points[first]
    return math.exp(high)


def epsilon_dp(m: int, made: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return a lower bound on epsilon at ``delta`` that holds with probability ``confidence``; 0 if there is none.

    It is the largest epsilon up to which every (epsilon, delta)-DP claim is refuted. Valid for every mechanism.
    """
    return _largest_refuted(lambda epsilon: p_value_dp(m, made, correct, epsilon, delta) <= 1 - confidence)


def epsilon_tradeoff(
    m: int,
    made: int,
    correct: int,
    family: Callable[[float], Tradeoff],
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Return a lower bound on epsilon at ``delta``, with probability ``confidence``, for mechanisms of one family.

    Valid only where the mechanism's curve is one of the family's, on or above it: the true theta is then bounded from
    below, and stated as an epsilon. For a mechanism outside the family it says no more than "not below this curve".

    Args:
        m: canaries.
        made: guesses, fixed in advance.
        correct: the right ones.
        family: curves that fall as the argument theta > 0 grows, with an ``epsilon(delta)``; theta 1 is about right.
        delta: where the epsilon is stated.
        confidence: see above.
    """
    return _epsilon_of_curves(m, ((made, correct),), family, delta, confidence)


@dataclass(frozen=True)
class OneRun:
    """What one run's guesses say, at several numbers of guesses, each with its share of the false alarms (Bonferroni).

    Attributes:
        m: canaries.
        included: those whose coins put them in.
        guesses: (made, correct) at each number of guesses, which are fixed before the scores are seen.

    Raises:
        ValueError: no guesses, or impossible ones.
    """

    m: int
    included: int
    guesses: tuple[tuple[int, int], ...]

    def __post_init__(self):
        if not self.guesses:
            raise ValueError("an audit needs at least one number of guesses")
        for made, correct in self.guesses:
            _check(self.m, made, correct)

    def p_value(self, tradeoff: Tradeoff) -> float:
        """Return the p-value of the claim of a whole curve; see :func:`p_value_tradeoff`."""
        return min(1.0, len(self.guesses) * min(p_value_tradeoff(self.m, *each, tradeoff) for each in self.guesses))

    def p_value_dp(self, epsilon: float, delta: float) -> float:
        """Return the p-value of the claim (epsilon, delta)-DP; see :func:`p_value_dp`."""
        return min(1.0, len(self.guesses) * min(p_value_dp(self.m, *each, epsilon, delta) for each in self.guesses))

    def epsilon_dp(self, delta: float, confidence: float = 0.95) -> float:
        """Return the best of :func:`epsilon_dp`; valid for every mechanism."""
        return max(epsilon_dp(self.m, *each, delta, self._each(confidence)) for each in self.guesses)

    def epsilon_tradeoff(self, family: Callable[[float], Tradeoff], delta: float, confidence: float = 0.95) -> float:
        """Return the best of :func:`epsilon_tradeoff`; valid for mechanisms of the family."""
        return _epsilon_of_curves(self.m, self.guesses, family, delta, self._each(confidence))

    def perfect(self) -> OneRun:
        """Return what the same coins and numbers of guesses would give if every score told the truth: the ceilings."""
        least, most = sorted((self.included, self.m - self.included))
        right = {made: min(made // 2, least) + min(made // 2, most) for made, _ in self.guesses}
        return OneRun(self.m, self.included, tuple(right.items()))

    def counts(self) -> str:
        """Say how many guesses were right, at each number of guesses."""
        return (
            ", ".join(f"{correct} of {made}" for made, correct in self.guesses) + f" guesses right, {self.m} canaries"
        )

    def _each(self, confidence: float) -> float:
        return 1 - (1 - confidence) / len(self.guesses)


def evaluate(scores: np.ndarray, included: np.ndarray, fractions: Sequence[float] = FRACTIONS) -> OneRun:
    """Guess at several numbers of guesses, the given shares of the canaries.

    Args:
        scores: shape (m,), m >= 2, larger for "in"; not NaN.
        included: bool of shape (m,), the coins.
        fractions: in (0, 1], fixed before the scores are seen.
    """
    found = tuple(guesses(scores, included, k) for k in _numbers(len(scores), fractions))
    return OneRun(len(scores), int(np.count_nonzero(included)), found)


# -- power ------------------------------------------------------------------------------------------------------------


def detectable_epsilon(
    m: int,
    claim: float,
    delta: float,
    *,
    tradeoff: Tradeoff | None = None,
    confidence: float = 0.95,
    power: float = 0.8,
    fractions: Sequence[float] = FRACTIONS,
    repetitions: int = 200,
    seed: int = 0,
) -> float | None:
    """Return the smallest true epsilon at which the audit refutes the claim with probability ``power``.

    The mechanism that is audited in thought is Gaussian, with canaries that do not disturb one another and an attack
    that reads its exact likelihood ratio: the scores are m independent normal variables, shifted by mu where the
    canary is in. Simulated with a public seed: with 200 repetitions the probability is known within 0.06 (95 %).

    Args:
        m: canaries.
        claim: epsilon of the claim at ``delta``.
        delta: in (0, 1).
        tradeoff: the claim's whole curve, if that is what is tested.
        confidence: of the test.
        power: in (0, 1).
        fractions: see :func:`evaluate`.
        repetitions: audits simulated.
        seed: of the simulation.

    Returns:
        Epsilon at ``delta``, or None: no mechanism is caught so often, the audit has no power at this claim.
    """
    made = _numbers(m, fractions)
    allowed = (1 - confidence) / len(made)

    def refuted(guessed: int, correct: int) -> bool:
        if tradeoff is None:
            return p_value_dp(m, guessed, correct, claim, delta) <= allowed
        return bool(_impossible(m, guessed, correct, tradeoff, np.array([allowed]))[0])

    needed = np.array([_first(lambda correct, k=k: refuted(k, correct), k) for k in made])
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal((repetitions, m))
    included = generator.random((repetitions, m)) < 0.5

    def detected(mu: float) -> bool:
        found = _correct(noise + mu * included, included, made) >= needed
        return float(found.any(axis=1).mean()) >= power

    # The same noise at every mu: right guesses only become more as mu grows, so there is one switch.
    low, high = 0.0, 64.0
    if not detected(high):
        return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if detected(middle) else (middle, high)
    return gaussian_epsilon(high, delta)


# -- how --------------------------------------------------------------------------------------------------------------


def _checked(scores: np.ndarray, included: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or scores.size < 2 or included.dtype != bool:
        raise ValueError("an audit needs scores and coins (bool) of one shape (m,), with m >= 2")
    if np.isnan(scores).any():
        raise ValueError("a canary's score is NaN")
    return scores, included


def _check(m: int, made: int, correct: int) -> None:
    if not 0 <= correct <= made <= m:
        raise ValueError(f"needs 0 <= correct <= made <= m, got {correct}, {made}, {m}")


def _numbers(m: int, fractions: Sequence[float]) -> list[int]:
    """Return the numbers of guesses: even, in [2, m], each once, ascending."""
    if not len(fractions) or not all(0 < each <= 1 for each in fractions):
        raise ValueError(f"fractions must lie in (0, 1], got {fractions}")
    return sorted({max(2, 2 * int(m * each / 2 + 1e-9)) for each in fractions})


def _correct(scores: np.ndarray, included: np.ndarray, made: Sequence[int]) -> np.ndarray:
    """Return the right guesses of each audit at each number of guesses, shape (audits, len(made)).

    Args:
        scores: shape (audits, m).
        included: bool of that shape.
        made: numbers of guesses, even.
    """
    order = np.argsort(scores, axis=1, kind="stable")
    ranked = np.take_along_axis(included, order, axis=1)
    found = [
        np.count_nonzero(~ranked[:, : k // 2], axis=1) + np.count_nonzero(ranked[:, -(k // 2) :], axis=1) for k in made
    ]
    return np.stack(found, axis=1)


def _impossible(m: int, made: int, correct: int, tradeoff: Tradeoff, tails: np.ndarray) -> np.ndarray:
    """Return which probabilities of ``correct`` or more right guesses the curve rules out, bool of shape (n,).

    Args:
        m: canaries.
        made: guesses.
        correct: v, the right ones.
        tradeoff: the claim.
        tails: probabilities tau, shape (n,).
    """
    right, wrong = tails * (correct / m), tails * ((made - correct) / m)
    limit = made / m * _SLACK
    for level in range(correct - 1, -1, -1):
        needed = np.maximum(wrong, tradeoff.inverse(np.minimum(right, 1.0)))
        right, wrong = right + level / (made - level) * (needed - wrong), needed
        if (right + wrong > limit).all():
            break
    return right + wrong > limit


def _first(refuted: Callable[[int], bool], made: int) -> int:
    """Return the fewest right guesses that refute; made + 1 where even all of them do not."""
    low, high = 0, made + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    """Return the largest epsilon up to which every claim is refuted, within 1e-6, downwards; 0 if none is.

    The theorem's p-value grows with epsilon for certain only while 2 m delta <= 1. The FIRST switch is what is valid
    (the true epsilon lies above it unless its own claim is refuted), so it is looked for from 0 upwards.
    """
    low = 0.0
    if not refuted(low):
        return 0.0
    for high in (np.linspace(0.0, 1.0, 65)[1:] ** 2 * LARGEST_EPSILON).tolist():
        if not refuted(high):
            break
        low = high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _epsilon_of_curves(
    m: int,
    guesses: Sequence[tuple[int, int]],
    family: Callable[[float], Tradeoff],
    delta: float,
    confidence: float,
) -> float:
    """Return the epsilon of the largest theta that one of the (made, correct) refutes, each at this confidence."""
    allowed = np.array([1 - confidence])

    def refuted(theta: float) -> bool:
        curve = family(theta)
        if curve.epsilon(delta) > LARGEST_EPSILON:  # see bounds.tradeoff_bound
            return False
        return any(_impossible(m, *each, curve, allowed)[0] for each in guesses)

    theta = largest_theta(refuted)
    return family(theta).epsilon(delta) if theta else 0.0
