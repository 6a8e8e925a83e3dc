"""Texts and mail: removing a user from the SOURCE leaves every other record byte-identical (rules 11, 12, 13, 25)."""

import json
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loading import load_private as load_labelled

from dpmixmin import artifacts
from dpmixmin.data import packages, split, texts
from dpmixmin.data.text_records import SCHEMA, TextRecords
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Access, Derive, Study
from dpmixmin.sections import Inputs, Parts, Private
from dpmixmin.table_sections import HubText, ImageTable, Maildir, ParquetTable, SpamAssassin, TextFile

KEY, SPLIT_KEY = b"key of the ids", b"split key"
FRACTIONS = Parts(mixing=0.3, finetune=0.4, validation=0.1, test=0.2)
USERS = ("ann", "bob", "cem", "dai", "eva")
UNITS = {"maildir": "user", "spam_assassin": "sender"}
FORMS = ("jsonl", "csv", "parquet", "saved", "maildir", "spam_assassin")
TABLES = FORMS[:4]


def letters() -> list[dict]:
    """Letters with copies inside a user, between users and (in tables) among rows without a user; one user has one."""
    common = "The meeting is on Friday, in the small room."
    found = [{"who": user, "text": f"{common} {i % 3}"} for user in USERS[:4] for i in range(5)]
    found += [{"who": "bob", "text": f"Bob's letter {i}"} for i in range(20)]
    found += [{"who": "eva", "text": f"{common} 0"}]
    return found


NAMELESS = [{"who": None, "text": text} for text in ("The meeting is on Friday, in the small room. 0",) * 2 + ("x",)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write letters in a form; return the table's config."""
    monkeypatch.setattr(packages, "spam_assassin_folder", lambda: tmp_path / "spam_assassin")

    def write(form: str, rows: list[dict]):
        path = tmp_path / (f"t.{form}" if form in TABLES else form)
        shutil.rmtree(path, ignore_errors=True)
        if form == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif form == "csv":
            path.write_text("who,text\n" + "".join(f'{row["who"] or ""},"{row["text"]}"\n' for row in rows))
        elif form in ("parquet", "saved"):
            table = pa.Table.from_pylist(rows, schema=pa.schema([("who", pa.string()), ("text", pa.string())]))
            if form == "parquet":
                pq.write_table(table, path)
            else:
                datasets = pytest.importorskip("datasets")
                datasets.Dataset(table).save_to_disk(path)
                return HubText(kind="hub", name=str(path))
        else:
            return write_mail(form, path, rows)
        return TextFile(kind="text", path=str(path))

    return write


def write_mail(form: str, path, rows: list[dict]):
    """Write mail whose raw messages are equal where the letters are, and so that one folder holds copies."""
    for i, row in enumerate(rows):
        body = f"Subject: letter\n\n{row['text']}\n-- \na signature\n"
        if form == "maildir":
            place = path / f"{row['who']}-x" / ("sent" if i % 2 else "_sent_mail") / f"{i}."
        else:
            place = path / f"easy-ham-{1 + i % 2}" / f"{i:05d}.json"
            body = json.dumps({"text": f"From: {row['who'].upper()} <{row['who']}@mail.example>\n{body}"})
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(body)
    if form == "maildir":
        path.mkdir(exist_ok=True)
        return Maildir(kind="maildir", path=str(path), min_characters=1)
    for group in (1, 2):
        (path / f"easy-ham-{group}").mkdir(parents=True, exist_ok=True)
    return SpamAssassin(kind="spam_assassin", groups=("easy-ham-1", "easy-ham-2"), min_characters=1)


def load(table, unit="unit", cap=15, least=1) -> TextRecords:
    private = Private(
        name="letters",
        table=table,
        unit=UNITS.get(table.kind, "who") if unit == "unit" else unit,
        max_records_per_unit=cap,
        min_records_per_unit=least,
        nominal_units=10,
    )
    return texts.load_private(
        private, KEY, lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32), Access(frozenset(PARTS))
    )


