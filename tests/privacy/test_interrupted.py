"""Signals, full disks, killed writers, several processes: whatever ends a job, the ledger counts once (18, 23, 26)."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import threading
import time

import pytest
from test_ledger import MIX, SPLIT, states
from test_ledger_processes import start

from dpmixmin import atomic, interrupt
from dpmixmin.errors import disk_failure
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Derive, Ledger

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
DEAD = 2 * atomic.LEFTOVER_SECONDS


def temporaries(folder) -> list:
    return sorted(path for path in folder.rglob(".*"))


def leftover(folder, age: float, name: str = "") -> object:
    """A file that a writer left so many seconds ago."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name if name else atomic.temporary_beside(folder / "x")
    path.write_bytes(b"half")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


# -- the state of a long computation (rule 23) ----------------------------------------------------------------


def test_rule_23_the_newest_whole_state_is_gone_on_from(tmp_path):
    """A writer that was killed between the rename and the deletion, and files that a broken disk cut short."""
    progress = Progress(tmp_path / "state", seconds=0)
    assert progress.load() is None
    progress.save(3, lambda: b"three")
    third = (tmp_path / "state" / "step=3").read_bytes()
    progress.save(10, lambda: b"ten")
    assert [path.name for path in progress.folder.iterdir()] == ["step=10"]
    (tmp_path / "state" / "step=3").write_bytes(third)
    assert progress.load() == (10, b"ten"), "ten is more than three, although not as text"
    for damaged in (b"", b"short", (tmp_path / "state" / "step=10").read_bytes()[:-1]):
        (tmp_path / "state" / "step=10").write_bytes(damaged)
        assert progress.load() == (3, b"three")
    (tmp_path / "state" / "step=x").write_bytes(b"")
    (tmp_path / "state" / "step=3").write_bytes(b"")
    assert progress.load() is None
    assert not progress.exists()
    progress.save(4, lambda: b"four")
    assert progress.load() == (4, b"four"), "whatever was there before"
    assert not (tmp_path / "state" / "step=10").exists()
    progress.forget()
    assert not progress.folder.exists()


def test_a_state_is_saved_once_in_a_while_or_at_once_by_this_machine_s_clock(tmp_path):
    progress = Progress(tmp_path / "state", seconds=1000)
    progress.save(1, lambda: b"1")
    progress.save(2, lambda: pytest.fail("not due"))
    progress.save(3, lambda: b"3", now=True)
    progress.save(3, lambda: b"3", now=True)
    assert progress.load() == (3, b"3")
    ahead = time.time() + 86400
    os.utime(tmp_path / "state" / "step=3", (ahead, ahead))
    later = Progress(tmp_path / "state", seconds=0.05)
    later.save(4, lambda: pytest.fail("not due"))
    time.sleep(0.06)
    later.save(5, lambda: b"5")
    assert later.load() == (5, b"5")


def test_temporaries_of_killed_writers_of_a_state_go_and_those_of_living_ones_stay(tmp_path):
    progress = Progress(tmp_path / "state", seconds=0)
    progress.save(1, lambda: b"1")
    for act in (progress.load, lambda: progress.save(2, lambda: b"2")):
        dead, living = leftover(progress.folder, DEAD), leftover(progress.folder, 60)
        act()
        assert not dead.exists()
        assert living.exists()
    progress.forget()
    assert not progress.folder.exists()


def test_a_state_that_cannot_be_saved_ends_no_training_and_is_told_once(tmp_path, monkeypatch, capsys):
    progress = Progress(tmp_path / "state", seconds=0)
    progress.save(1, lambda: b"1")
    for call in ("fsync", "replace", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing_after(getattr(os, call), 0))
            progress.save(2, lambda: b"2")
            progress.save(3, lambda: b"3", now=True)
        assert temporaries(tmp_path) == []
        assert progress.load() == (1, b"1")
    assert capsys.readouterr().err == "warning: the disk is full: the state is not saved; going on without\n"
    progress.save(4, lambda: b"4")
    assert progress.load() == (4, b"4")
    monkeypatch.setattr(os, "replace", failing_after(os.replace, 0, PermissionError(errno.EACCES, "no")))
    with pytest.raises(PermissionError):
        progress.save(5, lambda: b"5")


# -- signals --------------------------------------------------------------------------------------------------

STEPS = 30
WORKER = """
import json, os, sys, time
from pathlib import Path
from dpmixmin import interrupt
from dpmixmin.privacy.access import Progress
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.mechanisms import ModelGaussian

root, transcript, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
interrupt.install()
purpose = Mechanism(ModelGaussian(1.0, 2.0, 30, 0.5, 20.0, 1.0, 1e-5), {"task": "odd"}, {}, {}, "code")
with Ledger(root, "clinic").open(("finetune",), purpose, "seed=0") as release:
    if not release.committed:
        progress = Progress(release.progress.folder, seconds=1000)
        steps, made = progress.load() or (0, b"")
        made = made.decode()
        with interrupt.held() as asked_to_stop:
            for step in range(steps, 30):
                made += f"{step} {os.urandom(8).hex()}\\n"
                with open(transcript, "a") as out:
                    out.write(f"{step}\\n")
                print(step, flush=True)
                time.sleep(pause)
                if asked_to_stop():
                    progress.save(step + 1, made.encode, now=True)
                    raise interrupt.Interrupted
        release.commit({"model": made.encode()}, {"stage": "finetune"})
"""


