"""Ways in which one private record once reached the public, or moved more than it may; each stays closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deployment import raw_config
from loading import load_private
from PIL import Image

from dpmixmin import artifacts, provenance
from dpmixmin.data import split
from dpmixmin.data.loaders import load_public
from dpmixmin.errors import UserError
from dpmixmin.mixing.learners import learn_nonprivate
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive, Study
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.statement import least_public
from dpmixmin.sections import Inputs, Parts, Private
from dpmixmin.table_sections import ImageTable, ParquetTable

KEY = b"key of the ids"


def private_of(path, **options) -> Private:
    table = ParquetTable(
        kind="parquet", path=str(path), features=("x",), labels=("y",), record_id=options.pop("id", None)
    )
    return Private(name="clinic", table=table, nominal_units=100, **options)


@pytest.mark.parametrize("tiny", [1e-20, 1e-200, 0.0])
def test_rule_3_a_unit_of_two_records_does_not_change_how_others_are_clipped(tiny):
    """Extreme probabilities, and one unit with two records: removing any unit moves the integer sum by at most C."""
    p = np.full((40, 3), tiny)
    p[:, 0] = np.linspace(tiny, 5 * tiny, 40)
    index = np.r_[np.arange(39), 38]
    spec = GridGaussian(8.0, 26.0, 1, 1.0, 40, 1.0, 1e-5)
    weights = np.array([0.2, 0.5, 0.3])

    def total(keep):
        unit = index[keep]
        relabelled = np.unique(unit, return_inverse=True)[1]
        gradients = UnitGradients.of(SourceTable.of_labels(p[keep], (len(set(unit)), relabelled)), centred=True)
        return spec.to_grid(gradients.clipped(weights, spec.clip)).sum(axis=0)

    whole = total(np.ones(40, dtype=bool))
    for unit in range(39):
        moved = (whole - total(index != unit)) * spec.grid
        assert np.linalg.norm(moved) <= spec.clip * (1 + 1e-12)


def test_a_unit_s_gradient_is_the_same_to_the_last_bit_whoever_else_is_there(rng):
    p = rng.uniform(0.001, 1, (301, 14))
    weights = rng.dirichlet(np.ones(14))
    whole = UnitGradients.of(SourceTable.of_labels(p), centred=True).clipped(weights, 8.0)
    for gone in (0, 150, 300):
        keep = np.arange(301) != gone
        alone = UnitGradients.of(SourceTable.of_labels(p[keep]), centred=True).clipped(weights, 8.0)
        assert (alone == whole[keep]).all()


def test_rule_12_parts_are_joined_by_unit_although_record_ids_repeat_across_patients(tmp_path, ledger, monkeypatch):
    """Visits 0, 1, 2 of every patient: no part may see another part's patients."""
    monkeypatch.chdir(tmp_path)
    patients = np.repeat(np.arange(60), 3)
    table = pa.table({"x": np.arange(180.0), "y": np.zeros(180), "patient": patients, "visit": np.tile([0, 1, 2], 60)})
    pq.write_table(table, tmp_path / "t.parquet")
    records = load_private(private_of(tmp_path / "t.parquet", unit="patient", id="visit"), Inputs(bound=1e6), KEY)
    assert len(set(records.record)) == 180
    paths, parts = Paths("exp"), Parts(mixing=0.3, finetune=0.3, test=0.4)
    wanted = split.partition(
        ledger.keys, private_of(tmp_path / "t.parquet", unit="patient", id="visit", parts=parts), 0
    )
    manifest = artifacts.manifest(
        "x", config={}, code="", parents=[], private=True, partition={"ids": wanted.ids, "partition": wanted.name}
    )
    files = {"records.parquet": artifacts.parquet_bytes(records.to_arrow())}
    artifacts.publish(paths.records(), files, manifest)
    assigned = split.assign(records.unit, b"split key", parts)
    columns = {"record": pa.array(records.record), "unit": pa.array(records.unit), "part": pa.array(assigned)}
    artifacts.publish(paths.split(0), {"split.parquet": artifacts.parquet_bytes(pa.table(columns))}, manifest)
    seen = {}
    for part in ("mixing", "finetune", "test"):
        with ledger.open((part,), Study("a look")) as access:
            seen[part] = set(split.open_part(access, paths, wanted, 0).unit.tolist())
    assert all(seen.values())
    assert sum(len(units) for units in seen.values()) == len(set().union(*seen.values())) == 60


def test_rule_20_progress_says_nothing_about_the_number_of_units(capsys):
    torch = pytest.importorskip("torch")
    from dpmixmin.finetune.dp_sgd import ClippedSum, fine_tune

    texts = []
    for n in (3, 400):
        x = np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32)
        sums = ClippedSum(torch.nn.Linear(4, 1), x, np.ones(n, dtype=np.float32), np.arange(n), n)
        fine_tune(sums, ModelGaussian(1.0, 2.0, 120, 0.5, 100, 1.0, 1e-5), 0.1, InsecureNoise(0))
        texts.append(capsys.readouterr().err)
    assert texts[0] == texts[1]
    assert texts[0].count("step") == 10


