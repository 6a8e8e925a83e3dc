"""The site's lines of slurm/profile.yaml: what is set goes to Slurm, what is not is left out. Needs no Slurm."""

from __future__ import annotations

import os

import pytest
from checkout import ROOT
from snakemake.profiles import ProfileConfigFileParser

ASKED = ["mem_mb=4000", "runtime=60"]


@pytest.fixture
def read(monkeypatch):
    """Return a function that reads the profile under variables of a site: options, and what the rules then see."""

    def parse(**site):
        monkeypatch.setattr(os, "environ", dict(site))
        with open(ROOT / "slurm/profile.yaml") as stream:
            return ProfileConfigFileParser().parse(stream), os.environ

    return parse


def test_without_a_word_about_the_site_slurm_chooses_partition_and_account(read):
    options, seen = read()
    assert options["default-resources"] == ASKED
    assert seen == {"DPMIXMIN_GPU_PARTITION": "gpu", "DPMIXMIN_GRES": ""}


def test_what_the_environment_says_of_the_site_wins(read):
    options, seen = read(
        DPMIXMIN_PARTITION="long-a100.q", DPMIXMIN_ACCOUNT="00123", DPMIXMIN_GPU_PARTITION="big", DPMIXMIN_GRES="gpu"
    )
    # A number in quotes stays a word: accounts may start with zeros.
    assert options["default-resources"] == [*ASKED, "slurm_partition=long-a100.q", "slurm_account='00123'"]
    assert (seen["DPMIXMIN_GPU_PARTITION"], seen["DPMIXMIN_GRES"]) == ("big", "gpu")


def test_slurm_itself_restarts_nothing_and_logs_stay(read):
    options, _ = read()
    assert options["slurm-no-requeue"] == options["slurm-keep-successful-logs"] == "True"
    assert (options["retries"], options["slurm-logdir"]) == ("2", "logs/slurm")
