"""A deployment in miniature, made without a workflow: real ledger entries, made-up outputs. Of labels, or of texts."""

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
from dpmixmin.data import corpora
from dpmixmin.data.split import partition
from dpmixmin.errors import UserError
from dpmixmin.evaluation import dimension, metrics_of
from dpmixmin.paths import GPT2_FILES, Paths
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.statement import least_public
from dpmixmin.release import bundle, page, verify
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
        "audit": "none",
    }  # fmt: skip
    return changed(values, changes)


TEXTS = ("letters", "manuals", "verse")
"""Sources of the language model; all but the last can be had."""

TEXT = {
    "tokenizer": {"vocabulary": 400},
    "context": 32,
    "missing": "leave_out",
    "pretrain": {"layers": 1, "width": 16, "heads": 2, "tokens": 1000},
}


def raw_text_config(home: Path, **changes) -> dict:
    """The same of texts."""
    texts = {name: {"kind": "text", "path": f"{name}.jsonl", "licence": f"licence of {name}"} for name in TEXTS}
    values = raw_config(home, axes=None, tasks=None, public={"texts": texts}, text=TEXT)
    values["public"]["texts"]["manuals"] = {"kind": "packaged", "domain": "sotu"}
    values["private"]["table"] = {"kind": "text", "path": str(home / "patients-table.jsonl")}
    values["evaluation"] = {"loss_bound": 8.0}
    values["mixture"] |= {"objective": "token"}
    values["finetune"] |= {"trainable": {"which": "norms"}}
    return changed(values, changes)


def changed(values: dict, changes: dict) -> dict:
    """Set dotted keys with `__` for the dot; None removes."""
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


def tokenizer_files() -> dict[str, bytes]:
    from dpmixmin.data import tokenizer

    text = (
        "A made-up public text that is cut into tokens: some common words, some seldom ones, often enough for merges."
    )
    return tokenizer.files(tokenizer.train([text, text.lower(), text[::-1]], 400))


def model_files(config) -> dict[str, bytes]:
    """Return the files of a made-up model: a vector of weights, or a GPT-2 as it is initialised."""
    if config.text is None:
        return {"model.safetensors": save({"weight": np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)})}
    from tokenizers import Tokenizer

    from dpmixmin.data import tokenizer
    from dpmixmin.models import language

    files = tokenizer_files()
    trained = Tokenizer.from_str(files["tokenizer.json"].decode())
    end = tokenizer.end_of_text(trained)
    model = language.build(config.text.pretrain, trained.get_vocab_size(), config.text.context, end, 0)
    made = language.files(model, files, "")
    return {name: made[name] for name in GPT2_FILES}