def test_rule_20_a_private_list_of_another_length_is_no_error_but_contributes_zero(tmp_path):
    rows = [[1.0, 2.0], [3.0], [4.0, 5.0, 6.0], None, [7.0, 8.0]]
    pq.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.float64())), "y": np.zeros(5)}), tmp_path / "t.parquet")
    found = load_private(private_of(tmp_path / "t.parquet"), Inputs(bound=100.0), KEY, width=2).features
    assert found.shape == (5, 2)
    assert sorted(np.isnan(found).sum(axis=1).tolist()) == [0, 0, 2, 2, 2]


def test_rule_5_an_empty_private_table_of_lists_has_the_public_width(tmp_path):
    empty = pa.table({"x": pa.array([], pa.list_(pa.float64())), "y": pa.array([], pa.float64())})
    pq.write_table(empty, tmp_path / "t.parquet")
    records = load_private(private_of(tmp_path / "t.parquet"), Inputs(), KEY, width=7)
    assert records.features.shape == (0, 7)
    records.to_arrow()


@pytest.mark.parametrize("options", [{}, {"id": "born"}, {"unit": "born"}], ids=["not used", "as id", "as unit"])
def test_rule_20_an_unreadable_value_in_any_column_stops_nothing_and_moves_no_other_id(options, tmp_path):
    dates = pa.array([1, 10**8, 3], pa.int32()).view(pa.date32())
    with pytest.raises((OverflowError, ValueError)):
        dates.to_pylist()
    table = pa.table({"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 0.0], "born": dates})
    pq.write_table(table, tmp_path / "t.parquet")
    whole = load_private(private_of(tmp_path / "t.parquet", **options), Inputs(bound=10.0), KEY)
    pq.write_table(table.take([0, 2]), tmp_path / "t.parquet")
    less = load_private(private_of(tmp_path / "t.parquet", **options), Inputs(bound=10.0), KEY)
    assert set(less.record) < set(whole.record)
    assert set(less.unit) < set(whole.unit)
    assert len(whole) == 3


def test_rows_without_a_person_are_units_of_their_own_nan_included(tmp_path):
    people = pa.array([float("nan"), float("nan"), None, 1.0, 1.0])
    pq.write_table(pa.table({"x": np.arange(5.0), "y": np.zeros(5), "who": people}), tmp_path / "t.parquet")
    records = load_private(private_of(tmp_path / "t.parquet", unit="who"), Inputs(bound=10.0), KEY)
    assert records.units()[0] == 4


SAMPLES_PER_PIXEL = bytes.fromhex("1501 0300 01000000")
"""The tag, type and count of a TIFF's field."""


def bad_tiffs(rng) -> dict[str, bytes]:
    """Images that libtiff and Pillow's own logging complain about on standard error."""
    noise = Image.fromarray(rng.integers(0, 256, (32, 32, 3)).astype(np.uint8))

    def written(compression: str | None) -> bytes:
        out = BytesIO()
        noise.save(out, "TIFF", compression=compression)
        return out.getvalue()

    found = {name: written(f"tiff_{name}") for name in ("lzw", "adobe_deflate")}
    found = {name: data[:100] + b"\xff" * 8 + data[108:] for name, data in found.items()}
    before, after = written(None).split(SAMPLES_PER_PIXEL)
    return found | {"samples": before + SAMPLES_PER_PIXEL + (100).to_bytes(4, "little") + after[4:]}


def test_rule_20_no_decoder_of_images_writes_to_the_public_log(tmp_path, rng):
    """The stage as it is run, with and without bad images among the sensitive ones: the same bytes."""
    for place in ("public/a", "public/b", "scans/a", "scans/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (4, 4)).astype(np.uint8)).save(tmp_path / place / "0.png")
    images = {"kind": "images", "classes": ["a", "b"], "size": [4, 4]}
    rules = {name: {"column": "label", "positive": [i]} for i, name in enumerate("ab")}
    config = {
        "experiment": "scans",
        "axes": rules,
        "tasks": {"task": rules["a"]},
        "public": {"sources": {**images, "path": "public"}},
        "private": {"name": "scans", "table": {**images, "path": "scans"}, "nominal_units": 100},
        "ledger": {"path": str(tmp_path / "ledger")},
        "mixture": {"settings": {"clip": 1, "steps": 1, "learning_rate": 1}},
        "finetune": {"settings": {"learning_rate": 1, "steps": 1, "batch": 1, "clip": 1}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def run(stage: str) -> tuple[int, bytes, bytes]:
        command = [sys.executable, "-m", "dpmixmin", stage, "--config", "config.json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    assert run("sources")[0] == 0
    without = run("records")
    assert without[0] == 0
    for name, data in bad_tiffs(rng).items():
        (tmp_path / f"scans/a/{name}.tif").write_bytes(data)
    assert run("records") == without
    counts = json.loads((tmp_path / "results/scans/private/records/counts.json").read_text())
    assert counts["records_with_nan_or_infinity"] == 3


def test_rule_20_standard_error_is_given_back_after_an_image(tmp_path, rng, capfd):
    for name, data in bad_tiffs(rng).items():
        (tmp_path / f"{name}.tif").write_bytes(data)
    (tmp_path / "list.csv").write_text("file,label\nlzw.tif,1\nadobe_deflate.tif,0\n")
    table = ImageTable(kind="images", path=str(tmp_path), table=str(tmp_path / "list.csv"), size=(4, 4))
    private = Private(name="scans", table=table, nominal_units=100)
    before = len(os.listdir("/dev/fd"))
    assert np.isnan(load_private(private, Inputs(), KEY, 16).features).all()
    assert len(os.listdir("/dev/fd")) == before
    assert capfd.readouterr().err == ""
    os.write(2, b"back")
    assert capfd.readouterr().err == "back"
    with pytest.raises(UserError):
        load_public(table, Inputs())
    assert capfd.readouterr().err, "these images do make libtiff write"


@pytest.mark.parametrize(("stage", "heard"), [("records", False), ("sources", True)])
def test_rule_20_a_library_s_log_line_is_heard_in_public_stages_only(stage, heard, tmp_path):
    config = raw_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = (
        "import logging, sys; from dpmixmin import __main__; "
        f"from dpmixmin.stages import {stage} as module; "
        "module.run = lambda *_: logging.getLogger('library').critical('a value'); "
        f"sys.exit(__main__.main(['{stage}', '--config', 'config.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "a value\n" * heard)


def test_the_nonprivate_optimum_survives_records_that_every_source_finds_impossible():
    p = np.array([[0.9, 0.1], [0.0, 0.0], [np.nan, 0.5], [0.8, 0.3]])
    weights = learn_nonprivate(SourceTable.of_labels(p)).weights
    assert np.isfinite(weights).all()
    assert weights.sum() == pytest.approx(1)


def test_the_sensitive_source_is_read_with_an_open_access_only(tmp_path, ledger):
    """Rule 26 at run time, for the source itself."""
    from dpmixmin.data import loaders

    pq.write_table(pa.table({"x": [1.0], "y": [1.0]}), tmp_path / "t.parquet")
    with ledger.open(PARTS, Derive()) as access:
        loaders.load_private(private_of(tmp_path / "t.parquet"), Inputs(), KEY, 1, access)
    with pytest.raises(PermissionError):
        loaders.load_private(private_of(tmp_path / "t.parquet"), Inputs(), KEY, 1, access)


def test_a_split_is_named_by_its_exact_fractions():
    parts = Parts(mixing=0.2000001, finetune=0.3, test=0.4999999)
    other = replace_parts(parts, mixing=0.2000002, test=0.4999998)
    names = {split.partition_name("seed=0", private_of("a", parts=each)) for each in (parts, other)}
    assert len(names) == 2


def replace_parts(parts: Parts, **values) -> Parts:
    return Parts(**{**parts.model_dump(), **values})


def test_a_chain_states_its_worst_tuning():
    assert least_public("public_standin", "user_declared") == "user_declared"
    assert least_public("none", "public_standin") == "public_standin"


def test_a_store_key_knows_the_code_that_made_its_private_inputs(monkeypatch):
    before = provenance.made({"a": 1}, ("records", "split"))
    monkeypatch.setattr(provenance, "code_digest", lambda stage: "edited" if stage == "records" else "same")
    assert provenance.made({"a": 1}, ("records", "split")) != before
    assert provenance.made({"a": 1}, ("records",))["code"] == {"records": "edited"}


def test_specs_are_values():
    spec = GridGaussian(8.0, 26.0, 1, 1.0, 40, 1.0, 1e-5)
    assert replace(spec) == spec
    assert replace(spec, clip=9.0).digest() != spec.digest()


def test_a_record_s_prediction_is_the_same_to_the_last_bit_whoever_else_is_there():
    """The predict stage asks for one record at a time; in batches, last bits depend on how many records there are."""
    torch = pytest.importorskip("torch")
    from pathlib import Path

    from dpmixmin.models import networks
    from dpmixmin.proxies.joint import source_predictions
    from dpmixmin.stages import predict

    torch.manual_seed(0)
    model = networks.cnn((1, 14, 14), (24, 48), 72, 14)
    x = np.random.default_rng(0).normal(size=(6, 196)).astype(np.float32)
    whole = source_predictions(model, x, batch=1)
    for n in range(1, 6):
        assert (source_predictions(model, x[:n], batch=1) == whole[:n]).all()
    assert "records.features[keep], batch=1)" in Path(predict.__file__).read_text()
