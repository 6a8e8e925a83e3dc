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
        cell = ("mail", "next_token", method, learner, mechanism, epsilon, seed, stage_, metric, value)
        row = dict(zip(COLUMNS, cell, strict=True))
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


def text_of(html):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html)))


def values(rows, method, epsilon, stage_, metric="perplexity"):
    """Values by seed, read from the long table without the report's code."""
    return {row["seed"]: row["value"] for row in rows.iter_rows(named=True)
            if (row["method"], row["stage"], row["metric"]) == (method, stage_, metric)
            and row["epsilon"] in (epsilon, None)}  # fmt: skip


def with_levels(stage_, **levels):
    """The demo's measurements with other perplexities: method to seed to level, at every epsilon."""

    def changed(row):
        new = levels.get(row["method"])
        return new[row["seed"]] if new and (row["stage"], row["metric"]) == (stage_, "perplexity") else row["value"]

    return pl.DataFrame([{**row, "value": changed(row)} for row in make_rows().rows(named=True)], schema=COLUMNS)


@pytest.fixture(scope="module")
def demo():
    """The files of the demo's report, drawn once."""
    return stage.report(measure(), make_settings())


# -- numbers ----------------------------------------------------------------------------------------------------


def test_table_csv_against_hand_computation(demo):
    rows, found = make_rows(), pl.read_csv(io.BytesIO(demo["table.csv"]))
    assert set(found["task"]) == {"next_token"}, "a macro row would repeat the task"
    assert len(found) == len(METHODS) * len(EPSILONS)
    for row in found.rows(named=True):
        for name, stage_ in (("before", BEFORE), ("after", AFTER)):
            for suffix, metric in (("", "perplexity"), ("_user", "perplexity_user")):
                expected = list(values(rows, row["method"], row["epsilon"], stage_, metric).values())
                assert row[f"{name}{suffix}_n"] == len(expected) == 3
                assert row[f"{name}{suffix}_mean"] == pytest.approx(statistics.fmean(expected))
                assert row[f"{name}{suffix}_sd"] == pytest.approx(statistics.stdev(expected))


def test_perplexities_are_compared_by_paired_log_ratios():
    rows = make_rows()
    found = tables.compare(measure(rows), AFTER, 2.0, "dp_mixmin", "uniform")
    a, b = (values(rows, method, 2.0, AFTER) for method in ("dp_mixmin", "uniform"))
    logs = [math.log(a[seed]) - math.log(b[seed]) for seed in SEEDS]
    assert found.difference == pytest.approx(statistics.fmean(logs))
    assert found.error == pytest.approx(statistics.stdev(logs) / math.sqrt(3))
    reduction, ratio = tables.reduction(found), sum(a.values()) / sum(b.values())
    assert reduction.mean == pytest.approx(100 * (1 - ratio))
    assert reduction.sd == pytest.approx(100 * ratio * statistics.stdev(logs))
    assert found.change() == f"{100 * (ratio - 1):+.1f} %"


@pytest.mark.parametrize(
    ("ours", "reading"),
    [
        ({0: 320.0, 1: 300.0, 2: 340.0}, "DP-MixMin is clearly lower (better)."),
        ({0: 400.0, 1: 375.0, 2: 425.0}, "DP-MixMin is clearly higher (worse)."),
        ({0: 390.0, 1: 340.0, 2: 404.0}, "no clear difference."),
    ],
)
def test_lower_is_better_in_every_sentence(ours, reading):
    rows = with_levels(BEFORE, dp_mixmin=ours, uniform={0: 380.0, 1: 356.0, 2: 404.0})
    before = words.headline(words.comparisons(measure(rows)))[0]
    assert before.endswith(reading)
    mean = sum(ours.values()) / 3
    assert f"test perplexity {mean:.1f} for DP-MixMin and 380.0 for Uniform, {100 * (mean / 380 - 1):+.1f} %" in before
    assert "task" not in before


def test_one_seed_has_no_error_and_no_verdict():
    rows = with_levels(AFTER, dp_mixmin=dict.fromkeys(SEEDS, 322.9), uniform=dict.fromkeys(SEEDS, 378.1))
    after = words.headline(words.comparisons(measure(rows.filter(pl.col("seed") == 0))))[1]
    assert after == (
        "After fine-tuning at ε = 1: test perplexity 322.9 for DP-MixMin and 378.1 for Uniform, -14.6 %: one seed."
    )


