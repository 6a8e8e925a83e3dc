"""Reading the one chain of a deployment, and every reason not to release it.

What is read is an allow-list: files of released and public artefacts by name. Each reason to refuse is one
:class:`UserError` that says why and what to do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpmixmin import artifacts
from dpmixmin.cells import Cell, audited_mixtures, audited_trainings, audits_room
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.errors import UserError
from dpmixmin.paths import PUBLIC, Paths
from dpmixmin.privacy.ledger import Ledger
from dpmixmin.privacy.statement import NOT_PRIVATE_SEED, PRIVATE_STAMP, least_public
from dpmixmin.release.derive import chain_cells, charged_cells, expected, has_private_mixture, model_files

UNCHARGED = "private_uncharged"
PRIVATE_TUNING = (
    "settings or checkpoints were chosen on private scores without charge (private_uncharged), so no guarantee covers "
    "this chain: choose them on public stand-ins or declare them from public knowledge, set privacy.settings_from: "
    "public, and release under a new privacy.release label"
)


@dataclass(frozen=True)
class Chain:
    """A chain that may be released.

    Attributes:
        files: name in the bundle to content.
        entries: ids of its charged ledger entries; none where nothing private was touched.
        tuning: how its settings were chosen, the worst of all steps.
        public: public artefacts behind it: folder in the run to content digest.
        versions: package versions that made the model.
        left_out: text sources that could not be had.
    """

    files: dict[str, bytes]
    entries: tuple[str, ...]
    tuning: str
    public: dict[str, str]
    versions: dict[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Artefact:
    folder: str
    manifest: dict[str, Any]

    @classmethod
    def read(cls, folder: str) -> _Artefact:
        return cls(folder, artifacts.verify(folder))

    @property
    def digest(self) -> str:
        """Digest of its content, as its children name it."""
        files = self.manifest["files"]
        return artifacts.digest({name: value for name, value in files.items() if name not in artifacts.VIEWS})

    def file(self, name: str) -> bytes:
        """Return a file, the bytes that the manifest names."""
        data = Path(self.folder, name).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.manifest["files"].get(name):
            raise UserError(f"{self.folder}/{name}: altered since it was made; delete {self.folder} and run again")
        return data


def read_chain(config: Config, ledger: Ledger) -> Chain:
    """Read the chain of a deployment.

    Raises:
        UserError: a reason not to release it; see the module's text.
    """
    refuse_study(config)
    if config.privacy.settings_from == UNCHARGED:
        raise UserError(f"privacy.settings_from: {PRIVATE_TUNING}")
    _refuse_uncharged(ledger)
    _refuse_test_seeds(ledger)
    paths, cells = Paths(config.experiment), chain_cells(config)
    made = {stage: _Artefact.read(cell.folder(paths)) for stage, cell in cells.items()}
    statements = {stage: _statement(artefact) for stage, artefact in made.items()}
    settings = _settings(config, paths, cells["finetuned"])
    tuning = _tuning(settings, statements, made)
    lineage = _lineage([*made.values(), *settings.values()], paths)
    choice = artifacts.read_json(f"{settings['finetune'].folder}/settings.json")["choice"]
    names = corpora.source_names(config, paths)
    left_out = tuple(name for name in config.sources if name not in names)
    entries = _entries(config, ledger, choice, made, statements)
    _refuse_unaudited(config, paths, settings, left_out)
    files = {name: made[stage].file(name) for stage, names in _allowed(config) for name in names if stage in cells}
    files.update({f"settings_{name}.json": settings[name].file("settings.json") for name in settings})
    public = {place: lineage[place] for place in sorted(lineage) if place.startswith(f"{PUBLIC}/")}
    return Chain(files, entries, tuning, public, made["finetuned"].manifest["versions"], left_out)


def _allowed(config: Config) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the files of each cell that a bundle takes; a mixture's only where it was learned privately."""
    return (
        ("mixture", ("weights.json", "trajectory.parquet") if has_private_mixture(config) else ()),
        ("finetuned", model_files(config)),
        ("evaluation", ("metrics.json", "released.json")),
    )


