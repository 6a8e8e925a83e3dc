"""Private fine-tuning as a charged release: what the models of every kind share.

A stage gives a :class:`Kind`: how to build its sums and write its model. The rest is here: the spec from public
settings, the reservation, the sensitive records, the steps, the commit, and the statement of the whole chain.

Processes that ``torchrun`` started make the cells together (``ranks.py``). The leader alone writes: it opens the
ledger, commits and publishes. The others read their units through :meth:`Ledger.join`, train, and leave nothing.
Neither the spec nor the ledger knows how many there are, so a run may be gone on with by another number of them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dpmixmin import artifacts, progress, provenance
from dpmixmin.cells import TWICE, Cell, pretrained_cell, train_parts
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.data.records import OfUnits
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.paths import STUDY, Paths
from dpmixmin.privacy.access import Access, Release
from dpmixmin.privacy.events import from_json
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.noise import noise_source
from dpmixmin.privacy.statement import least_public
from dpmixmin.ranks import Ranks
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
    def sums(self, config: Config, paths: Paths, cell: Cell, records: OfUnits, folder: str) -> ClippedSum:
        """Return the sums of the pretrained model in ``folder`` over records of the open parts."""

    @abstractmethod
    def model_files(self, config: Config, sums: ClippedSum, folder: str) -> dict[str, bytes]:
        """Return the files of the trained model behind ``sums``."""

    def views(self, config: Config, cell: Cell, statement: dict, *, trained: bool) -> dict[str, bytes]:
        """Return the files that quote the statement; ``trained`` is False where the pretrained model was kept."""
        return {"privacy.json": artifacts.json_bytes(statement)}


def run_cells(kind: Kind, config: Config, *, method: str, cells: Sequence[Cell]) -> None:
    """Fine-tune cells of one method, alone or together with the other processes that ``torchrun`` started."""
    paths = Paths(config.experiment)
    settings_folder = paths.finetune_settings(method)
    chosen = artifacts.read_json(f"{settings_folder}/settings.json")
    settings_parent = artifacts.parent(settings_folder)
    with Ranks.of_environment() as ranks:
        # The leader first: it makes what is missing of the ledger, so that the others only read.
        ranks.led(lambda: Ledger.of(config).dataset_id.encode())
        ledger = Ledger.of(config)
        for cell in cells:
            progress.cell(cell.folder(paths))
            pretrained = pretrained_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
            if chosen["choice"] is not None:
                _fine_tune(kind, config, ranks, ledger, paths, cell, pretrained, settings_parent, chosen)
            elif ranks.leads:
                _keep_pretrained(kind, config, ledger, paths, cell, pretrained, settings_parent, chosen)
            if ranks.leads:
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
    ranks: Ranks,
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
    noise = noise_source(config.privacy.insecure_seed, _purpose(cell.folder(paths), ranks))
    purpose = Mechanism(
        spec=spec,
        cell=cell.coordinates(),
        inputs={"pretrained": parents[0]["sha256"], "settings": parents[1]["sha256"]},
        made=provenance.made(config.subtree("finetune", cell.task), kind.made),
        code=provenance.code_digest(kind.stage),
        private_randomness=noise.private,
    )
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with _opened(ledger, ranks, parts, purpose, wanted.name) as (access, release):
        if access is not None:
            tables = [paths.records(), paths.split(cell.seed)]
            if ranks.world > 1:
                # Whose unit is whose follows from the order of a table: all must read the same one.
                names = artifacts.digest([access.parent(table) for table in tables])
                ranks.check(same=names.encode(), different=noise.random_bytes(16))
            records = ranks.own(split.open_part(access, paths, wanted, cell.seed))
            sums = kind.sums(config, paths, cell, records, folder)
            # A test seed would repeat the noise of the first steps after a stop, so such a run keeps no state.
            kept = release.progress if release and noise.private else None
            fine_tune(sums, spec, values.learning_rate, noise, ranks, kept)
        if release is None:
            return
        if not release.committed:
            private = [release.parent(table) for table in tables]
            release.commit(kind.model_files(config, sums, folder), _manifest(kind, config, cell, [*parents, *private]))
        statement = _statement(config, ledger, paths, pretrained, [release.entry], chosen["chosen_by"])
        release.publish(cell.folder(paths), kind.views(config, cell, statement, trained=True))


@contextmanager
def _opened(
    ledger: Ledger, ranks: Ranks, parts: tuple[str, ...], purpose: Mechanism, partition: str
) -> Iterator[tuple[Access | None, Release | None]]:
    """Open a mechanism: on the leader to make it, on the others to read for it.

    Yields:
        ``(access, release)``: what reads the parts, None where the output is in the store already; and the release,
        None on every rank but the leader.
    """
    with ExitStack() as stack:
        release: Release | None = None

        def reserve() -> bytes:
            nonlocal release
            release = stack.enter_context(ledger.open(parts, purpose, partition))
            return json.dumps([release.entry, release.committed]).encode()

        entry, committed = json.loads(ranks.led_at_length(reserve))
        if committed:
            yield None, release
        elif release is not None:
            yield release, release
        else:
            yield stack.enter_context(ledger.join(entry, parts, purpose, partition)), None


def _purpose(name: str, ranks: Ranks) -> str:
    """Name the stream of this rank in a run under a test seed: no two ranks draw the same."""
    return name if ranks.leads else f"{name}, rank {ranks.rank}"


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