def test_rule_23_stopped_twice_by_a_signal_one_entry_and_exactly_the_spec_s_steps(ledger, tmp_path):
    transcript = tmp_path / "transcript"
    for number, reached in ((signal.SIGTERM, 5), (signal.SIGINT, 12)):
        process = start(WORKER, ledger.root.parent, transcript, 0.02)
        while int(process.stdout.readline()) < reached:
            pass
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == interrupt.STATUS, err
        (entry,) = ledger.entries()
        assert entry.state == "reserved"
        made = [int(line) for line in transcript.read_text().splitlines()]
        assert ledger.progress(entry.id).load()[0] == len(made) < STEPS
    assert start(WORKER, ledger.root.parent, transcript, 0).wait(timeout=60) == 0
    assert [int(line) for line in transcript.read_text().splitlines()] == list(range(STEPS)), "none twice, none lost"
    (entry,) = ledger.entries()
    assert entry.state == "committed"
    stored = (ledger.root / "store" / entry.key / "model").read_text().splitlines()
    assert [int(line.split()[0]) for line in stored] == list(range(STEPS))
    assert list((ledger.root / "tmp").iterdir()) == []


def test_rule_18_a_signal_before_the_first_state_voids_the_entry(ledger):
    script = WORKER.replace("interrupt.held() as asked_to_stop", "open('/dev/null')").replace(
        "if asked_to_stop()", "if False"
    )
    process = start(script, ledger.root.parent, os.devnull, 1)
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (interrupt.STATUS, "")
    assert states(ledger) == ["void"]


# -- full and broken disks ------------------------------------------------------------------------------------


def failing_after(call, times: int, error: OSError = FULL):
    """A system call that works so many times, and then fails."""
    left = [times]

    def limited(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **options)

    return limited


def released(ledger, saved: bool) -> str:
    """A mechanism of three steps that saves its state, or does not; returns its entry."""
    with ledger.open(("mixing",), MIX, SPLIT) as release:
        if not release.committed:
            made = release.progress.load()
            output = made[1] if made else os.urandom(16)
            if saved and not made:
                release.progress.save(3, lambda: output)
            release.commit({"weights": output}, {"stage": "mix"})
        return release.entry


