"""Ways in which one private record once reached the public, or moved more than it may; each stays closed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private

from dpmixmin import artifacts, provenance
from dpmixmin.data import split
from dpmixmin.mixing.learners import learn_nonprivate
from dpmixmin.mixing.objective import SourceTable, UnitGradients
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive, Study
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import InsecureNoise
from dpmixmin.privacy.statement import least_public
from dpmixmin.sections import Inputs, Parts, Private
from dpmixmin.table_sections import ParquetTable

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
