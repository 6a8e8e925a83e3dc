"""The workflow through its command line, on a miniature of the demo: artefacts, rooms, guarantee."""

from __future__ import annotations

import json
import re
import stat

import pyarrow.parquet as pq
import pytest

from dpmixmin import artifacts, cells
from dpmixmin.config import load
from dpmixmin.paths import PRIVATE, PUBLIC, RELEASED, Paths


@pytest.fixture(scope="module")
def config(finished):
    return load(finished.path / "config/test.yaml")


def test_every_cell_has_its_files_and_a_manifest_that_matches_them(finished, config):
    for cell in cells.cells_of(config):
        folder = finished.path / cell.folder(Paths(config.experiment))
        assert artifacts.verify(folder)["files"]
        assert (folder / "privacy.json").is_file()


def test_the_ledger_holds_one_committed_entry_per_mechanism_run(finished, config):
    mixtures = [c for c in cells.select(cells.cells_of(config), stage="mixture") if c.method == "dp_mixmin"]
    finetuned = [
        cell
        for cell in cells.select(cells.cells_of(config), stage="finetuned")
        if _choice(finished, cell.method) is not None
    ]
    assert finetuned, "the miniature's stand-ins chose never to fine-tune: the test would be empty"
    counts = finished.committed()
    assert len(counts) == len(mixtures) + len(finetuned)
    assert set(counts.values()) == {1}


def _choice(checkout, method: str) -> dict | None:
    path = checkout.path / Paths("mini").finetune_settings(method) / "settings.json"
    return json.loads(path.read_text())["choice"]


def test_every_released_cell_spends_at_most_its_epsilon_and_states_its_curve(finished, config):
    for cell in cells.cells_of(config):
        if cell.room != RELEASED:
            continue
        text = (finished.path / cell.folder(Paths("mini")) / "privacy.json").read_text()
        statement = json.loads(text)
        assert 0 < statement["guarantee"]["epsilon"] <= cell.epsilon
        assert statement["guarantee"]["delta"] == config.privacy.delta
        assert statement["stated_as"] == "only release"
        assert statement["curve"]["epsilon_at_delta"]
        assert statement["stamp"] == "private"


def test_what_follows_the_nonprivate_mixture_claims_no_guarantee(finished):
    folder = "results/mini/study/finetuned/task=three_or_eight/method=mixmin/mechanism=dp_sgd/eps=1/seed=0"
    statement = json.loads((finished.path / folder / "privacy.json").read_text())
    assert statement["guarantee"] is None
    assert statement["stamp"].startswith("NOT PRIVATE")


def test_chain_of_mixture_and_finetuning_is_stated_as_parallel(finished):
    folder = "results/mini/released/finetuned/task=three_or_eight/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"
    statement = json.loads((finished.path / folder / "privacy.json").read_text())
    assert [entry["parts"] for entry in statement["entries"]] == [["mixing"], ["finetune"]]
    assert statement["guarantee"]["composition"].startswith("parallel")


def test_private_files_are_for_their_owner_only(finished):
    base = finished.path / "results/mini/private"
    for path in [base, *base.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.parent.name != "benchmarks":  # Snakemake writes them; their folder is closed
            assert mode == (0o700 if path.is_dir() else 0o600), path
    for folder in (".snakemake", ".ledger", "logs", "results/mini/logs", "results/mini/study"):
        assert stat.S_IMODE((finished.path / folder).stat().st_mode) == 0o700


def test_outside_private_nothing_names_a_record_or_the_content_of_a_private_file(finished):
    """Rules 19 and 20: ids, hashes and sizes of private artefacts stay in private/."""
    base = finished.path / "results/mini/private"
    secrets = set()
    for path in base.rglob("*"):
        if path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None)
            secrets |= set(table["record"].to_pylist()) | set(table["unit"].to_pylist())
        if path.is_file():
            secrets.add(artifacts.file_digest(path))
    patterns = [secret.encode() for secret in secrets]
    assert len(patterns) > 600
    shown = finished.files(PUBLIC, RELEASED, "study", "logs")
    assert len(shown) > 50
    words = re.compile(rb"[0-9a-f]{32,64}")
    wanted = set(patterns)
    for name, content in shown.items():
        assert not wanted & set(words.findall(content)), name


def test_manifests_name_private_parents_by_random_id_only(finished):
    found = 0
    for name, content in finished.files(PUBLIC, RELEASED, "study").items():
        if not name.endswith("manifest.json"):
            continue
        for parent in json.loads(content)["parents"]:
            if f"/{PRIVATE}/" in parent["path"]:
                found += 1
                assert set(parent) == {"path", "artifact"}
                own = json.loads((finished.path / parent["path"] / "manifest.json").read_text())
                assert own["artifact"] == parent["artifact"]
            else:
                assert set(parent) == {"path", "sha256"}
    assert found


def test_the_report_shows_the_guarantee_and_every_number_comes_from_the_summary(finished):
    report = finished.path / "results/mini/study/report"
    assert (report / "summary.csv").read_text().splitlines()[0] == (
        "experiment,task,method,learner,mechanism,epsilon,seed,stage,metric,value"
    )
    page = (report / "index.html").read_text()
    assert "NOT PRIVATE" not in page
    assert "differentially private" in page


def test_a_second_run_has_nothing_to_do(finished):
    assert finished.planned("all") == set()
