"""Break a privacy rule on purpose and see whether a test notices.

    .venv/bin/python tests/mutations/run.py [--rule N] [--name TEXT] [--jobs N] [--markdown FILE]

Each mutant (mutants.py) is one edit of one source file. It is applied in a copy of the checkout, where only the tests
that must catch it are run. They pass on the unmutated copy, which is checked first, so a failing one is the mutant's
doing. Ends with 0 only when every mutant is caught.

What can become of a mutant:

* caught: at least one named test failed, by an assertion or an error of its own;
* SURVIVED: the tests pass all the same, so a test is missing;
* STALE: the old text is not in the file exactly once, so the table must follow the code;
* INVALID: the code does not import or names something that does not exist: any test would notice that;
* TIMEOUT: no verdict.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    *("src", "tests", "Snakefile", "workflow", "config", "docs", "envs", "slurm"),
    *("pyproject.toml", "Makefile", "README.md"),
)
TIMEOUT = 900
"""Seconds that the tests of one mutant may take."""

_BROKEN = re.compile(r"\b(NameError|UnboundLocalError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)\b")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: the mutant.
        word: caught, SURVIVED, STALE, INVALID or TIMEOUT.
        detail: the first test that failed, or what went wrong.
    """

    mutant: Mutant
    word: str
    detail: str = ""


class Checkout:
    """A copy of the checkout whose package is the one that its tests import.

    Args:
        path: where to copy to; must not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "mutations")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, path / name, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, path / name)
        # Byte code is judged by a file's size and second: that of an earlier mutant could pass for a later one.
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "DPMIXMIN"))},
            "PYTHONPATH": str(path / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "500",  # pytest cuts the errors of its summary to the terminal's width
        }
        imported = self._run("-c", "import dpmixmin; print(dpmixmin.__file__)")
        if Path(imported.stdout.strip()) != path / "src/dpmixmin/__init__.py":
            sys.exit(
                f"the copy in {path} is not what its tests would import, but {imported.stdout or imported.stderr}"
            )

    def pytest(self, tests: Iterable[str]) -> subprocess.CompletedProcess:
        """Run tests until the first failure; the short summary names it."""
        options = ("-q", "-x", "-rfE", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly")
        return self._run("-m", "pytest", *options, *tests)

    def judge(self, mutant: Mutant) -> Verdict:
        """Apply a mutant, run its tests, undo it."""
        file = self.path / "src" / mutant.file
        original = file.read_text(encoding="utf-8")
        if original.count(mutant.old) != 1:
            return Verdict(mutant, "STALE", f"the old text is {original.count(mutant.old)} times in src/{mutant.file}")
        mutated = original.replace(mutant.old, mutant.new)
        try:
            compile(mutated, mutant.file, "exec")
        except SyntaxError as error:
            return Verdict(mutant, "INVALID", str(error))
        file.write_text(mutated, encoding="utf-8")
        try:
            return _verdict(mutant, self.pytest(mutant.tests))
        except subprocess.TimeoutExpired:
            return Verdict(mutant, "TIMEOUT", f"after {TIMEOUT} s")
        finally:
            file.write_text(original, encoding="utf-8")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )


def _verdict(mutant: Mutant, done: subprocess.CompletedProcess) -> Verdict:
    """Read pytest's end: 0 passed, 1 failed, anything else never got as far as a verdict."""
    if done.returncode == 0:
        return Verdict(mutant, "SURVIVED", " ".join(mutant.tests))
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED ")]
    if done.returncode != 1 or not failed:
        last = next((line for line in reversed(lines + done.stderr.splitlines()) if line.strip()), "no output")
        return Verdict(mutant, "INVALID", last[:200])
    if _BROKEN.search(failed[0]):
        return Verdict(mutant, "INVALID", failed[0])
    return Verdict(mutant, "caught", failed[0].removeprefix("FAILED ").split(" - ")[0])


def run(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """Judge mutants on ``jobs`` copies at once, after their tests have passed unmutated; print one line for each."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        jobs = max(1, min(jobs, len(mutants)))
        copies: queue.Queue[Checkout] = queue.Queue()
        for number in range(jobs):
            copies.put(Checkout(Path(folder).resolve() / str(number)))
        _check_unmutated(mutants, copies)

        def judge(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return copy.judge(mutant)
            finally:
                copies.put(copy)

        verdicts = []
        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
                verdict = done.result()
                verdicts.append(verdict)
                by = "caught by" if verdict.word == "caught" else f"{verdict.word}:"
                head = f"[{len(verdicts)}/{len(mutants)}] rule {verdict.mutant.rule:<2} {verdict.mutant.name}"
                print(f"{head} ... {by} {verdict.detail}", flush=True)
    return sorted(verdicts, key=lambda verdict: mutants.index(verdict.mutant))


def _check_unmutated(mutants: Sequence[Mutant], copies: queue.Queue) -> None:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    # Where a whole file is named, its tests need not be named again.
    tests = [test for test in tests if test.partition("::")[0] == test or test.partition("::")[0] not in tests]
    print(f"{len(mutants)} mutants; their tests on the unmutated copy first ...", flush=True)
    copy = copies.get()
    try:
        done = copy.pytest(tests)
    except subprocess.TimeoutExpired:
        sys.exit(f"the named tests take more than {TIMEOUT} s without any mutant")
    copies.put(copy)
    if done.returncode:
        sys.exit(f"the named tests fail without any mutant (exit code {done.returncode}):\n{done.stdout}{done.stderr}")


def markdown(verdicts: Sequence[Verdict]) -> str:
    """Return the table of rules, mutations and the tests that caught them."""
    rows = [(str(v.mutant.rule), v.mutant.name, f"`{v.detail}`" if v.word == "caught" else v.word) for v in verdicts]
    lines = ["| rule | mutation | caught by |", "|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", type=int, help="mutants of this rule only")
    parser.add_argument("--name", default="", help="mutants whose name holds this text only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies that work at once")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--list", action="store_true", help="print the chosen mutants and run nothing")
    chosen = parser.parse_args()
    mutants = [m for m in MUTANTS if chosen.rule in (None, m.rule) and chosen.name in m.name]
    if not mutants:
        parser.error("no such mutant")
    if chosen.list:
        for mutant in mutants:
            print(f"rule {mutant.rule:<2} {mutant.name} (src/{mutant.file})")
        return 0
    verdicts = run(mutants, chosen.jobs)
    total, caught = (Counter(v.mutant.rule for v in some) for some in (verdicts, _caught(verdicts)))
    print("\nrule  caught")
    for rule in sorted(total):
        print(f"{rule:>4}  {caught[rule]}/{total[rule]}")
    print(f"\ncaught {len(_caught(verdicts))}/{len(verdicts)}")
    if chosen.markdown:
        chosen.markdown.write_text(markdown(verdicts) + "\n", encoding="utf-8")
    return 0 if len(_caught(verdicts)) == len(verdicts) else 1


def _caught(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.word == "caught"]


if __name__ == "__main__":
    sys.exit(main())
