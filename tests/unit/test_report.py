"""The report: its numbers against hand computation, holes, the page's promises."""

import io
import json
import math
import random
import re
import statistics
import subprocess
import sys
from html import unescape
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from dpmixmin import artifacts
from dpmixmin.config import validate
from dpmixmin.paths import Paths
from dpmixmin.report import drawing, page, tables, words
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, BEFORE, COLUMNS, Measurements, Stat
from dpmixmin.sections import METHODS
from dpmixmin.stages import report as stage

TASKS = ("odd", "prime", "round", "small")
AXES = tuple(f"digit_{i}" for i in range(6))
SEEDS = (0, 1, 2)
EPSILONS = (1.0, 2.0, 5.0)
BASE = {
    "pretrained": {"none": 0.5, "uniform": 0.9, "mixmin": 0.95, "dp_mixmin": 0.94},
    "finetuned": {"none": 0.92, "uniform": 0.955, "mixmin": 0.962, "dp_mixmin": 0.95},
}


def make_config(**changes):
    raw = {
        "experiment": "digits",
        "seeds": list(SEEDS),
        "axes": {name: {"column": "label", "positive": [i]} for i, name in enumerate(AXES)},
        "tasks": {name: {"column": "label", "positive": [i]} for i, name in enumerate(TASKS)},
        "public": {"sources": {"kind": "idx", "images": "a", "labels": "b"},
                   "standins": {"kind": "idx", "images": "c", "labels": "d"}},
        "private": {"name": "mnist_test", "nominal_units": 10000,
                    "table": {"kind": "idx", "images": "e", "labels": "f"}},
        "privacy": {"epsilons": list(EPSILONS)},
        "audit": "none",
    }  # fmt: skip
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
    return validate(raw)


def make_rows(keep=lambda row: True, twice=False):
    """The rows of the default demo, with its holes: see the fine-tuning blocks below."""
    rng, rows = random.Random(7), []

    def add(task, method, epsilon, seed, stage_, metric, value, mechanism=""):
        learner = {"mixmin": "nonprivate", "dp_mixmin": "centred"}.get(method, "")
        row = dict(zip(COLUMNS, ("digits", task, method, learner, mechanism, epsilon, seed, stage_, metric, value),
                       strict=True))  # fmt: skip
        if keep(row):
            rows.append(row)

    def auc(stage_, method, epsilon):
        return BASE[stage_][method] + 0.003 * (epsilon or 1) + rng.gauss(0, 0.004)

    for number, task in enumerate(TASKS):
        for seed in SEEDS:
            add(task, "none", None, seed, "pretrained", "auc", auc("pretrained", "none", None))
            for method in ("uniform", "mixmin", "dp_mixmin"):
                for epsilon in EPSILONS if method == "dp_mixmin" else (None,):
                    far = {"uniform": 0.3, "mixmin": 0.0, "dp_mixmin": 0.05 / (epsilon or 1)}[method]
                    add(task, method, epsilon, seed, "mixture", "cosine", 1 - far * rng.uniform(0.9, 1.1))
                    add(task, method, epsilon, seed, "mixture", "l1", 2 * far * rng.uniform(0.9, 1.1))
                    raw = [1.0 if method == "uniform" else 0.1 + rng.random() + 4 * (i % 4 == number)
                           for i in range(len(AXES))]  # fmt: skip
                    for axis, weight in zip(AXES, raw, strict=True):
                        add(task, method, epsilon, seed, "mixture", f"weight_{axis}", weight / sum(raw))
                    add(task, method, epsilon, seed, "pretrained", "auc", auc("pretrained", method, epsilon))
        for epsilon in EPSILONS:
            for method in BASE["finetuned"]:
                if epsilon > 1 and task not in TASKS[:2]:
                    continue
                for seed in SEEDS if epsilon == 1 and method in ("uniform", "dp_mixmin") else SEEDS[:1]:
                    for mechanism in ("dp_sgd", "dp_sgd_2x") if twice and epsilon == 1 else ("dp_sgd",):
                        add(
                            task,
                            method,
                            epsilon,
                            seed,
                            "finetuned",
                            "auc",
                            auc("finetuned", method, epsilon),
                            mechanism,
                        )
                        add(task, method, epsilon, seed, "finetuned", "epsilon_spent", epsilon * 0.9991, mechanism)
    return pl.DataFrame(rows, schema=COLUMNS)