def prepared(records: TextRecords) -> Counter:
    """Every record as it is prepared: ids, text, tokens and part."""
    parts = split.assign(records.unit, SPLIT_KEY, FRACTIONS).tolist()
    tokens = [array.tobytes() for array in records.tokens]
    return Counter(zip(records.record.tolist(), records.unit.tolist(), records.text, tokens, parts, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("cap", "least"), [(100, 1), (3, 1), (7, 2)])
def test_rules_11_12_25_removing_a_user_leaves_every_record_of_the_others_untouched(form, cap, least, source):
    rows = letters() + (NAMELESS if form in TABLES else [])
    full = load(source(form, rows), cap=cap, least=least)
    before = prepared(full)
    assert max(before.values()) == 1
    if least == 1:
        assert full.counts(cap)["contents_shared_by_several_units"] >= 2, "equal texts of two users stay apart"
    removed = Counter()
    for user in USERS:
        less = load(source(form, [row for row in rows if row["who"] != user]), cap=cap, least=least)
        assert not prepared(less) - before
        lost = before - prepared(less)
        assert len({unit for _, unit, *_ in lost}) == (1 if least == 1 or user != "eva" else 0)
        assert len({part for *_, part in lost}) <= 1, "a unit is in one part"
        assert less.to_arrow().schema == full.to_arrow().schema == SCHEMA
        removed += lost
    own = before - removed
    assert len({unit for _, unit, *_ in own}) == len(own) == (3 if form in TABLES and least == 1 else 0)
    sizes = sorted(Counter(unit for _, unit, *_ in removed).values())
    users = [5, 5, 5, 25] if least > 1 else [1, 5, 5, 5, 25]
    assert sizes == [min(size, cap) for size in users]


@pytest.mark.parametrize("form", FORMS)
def test_rule_11_removing_any_record_leaves_every_other_record_untouched(form, source):
    rows = letters()
    before = prepared(load(source(form, rows), unit="record"))
    assert max(before.values()) == 1
    assert sum(before.values()) == len(rows)
    for gone in range(0, len(rows), 4):
        less = prepared(load(source(form, rows[:gone] + rows[gone + 1 :]), unit="record"))
        assert not less - before
        ((_, _, text, _, _),) = before - less
        assert text == rows[gone]["text"]


@pytest.mark.parametrize("form", FORMS)
def test_rule_11_the_order_of_the_source_does_not_matter(form, source, rng):
    rows = letters()
    first = load(source(form, rows), cap=4)
    again = load(source(form, [rows[i] for i in rng.permutation(len(rows))]), cap=4)
    assert first.record.tolist() == again.record.tolist()
    assert prepared(first) == prepared(again)


def test_rule_11_ids_are_keyed(source):
    table = source("jsonl", letters())
    for unit in ("record", "who"):
        private = Private(name="letters", table=table, unit=unit, nominal_units=10)
        first, second = (
            texts.load_private(private, key, lambda text: np.zeros(1, np.int32), Access(frozenset(PARTS)))
            for key in (b"one", b"two")
        )
        assert not set(first.record) & set(second.record)
        assert not set(first.unit) & set(second.unit)


def test_rule_13_the_records_that_are_kept_are_those_with_the_smallest_ids(source):
    table = source("jsonl", letters())
    everything, capped = load(table, cap=100), load(table, cap=4)
    for unit in set(everything.unit):
        mine = sorted(everything.record[everything.unit == unit].tolist())
        assert capped.record[capped.unit == unit].tolist() == mine[:4]


def test_rule_25_a_unit_with_too_few_records_is_left_out_of_labelled_tables_too(tmp_path):
    who = ["ann"] * 5 + ["bob"] * 2 + ["cem"] + [None]
    pq.write_table(pa.table({"x": np.arange(9.0), "y": np.zeros(9), "who": who}), tmp_path / "t.parquet")
    table = ParquetTable(kind="parquet", path=str(tmp_path / "t.parquet"), features=("x",), labels=("y",))

    def sizes(**options) -> list[int]:
        private = Private(name="clinic", table=table, unit="who", nominal_units=10, **options)
        return sorted(Counter(load_labelled(private, Inputs(bound=1e6), KEY).unit.tolist()).values())

    assert sizes() == [1, 1, 2, 5]
    assert sizes(min_records_per_unit=2) == [2, 5]
    assert sizes(min_records_per_unit=2, max_records_per_unit=3) == [2, 3]
    assert sizes(min_records_per_unit=3, max_records_per_unit=2) == [2], "counted before the limit"
    assert sizes(min_records_per_unit=6) == []


def test_rule_25_mail_is_cleaned_alone_before_it_counts(source, tmp_path):
    """A message that says nothing of its own is no record: it does not help a sender over the minimum."""
    rows = [{"who": "ann", "text": "> only quoted"}, {"who": "ann", "text": "own words"}, *letters()]
    for form in ("maildir", "spam_assassin"):
        found = load(source(form, rows), least=6)
        assert "own words" in found.text
        assert not any("quoted" in text or "signature" in text for text in found.text)
        assert len(load(source(form, rows), least=7)) == len(found) - 6


def test_rule_12_a_json_line_without_unit_or_id_is_left_out_never_a_unit_of_its_own(tmp_path):
    """JSON lines have no schema: a typo must not turn a guarantee per person into one per record."""
    people = ["ann", "ann", "bob", "bob", None, None]
    rows = [{"who": who, "id": i, "text": f"letter {i}"} for i, who in enumerate(people)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = TextFile(kind="text", path=str(tmp_path / "t.jsonl"))
    with_id = table.model_copy(update={"record_id": "id"})
    assert load(table).units()[0] == 4, "null is a unit of its own"
    assert len(load(table, unit="hwo")) == len(load(table.model_copy(update={"record_id": "di"}))) == 0

    def write(rows: list, end: str = "") -> None:
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)

    lacking = [{"text": "no id", "who": "ann"}, {"text": "no unit", "id": 9}, {"text": "neither"}, "text", [1], {}]
    for chosen, unit, kept in ((table, "who", 7), (with_id, "who", 6), (with_id, "record", 7), (table, "record", 13)):
        before = load(chosen, unit=unit)
        write(rows + lacking, '{"cut')
        found = load(chosen, unit=unit)
        write(rows)
        assert len(found) == kept
        assert not prepared(before) - prepared(found), "each line is judged alone"
    assert load(table.model_copy(update={"column": "body"})).text == [""] * 6


SAME = [
    ["7", "7.0", '"7"', "7e0", "70e-1"],
    ["0", "-0.0", "-0"],
    ["7.5", '"7.5"', "75e-1"],
    ["true", '"true"'],
    ['{"a": 1, "b": 2}', '{"b": 2,"a":1}'],
    ["[7]", "[ 7 ]"],
    ["1e400", "Infinity"],
]
OTHERS = ['" 7"', '"07"', '"Ann"', '"ann"', "[7.0]", '""', "[" * 900 + "]" * 900]


@pytest.mark.parametrize("key", ["unit", "id"])
def test_rule_12_values_of_json_lines_are_compared_as_text(key, tmp_path):
    """7, 7.0 and "7" are one person; what is not unified is told in docs/sharp_edges.md."""
    spellings = [*[value for group in SAME for value in group], *OTHERS]
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "a", "key": {value}}}\n' for value in spellings))
    table = TextFile(kind="text", path=str(tmp_path / "t.jsonl"), record_id="key" if key == "id" else None)
    found = load(table, unit="record" if key == "id" else "key")
    assert sorted(Counter(found.unit.tolist()).values()) == sorted([*map(len, SAME), *[1] * len(OTHERS)])


