"""The table of cells: every model and mixture of an experiment, with its room, computed from the config alone.

It is the single input of rules, stages, report and budget. The room is a column here, not logic scattered over paths:
``public`` when nothing private is upstream, ``released`` when every private input passed a mechanism, ``study`` when
anything upstream is non-private.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from dpmixmin.config import Config
from dpmixmin.paths import PUBLIC, RELEASED, STUDY, Paths

TWICE = "_2x"
"""Suffix of a mechanism that runs with twice the chosen steps."""


PUBLIC_MIXTURES = ("uniform", "proportional")
"""Methods whose weights come from public data alone: equal, or by the sources' sizes."""


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        stage: mixture, pretrained, finetuned, or evaluation (deploy).
        task: sensitive task, or empty where the cell serves every task.
        method: none, uniform, proportional, mixmin or dp_mixmin.
        learner: how the weights are learned, or empty.
        mechanism: fine-tuning mechanism, or empty.
        epsilon: privacy target, or None where nothing private is released.
        seed: public seed, or None where the cell serves every seed.
        chain: the private steps behind the cell, in order.
        room: public, released or study.
    """

    stage: str
    task: str
    method: str
    learner: str
    mechanism: str
    epsilon: float | None
    seed: int | None
    chain: str
    room: str

    def folder(self, paths: Paths) -> str:
        """Return the cell's folder."""
        return paths.cell(
            self.room,
            self.stage,
            task=self.task,
            method=self.method,
            mechanism=self.mechanism,
            eps=self.epsilon,
            seed=self.seed,
        )

    def coordinates(self) -> dict:
        """Return the cell as plain JSON types."""
        return asdict(self)


def cells_of(config: Config) -> list[Cell]:
    """Return the whole table, in a fixed order."""
    cells = [*_mixtures(config), *_pretrained(config), *_finetuned(config)]
    return [*cells, *_evaluations(config, cells)]


def select(cells: list[Cell], **coordinates) -> list[Cell]:
    """Return the cells with these coordinates."""
    return [cell for cell in cells if all(getattr(cell, key) == value for key, value in coordinates.items())]


def mixture_cell(config: Config, task: str, method: str, epsilon: float | None, seed: int) -> Cell | None:
    """Return the mixture behind a model, or None for ``none``."""
    if method == "none":
        return None
    if method in PUBLIC_MIXTURES:
        return Cell("mixture", "", method, "", "", None, None, "", PUBLIC)
    if method == "mixmin":
        return Cell("mixture", task, method, "nonprivate", "", None, seed, "", STUDY)
    return Cell("mixture", task, method, config.mixture.learner, "", epsilon, seed, f"mix@{epsilon:g}", RELEASED)


def pretrained_cell(config: Config, task: str, method: str, epsilon: float | None, seed: int) -> Cell:
    """Return the pretrained model of a method (for ``none``: the initialisation)."""
    mixture = mixture_cell(config, task, method, epsilon, seed)
    if mixture is None:
        return Cell("pretrained", "", method, "", "", None, seed, "", PUBLIC)
    return Cell(
        "pretrained", mixture.task, method, mixture.learner, "", mixture.epsilon, seed, mixture.chain, mixture.room
    )


def finetuned_behind(config: Config, cell: Cell) -> Cell:
    """Return the fine-tuned model that an evaluation measures."""
    return select(cells_of(config), stage="finetuned", task=cell.task, method=cell.method, seed=cell.seed)[0]


def audited_mixtures(config: Config) -> list[Cell]:
    """Return the mixture cells whose mechanism is audited: one a task and epsilon (a seed changes no parameter)."""
    if config.audit.gate == "none":
        return []
    cells = select(cells_of(config), stage="mixture", method="dp_mixmin", seed=config.seeds[0])
    return [cell for cell in cells if not config.audit.tasks or cell.task in config.audit.tasks]


def audited_trainings(config: Config) -> list[Cell]:
    """Return the fine-tuned cells whose mechanism is audited: one a method and epsilon (settings differ by method)."""
    if config.audit.gate == "none" or config.audit.canaries == 0:
        return []
    methods = config.audit.methods or ("dp_mixmin" if "dp_mixmin" in config.methods else config.methods[0],)
    found: dict[tuple, Cell] = {}
    for cell in select(cells_of(config), stage="finetuned", mechanism=config.finetune.mechanism):
        if cell.method in methods:
            found.setdefault((cell.method, cell.epsilon), cell)
    return list(found.values())


