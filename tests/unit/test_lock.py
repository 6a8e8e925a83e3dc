"""The lock that a run and all its jobs hold through their standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

LOCK = f"{sys.executable} -m dpmixmin.lock"


def shell(script: str, lock) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", "-c", f"( {script} ) < {lock}"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_killed_run_keeps_the_lock_until_its_orphaned_jobs_end(tmp_path):
    lock, started, orphan_done = tmp_path / "lock", tmp_path / "started", tmp_path / "orphan_done"
    lock.touch()
    engine = (
        f"{sys.executable} -c \"import subprocess; subprocess.run(['bash', '-c', 'sleep 2; touch {orphan_done}'])\""
    )
    first = shell(f"{LOCK} && touch {started} && exec {engine}", lock)
    while not started.exists():
        assert first.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)
    engines = subprocess.run(["pgrep", "-f", "import subprocess; subprocess.run"], capture_output=True, text=True)
    for pid in engines.stdout.split():
        if os.getpgid(int(pid)) == first.pid:
            os.kill(int(pid), signal.SIGKILL)
    second = shell(f"{LOCK} && test -e {orphan_done}", lock)
    assert second.wait(timeout=20) == 0, "the second run started before the orphan had ended"
    assert "waiting for them" in second.stderr.read()
    first.wait(timeout=20)


def test_a_free_lock_is_taken_in_silence(tmp_path):
    lock = tmp_path / "lock"
    lock.touch()
    process = shell(LOCK, lock)
    assert process.wait(timeout=20) == 0
    assert process.stderr.read() == ""
