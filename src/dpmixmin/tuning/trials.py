"""Finished trials of a tuning, kept until its choice is published, so that a killed one goes on.

A trial is a candidate on a stand-in. What it found is a function of public data, public seeds and the code, so a kept
result is the one that would be computed again. It is kept in the public room, under a digest of everything that
decides it; results under another digest are deleted. A model that a stand-in's trials start from is kept too: training
it can cost more than they do.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from torch import nn

from dpmixmin import artifacts, progress, provenance
from dpmixmin.config import Config
from dpmixmin.data.fetch import say
from dpmixmin.models import networks
from dpmixmin.models.device import best
from dpmixmin.paths import Paths
from dpmixmin.pretrain.durable import remove_empty_parents
from dpmixmin.privacy.access import Progress

Name = Mapping[str, Any]
"""What tells a trial from the others of its tuning: plain JSON."""

_SECONDS = 1.0
"""Trials that end within this time share a file: what a power cut or SIGKILL can lose."""


class Trials:
    """The trials of one tuning, as a context that ends when its choice is published: then they are deleted.

    A second job of the same name (its first one outlived the Snakemake that was killed) waits at the beginning.

    Args:
        config: the experiment.
        stage: name of the stage, for its config and code.
        folder: the settings folder that the tuning writes.
        parents: of its artefact, with their digests.
    """

    def __init__(self, config: Config, stage: str, folder: str, parents: list[dict]):
        decides = {
            "config": config.shown(stage.removeprefix("text_")),
            "code": provenance.code_digest(stage),
            "parents": parents,
            "versions": artifacts.versions(),
            "device": best().type,
        }
        states = Path(Paths(config.experiment).state(folder))
        self._folder = states / f"trials={artifacts.digest(decides)[:16]}"
        self._alone = ExitStack()
        self._kept: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._steps = progress.Steps(0, unit="trial")

    def __enter__(self) -> Self:
        self._alone.enter_context(Progress(self._folder).lease())
        for other in set(self._folder.parent.glob("trials=*")) - {self._folder}:
            shutil.rmtree(other, ignore_errors=True)
        for path in self._folder.glob("*.json"):
            self._kept |= json.loads(_read(path) or b"{}")
        self._written = time.monotonic()
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._alone:
            if kind is not None:
                self._write()
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        remove_empty_parents(self._folder)

    def expect(self, total: int) -> None:
        """Say how many trials there are, for the estimated end."""
        self._steps = progress.Steps(total, start=len(self._kept), unit="trial")
        if self._kept:
            say(f"  going on after trial {len(self._kept)}/{total}")

    def result(self, name: Name, compute: Callable[[], Any]) -> Any:
        """Return what a trial found: kept, or computed now and kept.

        Args:
            name: of the trial.
            compute: gives plain JSON; NaN and infinities may be in it.
        """
        key = artifacts.digest(name)
        if key not in self._kept:
            # As it will be read, so that a run that goes on and one that was never killed find the same.
            with progress.rehearsal():
                found = compute()
            self._kept[key] = self._new[key] = json.loads(json.dumps(found))
            if time.monotonic() - self._written >= _SECONDS:
                self._write()
            self._steps.at(len(self._kept), lambda: _words(name, self._kept[key]))
        return self._kept[key]

    def model(self, name: Name, model: nn.Module, train: Callable[[Progress], Any]) -> None:
        """Bring a model to the end of its training, in place: from what was kept, or by training it now.

        Args:
            name: of the model.
            model: on the CPU, as the training starts from it and leaves it.
            train: trains it in place, and keeps its state where it is told.
        """
        path = self._folder / f"{artifacts.digest(name)[:16]}.model"
        data = _read(path)
        if data is not None:
            networks.load_bytes(model, data)
            return
        state = Progress(path.with_suffix(".training"))
        train(state)
        _keep(path, networks.state_bytes(model))
        state.forget()

    def _write(self) -> None:
        if self._new:
            _keep(self._folder / f"{next(iter(self._new))[:16]}.json", json.dumps(self._new).encode())
        self._new, self._written = {}, time.monotonic()


def _words(name: Name, found: Any) -> str:
    """Say what a trial was, and what it found if that is one number (public)."""
    values = [value for part in name.values() for value in (part.items() if isinstance(part, Mapping) else [part])]
    said = [" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values if value]
    return ", ".join(said) + (f": {found:.4g}" if isinstance(found, float) else "")


def _keep(path: Path, data: bytes) -> None:
    artifacts.write_bytes(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def _read(path: Path) -> bytes | None:
    """Return what was kept, or None if it is missing or not whole."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    return data if hashlib.sha256(data).hexdigest().encode() == digest else None
