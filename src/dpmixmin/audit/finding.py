"""What an audit found, in one form for every mechanism; and the gate over all findings of a run.

An audit of a new mechanism (another privacy notion too) makes :class:`Finding` rows: what was claimed, what the
attack showed, how strong the attack could have been, whether the control leaked, and ONE number for the gate: the
p-value of "the claim holds". Whatever test gives that number must be valid: under a true claim it is below x with
probability at most x.

The gate compares the p-values of all gated findings with 0.001 divided by their number (Bonferroni): a run whose
claims all hold fails with probability at most 0.1 %, however the findings depend on each other. What people are shown
are 95 % bounds, each alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

CONFIDENCE = 0.95
"""Of the bounds that people are shown."""

FALSE_ALARM = 1e-3
"""Chance that the gate fails a run in which every claim holds."""

HOLDS, EXCEEDED, NO_POWER, NO_LEAK, REPORTED = "holds", "EXCEEDED", "no power", "control does not leak", "reported"
FAILURES = (EXCEEDED, NO_LEAK)


@dataclass(frozen=True)
class Finding:
    """One attack on one claim.

    Attributes:
        audit: mixture (two worlds), one_run (fine-tuning), membership (released models), replay.
        mechanism: what was attacked: mixture, dp_sgd, evaluation, …
        task: of the cell, or empty; so are method, learner, epsilon (the target) and seed.
        unit: what is protected.
        canary: natural, worst_natural, max_clip, gradient, record, members, or a replay's neighbour.
        statistic: the attack; ``above_means_with``: whether a score above its threshold reads "the canary is in".
        claim: epsilon that the accounting states for this mechanism alone, at ``delta``.
        delta: of every epsilon here.
        bound: 95 % lower bound on epsilon that holds for any (epsilon, delta) mechanism.
        bound_family: 95 % bound that uses the mechanism's own trade-off family; None where there is none.
        family: that family: gaussian, sampled gaussian, or empty.
        ceiling: ``bound`` of an attack that is always right; ``ceiling_family``: the same of ``bound_family``.
        detects: smallest true epsilon that ``bound`` would have shown to exceed the claim with probability 0.8;
            None: none (no power). ``detects_family``: the same of ``bound_family``.
        control: ``bound`` of the same attack without noise, or None where there is no control.
        control_ceiling: what a control can be relied on to show: a unit that is sampled may never enter a step, and
            then nothing tells that it is there.
        p_value: of "the claim holds", or None where nothing is tested.
        best_p: the p-value that an attack without errors would have given: how much the audit could have shown.
        gated: whether the gate looks at ``p_value``.
        control_gated: whether the gate asks the control to exceed the claim.
        ratio: replay: largest distance over declared sensitivity; None where it has no bound.
        auc: membership inference, with ``auc_low`` and ``auc_high`` (95 %).
        tpr_at_1: its true positive rate at 1 % false positives; ``tpr_at_0p1``: at 0.1 %.
        counts: what the bounds were computed from, by name, for people who check.
    """

    audit: str
    mechanism: str
    canary: str
    unit: str
    delta: float
    task: str = ""
    method: str = ""
    learner: str = ""
    epsilon: float | None = None
    seed: int | None = None
    statistic: str = ""
    above_means_with: bool = True
    claim: float | None = None
    bound: float | None = None
    bound_family: float | None = None
    family: str = ""
    ceiling: float | None = None
    ceiling_family: float | None = None
    detects: float | None = None
    detects_family: float | None = None
    control: float | None = None
    control_ceiling: float | None = None
    p_value: float | None = None
    best_p: float | None = None
    gated: bool = False
    control_gated: bool = False
    ratio: float | None = None
    auc: float | None = None
    auc_low: float | None = None
    auc_high: float | None = None
    tpr_at_1: float | None = None
    tpr_at_0p1: float | None = None
    counts: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON types; an epsilon that is not finite is None."""
        values = asdict(self)
        return {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in values.items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Return the finding that :meth:`to_json` wrote."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def name(self) -> str:
        """A short name for one line of text."""
        where = [f"{key}={value}" for key, value in (("task", self.task), ("method", self.method)) if value]
        where += [f"eps={self.epsilon:g}"] if self.epsilon is not None else []
        mechanism = [self.mechanism] if self.mechanism != self.audit else []
        return " ".join([self.audit, *mechanism, *where, self.canary])


def level(findings: Iterable[Finding]) -> float:
    """Return the p-value below which a gated finding is a violation."""
    return FALSE_ALARM / max(1, sum(finding.gated for finding in findings))


def verdict(finding: Finding, threshold: float) -> str:
    """Judge one finding.

    Args:
        finding: the finding.
        threshold: from :func:`level` over all findings of the run.

    Returns:
        EXCEEDED: the claim is refuted. ``control does not leak``: without noise the same attack does not exceed a
        claim that it could have exceeded, so the attack proves nothing. ``no power``: an attack without errors
        would not have refuted the claim either. Otherwise holds; ``reported`` where the gate does not look.
    """
    if not (finding.gated or finding.control_gated):
        return REPORTED
    if finding.gated and finding.p_value is not None and finding.p_value < threshold:
        return EXCEEDED
    if (
        finding.control_gated
        and finding.control is not None
        and finding.control <= finding.claim < finding.control_ceiling
    ):
        return NO_LEAK
    if finding.best_p is not None and finding.best_p >= threshold:
        return NO_POWER
    return HOLDS


def judge(findings: list[Finding]) -> list[str]:
    """Return the verdict of each finding."""
    threshold = level(findings)
    return [verdict(finding, threshold) for finding in findings]


def failed_names(findings: list[Finding]) -> list[str]:
    """Return the names of the findings that fail the gate, in the order of :func:`failures`."""
    return [each.name for each, judged in zip(findings, judge(findings), strict=True) if judged in FAILURES]


def failures(findings: list[Finding]) -> list[str]:
    """Return one sentence for each finding that fails the gate: what, by how much."""
    found = []
    for finding, judged in zip(findings, judge(findings), strict=True):
        if judged not in FAILURES:
            continue
        if finding.audit == "replay" and finding.ratio is None:
            why = "private data leaves the mechanism outside its noisy releases, or a release has no noise of its own"
        elif finding.ratio is not None:
            why = f"one unit moves a release by {finding.ratio:.4g} times the declared sensitivity"
        elif judged == NO_LEAK:
            why = f"without noise the attack shows epsilon {finding.control:.3g} only, claimed {finding.claim:.3g}"
        else:
            shown = max(value for value in (finding.bound, finding.bound_family) if value is not None)
            why = f"epsilon is at least {shown:.3g} (95 %), claimed {finding.claim:.3g}; p = {finding.p_value:.2g}"
        found.append(f"{finding.name}: {why}")
    return found