def make_settings():
    """Settings as the tuning stages write them: chosen for three methods, `do not fine-tune` for one."""
    rng, found = random.Random(3), {}
    curve = [{"clip": c, "steps": s, "learning_rate": r, "standin_task": f"t{t}", "repeat": 0,
              "excess_loss": 0.02, "l1": 0.01 + abs(math.log(c / 6)) * 0.01 + rng.random() * 0.001}
             for c in (3.0, 6.0) for s in (25, 50) for r in (0.5, 1.0) for t in range(3)]  # fmt: skip
    choice = {"clip": 6.0, "steps": 50, "learning_rate": 1.0}
    found["mixture"] = ({"chosen_by": "public_standin", "choice": choice, "epsilon": 1.0}, pl.DataFrame(curve))
    for method in ("none", "uniform", "mixmin", "dp_mixmin"):
        tried = [{"method": method, "learning_rate": r, "steps": s, "batch": 125, "clip": 1.0, "standin_task": f"t{t}",
                  "auc": 0.9 - 0.01 * abs(math.log(r / 0.3)) + 0.005 * (s == 60) + rng.random() * 0.005}
                 for r in (0.03, 0.1, 0.5, 2.0) for s in (30, 60) for t in range(2)]  # fmt: skip
        stay = {"method": method, "learning_rate": None, "steps": None, "batch": None, "clip": None}
        tried += [{**stay, "standin_task": f"t{t}", "auc": 0.5 if method == "none" else 0.885} for t in range(2)]
        choice = {"learning_rate": 0.5, "steps": 60, "batch": 125, "clip": 1.0} if method != "mixmin" else None
        schema = {"method": pl.String, "learning_rate": pl.Float64, "steps": pl.Int64, "batch": pl.Int64,
                  "clip": pl.Float64, "standin_task": pl.String, "auc": pl.Float64}  # fmt: skip
        chosen = {"chosen_by": "public_standin", "method": method, "choice": choice, "epsilon": 1.0}
        found[method] = (chosen, pl.DataFrame(tried, schema=schema))
    return found


def write_inputs(config, rows, settings):
    """Publish the inputs of the stage below the working directory."""
    paths = Paths(config.experiment)
    manifest = {"stage": "test", "parents": []}
    for task in config.tasks:
        part = rows.filter(pl.col("task") == task)
        artifacts.publish(paths.metrics(task), {"metrics.parquet": artifacts.parquet_bytes(part.to_arrow())}, manifest)
    for name, (chosen, curve) in settings.items():
        folder = paths.settings("mixture") if name == "mixture" else paths.finetune_settings(name)
        files = {
            "settings.json": artifacts.json_bytes(chosen),
            "curve.parquet": artifacts.parquet_bytes(curve.to_arrow()),
        }
        artifacts.publish(folder, files, manifest)


def draw(rows, config=None, settings=None):
    """The files of a report, without the stage around it."""
    config = config or make_config()
    measured = Measurements(config, tables.summary([rows]))
    return stage.report(measured, {name: Settings(*found) for name, found in (settings or {}).items()})


def page_and_text(rows, demo, config=None, settings=None):
    """The page and the text of other measurements, with the demo's figures: drawing is what takes time."""
    measured = Measurements(config or make_config(), tables.summary([rows]))
    settings = {name: Settings(*found) for name, found in (settings or {}).items()}
    html = page.index_html(measured, settings, demo[1]).encode()
    return {"index.html": html, "summary.txt": words.summary_text(measured).encode()}


def text_of(files, name="index.html"):
    return unescape(re.sub(r"<[^>]+>", " ", files[name].decode()))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The whole stage, run once on the default demo's measurements, from its inputs on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        config, rows = make_config(), make_rows()
        write_inputs(config, rows, make_settings())
        stage.run(config, None)
        manifest = artifacts.verify(Paths("digits").report())
        files = {name: Path(Paths("digits").report(), name).read_bytes() for name in manifest["files"]}
    return rows, files, manifest


