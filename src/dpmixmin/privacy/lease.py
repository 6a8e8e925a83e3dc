"""A lease: one process at a time, on any number of machines that share a filesystem, works on something.

It is an ``flock`` on an empty file. The kernel frees it when its owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import IO

from dpmixmin.errors import disk_failure


class Unsupported(Exception):
    """The filesystem has no locks, or none across machines."""


def take(path: Path, waiting: str) -> IO:
    """Take a lease; who holds it may remove its file before closing it.

    Args:
        path: the file.
        waiting: what to print when another process holds it; public.

    Returns:
        The open file: closing it gives the lease back.

    Raises:
        Unsupported: no locks here.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = open(path, "a")  # noqa: SIM115 (the caller closes it)
        except (FileNotFoundError, FileExistsError):
            # Another job has just removed an empty folder above it, or while mkdir looked whether it is one.
            if path.parent.is_file():
                raise
            continue
        try:
            _lock(handle, waiting)
            if _is_at(handle, path):
                return handle
        except BaseException:
            handle.close()
            raise
        # Its last owner removed it: somebody may hold a new file of that name.
        handle.close()


def _lock(handle: IO, waiting: str) -> None:
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(waiting, file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if disk_failure(error):
            raise
        raise Unsupported from error


def _is_at(handle: IO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False
