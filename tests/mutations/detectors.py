"""Break a mechanism on purpose and see which detector notices: replay, statistical audit, or a test.

    .venv/bin/python tests/mutations/detectors.py [--name TEXT] [--markdown FILE]

Each row is a mechanism with an error that people make (broken.py), as edits of a copy of the sources. The copy is
attacked in a small case made for it: by the replay audit (``audit/replays.py``), by the statistical audit of its claim
(``audit/mixture.py`` or ``audit/training.py``), and by one named test of `make test`. Mechanisms as they are come
first; nothing may flag them. Ends with 0 only when every broken mechanism is flagged by something.

The cases have claims that their audits have the power to refute; what an audit of a real run can show depends on its
claim (docs/audits.md). All randomness is seeded, so the table is the same every time. For a new seed the statistical
audit would flag a sound mechanism with probability :data:`LEVEL` a case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from broken import BROKEN, Broken
from run import Checkout

LEVEL = 1e-3
"""The statistical audit flags a claim whose p-value is below this, divided by the canaries (Bonferroni)."""


@dataclass(frozen=True)
class Row:
    """What the detectors say.

    Attributes:
        broken: the mechanism.
        ratio: largest distance over declared sensitivity; ``neighbour``: where.
        replay: whether the replay audit flags it.
        claim: the epsilon that its accounting states, at delta 1e-5.
        bound: largest 95 % lower bound on epsilon that holds for any mechanism.
        p_value: of the claim, the least of the canaries' times their number.
        fault: why the statistical audit refused to go on, or empty.
        test: whether the named test fails.
    """

    broken: Broken
    ratio: float
    neighbour: str
    replay: bool
    claim: float
    bound: float
    p_value: float
    fault: str
    test: bool

    @property
    def audit(self) -> bool:
        """Whether the statistical audit flags it."""
        return bool(self.fault) or self.p_value < LEVEL

    @property
    def flagged(self) -> bool:
        """Whether anything does."""
        return self.replay or self.audit or self.test


# -- the cases, run in a process whose dpmixmin is the broken one ---------------------------------------------


def mixture() -> dict:
    """Attack the mixture, all users in every step: a Gaussian of mu = 1."""
    return _mixture(1.0, 10, 10**0.5)


def sampled_mixture() -> dict:
    """Attack the mixture, users sampled at a rate of 0.2."""
    return _mixture(0.2, 20, 1.0)


def _mixture(rate: float, steps: int, noise_multiplier: float) -> dict:
    """Attack `centred` on 100 users of one to three records."""
    import numpy as np

    from dpmixmin.audit import attacks, bounds, replays
    from dpmixmin.audit.mixture import audit_mixture
    from dpmixmin.mixing.objective import SourceTable
    from dpmixmin.privacy.accounting import Composition
    from dpmixmin.privacy.mechanisms import GridGaussian
    from dpmixmin.privacy.noise import InsecureNoise
    from dpmixmin.privacy.subsample import names

    rng = np.random.default_rng(1)
    unit = np.repeat(np.arange(100), rng.integers(1, 4, size=100))
    p = rng.uniform(0, 1, size=(len(unit), 5)) ** 4
    table = SourceTable.of_labels(p, (100, unit), names(map(str, range(len(unit)))))
    spec = GridGaussian(0.3, noise_multiplier, steps, rate, 100.0, 8.0, 1e-5, "user")
    claimed = Composition(spec.events())

    def attack() -> tuple[float, float]:
        noise = InsecureNoise(0, "detectors")
        audit = audit_mixture(table, spec, "centred", 1.0, runs=1000, seed=0, noise=noise, records_per_step=2)
        bound, p_value = 0.0, 1.0
        for canary in audit.canaries:
            select, evaluate = audit.select(canary, noise=True), audit.evaluate(canary, noise=True)
            errors = attacks.count(attacks.choose(select, spec.delta), evaluate)
            bound = max(bound, bounds.dp_bound(errors, spec.delta))
            p_value = min(p_value, _p_value(select, evaluate, claimed, spec.delta) * len(audit.canaries))
        return bound, p_value

    return _report(replays.replay_mixture(table, spec, "centred", 1.0, 2), claimed.epsilon(spec.delta), attack)


def dp_sgd() -> dict:
    """Attack DP-SGD on 60 users of one to three records, sampled at a rate of 0.3."""
    import numpy as np
    import torch

    from dpmixmin.audit import one_run, replays
    from dpmixmin.audit.training import audit_training
    from dpmixmin.models import networks
    from dpmixmin.privacy.accounting import Composition
    from dpmixmin.privacy.mechanisms import ModelGaussian
    from dpmixmin.privacy.noise import InsecureNoise
    from dpmixmin.privacy.subsample import names

    rng = np.random.default_rng(1)
    unit = np.repeat(np.arange(60), rng.integers(1, 4, size=60))
    x = rng.normal(size=(len(unit), 6)).astype(np.float32)
    y = rng.integers(0, 2, size=len(unit)).astype(np.float32)

    def build(make):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = networks.mlp(6, 240, 1)
        return make(model, x, y, unit, 60, 256, names=names(map(str, range(len(unit)))), records_per_step=3)

    spec = ModelGaussian(0.5, 2.0, 20, 0.3, 60.0, 8.0, 1e-5, "user")
    claimed = Composition(spec.events())

    def attack() -> tuple[float, float]:
        audit = audit_training(build, spec, 0.05, InsecureNoise(0, "detectors"), canaries=2000, seed=0)
        bound = one_run.evaluate(*audit.arrays("gradient")).epsilon_dp(spec.delta)
        return bound, _p_value(audit.select(), audit.evaluate(), claimed, spec.delta)

    return _report(replays.replay_training(build, spec, 0.05), claimed.epsilon(spec.delta), attack)


def _p_value(select: dict, evaluate: dict, claimed, delta: float) -> float:
    """Return the p-value of the curve that the accounting claims, from errors in two worlds."""
    from dpmixmin.audit import attacks, bounds
    from dpmixmin.audit.tradeoff import Tradeoff

    errors = attacks.count(attacks.choose(select, delta, "gaussian"), evaluate)
    curve = Tradeoff.of(claimed)
    return bounds.p_value(errors, lambda confidence: bounds.rejects(errors, curve, confidence))


def _report(results: list, claim: float, attack: Callable[[], tuple[float, float]]) -> dict:
    """Return the JSON of one case; an audit that cannot trust what it attacks says so by an AssertionError."""
    from dpmixmin.audit import replays

    worst = replays.worst(results)
    bound, p_value, fault = 0.0, 1.0, ""
    try:
        bound, p_value = attack()
    except AssertionError as error:
        fault = str(error) or "the audit refused"
    return {
        "ratio": worst.ratio,
        "neighbour": worst.neighbour,
        "replay": not all(result.holds for result in results),
        "claim": claim,
        "bound": bound,
        "p_value": p_value,
        "fault": fault,
    }


CASES = {"mixture": mixture, "mixture, sampled": sampled_mixture, "DP-SGD, sampled": dp_sgd}

# -- the table ------------------------------------------------------------------------------------------------


class Workshop(Checkout):
    """A copy of the checkout in which mechanisms are broken, one after the other."""

    def examine(self, broken: Broken) -> Row:
        """Break the copy, run the detectors, mend it.

        Raises:
            SystemExit: an old text is not in its file exactly once, or the case does not run.
        """
        originals = {}
        try:
            for edit in broken.edits:
                file = self.path / "src" / edit.file
                text = file.read_text(encoding="utf-8")
                originals.setdefault(file, text)
                if text.count(edit.old) != 1:
                    sys.exit(f"{broken.name}: the old text is {text.count(edit.old)} times in src/{edit.file}")
                file.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
            done = self._run(str(Path(__file__).resolve()), "--case", broken.case)
            if done.returncode:
                sys.exit(f"{broken.name}: its case does not run:\n{done.stderr}")
            failed = bool(broken.test) and self.pytest([broken.test]).returncode == 1
            return Row(broken, **json.loads(done.stdout.splitlines()[-1]), test=failed)
        finally:
            for file, text in originals.items():
                file.write_text(text, encoding="utf-8")


def examine(chosen: Sequence[Broken]) -> list[Row]:
    """Examine mechanisms on one copy; print one line for each."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="detectors-") as folder:
        workshop = Workshop(Path(folder).resolve() / "copy")
        tests = sorted({broken.test for broken in chosen if broken.test})
        if tests and workshop.pytest(tests).returncode:
            sys.exit("the named tests fail with nothing broken")
        for broken in chosen:
            rows.append(workshop.examine(broken))
            print(" | ".join(_cells(rows[-1])), flush=True)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: what is flagged is in bold."""
    head = (
        "mechanism",
        "broken by",
        "replay: largest distance / sensitivity",
        "statistical audit",
        "test of `make test`",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)])


def _cells(row: Row) -> list[str]:
    def shown(text: str, flagged: bool) -> str:
        return f"**{text}**" if flagged else text

    replay = f"{row.ratio:.3g} ({row.neighbour})" if row.replay else f"{row.ratio:.3g}"
    audit = row.fault or f"claim {row.claim:.3g}, bound {row.bound:.3g}, p = {row.p_value:.1g}"
    test = f"`{row.broken.test.partition('::')[2]}`" if row.test else "-"
    cells = [row.broken.case, row.broken.name, shown(replay, row.replay), shown(audit, row.audit), test]
    return [cell.replace("|", "\\|") for cell in cells]


def sound(rows: Sequence[Row]) -> list[str]:
    """Return what is wrong with the table: a sound mechanism that is flagged, or a broken one that is not."""
    wrong = [f"{row.broken.case}: flagged with nothing broken" for row in rows if row.flagged and not row.broken.edits]
    missed = [row.broken for row in rows if row.broken.edits and not row.flagged]
    return [*wrong, *(f"{broken.case}, {broken.name}: nothing notices" for broken in missed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="", help="errors whose name holds this text only")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(CASES[chosen.case]()))
        return 0
    rows = examine([broken for broken in BROKEN if chosen.name in broken.name])
    if chosen.markdown:
        chosen.markdown.write_text(markdown(rows) + "\n", encoding="utf-8")
    wrong = sound(rows)
    print("\n".join(wrong) or f"{len(rows)} mechanisms, each as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