# -- numbers ----------------------------------------------------------------------------------------------------


def test_summary_csv_is_the_long_table(demo):
    rows, files, _ = demo
    found = pl.read_csv(io.BytesIO(files["summary.csv"]), schema=COLUMNS)
    keys = list(COLUMNS)[:-1]
    assert found.with_columns(pl.col(pl.String).fill_null("")).sort(keys).equals(rows.sort(keys))
    lines = files["summary.csv"].decode().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert any(line.startswith("digits,odd,none,,,,0,pretrained,auc,0.") for line in lines)


def test_table_csv_against_hand_computation(demo):
    rows, files, _ = demo
    found = pl.read_csv(io.BytesIO(files["table.csv"]))
    assert len(found) == (len(TASKS) + 1) * 4 * len(EPSILONS)

    def cell(task, method, epsilon):
        return found.row(by_predicate=(pl.col("task") == task) & (pl.col("method") == method)
                         & (pl.col("epsilon") == epsilon), named=True)  # fmt: skip

    def values(task, method, epsilon, stage_):
        return [row["value"] for row in rows.iter_rows(named=True)
                if (row["task"], row["method"], row["stage"], row["metric"]) == (task, method, stage_, "auc")
                and row["epsilon"] in (epsilon, None)]  # fmt: skip

    row = cell("odd", "dp_mixmin", 1.0)
    before, after = values("odd", "dp_mixmin", 1.0, BEFORE), values("odd", "dp_mixmin", 1.0, AFTER)
    assert (row["before_n"], row["after_n"]) == (3, 3)
    assert row["before_mean"] == pytest.approx(sum(before) / 3)
    assert row["after_mean"] == pytest.approx(sum(after) / 3)
    assert row["after_sd"] == pytest.approx(math.sqrt(sum((v - sum(after) / 3) ** 2 for v in after) / 2))
    # One seed: no standard deviation. Not fine-tuned: empty, and the methods without epsilon serve every epsilon.
    row = cell("odd", "mixmin", 2.0)
    assert (row["after_n"], row["after_sd"]) == (1, None)
    assert row["before_mean"] == pytest.approx(statistics.fmean(values("odd", "mixmin", None, BEFORE)))
    row = cell("small", "uniform", 5.0)
    assert (row["after_mean"], row["after_n"], row["after_tasks"]) == (None, 0, None)
    # Macro: per seed over tasks, then over seeds; at epsilon 2 only over the two tasks that exist there.
    row = cell("macro", "uniform", 1.0)
    by_seed = [statistics.fmean(values(task, "uniform", 1.0, AFTER)[seed] for task in TASKS) for seed in SEEDS]
    assert (row["after_n"], row["after_tasks"]) == (3, " ".join(TASKS))
    assert row["after_mean"] == pytest.approx(statistics.fmean(by_seed))
    assert row["after_sd"] == pytest.approx(statistics.stdev(by_seed))
    row = cell("macro", "dp_mixmin", 2.0)
    assert (row["after_n"], row["after_tasks"]) == (1, "odd prime")
    expected = [values(task, "dp_mixmin", 2.0, AFTER)[0] for task in ("odd", "prime")]
    assert row["after_mean"] == pytest.approx(statistics.fmean(expected))


def test_mixtures_csv_against_hand_computation(demo):
    rows, files, _ = demo
    found = pl.read_csv(io.BytesIO(files["mixtures.csv"]))
    assert found["method"].to_list() == ["uniform", "dp_mixmin", "dp_mixmin", "dp_mixmin"]
    assert found["epsilon"].to_list() == [None, *EPSILONS]
    cosines = rows.filter((pl.col("metric") == "cosine") & (pl.col("epsilon") == 2.0))["value"].to_list()
    row = found.row(2, named=True)
    assert (row["n"], len(cosines)) == (12, 12)
    assert row["cosine_mean"] == pytest.approx(statistics.fmean(cosines))
    assert row["cosine_sd"] == pytest.approx(statistics.stdev(cosines))


