"""Hold the run's lock for as long as standard input stays open: ``python -m dpmixmin.lock < .demo.lock``.

``flock`` belongs to the open file, not to this process: the shell that redirected its standard input keeps it after
this process ends, and so does every job that inherits that input, however the workflow engine dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

LOCK_FILE = ".demo.lock"


def main() -> None:
    """Lock standard input, waiting for jobs of an earlier run that still hold it."""
    try:
        fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another run, or jobs of a killed one, are still working here: waiting for them.", file=sys.stderr)
        fcntl.flock(0, fcntl.LOCK_EX)


def hold_while_running():
    """Share the lock for the life of this process, unless standard input holds it already.

    A Snakemake run started by hand does this, so that a later ``make demo`` waits for it. Where the lock cannot be
    had (a dry run beside a working run), nothing happens: Snakemake's own lock decides.

    Returns:
        The open lock file, to be kept, or None.
    """
    handle = open(LOCK_FILE, "a")  # noqa: SIM115 (it stays open on purpose)
    with contextlib.suppress(OSError):  # there may be no standard input at all
        if os.path.samestat(os.fstat(handle.fileno()), os.fstat(0)):
            return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return None
    return handle


if __name__ == "__main__":
    main()
