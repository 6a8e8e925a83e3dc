"""Membership inference on the fine-tuned models of one task: study only, reported and not gated.

Reads: every fine-tuned model of the task and the pretrained one behind it, the sensitive records and the splits
(members: what the model was fine-tuned on; others: the test part). Writes:
``study/audits/membership/task=…/{audit.json,scores.parquet}``. Uncharged, so never released.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

from dpmixmin import artifacts
from dpmixmin.audit import membership
from dpmixmin.audit.finding import Finding
from dpmixmin.audit.report import publish
from dpmixmin.cells import Cell, audits_room, cells_of, pretrained_cell, select, train_parts
from dpmixmin.config import Config
from dpmixmin.data import corpora, split
from dpmixmin.data.fetch import say
from dpmixmin.data.records import Records
from dpmixmin.data.text_records import TextRecords
from dpmixmin.paths import STUDY, Paths
from dpmixmin.privacy.ledger import Ledger, Study

SCHEMA = {"method": pa.string(), "mechanism": pa.string(), "epsilon": pa.float64(), "seed": pa.int64(),
          "member": pa.bool_(), "loss": pa.float64(), "likelihood_ratio": pa.float64()}  # fmt: skip

Losses = Callable[[str, Records | TextRecords], np.ndarray]
"""Loss of every record under the model in a folder, in nats; NaN where a record has none."""


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Attack every fine-tuned model of one task."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)
    cells = select(cells_of(config), stage="finetuned", task=args.task)
    losses = _text_losses(config, paths) if config.text else _label_losses(config, args.task)
    parents, findings, tables = [artifacts.parent(cell.folder(paths)) for cell in cells], [], []
    ledger = Ledger.of(config)
    members = {(cell.seed, train_parts(config, cell.method)): None for cell in cells}
    others = {}
    for seed, parts in members:
        members[seed, parts] = _records(config, paths, ledger, parts, seed, parents, args.task)
    for seed in sorted({cell.seed for cell in cells}):
        others[seed] = _records(config, paths, ledger, ("test",), seed, parents, args.task)
    for cell in cells:
        pretrained = pretrained_cell(config, cell.task, cell.method, cell.epsilon, cell.seed)
        sides = {}
        for member, records in (
            (True, members[cell.seed, train_parts(config, cell.method)]),
            (False, others[cell.seed]),
        ):
            released, before = (losses(one.folder(paths), records) for one in (cell, pretrained))
            scores = membership.statistics(released, before)
            sides[member] = {name: membership.by_unit(values, records.units()) for name, values in scores.items()}
            tables.append(_table(cell, member, sides[member]))
        findings += _findings(config, cell, membership.attack(sides[True], sides[False]))
    folder = paths.audit(audits_room(config), "membership", task=args.task)
    publish(folder, "audit_membership", config, findings, pa.concat_tables(tables), parents, task=args.task)
    say(f"  {args.task}: membership inference on {len(cells)} models")


def _records(config: Config, paths: Paths, ledger: Ledger, parts, seed: int, parents: list, task: str):
    """Return the records of some parts; adds their parents."""
    wanted = split.partition(ledger.keys, config.private, seed)
    with ledger.open(parts, Study(f"membership inference on models of {task}")) as access:
        for folder in (paths.records(), paths.split(seed)):
            parent = access.parent(folder)
            parents += [parent] if parent not in parents else []
        return split.open_part(access, paths, wanted, seed)


def _label_losses(config: Config, task: str) -> Losses:
    from dpmixmin.models import networks

    def losses(folder: str, records: Records) -> np.ndarray:
        model = networks.build(config.inputs, records.features.shape[1], config.pretrain, 1, 0)
        networks.load_state(model, folder)
        logits = networks.predict(model, torch.from_numpy(records.features))[:, 0].numpy()
        return membership.label_losses(logits, records.label(config.tasks[task]))

    return losses


def _text_losses(config: Config, paths: Paths) -> Losses:
    from dpmixmin.models.language import load
    from dpmixmin.models.scoring import score

    def losses(folder: str, records: TextRecords) -> np.ndarray:
        corpora.check_tokenizer(paths, folder)
        return membership.text_losses(score(load(folder), records.tokens, config.text))

    return losses


def _table(cell: Cell, member: bool, scores: dict[str, np.ndarray]) -> pa.Table:
    count = len(scores["loss"])
    columns = {"method": cell.method, "mechanism": cell.mechanism, "epsilon": cell.epsilon, "seed": cell.seed,
               "member": member}  # fmt: skip
    rows = {name: [value] * count for name, value in columns.items()} | {n: v.tolist() for n, v in scores.items()}
    return pa.table({name: pa.array(rows[name], kind) for name, kind in SCHEMA.items()})


def _findings(config: Config, cell: Cell, found: dict[str, membership.Membership]) -> list[Finding]:
    return [
        Finding(
            audit="membership",
            mechanism=cell.mechanism,
            canary="members",
            unit=config.private.unit,
            delta=config.privacy.delta,
            task=cell.task,
            method=cell.method,
            learner=cell.learner,
            epsilon=cell.epsilon,
            seed=cell.seed,
            statistic=name,
            # A chain with a non-private mixture claims nothing.
            claim=None if cell.room == STUDY else cell.epsilon,
            auc=one.auc,
            auc_low=one.auc_low,
            auc_high=one.auc_high,
            tpr_at_1=_value(one, 0.01),
            tpr_at_0p1=_value(one, 0.001),
            counts={"members": one.members, "others": one.others},
        )
        for name, one in found.items()
    ]


def _value(found: membership.Membership, rate: float) -> float | None:
    return None if found.tpr[rate] is None else found.tpr[rate].value