def test_comparison_pairs_seeds_and_names_its_tasks():
    measured = Measurements(make_config(), tables.summary([make_rows()]))
    found = tables.compare(measured, AFTER, 1.0, "dp_mixmin", "uniform")
    a, b = (measured.macro(AFTER, TASKS, method, 1.0) for method in ("dp_mixmin", "uniform"))
    differences = [a[seed] - b[seed] for seed in SEEDS]
    assert (found.tasks, found.seeds) == (TASKS, 3)
    assert found.difference == pytest.approx(statistics.fmean(differences))
    assert found.error == pytest.approx(statistics.stdev(differences) / math.sqrt(3))
    found = tables.compare(measured, AFTER, 5.0, "dp_mixmin", "uniform")
    assert (found.tasks, found.seeds, found.error) == (TASKS[:2], 1, None)


@pytest.mark.parametrize(("shift", "reading"), [(-0.05, "clearly lower"), (0.0, "no clear"), (0.05, "clearly higher")])
def test_result_is_told_whichever_way_it_goes(shift, reading):
    auc = (pl.col("stage") == AFTER) & (pl.col("metric") == "auc")
    ours = auc & (pl.col("method") == "dp_mixmin")
    value = pl.when(ours).then(0.955 + shift + 1e-3 * (pl.col("seed") - 1)).when(auc).then(0.955).otherwise("value")
    rows = make_rows().with_columns(value.alias("value"))
    measured = Measurements(make_config(), tables.summary([rows]))
    before, after = words.headline(words.comparisons(measured))
    assert "DP-MixMin is clearly higher" in before
    assert reading in after


def test_relative_gain_propagates_the_deviations_that_are_known():
    gain = tables.relative_gain(Stat(0.96, 0.01, 3), Stat(0.8, 0.02, 3))
    assert gain.mean == pytest.approx(20)
    assert gain.sd == pytest.approx(100 * 1.2 * math.sqrt((0.01 / 0.96) ** 2 + (0.02 / 0.8) ** 2))
    assert tables.relative_gain(Stat(0.96, None, 1), Stat(0.8, None, 1)).sd is None


def test_every_method_has_a_name_a_colour_and_a_marker():
    assert set(tables.NAMES) == set(drawing.COLOURS) == set(drawing.MARKERS) == set(METHODS)
    for looks in (tables.NAMES, drawing.COLOURS, drawing.MARKERS):
        assert len(set(looks.values())) == len(METHODS)


def test_proportional_stands_beside_uniform(demo):
    config = make_config(methods=["uniform", "proportional", "dp_mixmin"])
    rows = make_rows(lambda row: row["method"] == "uniform").with_columns(method=pl.lit("proportional"))
    measured = Measurements(config, tables.summary([make_rows(), rows]))
    assert tables.mixtures(measured)["method"].to_list()[:3] == ["uniform", "proportional", "dp_mixmin"]
    found = tables.compare(measured, AFTER, 1.0, "proportional", "uniform")
    assert (found.difference, found.seeds) == (0, 3)
    files = page_and_text(pl.concat([make_rows(), rows]), demo, config)
    assert "Size-proportional" in text_of(files)
    assert max(map(len, files["summary.txt"].decode().splitlines())) <= 100


def test_view_across_epsilons_uses_one_set_of_tasks():
    shown = tables.view(Measurements(make_config(), tables.summary([make_rows()])), AFTER, tuple(tables.NAMES))
    assert (shown.tasks, shown.epsilons, shown.left_out) == (TASKS[:2], EPSILONS, ())
    assert shown.describe() == "2 tasks (odd, prime), 1 to 3 seeds"