def test_fine_tuning_that_hurts_is_told():
    rows = with_levels(AFTER, dp_mixmin={seed: 1.2 * value for seed, value in
                                         values(make_rows(), "dp_mixmin", 1.0, BEFORE).items()})  # fmt: skip
    first = words.finetuning(measure(rows))[0]
    assert "+20.0 % (standard error 0.0 % over 3 seeds): it is clearly higher (worse)." in first


def test_digits_follow_the_size():
    assert [PERPLEXITY.number(value) for value in (16.784, 322.94, 2049.6, 3e9)] == ["16.78", "322.9", "2050", "3e+09"]
    assert PERPLEXITY.best([3.0, None, 2.0]) == AUC.best([1.0, None, 2.0]) == 2.0
    assert PERPLEXITY.best([None]) is None


def test_tuning_scores_are_geometric_means():
    schema = {"learning_rate": pl.Float64, "steps": pl.Int64, "perplexity": pl.Float64}
    curve = pl.DataFrame([(0.1, 30, 100.0), (0.1, 30, 400.0), (None, None, 90.0)], schema=schema, orient="row")
    settings = Settings({"choice": {"learning_rate": 0.1, "steps": 30}, "chosen_by": "public_standin"}, curve)
    assert settings.chosen_score() == pytest.approx(200)
    assert settings.stay_score() == pytest.approx(90)


# -- page and summary -------------------------------------------------------------------------------------------


def test_nothing_speaks_of_auc_or_of_macro(demo):
    for name in ("index.html", "summary.txt", "table.csv", "mixtures.csv"):
        assert not re.search(r"\bAUC|\bmacro\b", demo[name].decode()), name


def test_page_has_the_form_of_table_1(demo):
    html, rows = demo["index.html"].decode(), make_rows()
    first, second = re.findall(r'<table class="levels">.*?</table>', html)
    assert re.findall(r'<th scope="col">([^<]*)', first) == [
        "pretraining",
        "no fine-tuning",
        "ε = 1",
        "ε = 2",
        "ε = 5",
    ]
    for table, metric in ((first, "perplexity"), (second, "perplexity_user")):
        lines = re.findall(r"<tr>(<th scope=\"row\">.*?)</tr>", table)
        assert len(lines) == len(METHODS)
        for method, line in zip(METHODS, lines, strict=True):
            start, *cells = re.findall(r"<td>(.*?)</td>", line)
            for epsilon in EPSILONS:
                found = list(values(rows, method, epsilon, BEFORE, metric).values())
                assert f"{PERPLEXITY.number(statistics.fmean(found))}" in start
            for epsilon, cell in zip(EPSILONS, cells, strict=True):
                found = list(values(rows, method, epsilon, AFTER, metric).values())
                mean, sd = PERPLEXITY.number(statistics.fmean(found)), statistics.stdev(found)
                assert f"{mean} ± {sd:.{PERPLEXITY.digits(statistics.fmean(found))}f}" in cell
                assert "n = 3" in cell
    strong = [set(re.findall(r"<b>([\d.]+)", line)) for line in re.findall(r"<tr>.*?</tr>", first)]
    assert [bool(found) for found in strong] == [False, False, False, False, False, True], "bold: the lowest, private"


def test_non_private_is_never_bold():
    rows = with_levels(AFTER, mixmin=dict.fromkeys(SEEDS, 10.0), none=dict.fromkeys(SEEDS, 20.0))
    html = stage.page.texts.levels(measure(rows))
    assert "10.00 ± 0.00" in html
    assert "<b>10.00" not in html
    assert html.count("<b>20.00 ± 0.00</b>") == len(EPSILONS)


def test_page_says_what_the_numbers_are(demo):
    text = text_of(demo["index.html"].decode())
    assert "all records of one sender of mail" in text
    assert "Test records are all records of those mail units (sender) that are in no other part" in text
    assert "Averaged per sender, each sender counts the same" in text
    assert "vim" not in text.replace("left out: vim.", "")
    assert "reduction for drawing whole documents" in text
    assert "convex surrogate" not in text
    token = " ".join(words.about_texts(measure(mixture={"objective": "token"})))
    assert "a convex surrogate, not the reduction for drawing whole documents" in token
    assert "objective" not in " ".join(words.about_texts(measure(methods=["none", "uniform"])))
    records = " ".join(words.about_texts(measure(private={"unit": "record"})))
    assert "Test records are records of mail that are in no other part" in records


