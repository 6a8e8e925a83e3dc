"""Private fine-tuning as a charged release: what the models of every kind share.

A stage gives a :class:`Kind`: how to read its sensitive records, build its sums and write its model. The rest is here:
the spec from public settings, the reservation, the steps, the commit, and the statement of the whole chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from dpmixmin import artifacts, provenance
from dpmixmin.cells import TWICE, Cell, cells_of, pretrained_cell, select, train_parts
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.paths import STUDY, Paths
from dpmixmin.privacy.access import Access
from dpmixmin.privacy.events import from_json
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.noise import noise_source
from dpmixmin.privacy.statement import least_public
from dpmixmin.sections import FinetuneSettings
from dpmixmin.specs import finetune_spec


class Kind(ABC):
    """A kind of model.

    Attributes:
        stage: the stage whose code makes the release.
        made: stages that made the private tables.
        files: names of a model's files.
        device: where it is trained.
    """

    device: str = "cpu"
    stage: str
    made: tuple[str, ...]
    files: tuple[str, ...]

    @abstractmethod
    def sums(self, config: Config, access: Access, paths: Paths, cell: Cell, wanted: split.Partition, folder: str):
        """Read the open parts and return the :class:`ClippedSum` of the pretrained model in ``folder`` over them."""

    @abstractmethod
    def model_files(self, config: Config, sums: ClippedSum, folder: str) -> dict[str, bytes]:
        """Return the files of the trained model behind ``sums``."""

    def views(self, config: Config, cell: Cell, statement: dict, *, trained: bool) -> dict[str, bytes]:
        """Return the files that quote the statement; ``trained`` is False where the pretrained model was kept."""
        return {"privacy.json": artifacts.json_bytes(statement)}


def run_cells(kind: Kind, config: Config, method: str, task: str) -> None:
    """Fine-tune every cell of one task and method."""
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    settings_folder = paths.finetune_settings(method)
    chosen = artifacts.read_json(f"{settings_folder}/settings.json")
    settings_parent = artifacts.parent(settings_folder)
    for cell in select(cells_of(config), stage="finetuned", task=task, method=method):
        pretrained = pretrained_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
        make = _keep_pretrained if chosen["choice"] is None else _fine_tune
        make(kind, config, ledger, paths, cell, pretrained, settings_parent, chosen)
        say(f"  {cell.folder(paths)}")


def _keep_pretrained(
    kind: Kind,
    config: Config,
    ledger: Ledger,
    paths: Paths,
    cell: Cell,
    pretrained: Cell,
    settings: dict,
    chosen: dict,
) -> None:
    """The stand-ins chose not to fine-tune: the result is the pretrained model, and nothing is spent."""
    folder = pretrained.folder(paths)
    parents = [artifacts.parent(folder), settings]
    statement = _statement(config, ledger, paths, pretrained, [], chosen["chosen_by"])
    files = {name: Path(folder, name).read_bytes() for name in kind.files}
    files |= kind.views(config, cell, statement, trained=False)
    artifacts.publish(cell.folder(paths), files, _manifest(kind, config, cell, parents))


def _fine_tune(
    kind: Kind,
    config: Config,
    ledger: Ledger,
    paths: Paths,
    cell: Cell,
    pretrained: Cell,
    settings: dict,
    chosen: dict,
) -> None:
    folder, parts = pretrained.folder(paths), train_parts(config, cell.method)
    values = FinetuneSettings(**chosen["choice"])
    factor = 2 if cell.mechanism.endswith(TWICE) else 1
    alongside = _events_on(f"{folder}/privacy.json", parts)
    spec = finetune_spec(config, values, cell.epsilon, parts, steps_factor=factor, alongside=alongside)
    spec.spent()
    parents = [artifacts.parent(folder), settings]
    noise = noise_source(config.privacy.insecure_seed, cell.folder(paths))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"pretrained": parents[0]["sha256"], "settings": parents[1]["sha256"]},
        made=provenance.made(config.subtree("finetune", cell.task), kind.made),
        code=provenance.code_digest(kind.stage),
        private_randomness=noise.private,
    )
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(parts, purpose, wanted.name) as release:
        if not release.committed:
            sums = kind.sums(config, release, paths, cell, wanted, folder)
            fine_tune(sums, spec, values.learning_rate, noise, progress=release.progress)
            private = [release.parent(paths.records()), release.parent(paths.split(cell.seed))]
            release.commit(kind.model_files(config, sums, folder), _manifest(kind, config, cell, [*parents, *private]))
        statement = _statement(config, ledger, paths, pretrained, [release.entry], chosen["chosen_by"])
        release.publish(cell.folder(paths), kind.views(config, cell, statement, trained=True))


def _events_on(statement: str, parts: tuple[str, ...]) -> tuple:
    """Return the events upstream that read some of these parts: the target has to cover them too."""
    upstream = artifacts.read_json(statement)
    if upstream["guarantee"] is None:
        return ()
    shared = [entry for entry in upstream["entries"] if set(entry["parts"]) & set(parts)]
    return tuple(from_json(event) for entry in shared for event in entry["events"])


def _statement(config: Config, ledger: Ledger, paths: Paths, pretrained: Cell, own: list[str], tuning: str) -> dict:
    """Return the guarantee of the whole chain: the mixture's entries and this one's."""
    upstream = artifacts.read_json(f"{pretrained.folder(paths)}/privacy.json")
    if pretrained.room == STUDY:
        statement = ledger.statement(own, delta=config.privacy.delta, tuning=tuning)
        statement["fine_tuning_alone"] = statement["guarantee"] if own else None
        statement["guarantee"] = None
        statement["stamp"] = "NOT PRIVATE: the mixture was learned without privacy"
        return statement
    entries = [entry["entry"] for entry in upstream["entries"]] + own
    return ledger.statement(entries, delta=config.privacy.delta, tuning=least_public(upstream["tuning"], tuning))


def _manifest(kind: Kind, config: Config, cell: Cell, parents: list[dict]) -> dict:
    return artifacts.manifest(
        "finetune",
        config=config.shown("finetune", cell.task),
        code=provenance.code_digest(kind.stage),
        parents=parents,
        cell=cell.coordinates(),
        seed=cell.seed,
        device=kind.device,
    )