def test_summary_txt_numbers_come_from_the_long_table(demo):
    rows, files, _ = demo
    text = files["summary.txt"].decode()
    assert max(map(len, text.splitlines())) <= 100
    top = [line for line in text.split("macro AUC")[0].splitlines() if "->" in line][1:]
    assert [line.split()[0] for line in top] == [*TASKS, "macro"]
    for line in top:
        numbers = re.findall(r"(\d\.\d{3}|-) -> (\d\.\d{3}|-)", line)
        tasks = TASKS if line.startswith("macro") else (line.split()[0],)
        for method, pair in zip(make_config().methods, numbers, strict=True):
            for stage_, shown in zip((BEFORE, AFTER), pair, strict=True):
                mean = rows.filter(
                    pl.col("task").is_in(tasks) & (pl.col("method") == method) & (pl.col("stage") == stage_)
                    & (pl.col("metric") == "auc") & (pl.col("epsilon").is_null() | (pl.col("epsilon") == 1.0))
                )["value"].mean()  # fmt: skip
                assert shown == f"{mean:.3f}", (line, method, stage_)
    last = [line.split() for line in text.split("macro AUC after")[1].splitlines() if re.match(r"[125] ", line)]
    assert [line[0] for line in last] == ["1", "2", "5"]
    for line in last[1:]:
        for method, shown in zip(make_config().methods, line[1:], strict=True):
            here = (pl.col("method") == method) & (pl.col("epsilon") == float(line[0])) & (pl.col("stage") == AFTER)
            assert shown == f"{rows.filter(here & (pl.col('metric') == 'auc'))['value'].mean():.3f}"
    assert "results/digits/study/report/index.html" in text


# -- the page ---------------------------------------------------------------------------------------------------


def test_page_is_self_contained(demo):
    _, files, manifest = demo
    html = files["index.html"].decode()
    assert "<script" not in html
    assert "<link" not in html
    assert "@import" not in html
    assert not re.search(r"""(src|href|url\()\s*=?\s*["'(]?\s*(https?:)?//""", html)
    assert html.count("<svg") == html.count("<figure>") == 4
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "ids of inline figures collide"
    used = re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', html)
    assert used
    assert set(used) <= set(ids), "an inline figure refers to something outside itself"
    linked = {to for to in re.findall(r'href="([^"#][^"]*)"', html) if not to.startswith("..")}
    assert linked <= {*manifest["files"]}


def test_guarantee_sentence_follows_the_config():
    text = words.guarantee(make_config())
    assert "epsilon = 1, 2 or 5 and delta = 1e-05 for adding or removing one record of mnist_test" in text
    assert "disjoint parts" in text
    assert text.endswith("Each cell is stated as if it were the only release.")
    one = words.guarantee(make_config(privacy={"epsilons": [0.5]}, private={"unit": "patient"}, methods=["uniform"]))
    assert "epsilon = 0.5 and" in one
    assert "all records of one patient of mnist_test" in one
    assert "mixture" not in one


def test_not_private_banner_only_with_the_test_seed(demo):
    assert "NOT PRIVATE" not in text_of(demo[1]) + text_of(demo[1], "summary.txt")
    stamped = page_and_text(make_rows(), demo, make_config(privacy={"insecure_seed": 0}))
    assert 'class="banner"' in stamped["index.html"].decode()
    for name in ("index.html", "summary.txt"):
        assert text_of(stamped, name).index("NOT PRIVATE") < text_of(stamped, name).index("differentially private")


def test_text_is_escaped(demo):
    config = make_config(private={"unit": "<img src=x onerror=alert(1)>&"})
    html = page_and_text(make_rows(), demo, config)["index.html"].decode()
    assert "<img" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;" in html


def test_overspending_is_shouted():
    spent = pl.col("metric") == "epsilon_spent"
    rows = make_rows().with_columns(pl.when(spent).then(pl.col("epsilon") * 1.2).otherwise("value").alias("value"))
    measured = Measurements(make_config(), tables.summary([rows]))
    assert "ABOVE ITS TARGET" in words.spent(measured)
    assert "0.9991 for a target of 1," in words.spent(Measurements(make_config(), tables.summary([make_rows()])))


def test_settings_are_told_as_they_were_chosen(demo):
    text = text_of(demo[1])
    assert "MixMin (non-private): do not fine-tune" in text
    assert "DP-MixMin: learning rate 0.5, 60 steps, batch 125, clip 1 (mean stand-in AUC" in text
    assert (
        "Mixture: clip 6, 50 steps, learning rate 1 (mean L1 distance to the non-private weights on stand-ins" in text
    )
    declared = {name: ({**chosen, "chosen_by": "user_declared"}, curve.clear())
                for name, (chosen, curve) in make_settings().items()}  # fmt: skip
    text = text_of(page_and_text(make_rows(), demo, settings=declared))
    assert "All settings were given in the config; nothing was tuned." in text
    assert "that is not counted" in text