def make_public(config, left_out: tuple[str, ...]) -> dict[str, dict]:
    """Make the public artefacts behind a chain, all but empty; return how a manifest names each."""
    paths = Paths(config.experiment)
    if config.text:
        artifacts.write_json(paths.fetched(), {"left_out": dict.fromkeys(left_out, "no such package")})
        artifacts.publish(paths.tokenizer(), tokenizer_files(), manifest({}, []))
        found = {"tokenizer": artifacts.parent(paths.tokenizer())}
        for name in corpora.present(config, paths):
            artifacts.publish(paths.text(name), {"content": name.encode()}, manifest({}, [found["tokenizer"]]))
            found[name] = artifacts.parent(paths.text(name))
            parents = [found[name], found["tokenizer"]]
            artifacts.publish(paths.proxy(name), {"content": name.encode()}, manifest({}, parents))
            found[f"proxy {name}"] = artifacts.parent(paths.proxy(name))
        return found
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
    left_out=(),
    evaluate=True,
) -> None:
    """Make every artefact of a deployment as the stages do, with real ledger entries and made-up outputs.

    What the ledger's store holds already is published from there.
    """
    paths, cells, method = Paths(config.experiment), chain_cells(config), config.methods[0]
    secret = {"path": f"{paths.base}/private/predictions/seed=0", "artifact": PRIVATE_PARENT}
    public = make_public(config, left_out)
    names = corpora.source_names(config, paths)
    proxies = [public[f"proxy {name}"] for name in names] if config.text else [public["proxy"]]
    parents = [public[key] for key in (("tokenizer", *names) if config.text else ("sources",))]
    entries, tuning, mixture_events = [], "none", ()
    delta, rng = config.privacy.delta, np.random.default_rng(0)

    def statement() -> dict:
        return {"privacy.json": artifacts.json_bytes(ledger.statement(entries, delta=delta, tuning=tuning))}

    searched = tuple(public.values()) if "standins" in public or config.text else ()
    settings = make_settings(
        paths.settings("mixture"), MIXTURE, tuned[0], searched if not config.mixture.settings else ()
    )
    searched = tuple(public[key] for key in ("tokenizer", *names)) if config.text else (*searched, settings)
    if method == "dp_mixmin":
        cell, parts = cells["mixture"], mixing_parts(config)
        spec = mixture_spec(config, MixtureSettings(**MIXTURE), cell.epsilon)
        mixture_events = spec.events() if "finetune" in parts else ()
        for _ in range(aborted):
            with pytest.raises(ZeroDivisionError), opened(ledger, config, cell, parts, spec, 2.0**-128):
                raise ZeroDivisionError
        rows = rng.dirichlet([1.0] * len(names), size=MIXTURE["steps"] + 1)
        final = rows[1 + MIXTURE["steps"] // 2 :].mean(axis=0)
        weights = dict(zip(names, (final / final.sum()).tolist(), strict=True))
        body = {"task": cell.task, "method": method, "epsilon": cell.epsilon, "seed": 0, "weights": weights}
        if config.text:
            digest = corpora.tokenizer_digest(paths)
            body |= {"objective": config.mixture.objective, "tokenizer": digest}
        table = pa.table({"step": np.arange(len(rows)), **{name: rows[:, i] for i, name in enumerate(names)}})
        files = {"weights.json": artifacts.json_bytes(body), "trajectory.parquet": artifacts.parquet_bytes(table)}
        variation = spec.total_variation(len(names))
        with opened(ledger, config, cell, parts, spec, variation, private) as release:
            commit(release, files, manifest(cell.coordinates(), [settings, *proxies, secret]))
            entries, tuning = [release.entry], tuned[0]
            release.publish(cell.folder(paths), statement())
        parents.append(artifacts.parent(cell.folder(paths)))
    if method == "uniform":
        cell = cells["mixture"]
        artifacts.publish(cell.folder(paths), {"weights.json": b"{}"} | statement(), manifest(cell.coordinates(), []))
        parents.append(artifacts.parent(cell.folder(paths)))
    pretrained = cells["pretrained"]
    model = model_files(config)
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
    if evaluate and "evaluation" in cells:
        model_folder, cell, spec = cell.folder(paths), cells["evaluation"], evaluation_spec(config, 1.0)
        sums = np.linspace(5, 200, dimension(config))
        found = metrics_of(config, sums, spec.noise_std)
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


def release(home: Path, day: str = DAY, raw=raw_config, **changes) -> tuple[Path, bool]:
    config = validate(raw(home, **changes))
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


# -- tampering with a bundle ------------------------------------------------------------------------------------


def rewrite(folder: Path, statement: dict, *, expert: bool) -> None:
    """Change the statement and the hashes; an expert also the statement's own digest and its page."""
    if expert:
        rest = {key: value for key, value in statement.items() if key != "sha256"}
        statement = {**rest, "sha256": artifacts.digest(rest)}
        (folder / "statement.md").write_text(page.render(statement))
    (folder / "statement.json").write_bytes(artifacts.json_bytes(statement))
    resum(folder)


def resum(folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "SHA256SUMS"}
    (folder / "SHA256SUMS").write_bytes(bundle.sums(files))


def refused(folder: Path) -> str:
    """Return the one line with which verify refuses a bundle."""
    with pytest.raises(UserError) as caught:
        list(verify.checks(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(copy: Path, change) -> str:
    stated = statement_of(copy)
    change(stated)
    rewrite(copy, stated, expert=True)
    return refused(copy)


def replaced(copy: Path, name: str, data: bytes) -> str:
    """Swap a file as an expert would, and return the refusal."""
    (copy / name).write_bytes(data)
    stated = statement_of(copy)
    files = [path for path in sorted(copy.iterdir())
             if path.name not in ("SHA256SUMS", "statement.json", "statement.md")]  # fmt: skip
    stated["files"] = [{"name": p.name, "sha256": artifacts.file_digest(p), "bytes": p.stat().st_size} for p in files]
    rewrite(copy, stated, expert=True)
    return refused(copy)
