"""What every rule promises, read from the rule files: retries, logs, benchmarks, what the shell does with signals."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT

from dpmixmin.__main__ import PRIVATE_STAGES

RULES = sorted((ROOT / "workflow/rules").glob("*.smk"))


def blocks() -> list[tuple[str, str]]:
    """Return (stage, text) of every rule that runs a stage."""
    found = []
    for path in RULES:
        for text in re.split(r"\n(?= *rule\b)", path.read_text())[1:]:
            called = re.search(r'"python -m dpmixmin(?:\.launch)? (\{params\.stage\}|\w+)', text)
            if called is None:
                continue
            stage = called[1]
            if stage == "{params.stage}":
                stage = re.search(r'stage=stage_of\("(\w+)"\)', text)[1]
            found.append((stage, text))
    return found


BLOCKS = blocks()


def test_the_rules_are_read():
    assert {"mix", "finetune", "pretrain", "records", "predict", "audit_replay", "report"} <= {s for s, _ in BLOCKS}
    assert PRIVATE_STAGES & {stage for stage, _ in BLOCKS} == {s for s in PRIVATE_STAGES if not s.startswith("text_")}


@pytest.mark.parametrize(("stage", "text"), BLOCKS, ids=[stage for stage, _ in BLOCKS])
def test_jobs_that_read_records_are_never_retried_nor_given_more_memory(stage, text):
    private = stage in PRIVATE_STAGES
    assert ("retries: 0" in text) == private
    assert ("private=True" in text) == private


@pytest.mark.parametrize(("stage", "text"), BLOCKS, ids=[stage for stage, _ in BLOCKS])
def test_a_log_survives_signals_and_a_measurement_stays_private(stage, text):
    assert "2>&1 | tee -i {log}" in text
    if "output:" in text:
        log = re.search(r"PATHS\.log\((.*)\)", text)[1]
        assert f"PATHS.benchmark({log})" in text
