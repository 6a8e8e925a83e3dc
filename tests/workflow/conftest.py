"""One finished miniature run for all workflow tests; each test that changes things works on a copy of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checkout import Checkout


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Checkout:
    """Return a checkout in which the miniature experiment was run; tests must not change it."""
    checkout = Checkout.fresh(tmp_path_factory.mktemp("workflow") / "finished")
    checkout.snakemake("all", "-c2", "--quiet", "reason", "host", "progress")
    return checkout


@pytest.fixture
def copy(finished, tmp_path) -> Checkout:
    """Return a copy of the finished checkout that a test may change."""
    return finished.clone(tmp_path / "copy")
