"""Audits through the command line: what they write, what they may not touch, and what the gate stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import polars as pl
from checkout import Checkout
from test_labels import rule_graph

from dpmixmin.paths import PRIVATE, RELEASED, room_of

AUDITS = "results/mini/study/audits"


def table(checkout: Checkout) -> pl.DataFrame:
    return pl.read_csv(checkout.path / AUDITS / "summary/audits.csv")


def test_every_mechanism_is_attacked_and_every_strongest_control_leaks(finished):
    found = table(finished)
    assert set(found["audit"]) == {"mixture", "one_run", "membership", "replay"}
    mixture = found.filter(pl.col("audit") == "mixture")
    assert set(mixture["canary"]) == {"natural", "worst_natural", "max_clip"}
    assert set(mixture["epsilon"]) == {1.0, 2.0}
    strongest = found.filter(pl.col("control_gated"))
    assert set(strongest["canary"]) == {"max_clip", "gradient"}
    assert (strongest["control"] > strongest["claim"]).all()
    assert (found.filter(pl.col("audit") == "replay")["ratio"] <= 1 + 1e-12).all()
    assert not set(found["verdict"]) & {"EXCEEDED", "control does not leak"}
    passed = json.loads((finished.path / AUDITS / "gate/passed.json").read_text())
    assert passed["failures"] == []
    assert len(passed["specs"]) == 4  # two mechanisms at two epsilons
    assert "DP-SGD, replay" in (finished.path / "results/mini/study/report/summary.txt").read_text()
    assert "what attacks on these claims found" in (finished.path / "results/mini/study/report/index.html").read_text()


def test_scores_of_every_run_are_kept(finished):
    scores = pl.read_parquet(finished.path / AUDITS / "mixture/task=three_or_eight/eps=1/scores.parquet")
    counts = scores.group_by("canary", "noise", "world", "half").len()
    assert set(counts["len"]) == {50}  # 100 runs a world, in halves
    assert len(counts) == 3 * 2 * 2 * 2


def test_a_second_audit_costs_nothing_and_changes_nothing_released(copy):
    released, events = copy.files(RELEASED), copy.ledger_events()
    shutil.rmtree(copy.path / AUDITS)
    done = copy.snakemake("audits", "-c2").stdout
    assert "audits: " in done
    assert copy.ledger_events() == events  # its uncharged touches were noted by the first
    assert copy.files(RELEASED) == released


def stage(checkout: Checkout, *arguments: str) -> subprocess.CompletedProcess:
    """Run stages by hand: an edit of a mechanism would have Snakemake make every model anew."""
    environment = {**os.environ, "PYTHONPATH": "src", "DPMIXMIN_ROOT": str(checkout.path)}
    return subprocess.run(
        [sys.executable, "-m", "dpmixmin", *arguments, "--config", "config/test.yaml"],
        cwd=checkout.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip


def test_a_mechanism_without_noise_is_stopped_and_the_summary_says_why(copy):
    copy.edit("src/dpmixmin/privacy/mechanisms.py", "scale = self.noise_multiplier * 2**self.grid_bits", "scale = 0.0")
    for arguments in (("audit_mixture", "--task", "three_or_eight"), ("audit_replay",), ("audit_summary",)):
        assert stage(copy, *arguments).returncode == 0
    assert "EXCEEDED" in (copy.path / AUDITS / "summary/audits.txt").read_text()
    (copy.path / AUDITS / "gate/passed.json").unlink()
    done = stage(copy, "audit_gate")
    assert done.returncode == 1
    assert re.search(r"error: audit: mixture task=three_or_eight .*: the claim does not hold", done.stdout)
    assert "audit: replay mixture nobody: each step has its noise" in done.stdout
    assert "epsilon is at least" not in done.stdout  # rule 20: the log is public
    assert "Traceback" not in done.stdout
    assert not (copy.path / AUDITS / "gate/passed.json").exists()
    copy.edit("config/test.yaml", "audit: {", "audit: {gate: report, ")
    assert "failed" in stage(copy, "audit_gate").stdout
    assert json.loads((copy.path / AUDITS / "gate/passed.json").read_text())["failures"]


def test_a_learner_that_its_audited_twin_does_not_follow_is_stopped(copy):
    copy.edit("src/dpmixmin/mixing/learners.py", "learning_rate * gradient", "1.01 * learning_rate * gradient")
    done = stage(copy, "audit_mixture", "--task", "three_or_eight")
    assert done.returncode == 1
    assert "error: audit: the mixture learner `centred` does something else than its audited twin" in done.stdout
    assert "Traceback" not in done.stdout


def test_audits_can_be_left_out(tmp_path):
    checkout = Checkout.fresh(tmp_path / "checkout")
    text = (checkout.path / "config/test.yaml").read_text()
    (checkout.path / "none.yaml").write_text(re.sub(r"audit: {.*}", "audit: none", text))
    assert not any("audit" in rule for rule in checkout.planned("all", config="none.yaml"))


def test_a_deployment_is_audited_on_public_data_before_it_spends(tmp_path):
    """The sensitive set is never audited: no audit reads `private/`; and every mechanism waits for the gate."""
    graph = rule_graph(Checkout.fresh(tmp_path / "checkout"), "config/test_deploy.yaml")
    audits = {rule: inputs for rule, (inputs, _) in graph.items() if rule.startswith("audit_")}
    assert len(audits) == 5
    for rule, inputs in audits.items():
        assert not {room_of(path) for path in inputs} & {PRIVATE, RELEASED}, rule
    gate = "results/mini_deploy/public/audits/gate/passed.json"
    spending = [rule for rule in graph if rule.startswith(("mix_", "finetune_", "evaluate_private", "write_bundle"))]
    assert len(spending) == 4
    for rule in spending:
        assert gate in graph[rule][0], rule