def test_twice_the_steps_stays_apart(demo):
    both = make_rows(twice=True)
    once = both.filter(~pl.col("mechanism").str.ends_with("_2x"))
    measured, plain = (Measurements(make_config(), tables.summary([rows])) for rows in (both, once))
    table = tables.twice(measured)
    assert set(table["epsilon"]) == {1.0}
    assert table.filter((pl.col("task") == "odd") & (pl.col("method") == "uniform"))["n"].item() == 3
    assert tables.table(measured).equals(tables.table(plain))
    assert "Twice the steps" in text_of(page_and_text(both, demo))
    assert "Twice the steps" not in text_of(demo[1])
    assert "twice.csv" in draw(both)
    assert "twice.csv" not in demo[1]


# -- holes ------------------------------------------------------------------------------------------------------

HOLES = {
    "nothing": lambda row: False,
    "no none": lambda row: row["method"] != "none",
    "only none": lambda row: row["method"] == "none",
    "no uniform": lambda row: row["method"] != "uniform",
    "no task": lambda row: row["task"] != "prime",
    "no smallest epsilon": lambda row: row["epsilon"] != 1.0,
    "not fine-tuned": lambda row: row["stage"] != "finetuned",
    "only fine-tuned": lambda row: row["stage"] == "finetuned",
    "one seed": lambda row: row["seed"] == 0,
    "no shared task": lambda row: row["stage"] == "mixture" or (row["task"] == "odd") == (row["method"] == "none"),
    "no shared seed": lambda row: row["stage"] == "mixture" or (row["seed"] == 0) == (row["task"] == "odd"),
    "some weights": lambda row: not row["metric"].startswith("weight_") or row["metric"] < "weight_digit_3",
}


@pytest.mark.parametrize("hole", HOLES)
def test_holes_do_not_crash(hole):
    files = draw(make_rows(HOLES[hole]))
    assert files["index.html"].decode().count("<svg") == 4
    assert "nan" not in files["summary.txt"].decode().replace("no pretraining", "")
    assert max(map(len, files["summary.txt"].decode().splitlines())) <= 100


def test_values_that_are_not_numbers_are_left_out():
    bad = (pl.col("task") == "odd") & (pl.col("seed") == 0) & (pl.col("metric") == "auc")
    rows = make_rows().with_columns(pl.when(bad).then(float("nan")).otherwise("value").alias("value"))
    table = tables.table(Measurements(make_config(), tables.summary([rows])))
    row = table.filter((pl.col("task") == "odd") & (pl.col("method") == "uniform")).row(0, named=True)
    assert (row["before_n"], row["after_n"]) == (2, 2)


# -- the stage --------------------------------------------------------------------------------------------------


def test_report_is_reproducible_and_names_its_parents(demo, tmp_path, monkeypatch):
    rows, files, manifest = demo
    monkeypatch.chdir(tmp_path)
    write_inputs(make_config(), rows, make_settings())
    stage.run(make_config(), None)
    again = artifacts.verify(Paths("digits").report())
    assert again["files"] == manifest["files"]
    assert (tmp_path / Paths("digits").report() / "index.html").read_bytes() == files["index.html"]
    assert len(again["parents"]) == len(TASKS) + 5
    assert json.loads((tmp_path / Paths("digits").report() / "manifest.json").read_text())["stage"] == "report"
    assert pq.read_table(f"{Paths('digits').metrics('odd')}/metrics.parquet", partitioning=None).num_rows


def test_report_loads_neither_torch_nor_matplotlib_for_tables():
    code = "import sys, dpmixmin.stages.report; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("composition", ["parallel", "sequential"])
def test_the_page_says_who_fine_tunes_on_the_mixing_part_only_where_it_is_a_part_of_its_own(demo, composition):
    text = text_of(page_and_text(make_rows(), demo, make_config(privacy={"composition": composition})))
    assert ("fine-tune on the records of the mixing part too" in text) == (composition == "parallel")
