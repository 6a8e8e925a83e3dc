"""The command line at its ends: signals, full disks, readers that go away. Each is one public line and a status."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "config" / "test.yaml"

SCRIPT = """
import errno, importlib, os, sys, time
from pathlib import Path
from dpmixmin.__main__ import main

stage = importlib.import_module("dpmixmin.stages." + sys.argv[1])

def run(config, args):
    {body}

stage.run = run
sys.exit(main())
"""


def heeding_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder, body: str, stage: str = "split", **options) -> subprocess.Popen:
    """Run the command with a stage that does something else."""
    command = [sys.executable, "-c", SCRIPT.format(body=body), stage, "--config", str(CONFIG)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Whoever started the tests in the background made them, and all that they start, ignore Ctrl-C.
    return subprocess.Popen(command, text=True, cwd=folder, env=environment, preexec_fn=heeding_interrupts, **pipes)


WAIT = "print('ready', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_one_line_and_its_status(number, status, tmp_path):
    process = start(tmp_path, WAIT)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.count("\n") == 1
    assert err.startswith("stopped by ")
    assert err.endswith("; the same command goes on from where it is\n")


FULL = "OSError(errno.ENOSPC, 'No space left', 'results/x/private/patient-17')"
WRAPPED = f"""
    try:
        raise {FULL}
    except OSError as error:
        raise RuntimeError('patient 17') from error
"""


@pytest.mark.parametrize("stage", ["split", "sources"])
@pytest.mark.parametrize("body", [f"raise {FULL}", WRAPPED], ids=["as it is", "wrapped by a library"])
def test_a_full_disk_is_one_line_without_a_path_or_a_text(body, stage, tmp_path):
    process = start(tmp_path, body, stage)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == (
        f"error: the disk is full, in {stage} of experiment `mini`: free some space, then run the same command again\n"
    )
    assert not list(tmp_path.rglob("*.traceback"))


def test_too_little_memory_is_one_line(tmp_path):
    process = start(tmp_path, "bytearray(1 << 60)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "error: split ran out of memory: give it more (compute.memory_mb on a cluster)\n"


def test_another_error_of_a_private_stage_keeps_its_text_private(tmp_path):
    process = start(tmp_path, "raise OSError('patient 17')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("internal error in split: OSError at __main__.py")
    assert "17" not in err.replace(str(tmp_path), "").partition("; traceback")[0]
    assert err.count("\n") == 1


TALK = "[print('line', file=f, flush=True) for f in (sys.stdout, sys.stderr) for _ in range(9)]; Path('done').touch()"


def test_a_log_whose_reader_is_gone_or_whose_disk_is_full_ends_no_stage(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(tmp_path, TALK, stdout=writing, stderr=writing)
    os.close(writing)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()
    (tmp_path / "done").unlink()
    with open("/dev/full", "w") as full:
        process = start(tmp_path, TALK, stdout=full, stderr=full)
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()


def test_what_is_printed_for_a_file_is_whole_or_the_status_says_so(tmp_path):
    """``schema`` prints more than a pipe holds."""
    command = [sys.executable, "-m", "dpmixmin", "schema", "--config", str(CONFIG)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the disk is full, in schema")
    with open("/dev/full", "w") as full:
        process = start(tmp_path, "print('a word, which waits in a buffer')", "schema", stdout=full)
        assert process.wait(timeout=60) == 1
        assert process.communicate()[1].startswith("error: the disk is full, in schema")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_running_stage_has_a_live_status_file_and_a_finished_one_has_none(tmp_path):
    process = start(tmp_path, f"print(*Path().rglob('private/progress/*.json')); {WAIT}")
    assert process.stdout.readline() == "results/mini/private/progress/assign_parts.json\n"
    process.kill()
    process.communicate(timeout=60)
    assert start(tmp_path, "pass").wait(timeout=60) == 0
    assert not list(tmp_path.rglob("*.json"))
    process = start(tmp_path, "print(*Path().rglob('*.json'))", "status")
    assert process.communicate(timeout=60)[0] == "\n"
