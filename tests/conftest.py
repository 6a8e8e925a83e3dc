"""Shared fixtures: every test starts as a fresh process would, and ends without the restrictions it caused."""

import sys

import numpy as np
import pytest

from dpmixmin import artifacts
from dpmixmin.privacy.ledger import Ledger


@pytest.fixture(autouse=True)
def fresh_process():
    """One torch thread where torch is loaded; forget the rooms a test gave up by opening private tables."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield
    artifacts.unrestrict_for_tests()


@pytest.fixture
def rng():
    """Public randomness of a test."""
    return np.random.default_rng(20240607)


@pytest.fixture
def ledger(tmp_path):
    """A new ledger of a dataset named `clinic`."""
    return Ledger(tmp_path / "ledger", "clinic")


@pytest.fixture
def run_folder(tmp_path):
    """Folder of a run; the room is its next path component."""
    return tmp_path / "results" / "exp"
