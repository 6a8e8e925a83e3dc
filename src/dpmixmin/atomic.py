"""Files that are there whole or not at all, whatever kills the writer, and what dead writers leave.

A writer fills a temporary file beside the wanted one, fsyncs it and renames it. It removes it when it fails; SIGKILL
or a power cut leaves it, under a name that nobody else uses, until :func:`remove_leftovers` comes by.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LEFTOVER_SECONDS = 3600.0
"""Age from which a temporary file has no living writer: files are written in minutes, and each write renews it."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}")


def temporary_beside(path: Path) -> Path:
    """Return a new name in the folder of a file."""
    return path.parent / f".tmp-{uuid.uuid4().hex}"


@contextmanager
def new_file(path: Path, mode: int) -> Iterator[BinaryIO]:
    """Fill a new file and fsync it; it is removed when anything fails.

    Args:
        path: a name that is free.
        mode: permissions, whatever the umask.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            yield out
            os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Fill a file that takes the place of another with one rename; :func:`fsync_folder` then makes the rename last.

    Args:
        path: the file; it need not exist.
        mode: permissions, whatever the umask.
    """
    temporary = temporary_beside(path)
    with new_file(temporary, mode) as out:
        yield out
    try:
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def fsync_folder(folder: Path) -> None:
    """Make a folder's new names survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers. Others may be writing here now: their files are younger.

    Ages are told by the clock that gives this filesystem's files their times, which on a network filesystem is not
    this machine's: a folder is touched to read it. A failure is no harm, the files stay.
    """
    with contextlib.suppress(OSError):
        os.utime(folder)
        now = folder.stat().st_mtime
        for path in folder.glob(".tmp-*"):
            if _TEMPORARY.fullmatch(path.name) and now - path.stat().st_mtime > LEFTOVER_SECONDS:
                path.unlink(missing_ok=True)
