"""Hold the run's lock for as long as standard input stays open: ``python -m dpmixmin.lock < .demo.lock``.

``flock`` belongs to the open file, not to this process: the shell that redirected its standard input keeps it after
this process ends, and so does every job that inherits that input, however the workflow engine dies.
"""

from __future__ import annotations

import fcntl
import sys


def main() -> None:
    """Lock standard input, waiting for jobs of an earlier run that still hold it."""
    try:
        fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another run, or jobs of a killed one, are still working here: waiting for them.", file=sys.stderr)
        fcntl.flock(0, fcntl.LOCK_EX)


if __name__ == "__main__":
    main()