def test_json_rows_without_an_id_share_one_as_in_other_formats(source):
    rows = [{"who": who, "text": f"letter {i}"} for i, who in enumerate(["ann", None, None, "nan"])]
    for form in TABLES:
        table = source(form, rows).model_copy(update={"record_id": "who"})
        assert sorted(Counter(load(table, unit="record").unit.tolist()).values()) == [1, 1, 2]


def test_rule_20_addresses_and_names_never_leave_the_loader(source):
    for form in FORMS:
        found = load(source(form, letters())).to_arrow()
        for column in ("record", "unit"):
            assert all(
                len(value) == 32 and set(value) <= set("0123456789abcdef") for value in found[column].to_pylist()
            )
        shown = repr(found["text"].to_pylist())
        assert "mail.example" not in shown


def test_rule_11_whatever_deals_units_anew_gives_the_partition_another_name():
    """Kind, format, column, id column and classes do; places, limits and cleaning do not."""

    def name(table, **options) -> str:
        return split.partition_name("seed=0", Private(name="letters", table=table, nominal_units=10, **options))

    def text(path="a.csv", **options):
        return TextFile(kind="text", path=path, **options)

    def images(**options):
        return ImageTable(kind="images", path="f", size=(2, 2), **options)

    names = [
        name(text()),
        name(text(), unit="who"),
        name(text("a.jsonl")),
        name(text("a.parquet")),
        name(text(column="body")),
        name(text(record_id="id")),
        name(text(record_id="nr")),
        name(HubText(kind="hub", name="a")),
        name(HubText(kind="hub", name="a", record_id="id")),
        name(Maildir(kind="maildir", path="m")),
        name(Maildir(kind="maildir", path="m"), unit="user"),
        name(SpamAssassin(kind="spam_assassin")),
        name(images(classes=("a", "b"))),
        name(images(classes=("b", "a"))),
        name(images(table="t.csv")),
        name(images(table="t.csv", labels=("a", "b"))),
        name(images(table="t.csv", record_id="id")),
    ]
    assert len(set(names)) == len(names)
    assert name(text("a.json")) == name(text("a.jsonl")), "one reader"
    assert name(text("b.csv")) == name(text(licence="none")) == names[0]
    assert name(Maildir(kind="maildir", path="n", min_characters=5, folders=("sent",))) == names[9]
    assert name(HubText(kind="hub", name="b", rows=5)) == names[7]
    assert "mail-v1" in names[9]


