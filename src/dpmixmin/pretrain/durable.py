"""Artefacts of long PUBLIC trainings: each is made once, whatever interrupts or doubles the job that makes them.

* A second job of the same name (its first one outlived the Snakemake that was killed) waits, and then finds the
  artefact whole: it keeps it if it was made of the same inputs, which its manifest says.
* A job of several artefacts that is killed at the seventh goes on with the seventh. Snakemake deletes a job's outputs
  before it starts it again, so until the last one is made the finished ones have a second name beside the states
  (hard links: no room on the disk), under which they are found.
* A training's state is deleted after its artefact is published, never before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dpmixmin import artifacts
from dpmixmin.errors import UserError
from dpmixmin.paths import ROOMS, Paths
from dpmixmin.privacy.access import Progress
from dpmixmin.ranks import Ranks


class Work:
    """The artefacts of one job; as a context, forgets the second names of finished ones when all are made.

    Args:
        paths: of the run.
        ranks: the processes of the job; the leader alone reads and writes.
    """

    def __init__(self, paths: Paths, ranks: Ranks | None = None):
        self._paths, self._ranks = paths, ranks or Ranks.single()
        self._kept: list[Path] = []

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None and self._ranks.leads:
            for kept in self._kept:
                shutil.rmtree(kept, ignore_errors=True)
                remove_empty_parents(kept)

    def make(
        self,
        folder: str,
        manifest: dict[str, Any],
        train: Callable[[Progress], dict[str, bytes]],
        views: Callable[[], dict[str, bytes]] = dict,
    ) -> None:
        """Make one artefact, unless it is there.

        Args:
            folder: the artefact's folder.
            manifest: from ``artifacts.manifest``: everything that decides the content.
            train: makes its files; called on every rank, with where the state is kept.
            views: makes the files that are derived from the ledger; they are written anew where the others are kept.

        Raises:
            Interrupted: a signal came, or another rank is gone.
        """
        states = Progress(Path(self._paths.state(folder)))
        # A state of other code, versions, device, data or settings is not gone on from.
        progress = Progress(states.folder / f"inputs={artifacts.digest(manifest)[:16]}")
        kept = states.folder.with_name(f"{states.folder.name}.finished")
        self._kept.append(kept)
        with ExitStack() as stack:

            def alone() -> bytes:
                stack.enter_context(states.lease())
                return b""

            self._ranks.led_at_length(alone)
            if self._ranks.led(lambda: _recover(folder, kept, manifest, views)) == _FOUND:
                return
            files = train(progress)
            self._ranks.led(lambda: _publish(folder, kept, manifest, {**files, **views()}))
            if self._ranks.leads:
                states.forget()


_FOUND, _TRAIN = b"found", b"train"


def remove_empty_parents(folder: Path) -> None:
    """Remove the empty folders above a deleted state, up to the room; other trainings may have states there."""
    for parent in folder.parents:
        if parent.name in ROOMS:
            break
        with contextlib.suppress(OSError):
            parent.rmdir()


def _recover(folder: str, kept: Path, manifest: dict, views: Callable[[], dict[str, bytes]]) -> bytes:
    """Find an artefact under one of its names and put it in its place."""
    for place in (Path(folder), kept):
        found = _files(place, manifest)
        if found is None:
            continue
        wanted = found | views()
        if place == kept or wanted != found:
            _publish(folder, kept, manifest, wanted)
        return _FOUND
    return _TRAIN


def _files(folder: Path, manifest: dict) -> dict[str, bytes] | None:
    """Return the files of an artefact, or None if it is not whole or of other inputs."""
    try:
        found = artifacts.verify(folder)
    except (UserError, KeyError):
        return None
    names = found.pop("files")
    if artifacts.canonical(found) != artifacts.canonical(manifest):
        return None
    return {name: (folder / name).read_bytes() for name in names}


def _publish(folder: str, kept: Path, manifest: dict, files: dict[str, bytes]) -> bytes:
    """Write an artefact, and give its files a second name; the manifest last, here as there."""
    artifacts.publish(folder, files, manifest)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (*files, artifacts.MANIFEST):
        try:
            os.link(Path(folder) / name, kept / name)
        except OSError:
            # A filesystem without links.
            shutil.copyfile(Path(folder) / name, kept / name)
    return b""
