"""The README's own-data example, run as its reader would: two Parquet files and the config that stands there.

``as_study`` turns it into a study of the same data, for the tests that compare methods or use a test seed.
"""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from checkout import ROOT, Checkout

AXES = ("Edema", "Mass", "Nodule")


def embeddings(rng, findings: np.ndarray) -> list[list[float]]:
    directions = np.random.default_rng(1).normal(size=(findings.shape[1], 12))
    return (findings @ directions + rng.normal(size=(len(findings), 12))).tolist()


def write_data(folder, *, bad_values: bool) -> None:
    rng = np.random.default_rng(0)
    public = (rng.uniform(size=(900, 3)) < 0.4).astype(float)
    columns = {name: public[:, i] for i, name in enumerate(AXES)}
    pq.write_table(pa.table({"embedding": embeddings(rng, public), **columns}), folder / "public.parquet")
    hidden = (rng.uniform(size=(800, 3)) < 0.4).astype(float)
    rows = embeddings(rng, hidden)
    label = np.maximum(hidden[:, 0], hidden[:, 1])
    patients = np.repeat(np.arange(400), 2)
    if bad_values:
        rows[0] = [float("nan")] * 12
        rows[1] = rows[1][:5]
        rows[2] = None
        label[3] = np.nan
    table = pa.table({"embedding": rows, "Pneumonia": label, "patient_id": patients})
    pq.write_table(table, folder / "private.parquet")


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    """Return a checkout, in a folder with a space, that holds the README's config as mine.yaml."""
    made = Checkout.fresh(tmp_path / "a folder" / "checkout")
    text = (ROOT / "README.md").read_text()
    config = yaml.safe_load(re.search(r"```yaml\n(experiment: mine.*?)```", text, re.S)[1])
    config["private"]["nominal_units"] = 400
    config["finetune"]["settings"].update(steps=10, batch=40)
    config["proxy"] = {"steps": 40}
    config["pretrain"] = {"steps": 20}
    config["audit"] = {"runs": 60, "canaries": 60}
    config["ledger"]["path"] = str(tmp_path / "a ledger")
    (made.path / "mine.yaml").write_text(yaml.safe_dump(config))
    return made


def as_study(checkout: Checkout, **changes: dict) -> None:
    """Make the example a study, with all methods, and change sections of its config."""
    path = checkout.path / "mine.yaml"
    config = yaml.safe_load(path.read_text())
    for key in ("mode", "methods", "ledger"):
        config.pop(key)
    for section, values in changes.items():
        config.setdefault(section, {}).update(values)
    path.write_text(yaml.safe_dump(config))


def test_the_readme_example_runs_on_patients_with_bad_values(checkout):
    write_data(checkout.path, bad_values=True)
    done = checkout.snakemake("all", "-c2", config="mine.yaml")
    assert "not a valid identifier" not in done.stdout
    bundle = checkout.path / "results/mine/released/bundle"
    statement = json.loads((bundle / "statement.json").read_text())["privacy"]
    assert statement["guarantee"]["unit"] == "patient_id"
    assert 0.98 < statement["guarantee"]["epsilon"] <= 1
    assert statement["tuning"] == "user_declared"
    assert "patient_id" in (bundle / "statement.md").read_text()
    ledger = checkout.path.parents[1] / "a ledger"
    assert (ledger / "my_hospital").is_dir()
    assert not (checkout.path / ".ledger").exists()
    assert not (checkout.path / "results/mine/study").exists()
    for room in ("public", "released", "logs"):
        for path in (checkout.path / "results/mine" / room).rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert b"private.parquet" not in content, path
                assert str(ledger).encode() not in content, path
    # A new file under the same name is noticed.
    write_data(checkout.path, bad_values=False)
    assert "prepare_records" in checkout.planned("all", config="mine.yaml")


@pytest.mark.ci
def test_an_empty_sensitive_file_is_a_dataset_like_any_other(checkout):
    """Rule 5: nothing in public says that it is empty."""
    write_data(checkout.path, bad_values=False)
    table = pq.read_table(checkout.path / "private.parquet")
    pq.write_table(table.slice(0, 0), checkout.path / "private.parquet")
    done = checkout.snakemake("all", "-c2", config="mine.yaml")
    assert "Warning" not in done.stdout
    assert (checkout.path / "results/mine/released/bundle/statement.json").is_file()


def test_rule_12_a_partition_of_another_ledger_is_not_taken(checkout):
    """The ledger's path changes between two stages: everything that its keys made is made again."""
    write_data(checkout.path, bad_values=False)
    checkout.snakemake("predictions", "-c2", config="mine.yaml")
    path = checkout.path / "mine.yaml"
    path.write_text(path.read_text().replace("a ledger", "another ledger"))
    planned = checkout.planned("mixtures", config="mine.yaml")
    assert {"prepare_records", "assign_parts", "predict"} <= planned
    for folder in ("records", "splits", "predictions"):
        for file in (checkout.path / "results/mine/private" / folder).rglob("*"):
            file.touch()
    keys = checkout.path.parents[1] / "another ledger/my_hospital/keys.json"
    checkout.snakemake("mixtures", "-c2", config="mine.yaml")
    assert keys.exists()
    name = json.loads(keys.read_text())["id"]
    manifest = json.loads((checkout.path / "results/mine/private/predictions/seed=0/manifest.json").read_text())
    assert manifest["partition"].startswith(f"key={name}/unit=patient_id/")
    # Keys that were lost and drawn anew are another partition, too: what is on disk no longer belongs to them.
    keys.unlink()
    shutil.rmtree(checkout.path / "results/mine/released")
    done = checkout.snakemake("mixtures", "-c2", config="mine.yaml", check=False)
    assert done.returncode != 0
    assert "made with other ids than this config and ledger have" in done.stdout
    assert "Traceback" not in done.stdout
