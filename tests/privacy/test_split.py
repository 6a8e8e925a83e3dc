"""Units and parts: removing a unit moves nobody, from the SOURCE FILE on (rules 10, 11, 12, 13, 25)."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private
from scipy.stats import binomtest

from dpmixmin.data.fetch import idx_bytes
from dpmixmin.data.loaders import content_ids
from dpmixmin.data.records import Records
from dpmixmin.data.split import assign, partition_name
from dpmixmin.privacy.ledger import PARTS
from dpmixmin.sections import Inputs, Parts, Private
from dpmixmin.table_sections import IdxTable, ParquetTable

KEY = b"key of the ids"
FRACTIONS = Parts(mixing=0.3, finetune=0.4, validation=0.1, test=0.2)
INPUTS = Inputs(bound=1e6)


def key_of(seed: int) -> bytes:
    return b"split key %d" % seed


def parts_of(records: Records, seed: int = 0) -> np.ndarray:
    return assign(records.unit, key_of(seed), FRACTIONS)


def contents(records: Records) -> list[tuple]:
    """Each record's content: features and labels as bytes."""
    columns = [records.features, *(records.labels[name][:, None] for name in sorted(records.labels))]
    return [row.tobytes() for row in np.concatenate(columns, axis=1).astype(np.float32)]


def assigned(records: Records) -> Counter:
    """Count every (content, part)."""
    return Counter(zip(contents(records), parts_of(records).tolist(), strict=True))


# -- the hash -------------------------------------------------------------------------------------------------


def test_rule_11_removing_any_unit_moves_nobody():
    units = np.asarray([f"unit {i}" for i in range(60)])
    before = assign(units, key_of(0), FRACTIONS)
    assert len(set(before)) == 4
    for gone in range(len(units)):
        after = assign(np.delete(units, gone), key_of(0), FRACTIONS)
        assert after.tolist() == np.delete(before, gone).tolist()


def test_rule_11_the_part_depends_on_id_and_key_alone(rng):
    units = np.asarray([f"unit {i}" for i in range(200)])
    before = assign(units, key_of(0), FRACTIONS)
    order = rng.permutation(len(units))
    assert assign(units[order], key_of(0), FRACTIONS).tolist() == before[order].tolist()
    other = assign(units, key_of(1), FRACTIONS)
    assert (other != before).mean() > 0.3


def test_rule_11_whatever_deals_units_anew_gives_the_partition_another_name():
    """Key, fractions, unit, id column, and without one the columns whose content makes the id."""

    def private(unit="record", parts=FRACTIONS, **table) -> Private:
        values = {"kind": "parquet", "path": "a.parquet", "features": ("x",), "labels": ("y",), **table}
        return Private(name="clinic", table=ParquetTable(**values), unit=unit, nominal_units=100, parts=parts)

    idx = Private(name="clinic", table=IdxTable(kind="idx", images="i", labels="l"), nominal_units=100)
    names = [
        partition_name("seed=0", private()),
        partition_name("seed=1", private()),
        partition_name("seed=0", private(parts=Parts())),
        partition_name("seed=0", private("patient")),
        partition_name("seed=0", private(record_id="row")),
        partition_name("seed=0", private(record_id="visit")),
        partition_name("seed=0", private(labels=("y", "z"))),
        partition_name("seed=0", private(features=("x", "w"))),
        partition_name("seed=0", private(features=("x", "y"), labels=("z",))),
        partition_name("seed=0", idx),
    ]
    assert len(set(names)) == len(names)
    same = [private(path="b.parquet"), private(licence="none")]
    assert {partition_name("seed=0", each) for each in same} == {names[0]}


def test_rule_12_each_unit_is_in_exactly_one_part():
    units = np.asarray([f"unit {i % 37}" for i in range(500)])
    parts = assign(units, key_of(0), FRACTIONS)
    assert len(set(zip(units.tolist(), parts.tolist(), strict=True))) == 37
    assert set(parts) <= set(PARTS)


def test_fractions_are_respected():
    """20,000 unrelated ids under 3 keys: exact binomial tests, false-alarm rate 1e-9 in all (the ids are fixed)."""
    units = np.asarray([f"patient {i}" for i in range(20_000)])
    for seed in range(3):
        parts = assign(units, key_of(seed), FRACTIONS)
        for part in PARTS:
            count = int((parts == part).sum())
            assert binomtest(count, len(units), getattr(FRACTIONS, part)).pvalue > 1e-9 / 12


