"""Tables of text: bad public input is one line, private values are never an error (rules 5, 6, 13, 20, 25)."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpmixmin.data import texts
from dpmixmin.data.text_records import SCHEMA, TextRecords
from dpmixmin.errors import UserError
from dpmixmin.privacy.ledger import PARTS, Access
from dpmixmin.sections import Private
from dpmixmin.table_sections import HubText, Maildir, TextFile

KEY = b"key of the ids"
WITHOUT_LIMIT = 10**9
NO_TEXT = pa.array([b"fine", b"\xff\xfe", None, b""]).view(pa.string())
"""A Parquet file may hold such strings: pyarrow does not check them when it reads."""


def encode(text: str) -> np.ndarray:
    """One token per byte, and a mark at the end that the empty text would have too."""
    return np.frombuffer(text.encode() + b"\0", dtype=np.uint8).astype(np.int32)


def load(table, **options) -> TextRecords:
    options.setdefault("nominal_units", 10)
    return texts.load_private(Private(name="letters", table=table, **options), KEY, encode, Access(frozenset(PARTS)))


def refused(call, *arguments, **options) -> str:
    """Return the one line that a call is refused with."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert text
    assert "\n" not in text
    return text


@pytest.fixture
def write(tmp_path):
    """Write rows in a format; return the config of the table."""

    def of(form: str, rows: list[dict], **options) -> TextFile:
        path = tmp_path / f"t.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif form == "csv":
            names = list(rows[0])
            quoted = [
                ['"' + str(row[n]).replace('"', '""') + '"' if row[n] is not None else "" for n in names]
                for row in rows
            ]
            path.write_text("\n".join([",".join(names), *map(",".join, quoted)]) + "\n", newline="")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TextFile(kind="text", path=str(path), **options)

    return of


