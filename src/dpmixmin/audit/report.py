"""The files of one audit: ``audit.json`` (the findings, the spec) and ``scores.parquet`` (one row a run or canary)."""

from __future__ import annotations

import pyarrow as pa

from dpmixmin import artifacts, provenance
from dpmixmin.audit.finding import Finding
from dpmixmin.config import Config
from dpmixmin.privacy.mechanisms import Spec


def publish(
    folder: str,
    stage: str,
    config: Config,
    findings: list[Finding],
    scores: pa.Table,
    parents: list[dict],
    *,
    task: str = "",
    spec: Spec | None = None,
) -> None:
    """Write the files of one audit.

    Args:
        folder: where.
        stage: the stage that made them.
        config: the experiment.
        findings: what was found.
        scores: what it was computed from.
        parents: for the manifest.
        task: sensitive task.
        spec: what was attacked, if it was one mechanism; `release` asks for its digest.
    """
    body = {
        "data": "public stand-ins" if config.mode == "deploy" else config.private.name,
        "spec": None if spec is None else {**spec.describe(), "digest": spec.digest()},
        "findings": [finding.to_json() for finding in findings],
    }
    manifest = artifacts.manifest(
        stage,
        config=config.shown(stage, task),
        code=provenance.code_digest(stage),
        parents=parents,
        seed=config.audit.seed,
    )
    files = {"audit.json": artifacts.json_bytes(body), "scores.parquet": artifacts.parquet_bytes(scores)}
    artifacts.publish(folder, files, manifest)


def read(folders: list[str]) -> list[Finding]:
    """Return the findings of these audits, in order."""
    found = []
    for folder in folders:
        found += [Finding.from_json(values) for values in artifacts.read_json(f"{folder}/audit.json")["findings"]]
    return found


def specs(folders: list[str]) -> list[str]:
    """Return the digests of the specs that these audits attacked; an audit without a tested claim passes nothing."""
    audits = [artifacts.read_json(f"{folder}/audit.json") for folder in folders]
    tested = [audit for audit in audits if any(finding["gated"] for finding in audit["findings"])]
    return sorted({audit["spec"]["digest"] for audit in tested if audit["spec"] is not None})