def test_parts_of_two_keys_are_independent():
    """Exact binomial test, p-value above 1e-9: one key's parts say nothing about another's."""
    units = np.asarray([f"patient {i}" for i in range(20_000)])
    both = (assign(units, key_of(0), FRACTIONS) == "mixing") & (assign(units, key_of(1), FRACTIONS) == "mixing")
    assert binomtest(int(both.sum()), len(units), 0.3**2).pvalue > 1e-9


def test_a_part_of_fraction_zero_gets_nobody_and_rounding_loses_nobody():
    units = np.asarray([f"patient {i}" for i in range(5000)])
    parts = assign(units, key_of(0), Parts(mixing=0.1, finetune=0.7, validation=0.0, test=0.2))
    assert set(parts) == {"mixing", "finetune", "test"}
    thirds = Parts(mixing=1 / 3, finetune=1 / 3, validation=1 / 3, test=0.0)
    assert len(assign(units, key_of(0), thirds)) == len(units)


def test_rule_5_an_empty_table_has_no_parts():
    assert assign(np.asarray([], dtype=np.str_), key_of(0), FRACTIONS).tolist() == []


# -- from the source file (rule 11) ---------------------------------------------------------------------------


def clinic_rows(rng) -> list[dict]:
    """Twenty rows with duplicates inside a person, between persons and among rows without a person."""
    rows = [
        {"x": float(rng.integers(0, 3)), "y": float(rng.integers(0, 2)), "person": person}
        for person in ["ann", "bob", "cem", "dai", None]
        for _ in range(3)
    ]
    return [*rows, rows[0], rows[0], rows[4], rows[13], {"x": math.nan, "y": 1.0, "person": "ann"}]


