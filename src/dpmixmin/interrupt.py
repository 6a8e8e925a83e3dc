"""Stopping between two steps: SIGTERM (a cluster's walltime, preemption, scancel) and Ctrl-C.

A long training runs inside :func:`held`. A signal then only sets a flag, which the training asks for after every step:
it saves its state and raises :class:`Interrupted`. A second Ctrl-C stops at once. Outside, SIGTERM raises
:class:`Interrupted` where it arrives, so that files under construction are removed and leases are freed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATUS = 128 + signal.SIGTERM


class Interrupted(SystemExit):
    """The process was told to stop, and stops; what it saved is gone on from."""

    def __init__(self):
        super().__init__(STATUS)


def install() -> None:
    """Make SIGTERM raise :class:`Interrupted` in this process. Called once, by the command line."""
    signal.signal(signal.SIGTERM, _stop)


@contextmanager
def held() -> Iterator[Callable[[], bool]]:
    """Hold SIGTERM and the first Ctrl-C back, and yield a function that says whether one has come.

    Who never asks is stopped at the end of the block. Outside the main thread, where Python runs no handlers, nothing
    is held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []

    def remember(number, frame):
        if number == signal.SIGINT and came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise Interrupted


def _stop(number, frame):
    # Once: a second SIGTERM must not cut the cleaning up short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Interrupted
