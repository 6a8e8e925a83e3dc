"""What private tables are opened for, and what a deployment may spend (see ledger.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpmixmin.privacy.mechanisms import Spec


@dataclass(frozen=True)
class Derive:
    """Private to private: free; the output stays in ``private/``."""


@dataclass(frozen=True)
class Study:
    """A non-private measurement on benchmark data: uncharged, output only in ``study/``, noted in the ledger.

    Attributes:
        what: what is measured, for the note.
    """

    what: str


@dataclass(frozen=True)
class Mechanism:
    """A charged release.

    Attributes:
        spec: the mechanism's public parameters.
        cell: coordinates of the cell (task, method, learner, mechanism, epsilon, seed, chain).
        inputs: digests of the non-private inputs (settings, proxies, weights, checkpoint).
        made: how the private inputs were made (public config and code), never their content.
        code: digest of the stage's code.
        private_randomness: False under ``insecure_seed``: the output is stamped NOT PRIVATE.
        total_variation: distance of the whole run's noise from its ideal law; it is added to delta.
    """

    spec: Spec
    cell: dict[str, Any]
    inputs: dict[str, str]
    made: dict[str, Any]
    code: str
    private_randomness: bool = True
    total_variation: float = 0.0


@dataclass(frozen=True)
class Cap:
    """What a deployment may spend on a dataset, over everything that was ever charged."""

    epsilon: float
    delta: float