def refuse_study(config: Config) -> None:
    """Refuse what is no deployment."""
    if config.mode != "deploy":
        raise UserError(
            "mode: study computes uncharged metrics on these records, so nothing of it is released; set mode: deploy "
            "(one chain, a ledger.cap) and run again"
        )


def _refuse_uncharged(ledger: Ledger) -> None:
    touches = ledger.uncharged()
    if touches:
        shown = "; ".join(touches[:3]) + (f" and {len(touches) - 3} more" if len(touches) > 3 else "")
        raise UserError(
            f"{ledger.root}: these records were measured without charge ({shown}), and what was seen may have shaped "
            "this chain; release from records that no study has read, under a private.name of their own"
        )


def _refuse_test_seeds(ledger: Ledger) -> None:
    seeded = [entry.name() for entry in ledger.charged() if not entry.facts["private_randomness"]]
    if seeded:
        raise UserError(
            f"{ledger.root}: {NOT_PRIVATE_SEED}, in {seeded[0]}; no guarantee covers these records any more: release "
            "from records that no such run has read, under a private.name of their own"
        )


def _statement(artefact: _Artefact) -> dict[str, Any]:
    """Return an artefact's ``privacy.json`` if it states a guarantee."""
    path = f"{artefact.folder}/privacy.json"
    found = artifacts.read_json(path)
    if found["guarantee"] is None or found["stamp"] != PRIVATE_STAMP:
        raise UserError(
            f"{path}: {found['stamp']}; make the chain from private steps alone, without privacy.insecure_seed, "
            "under a new privacy.release label"
        )
    if found["guarantee"]["no_dp_for_parts"]:
        raise UserError(
            f"{path}: {found['headline']}; a bundle states differential privacy for every unit: make the chain of DP "
            "mechanisms alone, under a new privacy.release label"
        )
    return found


def _refuse_unaudited(config: Config, paths: Paths, settings: dict[str, _Artefact], left_out: tuple[str, ...]) -> None:
    """With `audit: required`, every mechanism of the chain must have passed the gate with these very parameters."""
    if config.audit.gate != "required":
        return
    gate = _Artefact.read(paths.audit(audits_room(config), "gate"))
    passed = artifacts.read_json(f"{gate.folder}/passed.json")
    audited = {cell.stage for cell in (*audited_mixtures(config), *audited_trainings(config))}
    choices = {name: artifacts.read_json(f"{each.folder}/settings.json")["choice"] for name, each in settings.items()}
    for each in expected(config, choices, left_out):
        if passed["failures"] or (each.cell.stage in audited and each.spec.digest() not in passed["specs"]):
            raise UserError(
                f"{gate.folder}: the {each.cell.stage} mechanism did not pass an audit with the parameters of this "
                "chain; run `snakemake audits`, and see its summary if it fails"
            )


def _settings(config: Config, paths: Paths, model: Cell) -> dict[str, _Artefact]:
    found = {"mixture": _Artefact.read(paths.settings("mixture"))} if has_private_mixture(config) else {}
    return {**found, "finetune": _Artefact.read(paths.finetune_settings(model.method))}


def _tuning(settings: dict[str, _Artefact], statements: dict[str, dict], made: dict[str, _Artefact]) -> str:
    """Return how the chain's settings were chosen; what the settings say must be what the statements say."""
    how = {artefact.folder: artifacts.read_json(f"{artefact.folder}/settings.json")["chosen_by"]
           for artefact in settings.values()}  # fmt: skip
    stated = {made[stage].folder: statement["tuning"] for stage, statement in statements.items()}
    for folder, tuning in (how | stated).items():
        if tuning == UNCHARGED:
            raise UserError(f"{folder}: {PRIVATE_TUNING}")
    worst = least_public(*how.values())
    if statements["finetuned"]["tuning"] != worst:
        raise UserError(
            f"{made['finetuned'].folder}/privacy.json: says tuning {statements['finetuned']['tuning']}, but its "
            f"settings say {worst}; run the workflow again"
        )
    return worst


