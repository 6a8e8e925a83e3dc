"""The audits in the report: tables against hand computation, honest words, figures that show the right things."""

import io
import math
import re
from html import unescape

import numpy as np
import polars as pl
import pytest
from scipy.stats import norm

from dpmixmin.privacy.gaussian import gaussian_mu
from dpmixmin.report import audit_figures, audit_tables, audits, page, tables
from dpmixmin.report.audit_figures import Claim, Curve

TASKS = ("Edema", "Effusion", "Hernia", "Mass")
EPSILONS = (1.0, 2.0, 8.0)
DELTA = 1e-5
DETECTS = {1.0: (3.41, 1.94), 2.0: (6.14, 2.97), 8.0: (None, None)}
RUNS = 1000


def sample():
    """Findings of a run whose claims hold: a mixture a task and epsilon, fine-tuning, membership, replay."""
    rng, rows = np.random.default_rng(5), []
    for epsilon in EPSILONS:
        claim = 0.9993 * epsilon
        shared = {"epsilon": epsilon, "claim": claim, "delta": DELTA, "unit": "record", "seed": 0}
        low, family = DETECTS[epsilon]
        bounds = {"ceiling": 5.60, "ceiling_family": 6.21, "detects": low, "detects_family": family, "p_value": 0.4,
                  "family": "gaussian", "gated": True}  # fmt: skip
        verdict = "no power" if low is None else "holds"
        for task in TASKS:
            for canary in ("natural", "worst_natural", "max_clip"):
                strong = canary == "max_clip"
                rows.append({
                    **shared, **bounds, "audit": "mixture", "mechanism": "mixture", "task": task, "canary": canary,
                    "method": "dp_mixmin", "learner": "centred", "statistic": "likelihood_ratio",
                    "bound": round(float(rng.uniform(0.05, 0.13)) * epsilon if strong else 0.0, 3),
                    "bound_family": round(float(rng.uniform(0.25, 0.4)) * epsilon if strong else 0.0, 3),
                    "control": 5.60 if strong else round(float(rng.uniform(0, 2.4)), 2),
                    "control_gated": strong, "verdict": verdict,
                })  # fmt: skip
        for canary in ("gradient", "record"):
            strong = canary == "gradient"
            rows.append({
                **shared, **bounds, "audit": "one_run", "mechanism": "dp_sgd", "task": "Hernia", "canary": canary,
                "method": "dp_mixmin", "statistic": "likelihood_ratio" if strong else "loss",
                "bound": 0.11 * epsilon if strong else 0.0, "bound_family": 0.52 * epsilon if strong else 0.02,
                "family": "sampled gaussian", "detects": low, "detects_family": None,
                "control": 5.1 if strong else 0.3,
                "control_gated": strong, "verdict": verdict,
            })  # fmt: skip
        rows.append({
            **shared, "audit": "membership", "mechanism": "dp_sgd", "task": "Hernia", "canary": "members",
            "method": "dp_mixmin", "statistic": "loss", "auc": 0.503, "auc_low": 0.481, "auc_high": 0.525,
            "tpr_at_1": 0.012, "tpr_at_0p1": None, "gated": False, "verdict": "reported",
        })  # fmt: skip
    for mechanism, ratio in (("mixture", 0.9998), ("dp_sgd", 0.87)):
        for canary in ("worst_units", "first"):
            rows.append({"audit": "replay", "mechanism": mechanism, "canary": canary, "unit": "record", "gated": True,
                         "ratio": ratio if canary == "worst_units" else 0.3, "verdict": "holds"})  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def broken(findings, verdict="EXCEEDED", **changes):
    """The same findings with one that fails."""
    rows = findings.rows(named=True)
    number = next(i for i, row in enumerate(rows) if row["canary"] == "max_clip" and row["task"] == "Mass")
    rows[number] |= {"verdict": verdict, **changes}
    return pl.DataFrame(rows, infer_schema_length=None)


