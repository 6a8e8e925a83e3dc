"""Artefacts are whole or not there, whatever kills or stops their writer."""

import errno
import os
import time

import pytest

from dpmixmin import artifacts, atomic

MANIFEST = {"stage": "test"}


def leftover(folder, age: float):
    path = atomic.temporary_beside(folder / "x")
    path.write_bytes(b"half")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def failing_after(call, times: int):
    """A system call that works so many times; after that the disk is full."""
    left = [times]

    def limited(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **options)

    return limited


@pytest.fixture
def stored(tmp_path):
    folder = tmp_path / "store"
    artifacts.publish(folder, {"a": b"1", "b": b"2" * 100_000}, MANIFEST)
    return folder


def write(how, stored, folder):
    if how == "publish":
        artifacts.publish(folder, {"a": b"1", "b": b"2"}, MANIFEST)
    else:
        artifacts.republish(stored, folder, {"privacy.json": b"{}"})


@pytest.mark.parametrize("how", ["publish", "republish"])
def test_files_of_dead_writers_go_when_the_artefact_is_written_again_and_others_stay(how, stored, run_folder):
    folder = run_folder / "released" / "m"
    write(how, stored, folder)
    dead, living = leftover(folder, 2 * atomic.LEFTOVER_SECONDS), leftover(folder, 60)
    other = folder / ".snakemake_timestamp"
    other.touch()
    os.utime(other, (0, 0))
    write(how, stored, folder)
    assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)
    artifacts.verify(folder)


def test_ages_are_told_by_the_filesystem_s_clock(stored, monkeypatch):
    """A machine whose clock is a day ahead takes nobody's file for a dead writer's."""
    living = leftover(stored, 60)
    ahead = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: ahead)
    atomic.remove_leftovers(stored)
    assert living.exists()
    atomic.remove_leftovers(stored / "no such folder")


@pytest.mark.parametrize("how", ["publish", "republish"])
@pytest.mark.parametrize("call", ["fsync", "replace", "open", "fchmod"])
def test_a_full_disk_leaves_no_temporary_and_nothing_that_passes_for_whole(how, call, stored, run_folder, monkeypatch):
    """The n-th call fails, for every n; then there is room again."""
    for times in range(50):
        folder = run_folder / "released" / f"m{times}"
        failed = []
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing_after(getattr(os, call), times))
            try:
                write(how, stored, folder)
            except OSError as error:
                failed.append(error.errno)
        if not failed:
            break
        assert failed == [errno.ENOSPC]
        assert not list(folder.glob(".*"))
        # After the manifest only the folder is synced: then everything is there.
        if (folder / "manifest.json").exists():
            artifacts.verify(folder)
            assert call in ("fsync", "open")
        write(how, stored, folder)
        artifacts.verify(folder)
    assert times >= 3


def test_a_manifest_is_written_after_what_it_names_is_on_the_disk(stored, run_folder, monkeypatch):
    """The order of a power cut's victims: contents, their names, the manifest's content, its name."""
    done, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source, target):
        done.append(f"-> {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    for how, names in (("publish", ["a", "b"]), ("republish", ["privacy.json", "a", "b"])):
        done.clear()
        write(how, stored, run_folder / "released" / "m")
        told = ["content" if name.startswith(".tmp-") else name for name in done]
        files = [step for name in names for step in ("content", f"-> {name}")]
        assert told == [*files, "m", "content", "-> manifest.json", "m"]


def test_modes_do_not_depend_on_the_umask(stored, run_folder):
    before = os.umask(0o077)
    try:
        for room, mode in (("private", 0o600), ("public", 0o644), ("study", 0o644)):
            artifacts.publish(run_folder / room / "m", {"a": b"1"}, MANIFEST)
            assert {path.stat().st_mode & 0o777 for path in (run_folder / room / "m").iterdir()} == {mode}
        artifacts.republish(stored, run_folder / "released" / "m", {"privacy.json": b"{}"})
        assert {path.stat().st_mode & 0o777 for path in (run_folder / "released" / "m").iterdir()} == {0o644}
    finally:
        os.umask(before)