def test_shared_budget_is_not_called_disjoint():
    text = words.guarantee(make_config(privacy={"composition": "sequential"}))
    assert "disjoint" not in text
    assert "share epsilon" in text
    assert "disjoint parts" in words.guarantee(make_config())


def test_epochs_per_source_and_method(demo):
    rows, found = make_rows(), tables.epochs(measure())
    assert found["source"].unique().sort().to_list() == sorted({*SOURCES, ""} - {"vim"})
    assert "none" not in found["method"].to_list()
    row = found.row(by_predicate=(pl.col("method") == "dp_mixmin") & (pl.col("epsilon") == 2.0)
                    & (pl.col("source") == "git"), named=True)  # fmt: skip
    expected = [values(rows.filter(pl.col("epsilon").is_null() | (pl.col("epsilon") == 2.0)), "dp_mixmin", 2.0, BEFORE,
                       "epochs_git")[seed] for seed in SEEDS]  # fmt: skip
    assert row["mean"] == pytest.approx(statistics.fmean(expected))
    text = text_of(demo["index.html"].decode())
    assert f"{row['mean']:.2f} ± {row['sd']:.2f}" in text
    assert "tokens in all 1,130,000" in text


def test_summary_txt(demo):
    text = demo["summary.txt"].decode()
    assert max(map(len, text.splitlines())) <= 100
    line = next(line for line in text.splitlines() if line.startswith("next_token"))
    rows = make_rows()
    expected = [" -> ".join(PERPLEXITY.number(statistics.fmean(values(rows, method, 1.0, stage_).values()))
                            for stage_ in (BEFORE, AFTER)) for method in METHODS]  # fmt: skip
    assert re.split(r"\s{2,}", line)[1:] == expected
    assert re.search(r"for DP-MixMin and [\d.]+ for Uniform, *\n? *-\d", text)
    assert "averaged per sender" in text
    assert "figure_perplexity.png" in text


# -- figures ----------------------------------------------------------------------------------------------------


def test_every_figure_has_a_caption_and_every_caption_a_figure(demo):
    drawn = {name.split(".")[0] for name in demo if name.startswith("figure_")}
    assert drawn == set(words.CAPTIONS["perplexity"])
    assert PERPLEXITY.figure in drawn
    assert AUC.figure in words.CAPTIONS["auc"]


def test_untrained_model_is_named_instead_of_drawn(demo):
    svg = demo["figure_perplexity.svg"].decode()
    initial = PERPLEXITY.number(statistics.fmean(values(make_rows(), "none", 1.0, BEFORE).values()))
    assert f"off the scale: No pretraining, {initial}" in svg
    assert not re.search(r"<text[^>]*>No pretraining</text>", svg), "it must not be in the legend"
    near = with_levels(AFTER, none={seed: 370.0 + seed for seed in SEEDS})
    svg = stage.figures.draw_all(measure(near), {})["figure_perplexity.svg"].decode()
    assert re.search(r"<text[^>]*>No pretraining</text>", svg)


def test_weights_show_the_sources_that_were_found(demo):
    svg = demo["figure_weights.svg"].decode()
    assert [name for name in SOURCES if f">{name}<" not in svg] == ["vim"]
    assert ">Size-proportional<" in svg


def test_diverged_candidates_are_counted_and_equal_trials_share_a_panel(demo):
    svg = demo["figure_tuning.svg"].decode()
    assert svg.count("1 candidate off the scale") == 2
    assert svg.count(">mean stand-in perplexity<") == 2
    assert "Uniform, Size-proportional, MixMin (non-private)," in svg
    assert ">↑ do not fine-tune: 2060<" in svg


HOLES = {
    "nothing": lambda row: False,
    "only none": lambda row: row["method"] == "none",
    "no uniform": lambda row: row["method"] != "uniform",
    "not fine-tuned": lambda row: row["stage"] != AFTER,
    "only fine-tuned": lambda row: row["stage"] == AFTER,
    "one seed": lambda row: row["seed"] == 0,
    "no shared seed": lambda row: (row["method"] == "dp_mixmin") == (row["seed"] == 0),
}


@pytest.mark.parametrize("hole", HOLES)
def test_holes_do_not_crash(hole):
    files = stage.report(measure(make_rows(HOLES[hole])), {})
    assert files["index.html"].decode().count("<svg") == 4
    assert "nan" not in files["summary.txt"].decode()
    assert max(map(len, files["summary.txt"].decode().splitlines())) <= 100
