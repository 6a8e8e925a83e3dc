"""Hockey-stick divergences of mixtures of Gaussians by numerical integration: an independent reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.integrate import quad
from scipy.stats import norm


def mixture(weights, shifts, sigma):
    """Density of a mixture of Gaussians of one width."""
    return lambda x: sum(w * norm.pdf(x, shift, sigma) for w, shift in zip(weights, shifts, strict=True))


def hockey_stick(p, r, epsilon: float, sigma: float) -> float:
    """Integrate (p - e^epsilon r)+ numerically; the densities live within [-2, 12] around noise of width sigma."""
    points = np.linspace(-2 - 14 * sigma, 12 + 14 * sigma, 4001)
    excess = p(points) - math.exp(epsilon) * r(points)
    change = points[:-1][np.diff(np.sign(excess)) != 0]
    edges = sorted([points[0], *np.linspace(-2, 12, 29), *change, *(change + points[1] - points[0]), points[-1]])
    return sum(
        quad(lambda x: max(p(x) - math.exp(epsilon) * r(x), 0), a, b, epsabs=0, limit=200)[0]
        for a, b in itertools.pairwise(edges)
    )
