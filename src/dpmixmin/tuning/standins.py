"""Stand-in tasks: public records that pose as the sensitive task, at the run's nominal sizes.

A stand-in task is the union of a few random label axes, sometimes without another axis (so that, as for most real
tasks, no mixture of sources fits it exactly), with a share of labels flipped. The stand-ins are cut into
mixing, finetune and test records; the first two have the sizes the private parts nominally have (drawn with
replacement where there are fewer stand-ins). Everything here is public and reproducible from a public seed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dpmixmin.cells import nominal_units
from dpmixmin.config import Config
from dpmixmin.data.records import Records
from dpmixmin.errors import UserError

MIN_TEST = 100
"""Fewest stand-in test records that make a choice worth its name."""


@dataclass(frozen=True)
class StandIn:
    """One stand-in task.

    Attributes:
        name: its axes: ``a+b`` is a union, ``a+b-c`` leaves c out of it.
        records: all stand-in records of the task.
        labels: 0/1 with label noise, float32 of shape (n,).
        mixing: row indices of the mixing part.
        finetune: row indices of the fine-tuning part.
        test: row indices of the test part; disjoint from the others.
    """

    name: str
    records: Records
    labels: np.ndarray
    mixing: np.ndarray
    finetune: np.ndarray
    test: np.ndarray


def stand_ins(records: Records, axes: np.ndarray, config: Config, count: int) -> list[StandIn]:
    """Make ``count`` different stand-in tasks (fewer where few axes give fewer); longer lists start with shorter ones.

    Args:
        records: the stand-in records.
        axes: their axis labels, shape (n, k).
        config: sizes, label noise and the seed.
        count: number of tasks.

    Raises:
        UserError: there are too few stand-ins, or no combination of axes has both classes.
    """
    generator = np.random.default_rng(config.tune.seed)
    smallest, largest = (min(size, axes.shape[1]) for size in config.tune.axes_per_task)
    tasks: dict[str, np.ndarray] = {}
    for _ in range(200 * count):
        name, clean = _combination(axes, list(config.axes), int(generator.integers(smallest, largest + 1)),
                                   config.tune.difference, generator)  # fmt: skip
        if 0.05 <= clean.mean() <= 0.95:
            tasks.setdefault(name, clean)
        if len(tasks) == count:
            break
    if not tasks:
        raise UserError("public.standins: no combination of label axes has both classes; check axes")
    return [_stand_in(records, config, number, *task) for number, task in enumerate(tasks.items())]


def _combination(
    axes: np.ndarray, names: list[str], size: int, difference: float, generator: np.random.Generator
) -> tuple[str, np.ndarray]:
    """Draw a union of ``size`` axes, perhaps without one more; return its name and its labels."""
    order = generator.permutation(len(names))
    union, other = sorted(order[:size].tolist()), order[size:]
    name, labels = "+".join(names[i] for i in union), axes[:, union].max(axis=1)
    if len(other) and generator.random() < difference:
        name, labels = f"{name}-{names[other[0]]}", labels * (1 - axes[:, other[0]])
    return name, labels


def _stand_in(records: Records, config: Config, number: int, name: str, clean: np.ndarray) -> StandIn:
    generator = np.random.default_rng([config.tune.seed, number])
    flipped = generator.random(len(records)) < config.tune.label_noise
    labels = np.where(flipped, 1 - clean, clean).astype(np.float32)
    sizes = [round(nominal_units(config, (part,))) for part in ("mixing", "finetune")]
    order = generator.permutation(len(records))
    wanted = sum(sizes)
    pool_size = min(wanted, int(0.6 * len(records)))
    pool, test = order[:pool_size], order[pool_size:]
    if len(test) < MIN_TEST or pool_size < 2:
        raise UserError(
            f"public.standins: {len(records)} records are too few to tune on; give at least {3 * MIN_TEST}, "
            "or set mixture.settings and finetune.settings"
        )
    if pool_size < wanted:
        cut = max(1, int(pool_size * sizes[0] / wanted))
        mixing = generator.choice(pool[:cut], sizes[0])
        finetune = generator.choice(pool[cut:], sizes[1])
    else:
        mixing, finetune = pool[: sizes[0]], pool[sizes[0] :]
    return StandIn(name, records, labels, mixing, finetune, test)


def balanced_candidates(grid: dict[str, tuple], budget: int, seed: int) -> list[dict]:
    """Return ``budget`` candidates in which every value of every key is tried (almost) equally often.

    Args:
        grid: key to values.
        budget: number of candidates; at or above the number of combinations, all of them.
        seed: public seed.
    """
    names = list(grid)
    everything = [dict(zip(names, values, strict=True)) for values in itertools.product(*grid.values())]
    if budget >= len(everything):
        return everything
    generator = np.random.default_rng(seed)
    while True:
        columns = []
        for values in grid.values():
            repeated = [values[i % len(values)] for i in range(budget)]
            columns.append([repeated[i] for i in generator.permutation(budget)])
        rows = list(dict.fromkeys(zip(*columns, strict=True)))
        if len(rows) == budget:
            return [dict(zip(names, row, strict=True)) for row in rows]
