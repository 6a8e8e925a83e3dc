"""Stand-in tasks and candidates: public, reproducible, fair to every method."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dpmixmin import cells
from dpmixmin.config import load
from dpmixmin.data.records import Records
from dpmixmin.errors import UserError
from dpmixmin.metrics import auc
from dpmixmin.tuning.standins import balanced_candidates, stand_ins

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config():
    return load(ROOT / "config/test.yaml")


def records_of(n: int) -> tuple[Records, np.ndarray]:
    ids = np.asarray([f"{i:05d}" for i in range(n)])
    axes = (np.random.default_rng(3).uniform(size=(n, 4)) < [0.1, 0.1, 0.4, 0.4]).astype(np.float32)
    return Records(ids, ids, np.zeros((n, 2), dtype=np.float32), {}), axes


def test_every_value_of_every_key_is_tried_equally_often():
    grid = {"a": (1, 2, 3, 4), "b": (5, 6), "c": (7, 8)}
    chosen = balanced_candidates(grid, 8, seed=0)
    assert len({tuple(candidate.values()) for candidate in chosen}) == 8
    for key, values in grid.items():
        assert Counter(candidate[key] for candidate in chosen) == dict.fromkeys(values, 8 // len(values))
    assert chosen == balanced_candidates(grid, 8, seed=0)
    assert len(balanced_candidates(grid, 100, seed=0)) == 16


def test_stand_ins_have_the_nominal_sizes_and_parts_that_do_not_meet(config):
    records, axes = records_of(900)
    tasks = stand_ins(records, axes, config, 3)
    assert len({task.name for task in tasks}) == 3
    for task in tasks:
        assert (len(task.mixing), len(task.finetune)) == (150, 210)
        parts = [set(task.mixing.tolist()), set(task.finetune.tolist()), set(task.test.tolist())]
        assert len(set().union(*parts)) == sum(map(len, parts)) == 900
        assert set(np.unique(task.labels)) == {0.0, 1.0}
    again = stand_ins(records, axes, config, 5)
    assert [task.name for task in again[:3]] == [task.name for task in tasks]
    assert (again[1].labels == tasks[1].labels).all()


def test_few_stand_ins_are_drawn_again_but_never_tested_on(config):
    records, axes = records_of(400)
    for task in stand_ins(records, axes, config, 2):
        assert (len(task.mixing), len(task.finetune)) == (150, 210)
        train = set(task.mixing.tolist()) | set(task.finetune.tolist())
        assert not train & set(task.test.tolist())
        assert not set(task.mixing.tolist()) & set(task.finetune.tolist())
    with pytest.raises(UserError, match="too few to tune on"):
        stand_ins(*records_of(150), config, 2)


def test_few_axes_give_fewer_tasks_and_no_error(config):
    records, axes = records_of(900)
    two = config.model_copy(update={"axes": dict(list(config.axes.items())[:2])})
    assert 1 <= len(stand_ins(records, axes[:, :2], two, 8)) <= 8


def test_auc_agrees_with_scikit_learn(rng):
    from sklearn.metrics import roc_auc_score

    labels = (rng.uniform(size=500) < 0.3).astype(float)
    scores = np.round(rng.normal(size=500) + labels, 1)
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auc(np.ones(4), np.arange(4.0)) == 0.5
    labels[0], scores[1] = np.nan, np.nan
    usable = np.arange(500) > 1
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels[usable], scores[usable]), abs=1e-12)


def test_the_table_of_cells_of_the_default_demo():
    config = load(ROOT / "config/config.yaml")
    table = cells.cells_of(config)
    count = Counter((cell.stage, cell.method) for cell in table)
    assert count["mixture", "uniform"] == 1
    assert count["mixture", "mixmin"] == 12
    assert count["mixture", "dp_mixmin"] == 36
    assert [count["pretrained", m] for m in config.methods] == [3, 3, 12, 36]
    assert [count["finetuned", m] for m in config.methods] == [8, 16, 8, 16]
    rooms = {(cell.stage, cell.method): cell.room for cell in table}
    assert rooms["pretrained", "uniform"] == rooms["pretrained", "none"] == "public"
    assert rooms["finetuned", "uniform"] == rooms["mixture", "dp_mixmin"] == "released"
    assert rooms["finetuned", "mixmin"] == rooms["mixture", "mixmin"] == "study"
    assert cells.nominal_units(config, cells.train_parts(config, "uniform")) == 2800
    assert cells.nominal_units(config, cells.train_parts(config, "dp_mixmin")) == 2000