def _lineage(chain: list[_Artefact], paths: Paths) -> dict[str, str]:
    """Return every non-private artefact behind a chain, the chain included: its place in the run, and its digest.

    What lies in this run is followed to its own parents. Artefacts are told apart by their place and not by their
    path: what the ledger's store gives to a new experiment still names the folders of the old one.

    Raises:
        UserError: two of them name different versions of one, or another version than lies in this run.
    """
    found = {_place(artefact.folder): artefact.digest for artefact in chain}
    waiting = list(chain)
    while waiting:
        artefact = waiting.pop()
        for parent in artefact.manifest["parents"]:
            if "sha256" not in parent:
                continue  # a private one: named by a random id, never by content
            place = _place(parent["path"])
            folder = f"{paths.base}/{place}"
            if place not in found and Path(folder, artifacts.MANIFEST).exists():
                waiting.append(_Artefact.read(folder))
                found[place] = waiting[-1].digest
            if found.setdefault(place, parent["sha256"]) != parent["sha256"]:
                raise UserError(
                    f"{artefact.folder}: was made from another version of {folder} than lies there now; run the "
                    "workflow again (a changed release needs a new privacy.release label)"
                )
    return found


def _place(path: str) -> str:
    """Return where an artefact is in its run: its path without ``results/{experiment}``."""
    parts = Path(path).parts
    below = parts[len(parts) - parts[::-1].index("results") :] if "results" in parts else ("", *parts)
    return "/".join(below[1:])


def _entries(
    config: Config, ledger: Ledger, choice: dict | None, made: dict[str, _Artefact], statements: dict[str, dict]
) -> tuple[str, ...]:
    """Return the ids of the chain's ledger entries: those that the artefacts name AND those that the cells demand."""
    named = {entry["entry"] for statement in statements.values() for entry in statement["entries"]}
    entries = {entry.id: entry for entry in ledger.entries()}
    if named - set(entries):
        raise UserError(
            f"{ledger.root}: this ledger lacks an entry that a released artefact names; restore it from a backup, or "
            "delete the experiment's results and set privacy.release to a new label"
        )
    found = []
    for charged in charged_cells(config, choice):
        folder = made[charged.cell.stage].folder
        entry = next(
            (entries[key] for key in sorted(named) if entries[key].state == "committed"
             and entries[key].facts["cell"] == charged.cell.coordinates()
             and entries[key].facts["parts"] == sorted(charged.parts)), None
        )  # fmt: skip
        if entry is None:
            raise UserError(
                f"{folder}: the ledger has no committed entry that its privacy.json names; run the workflow again, so "
                "that it is published from the ledger"
            )
        if artifacts.verify(ledger.root / "store" / entry.key)["files"] != made[charged.cell.stage].manifest["files"]:
            raise UserError(
                f"{folder}: is not what the ledger was charged for; delete it and run the workflow again, so that it "
                "is published from the ledger"
            )
        found.append(entry.id)
    if named != set(found):
        raise UserError(
            "privacy.json of this chain names ledger entries of other cells; delete the experiment's results and run "
            "the workflow again"
        )
    splits = {entries[key].facts["split"] for key in found}
    if len(splits) > 1:
        raise UserError(
            f"{ledger.root}: the units were re-partitioned within this chain: its entries lie under {len(splits)} "
            "partitions, whose parts overlap. Restore what the first was made with (private.unit, private.parts, the "
            "table's ids, the ledger's keys.json), or delete the experiment's results, set privacy.release to a new "
            "label and run the whole chain again, which is charged"
        )
    return tuple(found)