CALLS = ("fsync", "rename", "replace", "link", "open")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("saved", [False, True], ids=["without a state", "with a state"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_rule_18_the_disk_fails_at_any_moment_and_the_count_is_right(call, saved, lasting, tmp_path, monkeypatch):
    """The n-th call fails, for every n of a release: the error is the disk's, and the rerun commits, once."""
    for times in range(100):
        ledger = Ledger(tmp_path / f"{times}", "clinic")
        original, failed = getattr(os, call), []
        limited = failing_after(original, times, OSError(errno.EIO if lasting else errno.ENOSPC, "text"))

        def failing(*args, original=original, limited=limited, failed=failed, **options):
            if failed and not lasting:
                return original(*args, **options)
            try:
                return limited(*args, **options)
            except OSError as error:
                failed.append(disk_failure(error))
                raise

        monkeypatch.setattr(os, call, failing)
        with contextlib.suppress(OSError):
            released(ledger, saved)
        monkeypatch.undo()
        if not any(failed):
            break
        assert temporaries(ledger.root) == [], times
        assert sum(state == "committed" for state in states(ledger)) <= 1
        before = states(ledger), [ledger.progress(each.id).load() for each in ledger.entries()]
        again = Ledger(tmp_path / f"{times}", "clinic")
        entry, output = released(again, saved), (ledger.root / "store" / again.entries()[-1].key / "weights")
        if before[0] == ["reserved"] and any(before[1]):
            assert len(again.entries()) == 1
            assert output.read_bytes() == before[1][0][1], "gone on from the state"
        assert released(again, saved) == entry
        assert [each.id for each in again.entries() if each.state != "void"] == [entry], times
        assert len(again.entries()) <= 2
        assert len(list((ledger.root / "store").iterdir())) == 1
        assert list((ledger.root / "tmp").iterdir()) == []
    assert times > {"rename": 0, "link": 1}.get(call, 3)


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 256 kB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small filesystem")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Leave not one free page."""

    def write():
        with open(folder / "filler", "wb", buffering=0) as out:
            while out.write(bytes(4096)):
                pass

    with pytest.raises(OSError, match="No space left"):
        write()


def test_rule_18_on_a_full_disk_a_release_with_a_state_stays_reserved_and_commits_when_there_is_room(small_disk):
    ledger = Ledger(small_disk / "ledger", "clinic")
    drawn = os.urandom(5000)

    def attempt():
        with ledger.open(("mixing",), MIX, SPLIT) as release:
            if not release.progress.exists():
                release.progress.save(3, lambda: drawn)
                fill(small_disk)
            release.commit({"weights": release.progress.load()[1]}, {"stage": "mix"})
            return release.entry

    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            attempt()
        assert states(ledger) == ["reserved"]
        assert [path.suffix for path in (ledger.root / "tmp").iterdir()] == [".state"]
        assert list((ledger.root / "store").iterdir()) == []
        assert temporaries(small_disk) == []
    (small_disk / "filler").unlink()
    entry = attempt()
    assert [(each.id, each.state) for each in ledger.entries()] == [(entry, "committed")]
    assert (ledger.root / "store" / ledger.entries()[0].key / "weights").read_bytes() == drawn


def test_rule_18_on_a_full_disk_a_release_without_a_state_shows_the_error_and_is_void_when_there_is_room(small_disk):
    ledger = Ledger(small_disk / "ledger", "clinic")

    def attempt():
        with ledger.open(("mixing",), MIX, SPLIT):
            fill(small_disk)
            raise ValueError("the error itself")

    with pytest.raises(ValueError, match="the error itself"):
        attempt()
    assert states(ledger) == ["reserved"], "not even this could be written"
    assert temporaries(small_disk) == []
    with pytest.raises(OSError, match="No space left"):
        released(ledger, saved=False)
    (small_disk / "filler").unlink()
    released(ledger, saved=False)
    assert states(ledger) == ["committed", "void"]


def test_a_log_whose_first_head_could_not_be_written_is_mended_and_not_taken_for_cut_short(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger", "clinic")
    event = {"event": "uncharged", "what": "x"}
    monkeypatch.setattr(os, "replace", failing_after(os.replace, 0))
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            ledger.log.append(event)
    monkeypatch.undo()
    ledger.log.append(event)
    assert len(Ledger(tmp_path / "ledger", "clinic").log.read()) == 2
    assert json.loads((ledger.root / "head.json").read_text())["number"] == 2


class LibraryError(Exception):
    """A library's own kind of error, without a number."""


def test_disk_failures_are_recognised_through_the_libraries_that_wrap_them():
    def wrapped():
        try:
            raise FULL
        except OSError as error:
            raise RuntimeError("could not write") from error

    with pytest.raises(RuntimeError) as caught:
        wrapped()
    assert disk_failure(caught.value).what == "the disk is full"
    assert disk_failure(LibraryError("I/O error: No space left on device (os error 28)")).fix == "free some space"
    assert disk_failure(OSError(errno.EDQUOT, "x")).what == "the disk quota is used up"
    quoted = ValueError("could not convert record 'mail: No space left on device'")
    for other in (OSError(errno.ENOENT, "No such file"), ValueError("x"), KeyboardInterrupt(), quoted):
        assert disk_failure(other) is None


# -- what killed processes leave ------------------------------------------------------------------------------


def ended(ledger, error: type[BaseException]) -> str:
    """A mechanism that saves a state and ends with an error; returns its entry."""
    entries = []

    def attempt():
        with ledger.open(("mixing",), dataclasses.replace(MIX, cell={"error": error.__name__}), SPLIT) as release:
            entries.append(release.entry)
            release.progress.save(1, lambda: b"state")
            raise error

    with pytest.raises(error):
        attempt()
    return entries[0]


def test_opening_a_mechanism_removes_what_killed_processes_left_and_nothing_else(ledger):
    over = released(ledger, saved=False)
    void, running = ended(ledger, ValueError), ended(ledger, KeyboardInterrupt)
    assert states(ledger) == ["committed", "reserved", "void"]
    tmp = ledger.root / "tmp"
    for entry in (over, void):
        Progress(tmp / f"{entry}.state").save(1, lambda: b"state")
        leftover(tmp / entry, DEAD, "weights")
    gone = [leftover(ledger.root / "entries", DEAD), leftover(ledger.root, DEAD)]
    stay = [
        *(leftover(ledger.root / "entries", 60), leftover(ledger.root, 60)),
        *(leftover(ledger.root, DEAD, ".other"), leftover(ledger.root, DEAD, ".tmp-mine")),
        leftover(tmp / "unknown", DEAD, "weights"),
    ]
    released(Ledger(ledger.root.parent, "clinic"), saved=False)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stay)
    assert sorted(path.name for path in tmp.iterdir()) == sorted([f"{running}.state", "unknown"])


def test_an_event_that_the_head_names_is_waited_for_a_moment(ledger):
    released(ledger, saved=False)
    last = sorted((ledger.root / "entries").iterdir())[-1]
    os.rename(last, ledger.root / "late")
    timer = threading.Timer(0.3, os.rename, (ledger.root / "late", last))
    timer.start()
    assert states(Ledger(ledger.root.parent, "clinic")) == ["committed"]
    timer.join()


def test_a_study_that_derives_leaves_the_log_alone(ledger):
    with ledger.open(("mixing",), Derive()):
        pass
    assert list((ledger.root / "entries").iterdir()) == []