def attack(mu, canary, epsilon, noise=True):
    """The errors of an attack on a mu-Gaussian mechanism, at every threshold."""
    rng = np.random.default_rng(len(canary))
    without, present = rng.normal(size=RUNS), rng.normal(size=RUNS) + mu
    cuts = np.sort(np.r_[-np.inf, without, present, np.inf])
    fpr = 1 - np.searchsorted(np.sort(without), cuts, side="left") / RUNS
    fnr = np.searchsorted(np.sort(present), cuts, side="left") / RUNS
    point = (float(norm.sf(mu / 2)), float(norm.cdf(-mu / 2)))
    upper = tuple(rate + 2.24 * math.sqrt(rate * (1 - rate) / RUNS) for rate in point)
    return Curve(canary, noise, fpr, fnr, "Hernia", epsilon, RUNS, point if noise else None, upper if noise else None)


def sample_curves():
    curves = []
    for epsilon in EPSILONS:
        mu = gaussian_mu(epsilon, DELTA)
        for canary, share in (("natural", 0.02), ("worst_natural", 0.25), ("max_clip", 1.0)):
            curves.append(attack(share * mu, canary, epsilon))
            control = {"natural": 0.4, "worst_natural": 2.5, "max_clip": 40.0}[canary]
            curves.append(attack(control, canary, epsilon, noise=False))
    return curves


CLAIMS = [Claim(epsilon, epsilon, DELTA) for epsilon in EPSILONS]


@pytest.fixture(scope="module")
def drawn():
    return audit_figures.draw_all(sample(), sample_curves(), CLAIMS)


def text_of(html):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL))).split())


def section(findings, images=None, **options):
    return audits.section(findings, images or {}, page._figure, **options)


# -- tables -----------------------------------------------------------------------------------------------------


def test_paper_table_has_a_row_a_task_and_the_maximum_last():
    findings = sample()
    table = audit_tables.paper_table(findings)
    assert table["task"].to_list() == [*TASKS, "maximum"] * 3
    assert table["epsilon"].to_list() == sorted(EPSILONS * 5)
    for row in table.rows(named=True):
        cells = findings.filter((pl.col("audit") == "mixture") & (pl.col("epsilon") == row["epsilon"]))
        if row["task"] != "maximum":
            cells = cells.filter(pl.col("task") == row["task"])
        for canary in ("natural", "worst_natural", "max_clip"):
            part = cells.filter(pl.col("canary") == canary)
            assert row[canary] == part["bound"].max()
            assert row[f"{canary}_control"] == part["control"].max()
        assert row["max_clip_family"] == cells.filter(pl.col("canary") == "max_clip")["bound_family"].max()
        assert (row["detects"], row["detects_family"]) == DETECTS[row["epsilon"]]
        assert row["verdict"] == ("no power" if row["epsilon"] == 8 else "holds")


def test_a_single_task_has_no_maximum_row_and_one_weak_task_leaves_no_power():
    mixture = sample().filter(pl.col("audit") == "mixture")
    assert audit_tables.paper_table(mixture.filter(pl.col("task") == "Mass"))["task"].to_list() == ["Mass"] * 3
    weaker = mixture.with_columns(
        detects=pl.when((pl.col("task") == "Mass") & (pl.col("epsilon") == 1)).then(None).otherwise("detects")
    )
    last = audit_tables.paper_table(weaker).filter((pl.col("task") == "maximum") & (pl.col("epsilon") == 1))
    assert last["detects"].to_list() == [None]
    assert last["detects_family"].to_list() == [1.94]


def test_two_learners_of_a_task_show_the_larger_bound_and_the_weaker_control():
    one = sample().filter((pl.col("audit") == "mixture") & (pl.col("task") == "Mass") & (pl.col("epsilon") == 1))
    other = one.with_columns(learner=pl.lit("eg"), bound=pl.col("bound") + 0.5, control=pl.col("control") / 2)
    row = audit_tables.paper_table(pl.concat([one, other])).row(0, named=True)
    strong = one.filter(pl.col("canary") == "max_clip").row(0, named=True)
    assert row["max_clip"] == strong["bound"] + 0.5
    assert row["max_clip_control"] == strong["control"] / 2


