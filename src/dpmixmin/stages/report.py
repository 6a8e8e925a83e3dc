"""Draw the report: the long table, tables, figures, one HTML page and a text summary, of AUCs or of perplexities.

Reads: ``study/metrics/task=…``, ``public/settings/mixture``, ``public/settings/finetune/method=…``.
Writes: ``study/report/{summary.csv,table.csv,mixtures.csv,figure_*.svg,figure_*.png,index.html,summary.txt}``, and
``twice.csv`` if the check with twice the steps was run. Touches nothing private: it only reads measurements.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dpmixmin import artifacts, provenance
from dpmixmin.cells import audits_room
from dpmixmin.config import Config
from dpmixmin.paths import Paths
from dpmixmin.report import figures, page, tables, words
from dpmixmin.report.audit_tables import SCHEMA, summary_rows
from dpmixmin.report.drawing import Images
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, Measurements


def add_arguments(parser) -> None:
    """Nothing to add."""


def run(config: Config, args) -> None:
    """Read the measurements and settings of the whole experiment and write the report."""
    paths = Paths(config.experiment)
    folders = [paths.metrics(task) for task in config.task_names]
    parents = [artifacts.parent(folder) for folder in folders]
    rows = tables.summary(_frame(f"{folder}/metrics.parquet") for folder in folders)
    measured = Measurements(config, rows)
    settings = {}
    for name, folder in _settings_folders(measured, paths).items():
        parents.append(artifacts.parent(folder))
        chosen = artifacts.read_json(f"{folder}/settings.json")
        settings[name] = Settings(chosen, _frame(f"{folder}/curve.parquet"))
    files = report(measured, settings, *_audits(config, paths, parents))
    manifest = artifacts.manifest(
        "report", config=config.subtree("report"), code=provenance.code_digest("report"), parents=parents
    )
    artifacts.publish(paths.report(), files, manifest)
    for old in {"twice.csv"} - set(files):
        Path(paths.report(), old).unlink(missing_ok=True)


def _audits(config: Config, paths: Paths, parents: list[dict]) -> tuple[pl.DataFrame | None, Images]:
    """Return the table and the figures of the audits, if there were any."""
    if config.audit.gate == "none":
        return None, {}
    folder = paths.audit(audits_room(config), "summary")
    parents.append(artifacts.parent(folder))
    images = {path.name: path.read_bytes() for path in sorted(Path(folder).glob("figure_*"))}
    return pl.read_csv(f"{folder}/audits.csv", schema_overrides=SCHEMA), images


def report(
    measured: Measurements,
    settings: dict[str, Settings],
    findings: pl.DataFrame | None = None,
    audited: Images | None = None,
) -> dict[str, bytes]:
    """Return the files of the report, name to content.

    Args:
        measured: the long table, without the audits.
        settings: the choices and their curves.
        findings: the table of audits, or None.
        audited: their figures.
    """
    images = figures.draw_all(measured, settings)
    rows = measured.rows
    if findings is not None:
        found = summary_rows(findings, measured.config.experiment)
        rows = pl.concat([rows, pl.DataFrame(found, schema=rows.schema)])
    frames = {
        "summary.csv": rows,
        "table.csv": tables.table(measured),
        "mixtures.csv": tables.mixtures(measured),
    }
    if len(twice := tables.twice(measured)):
        frames["twice.csv"] = twice
    return {
        **{name: _csv(frame) for name, frame in frames.items()},
        **images,
        "index.html": page.index_html(measured, settings, images | (audited or {}), findings).encode(),
        "summary.txt": words.summary_text(measured, findings).encode(),
    }


def _settings_folders(measured: Measurements, paths: Paths) -> dict[str, str]:
    """Return the settings that were used: the mixture's, and those of every method that was fine-tuned."""
    tuned = [m for m in measured.methods if any(m in measured.present_methods(AFTER, e) for e in measured.epsilons)]
    mixture = {"mixture": paths.settings("mixture")} if "dp_mixmin" in measured.methods else {}
    return mixture | {method: paths.finetune_settings(method) for method in tuned}


def _frame(path: str) -> pl.DataFrame:
    return pl.DataFrame(pl.from_arrow(artifacts.read_table(path)))


def _csv(frame: pl.DataFrame) -> bytes:
    """Return a table as CSV in which everything empty is written as nothing, not as ``""``."""
    return frame.with_columns(pl.col(pl.String).replace("", None)).write_csv().encode()