FORMS = ("jsonl", "json", "csv", "parquet")
LETTERS = ['Dear "A",\nhow are\u2028you?', "Grüße, B", "third, and last", "Grüße, B"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_texts_each_once_in_the_order_of_the_file(form, write):
    table = write(form, [{"body": text, "other": 1} for text in LETTERS], column="body")
    assert texts.read_public(table, WITHOUT_LIMIT) == LETTERS[:3]
    assert texts.read_public(table.model_copy(update={"rows": 2}), WITHOUT_LIMIT) == LETTERS[:2]


@pytest.mark.parametrize("form", FORMS)
def test_public_reading_stops_at_the_limit_and_cuts_the_last_text(form, write):
    rows = [{"text": text} for text in ("12345", "12345", "abcde", None, "never read")]
    assert texts.read_public(write(form, rows), 8) == ["12345", "abc"]
    assert texts.read_public(write(form, rows), 5) == ["12345"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [None, "", " \n"])
def test_a_public_row_without_text_is_refused_with_its_number(form, bad, write):
    text = refused(texts.read_public, write(form, [{"n": 0, "text": "a"}, {"n": 1, "text": bad}]), WITHOUT_LIMIT)
    assert "row 1 has no text in column `text`" in text


@pytest.mark.parametrize("line", [b'{"text": NaN}', b'{"text": 5}', b"{", b'"text"', b'{"text": "\\ud800"}', b"\xff"])
def test_a_public_line_that_is_no_text_is_refused_with_its_number(line, tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    table = TextFile(kind="text", path=str(tmp_path / "t.jsonl"))
    assert "row 1" in refused(texts.read_public, table, WITHOUT_LIMIT)


def test_files_and_schemas_that_do_not_fit_are_refused_for_public_and_private_alike(write, tmp_path):
    for call in (lambda table: texts.read_public(table, 100), load):
        for form in ("csv", "parquet"):
            text = refused(call, write(form, [{"body": "a", "other": "b"}]))
            assert "no column `text`; it has: body, other" in text
        assert "must hold text" in refused(call, write("parquet", [{"text": 5}]))
        (tmp_path / "t.parquet").write_bytes(b"not parquet")
        assert "not a readable Parquet file" in refused(call, TextFile(kind="text", path=str(tmp_path / "t.parquet")))
        (tmp_path / "t.txt").write_text("a")
        assert "unknown suffix `.txt`" in refused(call, TextFile(kind="text", path=str(tmp_path / "t.txt")))
        assert "no such data file" in refused(call, TextFile(kind="text", path=str(tmp_path / "none.csv")))
    (tmp_path / "e.csv").write_text("")
    assert "no column `text`" in refused(load, TextFile(kind="text", path=str(tmp_path / "e.csv")))
    for form in ("csv", "parquet"):
        assert "no column `who`" in refused(load, write(form, [{"text": "a"}]), unit="who")
        assert "no column `id`" in refused(load, write(form, [{"text": "a"}], record_id="id"))
    assert "private.table.rows" in refused(load, write("csv", [{"text": "a"}]).model_copy(update={"rows": 3}))
    assert "no column `who`; use `record` or `user`" in refused(
        load, Maildir(kind="maildir", path=str(tmp_path)), unit="who"
    )


def test_an_empty_public_table_is_refused_and_a_private_one_is_a_table(write, tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("text\n")
    (tmp_path / "t.jsonl").write_text("")
    for form in ("parquet", "csv", "jsonl"):
        table = TextFile(kind="text", path=str(tmp_path / f"t.{form}"))
        assert "no rows" in refused(texts.read_public, table, WITHOUT_LIMIT)
        found = load(table)
        assert len(found) == found.units()[0] == 0
        assert found.to_arrow().schema == SCHEMA
        assert len(TextRecords.from_arrow(found.to_arrow())) == 0


def test_the_sensitive_source_is_read_with_an_open_access_only(write, ledger):
    table = write("jsonl", [{"text": "a"}])
    access = Access(frozenset(PARTS))
    access.is_open = False
    with pytest.raises(PermissionError):
        texts.load_private(Private(name="letters", table=table, nominal_units=10), KEY, encode, access)


# -- private values -------------------------------------------------------------------------------------------


def bad_table(form: str, folder) -> TextFile:
    """A table of one good text and what is none, as bytes of the format."""
    path = folder / f"t.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": NO_TEXT}), path)
    elif form == "csv":
        path.write_bytes(b"n,text\n1,fine\n2,\xff\xfe\n3\n4,\n")
    else:
        path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"tex\n')
    return TextFile(kind="text", path=str(path))


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
@pytest.mark.filterwarnings("error")
def test_rule_6_what_is_no_text_is_the_empty_text_without_tokens(form, tmp_path, capfd, caplog):
    found = load(bad_table(form, tmp_path))
    assert sorted(found.text) == ["", "", "", "fine"]
    for text, tokens in zip(found.text, found.tokens, strict=True):
        assert tokens.tolist() == (encode(text).tolist() if text else [])
        assert tokens.dtype == np.int32
    assert len(set(found.record)) == 4
    assert found.counts(15)["empty_texts"] == 3
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize("value", [None, 5, 1.5, math.nan, True, [], {}, ["a"], {"a": 1}, 10**400])
def test_rule_20_no_value_of_a_json_line_is_an_error(value, write):
    lines = [{"text": "fine", "who": "ann", "id": 1}, {"text": value, "who": value, "id": value}]
    found = load(write("jsonl", lines, record_id="id"), unit="who")
    assert sorted(found.text) == ["", "fine"]
    assert found.units()[0] == 2


def test_rule_20_a_long_private_text_of_a_csv_is_no_error(write):
    assert [len(text) for text in load(write("csv", [{"text": "x" * 300_000}])).text] == [300_000]


def test_texts_are_encoded_one_at_a_time_and_only_those_that_are_kept(write):
    seen = []
    table = write("jsonl", [{"text": f"letter {i}", "who": "ann"} for i in range(20)])
    private = Private(name="letters", table=table, unit="who", max_records_per_unit=4, nominal_units=10)
    found = texts.load_private(private, KEY, lambda text: seen.append(text) or encode(text), Access(frozenset(PARTS)))
    assert seen == found.text
    assert len(seen) == 4


# -- the hub, and saved datasets ------------------------------------------------------------------------------