def audits_room(config: Config) -> str:
    """Return the room of audits: a deployment's read public data alone, a study's are measurements."""
    return PUBLIC if config.mode == "deploy" else STUDY


def audit_folders(config: Config, paths: Paths) -> list[str]:
    """Return the folders of every audit of a run, in the order of their table."""
    if config.audit.gate == "none":
        return []
    room = audits_room(config)
    found = [paths.audit(room, "mixture", task=cell.task, eps=cell.epsilon) for cell in audited_mixtures(config)]
    found += [
        paths.audit(room, "training", task=cell.task, method=cell.method, eps=cell.epsilon)
        for cell in audited_trainings(config)
    ]
    return [
        *found,
        paths.audit(room, "replay"),
        *(paths.audit(STUDY, "membership", task=task) for task in attacked_tasks(config)),
    ]


def attacked_tasks(config: Config) -> list[str]:
    """Return the tasks whose fine-tuned models a study attacks by membership inference."""
    if config.mode == "deploy" or config.audit.gate == "none":
        return []
    finetuned = {cell.task for cell in cells_of(config) if cell.stage == "finetuned"}
    return [task for task in config.task_names if task in finetuned]


def mixing_parts(config: Config) -> tuple[str, ...]:
    """Return the parts that the private mixture learns on: one of its own, or all of train where budgets are split."""
    return ("finetune", "mixing") if config.privacy.composition == "sequential" else ("mixing",)


def train_parts(config: Config, method: str) -> tuple[str, ...]:
    """Return the parts that a method fine-tunes on: all of train, unless the mixture spent some (paper, 5.1)."""
    spent = method == "dp_mixmin" and config.privacy.composition == "parallel"
    return ("finetune",) if spent else ("finetune", "mixing")


def nominal_units(config: Config, parts: tuple[str, ...]) -> float:
    """Return the public number of units of some parts; never counted from data."""
    share = sum(getattr(config.private.parts, part) for part in parts)
    return round(config.private.nominal_units * share, 6)


def _unique(cells: Iterator[Cell | None]) -> list[Cell]:
    return list(dict.fromkeys(cell for cell in cells if cell is not None))


def _grid(config: Config) -> Iterator[tuple[str, str, float, int]]:
    for task in config.task_names:
        for method in config.methods:
            for epsilon in config.privacy.epsilons:
                for seed in config.seeds:
                    yield task, method, epsilon, seed


def _mixtures(config: Config) -> list[Cell]:
    return _unique(mixture_cell(config, *point) for point in _grid(config))


def _pretrained(config: Config) -> list[Cell]:
    return _unique(pretrained_cell(config, *point) for point in _grid(config))


def _evaluations(config: Config, cells: list[Cell]) -> list[Cell]:
    """A deployment measures its one model for a price; a study measures everything without."""
    if config.mode == "study" or config.private.parts.test == 0:
        return []
    found = []
    for model in select(cells, stage="finetuned"):
        epsilon = config.evaluation.epsilon or model.epsilon
        chain = f"{model.chain} > evaluate@{epsilon:g}"
        found.append(replace(model, stage="evaluation", epsilon=epsilon, chain=chain))
    return found


def _finetuned(config: Config) -> list[Cell]:
    def wanted(task: str, method: str, epsilon: float, seed: int) -> bool:
        return any(
            (not block.tasks or task in block.tasks)
            and (not block.methods or method in block.methods)
            and (not block.epsilons or epsilon in block.epsilons)
            and (not block.seeds or seed in block.seeds)
            for block in config.finetune.grid
        )

    found = []
    for task, method, epsilon, seed in _grid(config):
        if not wanted(task, method, epsilon, seed):
            continue
        base = pretrained_cell(config, task, method, epsilon, seed)
        room = STUDY if base.room == STUDY else RELEASED
        names = [config.finetune.mechanism]
        names += [config.finetune.mechanism + TWICE] if config.finetune.twice_the_steps else []
        for name in names:
            chain = (f"{base.chain} > " if base.chain else "") + f"{name}@{epsilon:g}"
            found.append(Cell("finetuned", task, method, base.learner, name, epsilon, seed, chain, room))
    return found