def test_mechanism_table_keeps_the_largest_bound_with_its_own_claim_and_the_worst_verdict():
    findings = sample()
    table = audit_tables.mechanism_table(findings)
    assert table.select("audit", "epsilon").rows() == [
        *((audit, epsilon) for audit in ("mixture", "one_run", "membership") for epsilon in EPSILONS),
        ("replay", None), ("replay", None),
    ]  # fmt: skip
    mixture = findings.filter((pl.col("audit") == "mixture") & (pl.col("epsilon") == 1))
    row = table.row(0, named=True)
    assert row["bound_family"] == mixture["bound_family"].max()
    largest = mixture.filter(pl.col("bound_family") == row["bound_family"]).row(0, named=True)
    for name in ("task", "canary", "claim", "bound", "ceiling", "detects"):
        assert row[name] == largest[name]
    # The weakest control is that of the canaries that must leak, not that of the natural ones, which may be 0.
    assert row["control"] == mixture.filter(pl.col("control_gated"))["control"].min() == 5.6
    assert (row["attacks"], row["verdict"]) == (12, "holds")
    assert table.filter(pl.col("audit") == "replay")["ratio"].to_list() == [0.87, 0.9998]
    for verdict in ("EXCEEDED", "control does not leak"):
        assert audit_tables.mechanism_table(broken(findings, verdict))["verdict"][0] == verdict


def test_largest_task_is_the_one_to_draw():
    findings = broken(sample(), bound=0.9, bound_family=0.2)
    assert audit_tables.largest_task(findings, 1.0) == "Mass"
    assert audit_tables.largest_task(findings, 3.0) is None


def test_summary_rows_are_rows_of_the_long_table():
    findings = sample()
    rows = audit_tables.summary_rows(findings, "digits")
    frame = tables.summary([pl.DataFrame(rows, schema=tables.COLUMNS)])
    assert set(frame["stage"]) == {"audit"}
    assert set(frame["experiment"]) == {"digits"}
    assert not frame.drop("value").is_duplicated().any()
    assert frame["value"].is_not_null().all()

    def value(metric, **cell):
        found = frame.filter(pl.col("metric") == metric, **cell)["value"].to_list()
        assert len(found) == 1, (metric, found)
        return found[0]

    cell = findings.filter(
        (pl.col("canary") == "max_clip") & (pl.col("task") == "Mass") & (pl.col("epsilon") == 2)
    ).row(0, named=True)
    where = {"task": "Mass", "epsilon": 2.0, "mechanism": "mixture"}
    assert value("epsilon_bound_max_clip", **where) == cell["bound"]
    assert value("epsilon_bound_family_max_clip", **where) == cell["bound_family"]
    assert value("control_max_clip", **where) == 5.6
    assert value("detects_family", **where) == 2.97
    assert value("epsilon_claim", **where) == pytest.approx(2 * 0.9993)
    assert value("mia_auc", epsilon=1.0) == 0.503
    assert value("mia_tpr_at_1", epsilon=1.0) == 0.012
    assert value("replay_ratio", mechanism="mixture") == 0.9998
    assert not len(frame.filter(pl.col("metric") == "mia_tpr_at_0p1"))  # it has none
    assert not len(frame.filter((pl.col("metric") == "detects") & (pl.col("epsilon") == 8)))  # no power


def test_of_two_attacks_on_one_cell_the_long_table_has_the_stronger():
    members = sample().filter((pl.col("audit") == "membership") & (pl.col("epsilon") == 1))
    other = members.with_columns(statistic=pl.lit("likelihood_ratio"), auc=0.52, auc_low=0.5, tpr_at_1=0.011)
    for findings in (pl.concat([members, other]), pl.concat([other, members])):
        found = {row["metric"]: row["value"] for row in audit_tables.summary_rows(findings, "digits")}
        assert found == {"mia_auc": 0.52, "mia_auc_low": 0.5, "mia_auc_high": 0.525, "mia_tpr_at_1": 0.011}


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.05])
def test_what_a_claim_allows_is_the_area_and_the_edge_of_its_tradeoff(epsilon, delta):
    x = np.linspace(0, 1, 200001)
    f = audit_figures.allowed(x, epsilon, delta)
    assert audit_tables.largest_auc(epsilon, delta) == pytest.approx(1 - np.trapezoid(f, x), abs=1e-5)
    for rate in (0.0, 0.01, 0.3, 1.0):
        expected = 1 - np.interp(rate, x, f)
        assert audit_tables.largest_rate(rate, epsilon, delta) == pytest.approx(expected, abs=1e-5)


