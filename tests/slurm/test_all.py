"""`snakemake --profile slurm all` on a real Slurm: the demo's small twin gives what a run on one machine gives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest
from cluster import Job
from cluster_checkout import ClusterCheckout

pytestmark = pytest.mark.slurm

CPU_RULES = ("prepare_", "assign_", "mix_", "audit_mixture_")
"""Beginnings of rules that gain nothing from a GPU."""

DRAWN = r"study/(audits/(mixture|training|summary)/|report/(index\.html|summary\.txt))"


@dataclass(frozen=True)
class Twins:
    """The same experiment, run on this machine and on the cluster.

    Attributes:
        here: the copy that ran on this machine, without `compute`.
        there: the copy that ran on the cluster, with GPUs asked for.
        jobs: the cluster's jobs.
        output: what Snakemake said about them.
    """

    here: ClusterCheckout
    there: ClusterCheckout
    jobs: list[Job]
    output: str


@pytest.fixture(scope="module")
def twins(cluster, tmp_path_factory) -> Twins:
    folder = tmp_path_factory.mktemp("twins")
    here = ClusterCheckout.fresh(folder / "here", cluster)
    here.edit("config/test.yaml", "privacy:\n", "privacy:\n  insecure_seed: 7\n")
    there = here.clone(folder / "there")
    there.edit("config/test.yaml", "privacy:\n", "compute: {accelerator: gpu}\n\nprivacy:\n")
    here.snakemake("all", local=True)
    done = there.snakemake("all")
    return Twins(here, there, cluster.jobs(there.path), done.stdout)


def rules_in(output: str) -> set[str]:
    """Return the rules that Snakemake has submitted."""
    return set(re.findall(r"logs/slurm/rule_(\w+)/\d+\.log", output))


def deterministic(copy: ClusterCheckout) -> dict[str, bytes]:
    """Return every public, released and study file but what differs from run to run by design.

    Left out are manifests (names of ledger entries, and hashes of files that contain them), the audits that draw their
    own worlds and canaries, and what is made of these. Names of ledger entries in statements are blotted out.
    """
    found = {}
    for name, content in copy.files("public", "released", "study").items():
        if name.endswith("/manifest.json") or re.match(DRAWN, name):
            continue
        if name.endswith("/privacy.json"):
            content = re.sub(rb"\b[0-9a-f]{32}\b", b"entry", content)
        if name == "study/report/summary.csv":
            content = b"\n".join(line for line in content.split(b"\n") if b",audit," not in line)
        found[name] = content
    return found


def test_the_results_are_those_of_a_run_on_one_machine(twins):
    """Rule 14's test seed repeats the noise, so that releases can be compared at all."""
    assert twins.here.files("public", "released", "study").keys() == (
        twins.there.files("public", "released", "study").keys()
    )
    here, there = deterministic(twins.here), deterministic(twins.there)
    assert sorted(name for name in here if here[name] != there[name]) == []
    for name in ("public/settings/mixture/settings.json", "study/report/summary.csv"):
        assert here[name]
    for kind in ("released/mixtures/.*weights.json", "released/finetuned/.*model.safetensors", ".*privacy.json"):
        assert any(re.fullmatch(kind, name) for name in here), kind


def releases(copy: ClusterCheckout) -> list[str]:
    """Return what was committed (cell, mechanism, inputs, code), without the name each ledger draws for itself."""
    events = copy.ledger_events()
    reserved = {event["entry"]: event for event in events if event["event"] == "reserved"}
    committed = [reserved[event["entry"]] for event in events if event["event"] == "committed"]
    return sorted(json.dumps(event["identity"] | {"dataset": ""}, sort_keys=True) for event in committed)


def test_the_ledger_has_the_same_releases_each_once(twins):
    assert releases(twins.there) == releases(twins.here)
    assert set(twins.there.committed().values()) == {1}
    kinds = [event["event"] for event in twins.there.ledger_events() if event["event"] in ("reserved", "committed")]
    assert kinds.count("reserved") == kinds.count("committed") == len(releases(twins.here)) > 0


def test_every_rule_is_one_job_on_its_partition_and_says_its_name(twins):
    assert {job.state for job in twins.jobs} == {"COMPLETED"}
    names = [job.rule for job in twins.jobs]
    assert len(names) == len(set(names))
    assert set(names) == rules_in(twins.output)
    for job in twins.jobs:
        assert job.partition == ("cpu" if job.rule.startswith(CPU_RULES) else "gpu"), job.rule
        assert job.name.startswith("dpmixmin_")
    assert {"cn1", "gn1"} == {job.node for job in twins.jobs}


def test_logs_are_kept_and_named_after_the_rule(twins):
    for job in twins.jobs:
        assert (twins.there.path / f"logs/slurm/rule_{job.rule}/{job.id}.log").is_file()
        assert (twins.there.path / f"results/mini/logs/{job.rule}.log").is_file()


def test_nothing_is_left_to_do_and_no_job_is_left(twins):
    assert twins.there.planned("all") == set()
    assert all(job.ended for job in twins.there.cluster.jobs(twins.there.path))


def test_a_public_job_is_tried_again_with_more_memory_and_a_private_one_is_not(cluster, copy):
    """`retries: 2` of the profile, and `retries: 0` of a rule that reads sensitive records, which wins.

    The site is one that gives GPUs for --gres only.
    """
    copy.site["DPMIXMIN_GRES"] = "gpu"
    copy.edit("config/test.yaml", "privacy:\n", "compute: {accelerator: gpu}\n\nprivacy:\n")
    for stage in ("records", "proxy"):
        with open(copy.path / f"src/dpmixmin/stages/{stage}.py", "a") as module:
            module.write("\n\ndef run(config, args):\n    raise SystemExit(3)\n")
    done = copy.snakemake("proxies", "splits", "--slurm-init-seconds-before-status-checks", "3", check=False)
    assert done.returncode == 1
    jobs = cluster.jobs(copy.path)
    assert sorted(job.rule for job in jobs) == ["prepare_records", "prepare_sources", *["train_proxy"] * 3]
    assert {job.rule for job in jobs if job.state == "FAILED"} == {"prepare_records", "train_proxy"}
    asked = [cluster.command("scontrol", "show", "job", str(job.id)) for job in jobs if job.rule == "train_proxy"]
    assert [re.search(r"MinMemoryNode=(\S+)", text)[1] for text in asked] == ["4000M", "6000M", "8000M"]
    assert all("TresPerNode=gres:gpu:1" in text and "Partition=gpu" in text for text in asked)
