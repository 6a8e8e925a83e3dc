"""`python -m dpmixmin status`: what is made, what runs, what waits, what stopped; from folders and a made-up Slurm."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from dpmixmin import cells, progress
from dpmixmin.config import load
from dpmixmin.jobs import jobs_of
from dpmixmin.paths import Paths
from dpmixmin.stages import status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "bin").mkdir()
    return load(ROOT / "config/test.yaml")


def slurm(tmp_path: Path, script: str) -> None:
    """Put a ``squeue`` on PATH."""
    command = tmp_path / "bin/squeue"
    command.write_text(f"#!{sys.executable}\n{script}\n")
    command.chmod(0o755)


def row(number: int, state: str, comment: str, folder: str | Path = ".", name: str = "dpmixmin_0b1e") -> str:
    nodes, reason = ("cn1", "None") if state == "RUNNING" else ("", "Resources")
    return f"{number}|{state}|1:02|{nodes}|{reason}|{comment}|{name}|{Path(folder).resolve()}"


def says(rows: list[str]) -> str:
    return f"print({os.linesep.join(rows)!r})"


def make(*folders: str, name: str = "manifest.json") -> None:
    for folder in folders:
        Path(folder).mkdir(parents=True)
        (Path(folder) / name).touch()


def entry(job: str, **changes) -> None:
    """Write a live-status file, of this process unless changed."""
    now = time.time()
    found = {
        "job": job, "stage": "finetune", "cells": 3, "cell": "released/x", "cell_number": 2,
        "loops": [{"unit": "step", "step": 120, "total": 600}], "epsilon": 0.412, "epsilon_step": 120,
        "started": now - 130, "updated": now, "estimated_end": now + 181, "ended": None,
        "host": socket.gethostname(), "pid": os.getpid(), "slurm": None,
    }  # fmt: skip
    folder = Path(progress.folder_of(Paths("mini")))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}.json").write_text(json.dumps({**found, **changes}))


def section(text: str, title: str) -> list[str]:
    """Return the lines under a heading."""
    found = re.search(rf"^{title}.*\n((?:  .*\n?)*)", text, re.M)
    return found[1].splitlines() if found else []


def test_artefacts_are_counted_by_their_manifests(config):
    paths = Paths("mini")
    table = cells.select(cells.cells_of(config), stage="mixture")
    make(paths.source("sources"), *(cell.folder(paths) for cell in table), paths.settings("mixture"))
    make(paths.records(), name="records.parquet")
    found = {name: (done, total) for name, done, total in status.made(config, paths)}
    assert found["sources"] == (1, 2)
    assert found["records"] == (0, 1), "an artefact without a manifest is not made"
    assert found["mixture"] == (len(table), len(table))
    assert found["settings"] == (1, 5)
    assert found["report"] == (0, 1)
    assert "bundle" not in found
    assert f"  mixture      {len(table):>5} of {len(table):<5}  done" in status.text(config).splitlines()


def test_a_deployment_has_a_bundle_and_an_evaluation(config):
    deploy = load(ROOT / "config/test_deploy.yaml")
    paths = Paths(deploy.experiment)
    make(paths.bundle(), name="SHA256SUMS")
    found = {name: (done, total) for name, done, total in status.made(deploy, paths)}
    assert found["bundle"] == (1, 1)
    assert found["evaluation"][1] == 1
    assert "report" not in found


def test_without_slurm_it_shows_what_runs_here(config):
    assert section(status.text(config), "runs now") == ["  nothing"]
    entry("finetune_a")
    lines = section(status.text(config), "runs now")
    assert lines[0] == f"  finetune_a: process {os.getpid()} on {socket.gethostname()}, for 2 min"
    assert lines[1] == "    cell 2 of 3: released/x"
    assert lines[2].startswith("    step 120/600, epsilon so far 0.412 (after step 120), last step in about 3 min (")
    assert lines[3] == "    log: results/mini/logs/finetune_a.log"


def test_what_this_program_writes_is_what_it_shows(config):
    progress.begin(progress.folder_of(Paths("mini")), "tune_mixture", stage="tune_mixture")
    progress.cell("public/one")
    loop = progress.Steps(4, unit="trial", start=1)
    progress._job.written = 0.0
    loop.at(2)
    lines = section(status.text(config), "runs now")
    progress.end()
    assert lines[0].startswith(f"  tune_mixture: process {os.getpid()} on ")
    assert lines[2].startswith("    trial 2/4")


def test_a_job_of_slurm_is_shown_with_its_file_and_without(config, tmp_path):
    known = jobs_of(config)[-1]
    rows = [row(71, "RUNNING", "rule_finetune_a"), row(72, "RUNNING", f"rule_{known.name}")]
    slurm(tmp_path, says(rows))
    entry("finetune_a", slurm="71", host="elsewhere", updated=time.time() - 9999)
    lines = section(status.text(config), "runs now")
    assert lines[0] == "  finetune_a: Slurm job 71 on cn1, running for 1:02"
    assert f"  {known.name}: Slurm job 72 on cn1, running for 1:02" in lines
    assert f"    {len(known.cells)} cell(s), has said nothing yet" in lines
    assert lines[-1] == f"    log: results/mini/logs/{known.name}.log"


def test_a_run_inside_an_interactive_job_elsewhere_works_as_long_as_that_job(config, tmp_path):
    entry("finetune_a", slurm="90", host="elsewhere", updated=time.time() - 9999)
    slurm(tmp_path, says([row(90, "RUNNING", "(null)", name="bash")]))
    assert section(status.text(config), "runs now")[0].startswith("  finetune_a: Slurm job 90 on elsewhere, for ")
    slurm(tmp_path, says([]))
    assert section(status.text(config), "stopped")


def test_waiting_jobs_say_why(config, tmp_path):
    known = jobs_of(config)[-1]
    rows = [row(80 + i, "PENDING", "rule_mix_a") for i in range(30)]
    slurm(tmp_path, says([row(79, "PENDING", f"rule_{known.name}"), *rows]))
    lines = section(status.text(config), "waits for Slurm")
    assert lines[0] == f"  {known.name}: {len(known.cells)} cell(s), Slurm job 79, because of Resources"
    assert len(lines) == 21
    assert lines[-1] == "  and 11 more"
    assert section(status.text(config), "runs now") == ["  nothing"]


def test_stopped_jobs_say_what_to_do(config):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    entry("killed", pid=dead.pid, updated=time.time() - 1800)
    entry("told", ended=time.time() - 60)
    entry("lost", host="elsewhere", updated=time.time() - 700)
    entry("far", host="elsewhere", updated=time.time() - 500)
    text = status.text(config)
    assert "stopped: run the same command again" in text
    lines = section(text, "stopped")
    here = socket.gethostname()
    assert f"  killed: was killed, or its machine was lost, 30 min ago on {here}" in lines
    assert f"  told: ended before its work was done, 60 s ago on {here}" in lines
    assert "  lost: was killed, or its machine was lost, 12 min ago on elsewhere" in lines
    assert "    log: results/mini/logs/told.log" in lines
    assert section(text, "runs now")[0].startswith("  far: ")


def test_a_process_that_is_dead_and_not_yet_noticed_has_stopped(config):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    entry("killed", pid=dead.pid)
    for _ in range(1000):
        if Path(f"/proc/{dead.pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.01)
    assert section(status.text(config), "stopped")
    dead.wait()


def test_of_a_stopped_job_nothing_is_said_once_it_is_made_or_sent_again(config, tmp_path):
    first, second = jobs_of(config)[:2]
    entry(first.name, ended=time.time())
    entry(second.name, slurm="60", host="elsewhere")
    slurm(tmp_path, says([row(61, "PENDING", f"rule_{second.name}")]))
    assert len(section(status.text(config), "stopped")) == 4
    make(*(cell.folder(Paths("mini")) for cell in first.cells))
    assert section(status.text(config), "stopped") == []


def test_ids_are_those_of_this_checkout_s_jobs_alone(config, tmp_path, capsys):
    rows = [
        row(1, "RUNNING", "rule_mix_a"), row(2, "PENDING", "rule_mix_b_wildcards_c"), row(3, "PENDING", "(null)"),
        row(4, "RUNNING", "rule_mix_a", "/elsewhere"), row(5, "RUNNING", "(null)", name="bash"),
        "garbage", "6|RUNNING",
        row(7, "RUNNING", "rule_x").replace("7|", "7; rm -rf|", 1),
    ]  # fmt: skip
    slurm(tmp_path, says(rows))
    status.run(config, Namespace(ids=True, watch=None))
    assert capsys.readouterr().out == "1\n2\n3\n"


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit(1)",
        "import time; time.sleep(60)",
        r"print('\0\xff|' * 50)",
        "raise SystemExit('no controller')",
    ],
)
def test_a_slurm_that_does_not_answer_is_no_error(config, tmp_path, monkeypatch, capsys, script):
    monkeypatch.setattr(status, "_SQUEUE_SECONDS", 0.5)
    slurm(tmp_path, script)
    entry("finetune_a")
    assert section(status.text(config), "runs now")[0].startswith("  finetune_a: process")
    status.run(config, Namespace(ids=True, watch=None))
    assert capsys.readouterr().out == ""


def test_files_that_are_none_of_ours_are_passed_over(config):
    entry("good")
    folder = Path(progress.folder_of(Paths("mini")))
    for name, content in {"a": "", "b": "[1]", "c": '{"job": "c"}', "d": "{", "e": '"text"'}.items():
        (folder / f"{name}.json").write_text(content)
    (folder / ".good.17").write_text("{}")
    assert [found.job for found in progress.read(folder)] == ["good"]


def test_watching_redraws_a_terminal_and_prints_once_elsewhere(config, monkeypatch, capsys):
    status.run(config, Namespace(ids=False, watch=5.0))
    out = capsys.readouterr().out
    assert out.count("runs now") == 1
    assert "\x1b" not in out
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    status.run(config, Namespace(ids=False, watch=7.0))
    assert slept == [7.0] * 3
    assert capsys.readouterr().out.count("\x1b[H\x1b[2J") == 3


def test_the_command_needs_no_torch_and_writes_nothing(config, tmp_path):
    script = (
        "import sys; from dpmixmin.__main__ import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules); raise SystemExit(status)"
    )
    command = [sys.executable, "-c", script, "status", "--config", str(ROOT / "config/test.yaml"), "--watch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mini (study)\n")
    assert not (tmp_path / "results").exists()
