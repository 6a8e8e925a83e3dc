"""Image files through the workflow: public ones in a folder per class, sensitive ones in a CSV with patients."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from checkout import Checkout
from PIL import Image

pytestmark = pytest.mark.ci

SHADES = {"dark": 40, "bright": 200}


def picture(generator: np.random.Generator, shade: int) -> Image.Image:
    return Image.fromarray(np.clip(generator.normal(shade, 30, (12, 10)), 0, 255).astype(np.uint8))


def test_a_folder_of_classes_and_a_csv_of_patients(tmp_path):
    made, generator = Checkout.fresh(tmp_path / "checkout"), np.random.default_rng(0)
    for name, shade in SHADES.items():
        (made.path / "public" / name).mkdir(parents=True)
        for i in range(60):
            picture(generator, shade).save(made.path / "public" / name / f"{i}.png")
    (made.path / "scans").mkdir()
    lines = ["file,finding,patient,scan"]
    for i in range(120):
        finding = i % 2
        picture(generator, list(SHADES.values())[finding]).save(made.path / "scans" / f"{i}.png")
        lines.append(f"{i}.png,{finding},p{i // 4},s{i}")
    (made.path / "scans/7.png").write_bytes(b"no image")
    (made.path / "scans.csv").write_text("\n".join(lines))
    config = {
        "experiment": "scans",
        "methods": ["uniform", "proportional", "dp_mixmin"],
        "axes": {name: {"column": "shade", "positive": [i]} for i, name in enumerate(SHADES)},
        "tasks": {"finding": {"column": "finding", "positive": [1]}},
        "inputs": {"shape": [1, 8, 8], "scale": 255},
        "public": {
            "sources": {"kind": "images", "path": "public", "classes": list(SHADES), "labels": ["shade"],
                        "size": [8, 8]}
        },
        "private": {
            "name": "scans",
            "table": {"kind": "images", "path": "scans", "table": "scans.csv", "labels": ["finding"],
                      "size": [8, 8], "record_id": "scan"},
            "unit": "patient",
            "records_per_step": 2,
            "nominal_units": 30,
            "parts": {"mixing": 0.6, "finetune": 0.3, "test": 0.1},
        },
        "privacy": {"epsilons": [5], "delta": 0.01},
        "proxy": {"channels": [4, 4], "hidden": 8, "steps": 60},
        "pretrain": {"channels": [4, 4], "hidden": 8, "steps": 20},
        "mixture": {"settings": {"clip": 4, "steps": 20, "learning_rate": 1}},
        "finetune": {"trainable": {"which": "norms"},
                     "settings": {"learning_rate": 0.5, "steps": 3, "batch": 5, "clip": 1}},
    }  # fmt: skip
    (made.path / "mine.yaml").write_text(yaml.safe_dump(config))
    done = made.snakemake("finetuned", "-c2", config="mine.yaml")
    assert "7.png" not in done.stdout, "one unreadable sensitive image is nobody's business"
    base = made.path / "results/scans"
    found = json.loads(
        (base / "released/mixtures/task=finding/method=dp_mixmin/eps=5/seed=0/weights.json").read_text()
    )
    assert found["weights"]["bright"] > 0.7
    assert json.loads((base / "public/mixtures/method=proportional/weights.json").read_text())["weights"] == {
        "dark": 0.5,
        "bright": 0.5,
    }
    counts = json.loads((base / "private/records/counts.json").read_text())
    assert (counts["records"], counts["units"], counts["records_with_nan_or_infinity"]) == (120, 30, 1)
