"""Leases: one job at a time works on a thing, whoever is killed, and whatever else is removed meanwhile."""

import errno
import fcntl
import os
import threading
import time

import pytest
from test_ledger import MIX, SPLIT
from test_ledger_processes import start

from dpmixmin.errors import UserError
from dpmixmin.pretrain.durable import remove_empty_parents
from dpmixmin.privacy.access import Progress


def test_a_lease_whose_file_is_removed_holds_one_owner_at_a_time(tmp_path):
    inside, most, done = [], [], []

    def work():
        for _ in range(15):
            with Progress(tmp_path / "states" / "one").lease():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()
        done.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 6
    assert max(most) == 1
    assert list((tmp_path / "states").iterdir()) == []


def test_a_second_job_waits_for_the_lease_of_a_state_and_a_killed_owner_frees_it(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from dpmixmin.privacy.access import Progress\n"
        "with Progress(Path(sys.argv[1])).lease():\n    print('held', flush=True); time.sleep(float(sys.argv[2]))"
    )
    first = start(script, tmp_path / "state", 60)
    assert first.stdout.readline() == "held\n"
    second = start(script, tmp_path / "state", 0)
    assert second.stderr.readline().startswith("waiting for another job that works on")
    assert second.poll() is None
    first.kill()
    out, _ = second.communicate(timeout=60)
    first.communicate(timeout=60)
    assert (out, second.returncode) == ("held\n", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_refused_for_the_ledger_and_told_for_a_state(
    number, ledger, tmp_path, monkeypatch, capsys
):
    def unlockable(handle, flags):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unlockable)
    with pytest.raises(UserError, match=r"ledger\.path: .* `flock`") as caught, ledger.open(("mixing",), MIX, SPLIT):
        pass
    assert "\n" not in str(caught.value)
    assert ledger.entries() == []
    with Progress(tmp_path / "state").lease():
        pass
    assert "no file locks here" in capsys.readouterr().err


def test_jobs_that_remove_each_other_s_empty_folders_take_their_leases_all_the_same(tmp_path):
    """Any two trainings of one room share the folders above their states."""
    failed = []

    def work(number):
        progress = Progress(tmp_path / "public" / "states" / "a" / "b" / f"c{number % 2}")
        try:
            for _ in range(300):
                with progress.lease():
                    pass
                remove_empty_parents(progress.folder)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
