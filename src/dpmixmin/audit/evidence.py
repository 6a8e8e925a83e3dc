"""From scores to findings: the bounds, the power and the p-value of each attack.

Every finding has a bound that holds for whatever mechanism made the scores (Clopper-Pearson, as in the paper's A.8),
and, because we know what our mechanisms claim to be, one in their own family: a Gaussian's trade-off where all units
enter every step, the sampled Gaussian's otherwise. The p-value is that of
both claims: the curve, and the stated epsilon whatever curve it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from scipy.stats import binom

from dpmixmin.audit import attacks, bounds, one_run, power
from dpmixmin.audit.bounds import Errors
from dpmixmin.audit.finding import CONFIDENCE, Finding
from dpmixmin.audit.mixture import MixtureAudit
from dpmixmin.audit.tradeoff import Tradeoff, scaled_family
from dpmixmin.cells import Cell
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.mechanisms import MechanismSpec

if TYPE_CHECKING:  # torch, where it is needed only
    from dpmixmin.audit.training import TrainingAudit

CONTROLLED = {"max_clip", "gradient"}
"""Canaries whose control must leak: constructed to move every release as far as one unit can."""


def of_mixture(audit: MixtureAudit, spec: MechanismSpec, cell: Cell) -> list[Finding]:
    """Return one finding for each canary of a mixture's audit."""
    composition, shared = Composition(spec.events()), _shared("mixture", "mixture", spec, cell)
    claim, delta = shared["claim"], spec.delta
    gaussian = composition.mu is not None
    p_value, findings = _test_of(composition), []
    for canary in audit.canaries:
        select, evaluate = audit.select(canary, noise=True), audit.evaluate(canary, noise=True)
        errors = attacks.count(attacks.choose(select, delta, "dp"), evaluate)
        sharp = attacks.choose(select, delta, "gaussian" if gaussian else "dp")
        sharper = attacks.count(sharp, evaluate)
        perfect = Errors(0, errors.without, 0, errors.with_canary)
        control = attacks.count(
            attacks.choose(audit.select(canary, noise=False), delta, "dp"), audit.evaluate(canary, noise=False)
        )
        findings.append(
            Finding(
                **shared,
                canary=canary,
                statistic=sharp.statistic,
                above_means_with=sharp.above_means_with,
                bound=bounds.dp_bound(errors, delta, CONFIDENCE),
                bound_family=_family_bound(sharper, composition, delta),
                family="gaussian" if gaussian else "sampled gaussian",
                ceiling=bounds.dp_ceiling(errors.without, delta, CONFIDENCE),
                ceiling_family=_family_bound(perfect, composition, delta),
                detects=power.detectable_epsilon(claim, errors.without, delta, "dp", CONFIDENCE),
                detects_family=(
                    power.detectable_epsilon(claim, errors.without, delta, "gaussian", CONFIDENCE)
                    if gaussian
                    else power.detectable_in_family(
                        scaled_family(composition.events[0]), errors.without, delta, CONFIDENCE
                    )
                ),
                control=bounds.dp_bound(control, delta, CONFIDENCE),
                control_ceiling=_reliable(control, spec),
                p_value=_either(p_value(sharper), _p_of_dp(errors, claim, delta)),
                best_p=_either(p_value(perfect), _p_of_dp(perfect, claim, delta)),
                gated=True,
                control_gated=canary in CONTROLLED,
                counts=asdict(sharper),
            )
        )
    return findings


def _tradeoff(composition: Composition) -> Tradeoff:
    return Tradeoff.of(composition) if composition.mu is None else Tradeoff.gaussian(composition.mu)


def _test_of(composition: Composition) -> Callable[[Errors], float]:
    """Return the p-value of the claim that a mechanism's trade-off is the one that its accounting says."""
    claimed = _tradeoff(composition)
    return lambda errors: bounds.p_value(errors, lambda confidence: bounds.rejects(errors, claimed, confidence))


def _family_bound(errors: Errors, composition: Composition, delta: float) -> float:
    if composition.mu is not None:
        return bounds.gaussian_bound(errors, delta, CONFIDENCE)
    return bounds.tradeoff_bound(errors, scaled_family(composition.events[0]), delta, CONFIDENCE)


