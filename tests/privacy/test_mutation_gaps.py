"""What the mutants of tests/mutations showed to be missing elsewhere."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private

from dpmixmin.data import loaders
from dpmixmin.privacy.accounting import Composition
from dpmixmin.privacy.events import GaussianEvent
from dpmixmin.privacy.mechanisms import GridGaussian, ModelGaussian
from dpmixmin.privacy.noise import NoiseSource
from dpmixmin.sections import Inputs, Private
from dpmixmin.table_sections import ParquetTable


@pytest.mark.parametrize("record_id", [None, "visit"])
def test_rule_11_ids_of_columns_and_units_are_keyed(record_id, tmp_path):
    """Whoever knows a patient's number cannot compute the id: another key gives other ids, one key the same."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": [0.0, 1.0], "y": [0.0, 1.0], "patient": [7, 8], "visit": [1, 2]}), path)
    table = ParquetTable(kind="parquet", path=str(path), features=("x",), labels=("y",), record_id=record_id)
    private = Private(name="clinic", table=table, unit="patient", max_records_per_unit=2, nominal_units=10)
    first, same, other = (load_private(private, Inputs(), key) for key in (b"one", b"one", b"two"))
    assert np.array_equal(first.record, same.record)
    assert np.array_equal(first.unit, same.unit)
    assert not set(first.record) & set(other.record)
    assert not set(first.unit) & set(other.unit)
    assert loaders.content_ids([b"a"], b"one") != loaders.content_ids([b"a"], b"two")


@pytest.mark.parametrize("k", [1, 2, 5])
def test_rule_15_every_coordinate_of_a_release_gets_noise(k):
    """An empty part, five times: false-alarm rate below 1e-25, a zero having probability 4e-7 a draw."""
    grid = GridGaussian(1.0, 1.0, 1, 1.0, 100, 1.0, 1e-5)
    model = ModelGaussian(1.0, 1.0, 1, 1.0, 100, 1.0, 1e-5)
    releases = [grid.release_sum(np.zeros((0, k)), NoiseSource()) for _ in range(5)]
    assert np.abs(releases).max(axis=0).all()
    releases = [model.release_sum(np.zeros(k), NoiseSource()) for _ in range(5)]
    assert np.abs(releases).max(axis=0).all()


def test_rule_16_four_full_batches_with_twice_the_noise_cost_what_one_costs():
    once, often = GaussianEvent(2.0, 1.0, 1), GaussianEvent(4.0, 1.0, 4)
    for delta in (1e-3, 1e-6):
        assert Composition([often]).epsilon(delta) == pytest.approx(Composition([once]).epsilon(delta), rel=1e-9)


def test_rule_17_epsilon_is_zero_and_never_less_where_delta_pays_for_everything():
    for noise in (1e3, 1e6):
        assert Composition([GaussianEvent(noise, 1.0, 1)]).epsilon(0.01) == 0
