"""Fine-tune privately: mechanism 2.

Reads: pretrained models, the method's settings, the sensitive table and the splits (finetune part; none, uniform and
mixmin read all of train, as in the paper, and so does dp_mixmin under sequential composition). Writes, per cell,
``model.safetensors``, ``privacy.json``, ``manifest.json``: in ``released/``, or in ``study/`` when the mixture was
non-private.
Spends: each cell is one ledger entry at (epsilon, delta), unless the public stand-ins chose not to fine-tune: then
the pretrained model is the result and nothing is spent here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dpmixmin import artifacts, provenance
from dpmixmin.cells import TWICE, Cell, cells_of, pretrained_cell, select, train_parts
from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.data.fetch import say
from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune
from dpmixmin.models import networks
from dpmixmin.paths import STUDY, Paths
from dpmixmin.privacy.events import from_json
from dpmixmin.privacy.ledger import Ledger, Mechanism
from dpmixmin.privacy.noise import noise_source
from dpmixmin.privacy.statement import least_public
from dpmixmin.sections import METHODS, FinetuneSettings
from dpmixmin.specs import finetune_spec


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="method whose models are fine-tuned")
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Fine-tune every cell of one task and method."""
    torch.set_num_threads(config.threads)
    paths, ledger = Paths(config.experiment), Ledger.of(config)
    settings_folder = paths.finetune_settings(args.method)
    chosen = artifacts.read_json(f"{settings_folder}/settings.json")
    settings_parent = artifacts.parent(settings_folder)
    for cell in select(cells_of(config), stage="finetuned", task=args.task, method=args.method):
        pretrained = pretrained_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
        if chosen["choice"] is None:
            _keep_pretrained(config, ledger, paths, cell, pretrained, settings_parent, chosen["chosen_by"])
        else:
            _fine_tune(config, ledger, paths, cell, pretrained, settings_parent, chosen)
        say(f"  {cell.folder(paths)}")


def _keep_pretrained(
    config: Config, ledger: Ledger, paths: Paths, cell: Cell, pretrained: Cell, settings: dict, tuning: str
) -> None:
    """The stand-ins chose not to fine-tune: the result is the pretrained model, and nothing is spent."""
    folder = pretrained.folder(paths)
    parents = [artifacts.parent(folder), settings]
    statement = _statement(config, ledger, paths, pretrained, [], tuning)
    files = {
        "model.safetensors": Path(folder, "model.safetensors").read_bytes(),
        "privacy.json": artifacts.json_bytes(statement),
    }
    artifacts.publish(cell.folder(paths), files, _manifest(config, cell, parents))


def _fine_tune(
    config: Config, ledger: Ledger, paths: Paths, cell: Cell, pretrained: Cell, settings: dict, chosen: dict
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
        made=provenance.made(config.subtree("finetune", cell.task), ("records", "split")),
        code=provenance.code_digest("finetune"),
        private_randomness=noise.private,
    )
    wanted = split.partition(ledger.keys, config.private, cell.seed)
    with ledger.open(parts, purpose, wanted.name) as release:
        if not release.committed:
            records = split.open_part(release, paths, wanted, cell.seed)
            units, index = records.units()
            labels = records.label(config.tasks[cell.task])
            model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
            networks.load_state(model, folder)
            sums = ClippedSum(model, records.features, labels, index, units, config.finetune.physical_batch)
            fine_tune(sums, spec, values.learning_rate, noise, progress=release.progress)
            manifest = _manifest(config, cell, [*parents, release.parent(paths.records()),
                                                release.parent(paths.split(cell.seed))])  # fmt: skip
            release.commit({"model.safetensors": networks.state_bytes(model)}, manifest)
        statement = _statement(config, ledger, paths, pretrained, [release.entry], chosen["chosen_by"])
        release.publish(cell.folder(paths), {"privacy.json": artifacts.json_bytes(statement)})


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


def _manifest(config: Config, cell: Cell, parents: list[dict]) -> dict:
    return artifacts.manifest(
        "finetune",
        config=config.shown("finetune", cell.task),
        code=provenance.code_digest("finetune"),
        parents=parents,
        cell=cell.coordinates(),
        seed=cell.seed,
    )
