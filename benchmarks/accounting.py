"""How tight the accounting is, over the whole range of settings.

    python benchmarks/accounting.py                 prints a markdown table
    python benchmarks/accounting.py --check FILE    recomputes the table that FILE holds; exit status 1 on a difference

Every row calibrates the noise for a target and then asks several accountants what is spent with it:

* spent: this package's upper bound (exact for full batches), never above the target;
* lower: a lower bound by PLDs of the mechanism with its outputs merged into bins, so the true epsilon lies between the
  two; their ratio is the whole error ("-" where a useful lower bound needs too fine a grid);
* PRV: the error interval of Opacus' PRV accountant ("fails" where it gives none);
* RDP: dp-accounting's Rényi accountant, which is what most libraries report.

Everything but the seconds is deterministic.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from dpmixmin.privacy.accounting import Composition, calibrate
from dpmixmin.privacy.events import GaussianEvent

HEADER = ("epsilon", "delta", "q", "T", "noise", "spent", "lower", "spent/lower", "PRV", "RDP", "seconds")
SETTINGS = [  # epsilon, delta, q, T
    (0.01, 1e-5, 1.0, 1),
    (0.01, 1e-12, 1.0, 36_000),
    (1.0, 1e-5, 1.0, 100),
    (50.0, 1e-5, 1.0, 1),
    (50.0, 1e-12, 1.0, 36_000),
    (0.01, 1e-5, 0.5, 1),
    (0.01, 1e-5, 0.01, 1_000),
    (0.01, 1e-12, 200 / 80_726, 36_000),
    (0.01, 1e-5, 1e-4, 36_000),
    (0.1, 1e-8, 0.1, 100),
    (0.1, 1e-6, 1e-4, 100),
    (0.5, 1e-6, 0.01, 3_000),
    (1.0, 1e-5, 0.03, 30),
    (1.0, 1e-5, 0.1, 100),
    (1.0, 1e-5, 200 / 80_726, 36_000),
    (1.0, 1e-5, 1e-4, 36_000),
    (1.0, 1e-12, 1e-4, 1),
    (1.0, 1e-12, 0.01, 1_000),
    (1.0, 1e-5, 0.99, 10),
    (2.0, 1e-12, 0.01, 300),
    (3.0, 1e-8, 0.004, 10_000),
    (5.0, 1e-5, 0.2, 1),
    (8.0, 1e-5, 0.02, 60),
    (8.0, 1e-12, 1e-4, 36_000),
    (20.0, 1e-6, 0.05, 500),
    (50.0, 1e-5, 0.5, 1),
    (50.0, 1e-12, 0.01, 10),
    (50.0, 1e-5, 0.01, 1_000),
    (50.0, 1e-5, 1e-4, 36_000),
    (50.0, 1e-12, 0.9, 36_000),
]


def optimistic(event: GaussianEvent, delta: float) -> float:
    """Return a lower bound on epsilon, or NaN where none is near."""
    composition = Composition([event], pessimistic=False, tolerance=2e-3)
    if composition.mu is not None:
        return composition.epsilon(delta)
    try:
        return composition.epsilon(delta)
    except ArithmeticError:
        return math.nan


def prv(event: GaussianEvent, epsilon: float, delta: float) -> tuple[float, float] | None:
    """Return the error interval of Opacus' PRV accountant, or None where it gives none within two minutes."""
    from opacus.accountants import PRVAccountant

    def too_long(*_):
        raise TimeoutError

    peer = PRVAccountant()
    peer.history = [(event.noise_multiplier, event.sampling_rate, event.steps)]
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        law = peer._get_dprv(eps_error=0.01 * epsilon, delta_error=delta / 1000)
        low, _, high = law.compute_epsilon(delta, delta / 1000, 0.01 * epsilon)
    except Exception:  # it raises whatever its quadrature or search ran into
        return None
    finally:
        signal.alarm(0)
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None


def renyi(event: GaussianEvent, delta: float) -> float:
    """Return epsilon by dp-accounting's Rényi accountant."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    single = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    if event.sampling_rate < 1:
        single = dp_accounting.PoissonSampledDpEvent(event.sampling_rate, single)
    return float(RdpAccountant().compose(single, event.steps).get_epsilon(delta))


def row(epsilon: float, delta: float, rate: float, steps: int) -> list[str]:
    """Return one row of the table."""
    started = time.perf_counter()
    sigma = calibrate(epsilon, delta, rate, steps)
    seconds = time.perf_counter() - started
    event = GaussianEvent(sigma, rate, steps)
    spent = Composition([event]).epsilon(delta)
    lower = optimistic(event, delta)
    useful = lower > 0.9 * spent
    interval = prv(event, epsilon, delta)
    return [
        f"{epsilon:g}",
        f"{delta:g}",
        f"{rate:.4g}",
        f"{steps}",
        f"{sigma:.5g}",
        f"{spent:.5g}",
        f"{lower:.5g}" if useful else "-",
        f"{spent / lower:.4f}" if useful else "-",
        "fails" if interval is None else f"{interval[0]:.4g} to {interval[1]:.4g}",
        f"{renyi(event, delta):.4g}",
        f"{seconds:.2f}",
    ]


def line(cells: list[str] | tuple[str, ...]) -> str:
    """Return a row of a markdown table."""
    return "| " + " | ".join(cells) + " |"


def same(one: str, other: str) -> bool:
    """Return whether two cells agree: texts exactly, numbers to a thousandth."""
    words = one.split(), other.split()
    if len(words[0]) != len(words[1]):
        return False
    for left, right in zip(*words, strict=True):
        try:
            if not math.isclose(float(left), float(right), rel_tol=1e-3):
                return False
        except ValueError:
            if left != right:
                return False
    return True


def check(path: Path, settings: list[tuple[float, float, float, int]]) -> int:
    """Compare the table in a file with what the code computes now; return the exit status."""
    lines = path.read_text().splitlines()
    if line(HEADER) not in lines:
        print(f"{path} has no table of benchmarks/accounting.py")
        return 1
    first = lines.index(line(HEADER)) + 2
    status = 0
    for setting, text in zip(settings, lines[first : first + len(settings)], strict=True):
        old, new = [cell.strip() for cell in text.strip("|").split("|")], row(*setting)
        if len(old) != len(new) or not all(map(same, old[:-1], new[:-1])):
            print(f"differs:\n  file {text}\n  now  {line(new)}")
            status = 1
    return status


def main() -> int:
    """Print or check the table."""
    parser = argparse.ArgumentParser(description="Table of the accounting's tightness.")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with the table in FILE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    if arguments.check:
        return check(arguments.check, SETTINGS)
    print(line(HEADER))
    print(line(["---"] * len(HEADER)))
    for setting in SETTINGS:
        print(line(row(*setting)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
