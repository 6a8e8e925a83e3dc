"""Several processes that train one model, on one node and on two, started by the allocation of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from faults import ALL, CELL, CONFIG, PRETRAINED, PRIVATE, PUBLIC, STEPS

from dpmixmin import artifacts

pytestmark = pytest.mark.slurm


def works(pid: int, stage: str) -> bool:
    """Say whether a process of a job is one that trains."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"dpmixmin" in words and stage.encode() in words


def losses(folder: Path) -> list[float]:
    """Return the public loss at every step."""
    return pq.read_table(folder / "loss.parquet")["loss"].to_pylist()


@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (2, 2)], ids=["one_node", "two_nodes"])
def test_two_processes_train_one_model_and_spend_once(experiment, devices, nodes):
    """Public: the undisturbed model, up to rounding. Private: one release of exactly the reserved steps."""
    raw = yaml.safe_load((experiment.path / CONFIG).read_text())
    raw["compute"] = {"devices": devices, "nodes": nodes}
    (experiment.path / CONFIG).write_text(yaml.safe_dump(raw))
    # The machine of the tests is both nodes: its processes find each other on its own address.
    experiment.site |= {"DPMIXMIN_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if nodes > 1:
        experiment.cluster.command("scontrol", "create", "PartitionName=both", "Nodes=cn1,gn1")
        experiment.site["DPMIXMIN_PARTITION"] = "both"
    run = experiment.begin(*ALL)
    seen: dict[str, int] = {}

    def over() -> bool:
        for job in experiment.cluster.jobs(experiment.path):
            if job.rule in (PRIVATE, PUBLIC) and job.state == "RUNNING":
                stage = job.rule.partition("_")[0]
                workers = [pid for pid in experiment.cluster.pids_of(job.id) if works(pid, stage)]
                seen[job.rule] = max(seen.get(job.rule, 0), len(workers))
        return run.status is not None

    experiment.cluster.wait(over, 240, "the run ends")
    assert run.wait() == 0, run.output
    assert seen == {PRIVATE: 2, PUBLIC: 2}
    for rule in (PRIVATE, PUBLIC):
        job = experiment.cluster.job(rule, experiment.path)
        assert job.state == "COMPLETED"
        assert job.node == ("cn1,gn1" if nodes > 1 else "cn1")
    experiment.check_ledger()
    assert f"step {STEPS}/{STEPS}" in experiment.log(PRIVATE)
    (entry,) = (event for event in experiment.ledger_events() if event["event"] == "reserved")
    assert [event["steps"] for event in entry["events"]] == [STEPS]
    artifacts.verify(experiment.base / CELL)
    # Adam magnifies rounding over thousands of steps, so that weights drift apart and losses do not.
    here, there = (losses(folder) for folder in (experiment.path / "expected", experiment.base / PRETRAINED))
    assert len(here) == len(there)
    assert there[:100] == pytest.approx(here[:100], rel=1e-3)
    assert sum(there[-1000:]) == pytest.approx(sum(here[-1000:]), rel=0.02)
    assert experiment.planned(*ALL) == set()
