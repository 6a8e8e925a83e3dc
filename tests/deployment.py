"""A deployment in miniature, made without a workflow: real ledger entries, made-up outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save

from dpmixmin import artifacts
from dpmixmin.cells import mixing_parts, train_parts
from dpmixmin.config import validate
from dpmixmin.data.split import partition
from dpmixmin.evaluation import metrics
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.statement import least_public
from dpmixmin.release import bundle
from dpmixmin.release.derive import chain_cells
from dpmixmin.sections import FinetuneSettings, MixtureSettings
from dpmixmin.specs import evaluation_spec, finetune_spec, mixture_spec

STANDINS = {"kind": "parquet", "path": "standins.parquet", "features": ["x"], "labels": ["label"],
            "licence": "CC-BY-4.0"}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
DAY = "2030-01-31"
PRIVATE_PARENT = "5ec2e75ec2e75ec2e75ec2e75ec2e7aa"
MIXTURE = {"clip": 4.0, "steps": 6, "learning_rate": 0.5}
FINETUNE = {"learning_rate": 0.5, "steps": 20, "batch": 100, "clip": 1.0}


def raw_config(home: Path, **changes) -> dict:
    """A deployment in miniature; ``changes`` are dotted keys with `__` for the dot."""
    values = {
        "experiment": "clinic_run",
        "mode": "deploy",
        "methods": ["dp_mixmin"],
        "axes": {"one": {"column": "label", "positive": [1]}, "two": {"column": "label", "positive": [2]}},
        "tasks": {"ill": {"column": "label", "positive": [1, 2]}},
        "public": {"sources": {"kind": "parquet", "path": "public.parquet", "features": ["x"], "labels": ["label"],
                               "licence": "CC0-1.0"}},
        "private": {
            "name": "clinic",
            "table": {"kind": "parquet", "path": str(home / "patients-table.parquet"), "features": ["x"],
                      "labels": ["label"]},
            "unit": "patient",
            "nominal_units": 4000,
            "parts": {"mixing": 0.2, "finetune": 0.6, "test": 0.2},
        },
        "ledger": {"path": str(home.parent / "vault"), "cap": {"epsilon": 2.5, "delta": 2e-5}},
        "privacy": {"epsilons": [1], "delta": 1e-5},
        "mixture": {"settings": MIXTURE},
        "finetune": {"settings": FINETUNE},
    }  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split("__")
        place = values
        for step in path:
            place = place[step]
        place[last] = value
        if value is None:
            del place[last]
    return values


@contextlib.contextmanager
def opened(ledger, config, cell, parts, spec, variation=0.0, private=True, split=None):
    """Open a mechanism as a stage does; afterwards this process may write again, as a new one could."""
    purpose = Mechanism(spec, cell.coordinates(), {"in": "aa"}, {"config": {}, "code": {}}, "code", private, variation)
    try:
        split = split or partition(ledger.keys, config.private, 0).name
        with ledger.open(parts, purpose, split) as release:
            yield release
    finally:
        artifacts.unrestrict_for_tests()


def commit(release, files: dict[str, bytes], made: dict) -> None:
    if not release.committed:
        release.commit(files, made)


def manifest(cell: dict, parents: list) -> dict:
    return artifacts.manifest("test", config={"private.table": "secret"}, code="c", parents=parents, cell=cell)


def make_settings(folder: str, choice: dict | None, chosen_by: str, parents: tuple = ()) -> dict:
    body = {"chosen_by": chosen_by, "choice": choice, "epsilon": 1.0}
    artifacts.publish(folder, {"settings.json": artifacts.json_bytes(body)}, manifest({}, list(parents)))
    return artifacts.parent(folder)


def make_public(config) -> dict[str, dict]:
    """Make the public artefacts behind a chain, empty; return how a manifest names each."""
    paths = Paths(config.experiment)
    folders = {name: paths.source(name) for name in ("sources", "standins")} | {"proxy": paths.proxy()}
    if config.public.standins is None:
        del folders["standins"]
    for name, folder in folders.items():
        parents = [artifacts.parent(folders["sources"])] if name == "proxy" else []
        artifacts.publish(folder, {"content": name.encode()}, manifest({}, parents))
    return {name: artifacts.parent(folder) for name, folder in folders.items()}


def make_chain(
    config,
    ledger,
    *,
    tuned=("user_declared", "user_declared"),
    private=True,
    finetune=FINETUNE,
    aborted=0,
    evaluation_split=None,
) -> None:
    """Make every artefact of a deployment as the stages do, with real ledger entries and made-up outputs.

    What the ledger's store holds already is published from there.
    """
    paths, cells, method = Paths(config.experiment), chain_cells(config), config.methods[0]
    secret = {"path": f"{paths.base}/private/predictions/seed=0", "artifact": PRIVATE_PARENT}
    public = make_public(config)
    parents, entries, tuning, mixture_events = [public["sources"]], [], "none", ()
    delta, rng = config.privacy.delta, np.random.default_rng(0)

    def statement() -> dict:
        return {"privacy.json": artifacts.json_bytes(ledger.statement(entries, delta=delta, tuning=tuning))}

    searched = tuple(public.values()) if "standins" in public else ()
    settings = make_settings(
        paths.settings("mixture"), MIXTURE, tuned[0], searched if not config.mixture.settings else ()
    )
    searched += (settings,)
    if method == "dp_mixmin":
        cell, parts = cells["mixture"], mixing_parts(config)
        spec = mixture_spec(config, MixtureSettings(**MIXTURE), cell.epsilon)
        mixture_events = spec.events() if "finetune" in parts else ()
        for _ in range(aborted):
            with pytest.raises(ZeroDivisionError), opened(ledger, config, cell, parts, spec, 2.0**-128):
                raise ZeroDivisionError
        rows = rng.dirichlet([1.0, 1.0], size=MIXTURE["steps"] + 1)
        final = rows[1 + MIXTURE["steps"] // 2 :].mean(axis=0)
        weights = dict(zip(config.axes, (final / final.sum()).tolist(), strict=True))
        body = {"task": cell.task, "method": method, "epsilon": cell.epsilon, "seed": 0, "weights": weights}
        table = pa.table({"step": np.arange(len(rows)), **{name: rows[:, i] for i, name in enumerate(config.axes)}})
        files = {"weights.json": artifacts.json_bytes(body), "trajectory.parquet": artifacts.parquet_bytes(table)}
        variation = spec.total_variation(len(config.axes))
        with opened(ledger, config, cell, parts, spec, variation, private) as release:
            commit(release, files, manifest(cell.coordinates(), [settings, public["proxy"], secret]))
            entries, tuning = [release.entry], tuned[0]
            release.publish(cell.folder(paths), statement())
        parents.append(artifacts.parent(cell.folder(paths)))
    if method == "uniform":
        cell = cells["mixture"]
        artifacts.publish(cell.folder(paths), {"weights.json": b"{}"} | statement(), manifest(cell.coordinates(), []))
        parents.append(artifacts.parent(cell.folder(paths)))
    pretrained = cells["pretrained"]
    model = {"model.safetensors": save({"weight": rng.normal(size=(3, 2)).astype(np.float32)})}
    artifacts.publish(pretrained.folder(paths), model | statement(), manifest(pretrained.coordinates(), parents))
    cell = cells["finetuned"]
    settings = make_settings(
        paths.finetune_settings(method), finetune, tuned[1], () if config.finetune.settings else searched
    )
    parents, tuning = [artifacts.parent(pretrained.folder(paths)), settings], least_public(tuning, tuned[1])
    if finetune is None:
        artifacts.publish(cell.folder(paths), model | statement(), manifest(cell.coordinates(), parents))
    else:
        parts = train_parts(config, method)
        spec = finetune_spec(config, FinetuneSettings(**finetune), cell.epsilon, parts, alongside=mixture_events)
        with opened(ledger, config, cell, parts, spec, private=private) as release:
            commit(release, model, manifest(cell.coordinates(), [*parents, secret]))
            entries = [*entries, release.entry]
            release.publish(cell.folder(paths), statement())
    if "evaluation" in cells:
        model_folder, cell, spec = cell.folder(paths), cells["evaluation"], evaluation_spec(config, 1.0)
        sums = np.linspace(5, 200, 2 + 2 * config.evaluation.bins)
        found = metrics(sums, spec.noise_std, config.evaluation.loss_bound)
        released = {"noisy_sum": sums.tolist(), "noise_std": spec.noise_std}
        variation = spec.total_variation(len(sums))
        with opened(ledger, config, cell, ("test",), spec, variation, private, evaluation_split) as release:
            files = {"metrics.json": artifacts.json_bytes(found), "released.json": artifacts.json_bytes(released)}
            commit(release, files, manifest(cell.coordinates(), [artifacts.parent(model_folder), secret]))
            entries = [*entries, release.entry]
            release.publish(cell.folder(paths), statement())


def other_release(ledger, config, task="other", private=True) -> None:
    """Another charged release from the same dataset."""
    cell = dataclasses.replace(chain_cells(config)["mixture"], task=task)
    spec = mixture_spec(config, MixtureSettings(**MIXTURE), 0.8)
    with opened(ledger, config, cell, ("mixing",), spec, spec.total_variation(2), private) as release:
        release.commit({"weights.json": b"{}"}, manifest(cell.coordinates(), []))


def checkout(where: Path) -> Path:
    """Return what counts as a checkout: the ledger of a deployment lies outside it."""
    (where / "home").mkdir()
    (where / "home/Snakefile").touch()
    return where / "home"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkout with a whole chain's results; the ledger beside it has an aborted attempt and another release too."""
    home = checkout(tmp_path_factory.mktemp("made"))
    config = validate(raw_config(home))
    with contextlib.chdir(home):
        ledger = Ledger.of(config)
        make_chain(config, ledger, aborted=1)
        other_release(ledger, config)
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch) -> Path:
    """A copy of that folder of this test's own, as working directory."""
    home = shutil.copytree(made.parent, tmp_path / "whole") / "home"
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    home = checkout(tmp_path)
    monkeypatch.chdir(home)
    return home


def release(home: Path, day: str = DAY, **changes) -> tuple[Path, bool]:
    config = validate(raw_config(home, **changes))
    return bundle.release(config, Ledger.of(config), day)


@pytest.fixture(scope="module")
def released(made, tmp_path_factory) -> Path:
    """The bundle, copied out of the checkout that made it."""
    home = shutil.copytree(made.parent, tmp_path_factory.mktemp("released") / "whole") / "home"
    with contextlib.chdir(home):
        folder, _ = release(home)
        return shutil.copytree(folder, home.parent / "bundle")


@pytest.fixture
def copy(released, tmp_path) -> Path:
    return shutil.copytree(released, tmp_path / "copy")


def statement_of(folder: Path) -> dict:
    return json.loads((folder / "statement.json").read_text())
