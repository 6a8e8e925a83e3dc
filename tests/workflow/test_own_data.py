"""The README's own-data example, run as its reader would: two Parquet files and the config that stands there."""

from __future__ import annotations

import json
import re

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
    (made.path / "mine.yaml").write_text(yaml.safe_dump(config))
    return made


def test_the_readme_example_runs_on_patients_with_bad_values(checkout):
    write_data(checkout.path, bad_values=True)
    done = checkout.snakemake("all", "-c2", config="mine.yaml")
    assert "not a valid identifier" not in done.stdout
    cell = (
        checkout.path / "results/mine/released/finetuned/task=pneumonia/method=dp_mixmin/mechanism=dp_sgd/eps=1/seed=0"
    )
    statement = json.loads((cell / "privacy.json").read_text())
    assert statement["guarantee"]["unit"] == "patient_id"
    assert statement["guarantee"]["epsilon"] <= 1
    assert statement["tuning"] == "user_declared"
    assert "patient_id" in (checkout.path / "results/mine/study/report/index.html").read_text()
    assert (checkout.path / ".ledger/my_hospital").is_dir()
    # A new file under the same name is noticed.
    write_data(checkout.path, bad_values=False)
    assert "prepare_records" in checkout.planned("all", config="mine.yaml")


def test_an_empty_sensitive_file_is_a_dataset_like_any_other(checkout):
    """Rule 5: nothing in public says that it is empty."""
    write_data(checkout.path, bad_values=False)
    (checkout.path / "mine.yaml").write_text((checkout.path / "mine.yaml").read_text() + "methods: [dp_mixmin]\n")
    table = pq.read_table(checkout.path / "private.parquet")
    pq.write_table(table.slice(0, 0), checkout.path / "private.parquet")
    done = checkout.snakemake("finetuned", "-c2", config="mine.yaml")
    assert "Warning" not in done.stdout
    assert "mine" in done.stdout