def test_a_gaussian_mechanism_stays_above_what_its_claim_allows_and_touches_it():
    x = np.linspace(1e-6, 1 - 1e-6, 200001)
    for epsilon in EPSILONS:
        gap = audit_figures.gaussian_tradeoff(gaussian_mu(epsilon, DELTA))(x) - audit_figures.allowed(
            x, epsilon, DELTA
        )
        assert -1e-9 < gap.min() < 1e-6


# -- words ------------------------------------------------------------------------------------------------------


def test_section_says_what_came_out_and_what_it_does_not_mean():
    text = text_of(section(sample(), runs=2000))
    assert "None of 46 attacks refuted a claim; 14 of them could not have (no power)." in text
    assert "does not show that the claim is loose" in text
    assert "median DP bound of about 0.1 at 1000 counted runs a world" in text
    assert (
        "mixture weights: 1.94 for a claim of 1.00, 2.97 for a claim of 2.00, nothing (no power) for a claim of 7.99"
        in text
    )
    assert "controls of natural canaries are reported and not gated" in text
    assert "learned 2,000 times without and 2,000 times with one record more" in text
    # mean and largest AUC, what the claim allows, TPR, what it allows
    assert re.search(r"0\.503 0\.503 \(0\.481 to 0\.525\) \S.* 0\.731 1\.2 % 2\.7 %", text)
    assert "0.9998" in text
    assert "stand-in" not in text


def test_a_deployment_says_that_the_private_set_was_never_audited():
    findings = sample().filter(pl.col("audit") != "membership")
    assert "Public stand-in data was audited" in text_of(section(findings, mode="deploy"))
    assert "Public stand-ins were audited, never the private set." in audits.lines(findings, "deploy")


def test_user_level_speaks_of_users():
    assert "with one sender more" in text_of(section(sample().with_columns(unit=pl.lit("sender"))))


def test_failures_are_said_first_and_loudly():
    html = section(broken(sample(), bound=1.4, bound_family=1.9, p_value=3e-7))
    lead = html.split("</p>")[0]
    assert 'class="banner"' in lead
    assert "EXCEEDED at ε = 1: mixture weights, task Mass, canary max-clip: ε is at least 1.90" in lead
    assert "None of" not in html
    text = text_of(section(broken(sample(), "control does not leak", control=0.2)))
    assert "without noise the attack shows ε = 0.20 only, for a claim of 1.00: this attack proves nothing." in text
    rows = [{"audit": "replay", "mechanism": "dp_sgd", "canary": "nan", "ratio": 2.5, "gated": True,
             "verdict": "EXCEEDED"}]  # fmt: skip
    assert "moves a release by 2.5 times the declared sensitivity" in text_of(section(pl.DataFrame(rows)))


def test_a_bound_above_its_claim_by_chance_is_not_hidden():
    lucky = broken(sample(), "holds", bound=1.2)
    assert "At 95 % 1 of 42 attacks lie above their claim, but not at the gate's level." in text_of(section(lucky))
    assert "lie above" not in text_of(section(sample()))


def test_lines_fit_the_terminal():
    long = broken(sample(), "control does not leak", control=0.1, mechanism="a mechanism with a long name")
    for findings in (sample(), long, broken(sample(), bound=1.4, task="A task with a very long name " * 4)):
        lines = audits.lines(findings)
        assert max(map(len, lines)) <= 100
        assert all(line.isascii() and not line.lstrip().startswith("%") for line in lines)
    assert any(line.startswith("mixture weights") and line.endswith("no power") for line in lines)
    assert any(line.startswith("EXCEEDED at epsilon = 1") for line in lines)


@pytest.mark.parametrize("column", [name for name in audit_tables.SCHEMA if name not in ("audit", "canary")])
def test_every_column_may_be_missing_or_empty(column):
    for findings in (sample().drop(column, strict=False), sample().with_columns(pl.lit(None).alias(column))):
        assert "Audits" in section(findings)
        assert audits.lines(findings)
        assert audit_tables.summary_rows(findings, "digits")
        audit_figures._panels(findings)


