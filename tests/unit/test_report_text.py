"""The report of a language model: perplexities, lower is better, one task, sources that may be missing."""

import io
import math
import random
import re
import statistics
from html import unescape

import polars as pl
import pytest

from dpmixmin.config import validate
from dpmixmin.report import tables, words
from dpmixmin.report.score import AUC, PERPLEXITY
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, BEFORE, COLUMNS, Measurements
from dpmixmin.stages import report as stage

SOURCES = ("anarchism", "foldoc", "fortunes", "freebsd", "gap", "git", "kjv", "manpages", "metamath", "perl",
           "postgres", "radiology", "sotu", "sympy", "vim", "wordnet")  # fmt: skip
SEEDS = (0, 1, 2)
EPSILONS = (1.0, 2.0, 5.0)
METHODS = ("none", "uniform", "proportional", "mixmin", "dp_mixmin")
LEVELS = {"none": 2075.0, "uniform": 342.5, "proportional": 361.0, "mixmin": 293.8, "dp_mixmin": 295.4}


def make_config(**changes):
    raw = {
        "experiment": "mail",
        "seeds": list(SEEDS),
        "methods": list(METHODS),
        "text": {},
        "public": {"texts": {name: {"kind": "packaged", "domain": name} for name in SOURCES}},
        "private": {"name": "mail", "table": {"kind": "spam_assassin"}, "unit": "sender", "nominal_units": 350},
        "privacy": {"epsilons": list(EPSILONS)},
        "tune": {"finetune": {"batch": [50]}},
    }
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
    return validate(raw)


def make_rows(keep=lambda row: True):
    """Measurements as ``evaluate`` writes them; source `vim` could not be had, mixtures after the issue's numbers."""
    rng, rows = random.Random(11), []
    sources = [name for name in SOURCES if name != "vim"]

    def add(method, epsilon, seed, stage_, metric, value):
        learner = {"mixmin": "nonprivate", "dp_mixmin": "centred"}.get(method, "")
        mechanism = "dp_sgd" if stage_ == AFTER else ""
        row = dict(zip(COLUMNS, ("mail", "next_token", method, learner, mechanism, epsilon, seed, stage_, metric, value),
                       strict=True))  # fmt: skip
        if keep(row):
            rows.append(row)

    for seed in SEEDS:
        shift = rng.gauss(0, 0.03)  # the partition's own difficulty, which every method shares
        for method in METHODS:
            own = (None,) if method != "dp_mixmin" else EPSILONS
            for epsilon in own:
                level = LEVELS[method] * math.exp(shift + rng.gauss(0, 0.01) + (0.01 / epsilon if epsilon else 0))
                add(method, epsilon, seed, BEFORE, "perplexity", level)
                add(method, epsilon, seed, BEFORE, "perplexity_user", 0.93 * level)
                if method == "none":
                    continue
                raw = [rng.random() ** 4 + 0.01 if "mixmin" in method else 1.0 + (method == "proportional") * i % 5
                       for i in range(len(sources))]  # fmt: skip
                far = {"uniform": 0.4, "proportional": 0.5, "mixmin": 0.0, "dp_mixmin": 0.02 / (epsilon or 1)}[method]
                add(method, epsilon, seed, "mixture", "cosine", 1 - far)
                add(method, epsilon, seed, "mixture", "l1", 2 * far)
                for name, value in zip(sources, raw, strict=True):
                    add(method, epsilon, seed, "mixture", f"weight_{name}", value / sum(raw))
                    add(method, epsilon, seed, BEFORE, f"epochs_{name}", 3 * value / sum(raw))
                add(method, epsilon, seed, BEFORE, "tokens", 1_130_000)
            for epsilon in EPSILONS:
                level = LEVELS[method] * math.exp(shift + rng.gauss(0, 0.01)) * (0.98 - 0.01 * math.log(epsilon))
                add(method, epsilon, seed, AFTER, "perplexity", level)
                add(method, epsilon, seed, AFTER, "perplexity_user", 0.92 * level)
                add(method, epsilon, seed, AFTER, "epsilon_spent", epsilon * 0.9991)
    return pl.DataFrame(rows, schema=COLUMNS)


def make_settings():
    """A declared mixture, and tuning curves: one trial serves all methods that pretrain, one candidate diverges."""
    found = {}
    choice = {"clip": 0.3, "steps": 30, "learning_rate": 3.0}
    curve = pl.DataFrame(schema={"clip": pl.Float64, "steps": pl.Int64, "learning_rate": pl.Float64, "l1": pl.Float64})
    found["mixture"] = Settings({"chosen_by": "user_declared", "choice": choice, "epsilon": 1.0}, curve)
    schema = {"method": pl.String, "learning_rate": pl.Float64, "steps": pl.Int64, "batch": pl.Int64,
              "clip": pl.Float64, "standin_task": pl.String, "perplexity": pl.Float64}  # fmt: skip
    for method in METHODS:
        rng, stay = random.Random(method == "none"), 2060.0 if method == "none" else 335.0
        tried = [(method, r, s, 50, 1.0, f"t{t}", 320 + 12 * abs(math.log(r / 0.3)) + 4 * rng.random())
                 for r in (0.03, 0.1, 0.5) for s in (30, 60) for t in range(2)]  # fmt: skip
        tried += [(method, 2.0, 60, 50, 1.0, f"t{t}", 9e5) for t in range(2)]
        tried += [(method, None, None, None, None, f"t{t}", stay) for t in range(2)]
        choice = {"learning_rate": 0.5, "steps": 60, "batch": 50, "clip": 1.0}
        chosen = {"chosen_by": "public_standin", "method": method, "choice": choice, "epsilon": 1.0}
        found[method] = Settings(chosen, pl.DataFrame(tried, schema=schema, orient="row"))
    return found


def measure(rows=None, **changes):
    return Measurements(make_config(**changes), tables.summary([make_rows() if rows is None else rows]))