def of_training(audit: TrainingAudit, spec: MechanismSpec, cell: Cell) -> list[Finding]:
    """Return one finding for each kind of canary of a fine-tuning's audit.

    Gradient canaries are independent trials wherever the noise is independent from coordinate to coordinate
    (``TrainingAudit.select``), as the claim says: their errors test it more sharply than the number of right guesses
    does. Of record canaries, which share the model, only the guesses may be used.

    Args:
        audit: the one run, with its control.
        spec: what was claimed.
        cell: the fine-tuned cell.
    """
    from dpmixmin.audit.training import GRADIENT

    composition, shared = Composition(spec.events()), _shared("one_run", cell.mechanism, spec, cell)
    claim, delta = shared["claim"], spec.delta
    findings = []
    for kind in audit.kinds:
        found = one_run.evaluate(*audit.arrays(kind))
        perfect, without_noise = found.perfect(), one_run.evaluate(*audit.control.arrays(kind))
        if kind == GRADIENT:
            sharp = _of_gradients(audit, spec, composition)
            # Of a sampled canary that never enters, guessing "out" is right by chance only: two worlds see further.
            sharp["p_value"] = _either(sharp["p_value"], found.p_value_dp(claim, delta))
            sharp["best_p"] = _either(sharp["best_p"], perfect.p_value_dp(claim, delta))
            sharp["control"] = max(sharp["control"], without_noise.epsilon_dp(delta, CONFIDENCE))
        else:
            sharp = _of_guesses(found, composition, claim, delta)
            sharp["control"] = without_noise.epsilon_dp(delta, CONFIDENCE)
        findings.append(
            Finding(
                **shared,
                canary=kind,
                statistic=audit.statistic(kind),
                bound=found.epsilon_dp(delta, CONFIDENCE),
                family="gaussian" if composition.mu is not None else "sampled gaussian",
                ceiling=perfect.epsilon_dp(delta, CONFIDENCE),
                detects=one_run.detectable_epsilon(found.m, claim, delta, confidence=CONFIDENCE),
                gated=True,
                control_gated=kind in CONTROLLED,
                **sharp,
            )
        )
    return findings


def _of_gradients(audit: TrainingAudit, spec: MechanismSpec, composition: Composition) -> dict:
    """Return what errors of independent gradient canaries say of the mechanism's own family, and of the control."""
    delta, silent = spec.delta, audit.control
    control = attacks.count(attacks.choose(silent.select(), delta, "dp"), silent.evaluate())
    errors = attacks.count(attacks.choose(audit.select(), delta, "gaussian"), audit.evaluate())
    perfect = Errors(0, errors.without, 0, errors.with_canary)
    p_value = _test_of(composition)
    return {
        "bound_family": _family_bound(errors, composition, delta),
        "ceiling_family": _family_bound(perfect, composition, delta),
        "detects_family": power.detectable_in_family(
            scaled_family(composition.events[0]), min(errors.without, errors.with_canary), delta, CONFIDENCE
        ),
        "control": bounds.dp_bound(control, delta, CONFIDENCE),
        "control_ceiling": _reliable(control, spec),
        "p_value": p_value(errors),
        "best_p": p_value(perfect),
        "counts": asdict(errors),
    }


def _of_guesses(found: one_run.OneRun, composition: Composition, claim: float, delta: float) -> dict:
    """Return what right guesses say of the mechanism's own family."""
    family, claimed = scaled_family(composition.events[0]), _tradeoff(composition)
    return {
        "bound_family": found.epsilon_tradeoff(family, delta, CONFIDENCE),
        "ceiling_family": found.perfect().epsilon_tradeoff(family, delta, CONFIDENCE),
        "detects_family": one_run.detectable_epsilon(found.m, claim, delta, tradeoff=claimed, confidence=CONFIDENCE),
        "p_value": _either(found.p_value(claimed), found.p_value_dp(claim, delta)),
        "best_p": _either(found.perfect().p_value(claimed), found.perfect().p_value_dp(claim, delta)),
        "counts": {"canaries": found.m} | {f"right_of_{made}": correct for made, correct in found.guesses},
    }


def _p_of_dp(errors: Errors, claim: float, delta: float) -> float:
    """Return the p-value of the stated (claim, delta) itself, whatever curve the accounting got it from."""
    return bounds.p_value(errors, lambda confidence: bounds.dp_bound(errors, delta, confidence) > claim)


def _either(curve: float, stated: float) -> float:
    """Return the p-value of two claims at once, the mechanism's curve and the stated epsilon (Bonferroni)."""
    return min(1.0, 2 * min(curve, stated))


def _reliable(control: Errors, spec: MechanismSpec) -> float:
    """Return the bound that a control without noise falls short of with probability 1e-6 at most.

    Nothing tells that a canary is there if it never entered a step: (1 - q)**T of them, and as many more as chance may
    make, are missed by every attack.
    """
    hidden = (1 - spec.sampling_rate) ** spec.steps
    missed = int(binom.ppf(1 - 1e-6, control.with_canary, hidden)) if control.with_canary and hidden else 0
    return bounds.dp_bound(Errors(0, control.without, missed, control.with_canary), spec.delta, CONFIDENCE)


def _shared(audit: str, mechanism: str, spec: MechanismSpec, cell: Cell) -> dict:
    """Return what the findings of one cell share; the claim is that of this mechanism alone, not of the chain."""
    return {
        "audit": audit,
        "mechanism": mechanism,
        "task": cell.task,
        "method": cell.method,
        "learner": cell.learner,
        "epsilon": cell.epsilon,
        "seed": cell.seed,
        "unit": spec.unit,
        "delta": spec.delta,
        "claim": Composition(spec.events()).epsilon(spec.delta),
    }