def test_nothing_audited_says_nothing():
    empty = pl.DataFrame(schema=audit_tables.SCHEMA)
    assert section(empty) == ""
    assert audits.lines(empty) == audit_tables.summary_rows(empty, "digits") == []
    assert audit_figures.draw_all(empty, [], []) == {}


def test_text_is_escaped_and_the_page_needs_nothing_else(drawn):
    nasty = sample().with_columns(pl.col("task").str.replace("Mass", "<script>x</script>"))
    html = section(nasty, drawn)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xlink:href="#', "", html))


# -- figures ----------------------------------------------------------------------------------------------------


def test_figures_are_files_with_their_captions(drawn):
    assert set(drawn) == {f"{name}.{kind}" for name in audits.CAPTIONS for kind in ("svg", "png")}
    assert drawn["figure_tradeoff.png"].startswith(b"\x89PNG")
    again = audit_figures.draw_all(sample(), sample_curves(), CLAIMS)
    assert again == drawn  # deterministic
    svg = drawn["figure_tradeoff.svg"].decode()
    for label in ("max-clip", "worst natural", "max-clip, no noise", "refutes the claim", "ε = 8, task Hernia"):
        assert label in unescape(svg)
    assert len(io.BytesIO(drawn["figure_audit_bounds.svg"]).read()) < 400_000


def test_only_points_below_what_the_claim_allows_are_shaded():
    figure = audit_figures.figure_tradeoff(sample_curves(), CLAIMS)
    for axis, claim in zip(figure.axes, CLAIMS, strict=True):
        region = axis.collections[0].get_paths()[0]
        for fpr in (0.0005, 0.01, 0.1, 0.5, 0.9):
            limit = float(audit_figures.allowed(np.array([fpr]), claim.epsilon, claim.delta)[0])
            for fnr in (0.0003, 0.01, 0.05, 0.3, 0.9, 0.99):
                if abs(norm.ppf(fnr) - norm.ppf(max(limit, 1e-9))) > 0.05:
                    inside = region.contains_point((norm.ppf(fpr), norm.ppf(fnr)))
                    assert inside == (fnr < limit), (claim.epsilon, fpr, fnr)


def test_a_tight_mechanism_lies_on_its_own_line():
    """10 standard errors of a rate from 1000 runs, on the quantile scale: never by chance."""
    mu = gaussian_mu(1.0, DELTA)
    curve = attack(mu, "max_clip", 1.0)
    fpr, fnr = audit_figures._certain(curve)
    assert np.minimum(fpr, fnr).min() >= 0.0095
    assert np.abs(norm.ppf(fpr) + norm.ppf(fnr) + mu).max() < 0.45


def test_an_attack_without_errors_is_drawn_into_the_corner():
    whole = Curve("max_clip", False, np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0]), "", 1.0, RUNS)
    fpr, fnr = audit_figures._certain(whole)
    assert (fpr + fnr).min() == 0


def test_the_mechanisms_own_tradeoff_is_drawn_in_place_of_the_gaussian():
    flat = Claim(1.0, 1.0, DELTA, own=lambda fpr: 1 - fpr)
    axis = audit_figures.figure_tradeoff(sample_curves(), [flat]).axes[0]
    line = next(line for line in axis.lines if line.get_label() == "the mechanism as accounted")
    assert np.allclose(line.get_xdata(), -line.get_ydata())


def test_bounds_figure_shows_every_claim_and_bound():
    figure = audit_figures.figure_bounds(sample())
    for axis, epsilon in zip(figure.axes, EPSILONS, strict=True):
        found = {line.get_label(): [] for line in axis.lines}
        for line in axis.lines:
            found[line.get_label()] += list(line.get_xdata())
        assert set(found["claim"]) == {0.9993 * epsilon}
        assert len(found["f-DP bound, the same canary"]) == len(TASKS) + 1
        assert axis.get_xlim()[1] > max(max(values) for values in found.values())
        assert ("detected with 80 %" in found) == (epsilon < 8)