def write_clinic(path, rows) -> None:
    schema = pa.schema([("x", pa.float64()), ("y", pa.float64()), ("person", pa.string()), ("id", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def clinic(path, unit="record", cap=15, record_id=None) -> Private:
    table = ParquetTable(kind="parquet", path=str(path), features=("x",), labels=("y",), record_id=record_id)
    return Private(name="clinic", table=table, unit=unit, max_records_per_unit=cap, nominal_units=10)


@pytest.mark.parametrize("record_id", [None, "id"])
def test_rule_11_deleting_a_row_of_the_parquet_file_moves_no_other_record(record_id, tmp_path, rng):
    path = tmp_path / "clinic.parquet"
    rows = [{**row, "id": 100 + i if record_id else 0} for i, row in enumerate(clinic_rows(rng))]
    write_clinic(path, rows)
    private = clinic(path, record_id=record_id)
    full = load_private(private, INPUTS, KEY)
    before = assigned(full)
    assert max(Counter(contents(full)).values()) > 2, "duplicates are in play"
    assert len(set(full.record)) == len(rows)
    for gone in range(len(rows)):
        write_clinic(path, rows[:gone] + rows[gone + 1 :])
        less = load_private(private, INPUTS, KEY)
        assert set(less.record) < set(full.record)
        lost = before - assigned(less)
        assert sum(lost.values()) == 1
        assert not assigned(less) - before
        ((content, _),) = lost
        assert content == np.asarray([[rows[gone]["x"], rows[gone]["y"]]], dtype=np.float32).tobytes()


def test_rule_11_deleting_a_record_of_the_idx_pair_moves_no_other_record(tmp_path, rng):
    images = rng.integers(0, 2, size=(24, 2, 2)).astype(np.uint8)
    labels = rng.integers(0, 2, size=24).astype(np.uint8)
    images[5:9], labels[5:9] = images[0], labels[0]
    table = IdxTable(kind="idx", images=str(tmp_path / "images"), labels=str(tmp_path / "labels"))
    private = Private(name="clinic", table=table, nominal_units=20)

    def load(keep):
        (tmp_path / "images").write_bytes(idx_bytes(images[keep]))
        (tmp_path / "labels").write_bytes(idx_bytes(labels[keep]))
        return load_private(private, INPUTS, KEY)

    everyone = np.arange(24)
    full = load(everyone)
    before = assigned(full)
    assert len(set(full.record)) == 24
    for gone in everyone:
        less = load(np.delete(everyone, gone))
        assert set(less.record) < set(full.record)
        assert sum((before - assigned(less)).values()) == 1
        assert not assigned(less) - before


def test_rule_11_the_order_of_the_source_file_does_not_matter(tmp_path, rng):
    rows = clinic_rows(rng)
    tables = []
    for order in (np.arange(len(rows)), rng.permutation(len(rows))):
        write_clinic(tmp_path / "t.parquet", [rows[i] for i in order])
        tables.append(load_private(clinic(tmp_path / "t.parquet", unit="person", cap=2), INPUTS, KEY))
    assert contents(tables[0]) == contents(tables[1])
    assert tables[0].record.tolist() == tables[1].record.tolist()
    assert tables[0].unit.tolist() == tables[1].unit.tolist()


@pytest.mark.parametrize("cap", [15, 2])
def test_rules_11_12_25_removing_a_person_leaves_every_record_of_the_others_untouched(cap, tmp_path, rng):
    path = tmp_path / "clinic.parquet"
    rows = clinic_rows(rng)
    write_clinic(path, rows)
    private = clinic(path, unit="person", cap=cap)

    def prepared():
        records = load_private(private, INPUTS, KEY)
        whole = zip(records.record, records.unit, contents(records), parts_of(records), strict=True)
        return records, set(whole)

    full, before = prepared()
    assert len(before) == len(full)
    assert all(len(set(parts_of(full)[full.unit == unit])) == 1 for unit in full.unit)
    removed = set()
    for person in ("ann", "bob", "cem", "dai"):
        write_clinic(path, [row for row in rows if row["person"] != person])
        _, after = prepared()
        assert after < before
        assert len({unit for _, unit, _, _ in before - after}) == 1, "one unit goes, and whole"
        removed |= before - after
    nameless = before - removed
    expected = sum(row["person"] is None for row in rows)
    assert len({unit for _, unit, _, _ in nameless}) == len(nameless) == expected, "no person: a unit of its own"


def test_rule_13_a_unit_keeps_at_most_its_cap_chosen_by_that_unit_alone(tmp_path, rng):
    path = tmp_path / "clinic.parquet"
    rows = [{"x": float(i), "y": 0.0, "person": "ann" if i < 30 else f"p{i}"} for i in range(40)]
    write_clinic(path, rows)
    everything = load_private(clinic(path, unit="person", cap=100), INPUTS, KEY)
    capped = load_private(clinic(path, unit="person", cap=4), INPUTS, KEY)
    assert len(everything) == 40
    sizes = Counter(capped.unit.tolist())
    assert sorted(sizes.values()) == [1] * 10 + [4]
    (ann,) = [unit for unit, size in sizes.items() if size == 4]
    smallest = sorted(everything.record[everything.unit == ann].tolist())[:4]
    assert capped.record[capped.unit == ann].tolist() == smallest
    # A record of Ann's that was cut and is now gone changes nothing; neither do other people's.
    kept = set(capped.features[capped.unit == ann, 0].tolist())
    cut = next(i for i in range(30) if float(i) not in kept)
    write_clinic(path, [row for i, row in enumerate(rows) if i not in (cut, 35)])
    again = load_private(clinic(path, unit="person", cap=4), INPUTS, KEY)
    assert set(again.record) == set(capped.record[capped.features[:, 0] != 35])


def test_rule_10_the_only_record_of_a_class_leaves_the_shapes_as_they_are(tmp_path, rng):
    rows = [{"x": 0.5, "y": float(i == 0), "person": "ann"} for i in range(5)]
    shapes = []
    for part in (rows, rows[1:], []):
        write_clinic(tmp_path / "t.parquet", part)
        schema = load_private(clinic(tmp_path / "t.parquet"), INPUTS, KEY).to_arrow().schema
        shapes.append(schema)
    assert shapes[0] == shapes[1] == shapes[2]


def test_content_ids_are_keyed_and_number_equal_rows():
    ids = content_ids([b"a", b"b", b"a", b"a"], KEY)
    assert len(set(ids)) == 4
    assert content_ids([b"a", b"a"], KEY) == [ids[0], ids[2]]
    assert content_ids([b"b"], KEY) == [ids[1]]
    assert not set(ids) & set(content_ids([b"a", b"b", b"a", b"a"], b"another key"))
