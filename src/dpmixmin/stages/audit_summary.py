"""Put all audits of a run side by side: the table of findings, the paper's table, figures, a page, a short text.

Reads: every audit of the run. Writes: ``audits/summary/{audits.csv,table.csv,audits.txt,index.html,figure_*}`` in
``study/``, in a deployment in ``public/``. Touches nothing private: it reads what audits found.
"""

from __future__ import annotations

import json

import polars as pl

from dpmixmin import artifacts, provenance
from dpmixmin.audit import attacks, bounds, report
from dpmixmin.audit.finding import CONFIDENCE, Finding, judge
from dpmixmin.cells import audit_folders, audited_mixtures, audits_room
from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.report import audit_figures, audit_tables, audits, page
from dpmixmin.report.audit_figures import Claim, Curve


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Read every audit and write the summary."""
    paths = Paths(config.experiment)
    folders = audit_folders(config, paths)
    findings = report.read(folders)
    frame = table_of(findings)
    images = audit_figures.draw_all(frame, _curves(config, paths, findings, frame), _claims(findings))
    files = {
        "audits.csv": frame.write_csv().encode(),
        "table.csv": audit_tables.paper_table(frame).write_csv().encode(),
        "audits.txt": ("\n".join(audits.lines(frame, config.mode)) + "\n").encode(),
        "index.html": page.audits_html(config, frame, images).encode(),
        **images,
    }
    manifest = artifacts.manifest(
        "audit_summary",
        config=config.shown("audit_summary"),
        code=provenance.code_digest("audit_summary"),
        parents=[artifacts.parent(folder) for folder in folders],
    )
    artifacts.publish(paths.audit(audits_room(config), "summary"), files, manifest)


def table_of(findings: list[Finding]) -> pl.DataFrame:
    """Return the findings with their verdicts, one row each."""
    rows = [
        {**finding.to_json(), "counts": json.dumps(finding.counts) if finding.counts else None, "verdict": judged}
        for finding, judged in zip(findings, judge(findings), strict=True)
    ]
    return pl.DataFrame(rows, infer_schema_length=None)


def _curves(config: Config, paths: Paths, findings: list[Finding], frame: pl.DataFrame) -> list[Curve]:
    """Return the errors of each attack on the mixture, of the task with the largest bound at each epsilon."""
    curves = []
    for cell in audited_mixtures(config):
        if cell.task != audit_tables.largest_task(frame, cell.epsilon):
            continue
        folder = paths.audit(audits_room(config), "mixture", task=cell.task, eps=cell.epsilon)
        scores = pl.DataFrame(pl.from_arrow(artifacts.read_table(f"{folder}/scores.parquet")))
        scores = scores.filter(pl.col("half") == "eval")
        for finding in findings:
            if (finding.audit, finding.task, finding.epsilon) != ("mixture", cell.task, cell.epsilon):
                continue
            curves += [_curve(scores, finding, noise) for noise in (True, False)]
    return curves


def _curve(scores: pl.DataFrame, finding: Finding, noise: bool) -> Curve:
    here = scores.filter(pl.col("noise") == noise)
    with_canary = here.filter((pl.col("world") == "with") & (pl.col("canary") == finding.canary))
    # The runs without a canary serve all canaries; what they score depends on whose presence is asked.
    without = here.filter((pl.col("world") == "without") & (pl.col("canary") == finding.canary))
    sign = 1 if finding.above_means_with else -1
    fpr, fnr = attacks.curve(*(sign * part[finding.statistic].to_numpy() for part in (without, with_canary)))
    point = upper = None
    if noise:
        errors = bounds.Errors(**finding.counts)
        point = errors.false_positives / errors.without, errors.false_negatives / errors.with_canary
        upper = bounds.rates(errors, CONFIDENCE)
    return Curve(finding.canary, noise, fpr, fnr, finding.task, finding.epsilon, len(without), point, upper)


def _claims(findings: list[Finding]) -> list[Claim]:
    found = {f.epsilon: Claim(f.epsilon, f.claim, f.delta) for f in findings if f.audit == "mixture"}
    return list(found.values())
