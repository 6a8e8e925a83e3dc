"""A release and its tables are about one partition, a deployment about one unit (rules 11, 12, 21, 26)."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private

from dpmixmin import artifacts
from dpmixmin.data import split
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths
from dpmixmin.privacy import statement
from dpmixmin.privacy.keys import Keys, bind
from dpmixmin.privacy.ledger import Cap, Derive, Ledger, Mechanism
from dpmixmin.privacy.mechanisms import GridGaussian
from dpmixmin.sections import Inputs, Private
from dpmixmin.table_sections import ParquetTable

SPEC = GridGaussian.for_target(epsilon=1.0, delta=1e-5, clip=2.0, steps=5, sampling_rate=1.0, nominal_units=100)
PURPOSE = Mechanism(SPEC, {"stage": "mixture", "task": "odd"}, {}, {"config": {}}, "code")


def private_of(path="a.parquet", **options) -> Private:
    table = ParquetTable(kind="parquet", path=str(path), features=("x",), labels=("y",))
    return Private(name="clinic", table=table, nominal_units=100, **options)


def write(folder, partition, name="split", **columns) -> None:
    table = pa.table({"record": ["a", "b"], "unit": ["a", "b"], "part": ["mixing", "finetune"], **columns})
    manifest = artifacts.manifest(
        name, config={}, code="c", parents=[], private=True,
        partition={"ids": partition.ids, "partition": partition.name},
    )  # fmt: skip
    artifacts.publish(folder, {f"{name}.parquet": artifacts.parquet_bytes(table)}, manifest)


def test_rule_12_a_mechanism_reads_tables_of_its_own_partition_only(tmp_path, monkeypatch):
    """A partition left over from another ledger, key or id rule would put one unit into both mechanisms."""
    monkeypatch.chdir(tmp_path)
    paths, private = Paths("exp"), private_of()
    first, second = (Ledger(tmp_path / name, "clinic", cap=Cap(9.0, 1e-5)) for name in ("x", "y"))
    stale, wanted = (split.partition(ledger.keys, private, 0) for ledger in (first, second))
    assert stale.name != wanted.name
    write(paths.split(0), stale)
    with second.open(("mixing",), Derive()) as access, pytest.raises(UserError, match="made with other"):
        access.table(paths.split(0), "split", ids=wanted.ids, partition=wanted.name)
    with pytest.raises(UserError, match="other partition"), second.open(("mixing",), PURPOSE, wanted.name) as release:
        release.table(paths.split(0), "split")
    assert [entry.state for entry in second.entries()] == ["void"]
    artifacts.unrestrict_for_tests()
    write(paths.split(0), wanted)
    with second.open(("mixing",), PURPOSE, wanted.name) as release:
        assert release.table(paths.split(0), "split")["record"].to_pylist() == ["a"]
        release.commit({"w": b"1"}, {})


def test_rule_11_another_column_or_type_deals_nobody_anew(tmp_path):
    """Ids by content are made of the configured columns, as numbers."""
    x, y = [0.5, 1.5, 2.0, 2.0], [0, 1, 0, 0]
    ids = []
    for name, columns in {
        "plain": {"x": x, "y": y},
        "a note": {"x": x, "y": y, "note": ["a", "b", "c", "d"]},
        "other types": {"x": pa.array(x, pa.float32()), "y": pa.array(y, pa.int8())},
        "another order of columns": {"y": y, "x": x},
    }.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        found = load_private(private_of(tmp_path / f"{name}.parquet"), Inputs(), b"key", 1)
        ids.append(sorted(found.record.tolist()))
    assert len(set(ids[0])) == 4
    assert all(each == ids[0] for each in ids)


def test_rule_21_a_deployment_is_held_to_its_mode_and_its_unit(tmp_path):
    """Entries that protect different units have no common guarantee, and a study would not keep the cap."""
    bind(tmp_path, deploy=False, unit="record")
    bind(tmp_path, deploy=False, unit="patient")
    bind(tmp_path, deploy=True, unit="patient")
    bind(tmp_path, deploy=True, unit="patient")
    with pytest.raises(UserError, match="protects `patient`, not `record`"):
        bind(tmp_path, deploy=True, unit="record")
    with pytest.raises(UserError, match="belongs to a deployment"):
        bind(tmp_path, deploy=False, unit="patient")


def test_rule_21_a_statement_never_adds_up_what_protects_different_units():
    entry = {
        "entry": "a", "cell": {}, "parts": ["mixing"], "split": "s", "release": "first", "unit": "patient",
        "delta": 1e-5, "adjacency": "add_remove", "sampler_total_variation": 0.0, "private_randomness": True,
        "events": [{"kind": "gaussian", "noise_multiplier": 9.0, "sampling_rate": 1.0, "steps": 1,
                    "replace_factor": 2.0}],
    }  # fmt: skip
    with pytest.raises(UserError, match="different units"):
        statement.build([entry], delta=1e-5, tuning="none", others=[{**entry, "entry": "b", "unit": "record"}])


def test_keys_of_a_study_do_not_follow_its_folder(tmp_path):
    one, two = Keys(tmp_path / "a" / "clinic", deploy=False), Keys(tmp_path / "b" / "clinic", deploy=False)
    assert one.of_ids() == two.of_ids()
    assert one.of_split(3) == two.of_split(3) != one.of_split(4)
