"""What the accountant composes: immutable events of public parameters, and the neighbours they are stated for.

An event is one mechanism's whole cost. It holds no data and nothing counted from data (docs/rules.md, rule 2), so two
neighbouring datasets have equal events. Events go to and from plain JSON without loss.

Adjacency, for two datasets D and D′ whose units have public ids:

* ``ADD_REMOVE``: D′ lacks one unit of D, or has one more.
* ``REPLACE_ONE``: one unit's records are replaced by others under the SAME public unit id, so the unit stays in its
  part. (A replacement that also changes the id is one removal and one addition.)
* ``ZERO_OUT``: one unit's contribution is replaced by zero; the number of units stays, and may be public.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

ADD_REMOVE = "add_remove"
REPLACE_ONE = "replace_one"
ZERO_OUT = "zero_out"
ADJACENCIES = (ADD_REMOVE, REPLACE_ONE, ZERO_OUT)


def _check(event: Any, condition: bool, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{type(event).__name__} needs {wanted}, got {event}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class GaussianEvent:
    """T steps of a (possibly Poisson-sampled) Gaussian mechanism.

    Attributes:
        noise_multiplier: noise standard deviation over the add/remove sensitivity, > 0.
        sampling_rate: probability q in (0, 1] of each unit to enter a step, by its own coin; 1 is full batch.
        steps: T >= 1.
        replace_factor: replace-one sensitivity over add/remove sensitivity, in [1, 2]: 2 for clipped sums, sqrt 2 for
            vectors on the simplex.

    Raises:
        ValueError: a parameter is out of range.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    replace_factor: float = 2.0

    def __post_init__(self):
        numbers = (self.noise_multiplier, self.sampling_rate, self.steps, self.replace_factor)
        _check(self, all(map(_is_number, numbers)), "numbers")
        _check(self, 0 < self.noise_multiplier < math.inf, "a finite noise_multiplier > 0")
        _check(self, 0 < self.sampling_rate <= 1, "a sampling_rate in (0, 1]")
        _check(self, isinstance(self.steps, int) and self.steps >= 1, "an integer number of steps >= 1")
        # Two vectors of norm 1 are at most 2 apart; below 1 a unit replaced by zero would not be covered.
        _check(self, 1 <= self.replace_factor <= 2, "a replace_factor in [1, 2]")


@dataclass(frozen=True)
class PureEvent:
    """A pure-DP mechanism (exponential mechanism, permute-and-flip, Laplace).

    Attributes:
        epsilon: guarantee for add/remove and zero-out neighbours, > 0.
        replace_epsilon: guarantee for replace-one neighbours, > 0; 2 epsilon always suffices, which is what a removal
            followed by an addition costs.

    Raises:
        ValueError: a parameter is out of range.
    """

    epsilon: float
    replace_epsilon: float

    def __post_init__(self):
        _check(self, _is_number(self.epsilon) and 0 < self.epsilon < math.inf, "a finite epsilon > 0")
        good = _is_number(self.replace_epsilon) and 0 < self.replace_epsilon < math.inf
        _check(self, good, "a finite replace_epsilon > 0")


@dataclass(frozen=True)
class RepeatSelectEvent:
    """Repeat a base mechanism a random number of times and release the best run only (Papernot & Steinke 2110.03620).

    The base outputs a candidate AND its noisy score; the best is chosen by that score.

    Attributes:
        base: the events of one run, composed. No RepeatSelectEvent inside.
        mean: mean number of repetitions, >= 1 (and above 1 unless Poisson, as the others always run once).
        shape: law of the number: infinity Poisson, 1 geometric, 0 logarithmic, else truncated negative binomial.
        delta_share: the part of the total delta in (0, 1) that this event takes for itself: it enters compositions as
            an (epsilon, delta_share) mechanism.

    Raises:
        ValueError: a parameter is out of range.
    """

    base: tuple[GaussianEvent | PureEvent, ...]
    mean: float
    shape: float
    delta_share: float

    def __post_init__(self):
        good = isinstance(self.base, tuple) and self.base
        good = good and all(isinstance(event, (GaussianEvent, PureEvent)) for event in self.base)
        _check(self, good, "a non-empty tuple of GaussianEvent and PureEvent as base")
        _check(self, all(map(_is_number, (self.mean, self.shape, self.delta_share))), "numbers")
        least = self.mean >= 1 if self.shape == math.inf else self.mean > 1
        _check(self, least and self.mean < math.inf, "a finite mean > 1 (Poisson: >= 1)")
        _check(self, self.shape >= 0, "a shape >= 0")
        _check(self, 0 < self.delta_share < 1, "a delta_share in (0, 1)")


AnyEvent = GaussianEvent | PureEvent | RepeatSelectEvent
"""What the accountants of DP compose."""


@dataclass(frozen=True)
class PacEvent:
    """A PAC mechanism (PACZero): no accountant of DP takes it, see pac.py.

    Attributes:
        mutual_information: between the output and the secret subset, in nats, >= 0.
        prior: probability of guessing a unit's membership in the subset without the output, in [1/2, 1).

    Raises:
        ValueError: a parameter is out of range.
    """

    mutual_information: float
    prior: float = 0.5

    def __post_init__(self):
        good = _is_number(self.mutual_information) and 0 <= self.mutual_information < math.inf
        _check(self, good, "a finite mutual_information >= 0")
        _check(self, _is_number(self.prior) and 0.5 <= self.prior < 1, "a prior in [1/2, 1)")


KINDS = {"gaussian": GaussianEvent, "pure": PureEvent, "repeat_select": RepeatSelectEvent, "pac": PacEvent}
"""Event classes by their name in JSON."""


def to_json(event: AnyEvent | PacEvent) -> dict[str, Any]:
    """Return an event as plain JSON types, with its kind; an infinite shape becomes the text ``"inf"``."""
    kind = next(name for name, cls in KINDS.items() if type(event) is cls)
    values = asdict(event)
    if kind == "repeat_select":
        values["base"] = [to_json(each) for each in event.base]
        values["shape"] = "inf" if event.shape == math.inf else event.shape
    return {"kind": kind, **values}


def from_json(values: dict[str, Any]) -> AnyEvent | PacEvent:
    """Return the event that :func:`to_json` wrote.

    Raises:
        ValueError: unknown kind, missing or unknown fields, or a parameter out of range.
    """
    values = dict(values)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"unknown kind of event {kind!r}; known: {', '.join(KINDS)}")
    names = {field.name for field in fields(KINDS[kind])}
    if set(values) != names:
        raise ValueError(f"an event of kind {kind} has the fields {sorted(names)}, got {sorted(values)}")
    if kind == "repeat_select":
        values["base"] = tuple(from_json(each) for each in values["base"])
        values["shape"] = math.inf if values["shape"] == "inf" else values["shape"]
    return KINDS[kind](**values)
