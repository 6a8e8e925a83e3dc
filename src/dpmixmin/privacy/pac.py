"""What a PAC guarantee says, beside DP and never merged with it (rule 22).

A PAC mechanism bounds the mutual information between its output and WHICH candidate subset of a known pool was the
training set. Its adversary is another one than DP's: it must guess membership in the subset, and the guarantee says
nothing about membership in the pool. So the units of a part that a PAC mechanism reads have no DP guarantee at all,
and a statement says that first. Releases about one secret subset add up their mutual information (PACZero paper).
"""

from __future__ import annotations

import math


def posterior_success(mutual_information: float, prior: float = 0.5) -> float:
    """Return the largest probability of guessing one unit's membership in the secret subset.

    The largest p >= prior with kl(p || prior) <= mutual information (Xiao & Devadas 2023; data processing).

    Args:
        mutual_information: in nats, >= 0.
        prior: probability of guessing without the output, in [1/2, 1).
    """
    if not (mutual_information >= 0 and 0.5 <= prior < 1):
        raise ValueError("posterior_success needs mutual_information >= 0 and prior in [1/2, 1)")

    def divergence(p: float) -> float:
        tail = (1 - p) * math.log((1 - p) / (1 - prior)) if p < 1 else 0.0
        return p * math.log(p / prior) + tail

    if divergence(1.0) <= mutual_information:
        return 1.0
    low, high = prior, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if divergence(middle) <= mutual_information else (low, middle)
    return high