def test_a_saved_dataset_is_read_as_its_rows_stand(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"body": ["one", "two", "two", "three"], "who": ["a", "b", None, "a"], "other": [1, 2, 3, 4]}
    whole = datasets.Dataset.from_dict(rows)
    whole.select([0, 2, 3]).save_to_disk(tmp_path / "saved")
    table = HubText(kind="hub", name=str(tmp_path / "saved"), column="body")
    datasets.enable_progress_bars()
    assert texts.read_public(table, WITHOUT_LIMIT) == ["one", "two", "three"]
    assert datasets.are_progress_bars_disabled(), "they would show the size of a private table"
    assert texts.read_public(table.model_copy(update={"rows": 1}), WITHOUT_LIMIT) == ["one"]
    found = load(table, unit="who")
    assert sorted(found.text) == ["one", "three", "two"]
    assert found.units()[0] == 2
    assert "no column `text`; it has: body, who, other" in refused(load, table.model_copy(update={"column": "text"}))
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(tmp_path / "both")
    both = HubText(kind="hub", name=str(tmp_path / "both"), split="test", column="body")
    assert texts.read_public(both, WITHOUT_LIMIT) == ["two"]
    assert "no split `dev`; it has: train, test" in refused(
        texts.read_public, both.model_copy(update={"split": "dev"}), WITHOUT_LIMIT
    )
    (tmp_path / "empty").mkdir()
    empty = HubText(kind="hub", name=str(tmp_path / "empty"))
    assert "cannot read it (FileNotFoundError)" in refused(texts.read_public, empty, WITHOUT_LIMIT)
    assert "no such folder" in refused(load, HubText(kind="hub", name=str(tmp_path / "none")))


def test_a_hub_dataset_is_streamed_as_far_as_rows_say(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked, given = [], []

    def stream():
        for i in range(100):
            given.append(i)
            yield {"text": f"text {i}"}

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.IterableDataset.from_generator(stream)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = HubText(kind="hub", name="owner/corpus", subset="en", split="validation", revision="abc", rows=5)
    assert texts.read_public(source, WITHOUT_LIMIT) == [f"text {i}" for i in range(5)]
    assert asked == [(("owner/corpus", "en"), {"split": "validation", "revision": "abc", "streaming": True})]
    assert len(given) < 10
    assert len(texts.read_public(source, 10)) == 2
    assert "no column `body`" in refused(texts.read_public, source.model_copy(update={"column": "body"}), 10)


def test_the_hubs_exceptions_become_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fail(*arguments, **options):
        raise ConnectionError("several\nlines of something")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    text = refused(texts.read_public, HubText(kind="hub", name="owner/corpus"), WITHOUT_LIMIT)
    assert "owner/corpus" in text
    assert "ConnectionError" in text
    assert "lines" not in text


# -- the table ------------------------------------------------------------------------------------------------


def some_records() -> TextRecords:
    found = ["b", "", "a", "a", "c"]
    return TextRecords(
        np.asarray(["5", "4", "3", "2", "1"]),
        np.asarray(["v", "u", "v", "u", "w"]),
        found,
        [encode(t)[:-1] for t in found],
    )


def test_text_records_are_sorted_chosen_and_survive_arrow():
    records = some_records().sorted()
    assert records.record.tolist() == ["2", "4", "3", "5", "1"]
    assert records.text == ["a", "", "a", "b", "c"]
    assert records.units()[1].tolist() == [0, 0, 1, 1, 2]
    table = records.to_arrow()
    assert table.schema == SCHEMA
    mask = np.asarray([True, False, True, False, True])
    halves = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    for again in (TextRecords.from_arrow(table), TextRecords.from_arrow(halves)):
        assert again.text == records.text
        assert [tokens.tolist() for tokens in again.tokens] == [[97], [], [97], [98], [99]]
        assert all(tokens.dtype == np.int32 and tokens.flags.writeable for tokens in again.tokens)
        assert again.take(mask).text == again.take(np.asarray([0, 2, 4])).text == ["a", "a", "c"]
    assert TextRecords.from_arrow(table.slice(3)).tokens[0].tolist() == [98]


def test_counts_are_what_an_owner_wants_to_know():
    counts = some_records().counts(2)
    assert counts == {
        "records": 5,
        "units": 3,
        "units_at_the_record_limit": 2,
        "empty_texts": 1,
        "tokens": 4,
        "tokens_per_record": {"0%": 0, "25%": 1, "50%": 1, "75%": 1, "90%": 1, "99%": 1, "100%": 1},
        "contents_shared_by_several_units": 1,
    }
    nothing = some_records().take(np.zeros(5, dtype=bool)).counts(2)
    assert json.dumps(nothing)
    assert nothing["records"] == nothing["tokens"] == 0