def test_open_part_gives_texts_by_unit(source, tmp_path, ledger, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = source("jsonl", [{"who": f"p{i % 40}", "text": f"letter {i}"} for i in range(120)])
    private = Private(name="letters", table=table, unit="who", nominal_units=10, parts=FRACTIONS)
    with ledger.open(PARTS, Derive()) as access:
        records = texts.load_private(private, KEY, lambda text: np.arange(len(text), dtype=np.int32), access)
    paths, wanted = Paths("exp"), split.partition(ledger.keys, private, 0)
    manifest = artifacts.manifest(
        "x", config={}, code="", parents=[], private=True, partition={"ids": wanted.ids, "partition": wanted.name}
    )
    parts = split.assign(records.unit, wanted.key, FRACTIONS)
    dealt = pa.table({"record": pa.array(records.record), "unit": pa.array(records.unit), "part": pa.array(parts)})
    artifacts.publish(paths.records(), {"records.parquet": artifacts.parquet_bytes(records.to_arrow())}, manifest)
    artifacts.publish(paths.split(0), {"split.parquet": artifacts.parquet_bytes(dealt)}, manifest)
    for part in ("mixing", "finetune"):
        with ledger.open((part,), Study("a look")) as access:
            found = split.open_part(access, paths, wanted, 0)
        expected = records.take(parts == part)
        assert isinstance(found, TextRecords)
        assert found.text == expected.text
        assert len(found) > 0
        assert all(map(np.array_equal, found.tokens, expected.tokens))
