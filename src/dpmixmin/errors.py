"""The one exception whose text is meant for a user, and what is said of disks that fail."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import NamedTuple


class DiskFailure(NamedTuple):
    """What happened to a disk, in public words: no path, no size."""

    what: str
    fix: str


_DISK = {
    errno.ENOSPC: DiskFailure("the disk is full", "free some space"),
    errno.EDQUOT: DiskFailure("the disk quota is used up", "free some space"),
    errno.EIO: DiskFailure("the disk failed (input/output error)", "check the disk"),
    errno.ESTALE: DiskFailure("the network filesystem failed (stale file handle)", "check its mount"),
}
_FULL = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT}


class UserError(Exception):
    """A mistake the user can fix: shown as one line (what, where, the fix), exit status 1, no traceback.

    Its text must never hold anything computed from sensitive records: it is printed in public.
    """


def disk_failure(error: BaseException) -> DiskFailure | None:
    """Return what happened to the disk, or None where the error is another.

    Args:
        error: as it was caught; the disk's own error may be what caused it.
    """
    return next((_DISK[number] for each in _chain(error) if (number := _number(each)) in _DISK), None)


def _number(error: BaseException) -> int | None:
    """Return the error number of the operating system.

    Libraries of other languages keep its text alone. That is believed of their own kinds of error: the text of one of
    Python's could quote a record.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if type(error).__module__ == "builtins" and not isinstance(error, OSError):
        return None
    return next((number for text, number in _FULL.items() if text in str(error)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
