"""One private cluster for all tests here, and fresh copies of the checkout that run on it.

Without Slurm or the right to start one, the tests are skipped and say why; with DPMIXMIN_NEEDS_SLURM=1, as in
`make test-slurm` and in the continuous integration, they fail instead.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, UnavailableError
from cluster_checkout import ClusterCheckout
from faults import Experiment


@pytest.fixture(scope="session")
def cluster():
    """Return a running cluster; a test that breaks it must repair it."""
    started = Cluster()
    try:
        started.start()
    except UnavailableError as why:
        (pytest.fail if os.environ.get("DPMIXMIN_NEEDS_SLURM") == "1" else pytest.skip)(str(why))
    yield started
    started.stop()


@pytest.fixture
def copy(cluster, tmp_path) -> ClusterCheckout:
    """Return a fresh copy of the checkout, without results, that runs on the cluster."""
    return ClusterCheckout.fresh(tmp_path / "copy", cluster)


@pytest.fixture(scope="session")
def prepared(cluster, tmp_path_factory) -> Experiment:
    """Return an experiment with two jobs left to do; tests work on copies."""
    return Experiment.prepared(tmp_path_factory.mktemp("faults") / "prepared", cluster)


@pytest.fixture
def experiment(prepared, tmp_path) -> Experiment:
    """Return a copy that a test may disturb."""
    copy = prepared.clone(tmp_path / "run")
    yield copy
    copy.stop()
    shutil.rmtree(copy.path)
