"""Loaders of text: JSON lines, CSV, Parquet, and datasets of the Hugging Face hub or on disk.

Every transformation here is a function of ONE record and public constants (docs/rules.md, rule 25). For PUBLIC data a
row without text is an error, and equal texts are kept once. For PRIVATE data only the schema is an error: what is no
text becomes the empty text, which has no tokens and contributes zero later (rule 6).

JSON lines have neither schema nor types. So a private line without the text column is an empty text too; but one
without the configured unit or id column is LEFT OUT, because a guess would break the guarantee: with a mistyped unit,
every record would be a unit of its own. And the values of these two columns are compared as text, so that 7, 7.0 and
"7" are one person (:func:`_json_id`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpmixmin.data import fetch, mail, packages
from dpmixmin.data.loaders import (
    column_values,
    csv_rows,
    identify,
    owned,
    parquet_table,
    require_columns,
    within_limits,
)
from dpmixmin.data.text_records import RawTexts, TextRecords
from dpmixmin.errors import UserError
from dpmixmin.sections import Private
from dpmixmin.table_sections import HubText, TextFile

if TYPE_CHECKING:
    import pyarrow as pa

_Row = dict[str, Any]


def read_public(source: TextFile | HubText, limit_characters: int) -> list[str]:
    """Read a public source in its own order, each text once.

    Args:
        source: the source's config.
        limit_characters: reading stops there; the last text is cut.

    Raises:
        UserError: unreadable, no rows, or a row without text.
    """
    where, total = _place(source), 0
    kept: dict[str, None] = {}
    for number, row in enumerate(itertools.islice(_rows(source, [source.column]), source.rows)):
        text = valid_text(row[source.column])
        if text is None or not text.strip():
            raise UserError(
                f"{where}: row {number} has no text in column `{source.column}` (missing, empty or not UTF-8 text); "
                "clean it"
            )
        if text not in kept:
            text = text[: limit_characters - total]
            kept[text] = None
            total += len(text)
        if total >= limit_characters:
            break
    if not kept:
        raise UserError(f"{where}: no rows; a public source must have some")
    return list(kept)


def load_private(private: Private, key: bytes, encode: Callable[[str], np.ndarray], access: object) -> TextRecords:
    """Load the sensitive texts.

    Ids and limits are those of all records (``loaders.identify``, ``loaders.within_limits``). What identifies a record
    without an id column is its text and its unit; of a mail, the whole raw message and its unit.

    Args:
        private: the dataset's config.
        key: HMAC key of the ids.
        encode: from a text to its tokens, int32 of shape (length,); called for one text at a time.
        access: an open ``ledger.Access`` (rule 26).

    Raises:
        UserError: the schema is wrong (file, columns, types); never about a value.
    """
    if not getattr(access, "is_open", False):
        raise PermissionError("the sensitive source is opened through ledger.open only")
    raw = _read(private)
    texts = [valid_text(text) or "" for text in raw.text]
    units = raw.unit if raw.unit is not None else [None] * len(texts)
    contents = raw.content if raw.content is not None else [text.encode() for text in texts]
    record, unit = identify(units, raw.record_id, map(owned, contents, units), key)
    nothing = np.zeros(0, dtype=np.int32)
    records = within_limits(TextRecords(record, unit, texts, [nothing] * len(texts)), private)
    return replace(records, tokens=[encode(text) if text else nothing for text in records.text])


def valid_text(value: object) -> str | None:
    """Return a value that is text and can be written as UTF-8, else None."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate: bytes that were no text, or half a JSON escape
        return None
    return value


def _place(source: TextFile | HubText) -> str:
    return source.path if isinstance(source, TextFile) else source.name


def _read(private: Private) -> RawTexts:
    table = private.table
    if table.kind in mail.UNITS:
        known = mail.UNITS[table.kind]
        if private.unit not in ("record", known):
            raise UserError(f"private.unit: {table.kind} has no column `{private.unit}`; use `record` or `{known}`")
        if table.kind == "maildir":
            raw = mail.read_maildir(table)
        else:
            raw = mail.read_spam_assassin(table, packages.spam_assassin_folder())
        return raw if private.unit == known else replace(raw, unit=None)
    if isinstance(table, TextFile) and table.rows:
        raise UserError(
            "private.table.rows is for public tables: a unit's records must not depend on others; remove it"
        )
    unit = None if private.unit == "record" else private.unit
    ids = [name for name in (table.record_id, unit) if name]
    rows = list(itertools.islice(_rows(table, [table.column, *ids], ids), table.rows))
    as_id = _json_id if isinstance(table, TextFile) and Path(table.path).suffix in _JSON_LINES else lambda value: value
    return RawTexts(
        [row[table.column] for row in rows],
        [as_id(row[unit]) for row in rows] if unit else None,
        [as_id(row[table.record_id]) for row in rows] if table.record_id else None,
    )


# -- formats --------------------------------------------------------------------------------------------------


_JSON_LINES = (".jsonl", ".json")


def _rows(source: TextFile | HubText, wanted: list[str], ids: Iterable[str] = ()) -> Iterator[_Row]:
    """Read a table row by row: the wanted columns, None where a row has no value that can be read.

    Args:
        source: the table.
        wanted: the columns; a format with a schema must have them all.
        ids: those without which a JSON line is left out.
    """
    wanted = list(dict.fromkeys(wanted))
    if isinstance(source, HubText):
        return _hub_rows(source, wanted)
    path = fetch.resolve(source.path)
    if path.suffix == ".parquet":
        return _arrow_rows(parquet_table(path, wanted), wanted, source.column, str(path))
    if path.suffix == ".csv":
        # An empty field of a CSV is how it says that there is no value.
        return ({name: value or None for name, value in row.items()} for row in csv_rows(path, wanted))
    if path.suffix in _JSON_LINES:
        return _json_rows(path, wanted, ids)
    raise UserError(f"{path}: unknown suffix `{path.suffix}`; use .jsonl, .csv or .parquet")


def _json_rows(path: Path, wanted: list[str], ids: Iterable[str]) -> Iterator[_Row]:
    with open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                found = _json_object(line)
                if all(name in found for name in ids):
                    yield {name: found.get(name) for name in wanted}


def _json_object(line: bytes) -> _Row:
    """Return a line's object; one without keys where there is none."""
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _json_id(value: object) -> str | None:
    """Return the text that stands for a unit or record id of a JSON line; None for null and NaN.

    Text is itself, and a number is written as an integer if it is one: 7, 7.0, 7e0 and "7" are one id. true, false,
    lists and objects are their JSON text with sorted keys. Where two spellings meet that the owner meant to differ,
    two people are protected as one, which is safe; one person under two ids is not.
    """
    if value is None or value != value:
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:  # nested as deep as the reader just bears
        return "too deep"


def _arrow_rows(table: pa.Table, wanted: list[str], column: str, where: str) -> Iterator[_Row]:
    """Go through a table that has the wanted columns.

    Raises:
        UserError: the text column holds no text.
    """
    columns = [_arrow_texts(table[name], where, name) if name == column else column_values(table[name])
               for name in wanted]  # fmt: skip
    return (dict(zip(wanted, row, strict=True)) for row in zip(*columns, strict=True))


def _arrow_texts(column: pa.ChunkedArray, where: str, name: str) -> list[str | None]:
    """Return a text column's values, None for what is null or not UTF-8: Parquet's strings are not checked."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)):
        raise UserError(f"{where}: column `{name}` holds {kind}; it must hold text")
    values = column.cast(kind).cast(pa.large_binary()).to_pylist()
    return [None if value is None else _utf8(value) for value in values]


def _utf8(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


# -- the hub and saved datasets -------------------------------------------------------------------------------


def _hub_rows(source: HubText, wanted: list[str]) -> Iterator[_Row]:
    """Read a dataset; streamed where the number of rows is given.

    Raises:
        UserError: it cannot be loaded, or its schema is wrong.
    """
    import datasets
    import huggingface_hub.utils

    # Progress bars and warnings tell sizes, and quote rows, which may be private.
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        dataset = _hub_dataset(source)
        names = dataset.column_names
        if isinstance(dataset, datasets.Dataset):
            require_columns(source.name, names, wanted)
            count = min(source.rows or len(dataset), len(dataset))
            table = dataset.select_columns(wanted).select(range(count)).with_format("arrow")[:]
            yield from _arrow_rows(table, wanted, source.column, source.name)
            return
        for row in dataset:
            if names is None:  # a stream may know its columns from its first row only
                names = list(row)
            require_columns(source.name, names, wanted)
            yield {name: row[name] for name in wanted}
    except UserError:
        raise
    except Exception as error:  # the library's clients raise many kinds, some with several lines of values
        raise UserError(
            f"{source.name}: the datasets library cannot read it ({type(error).__name__}); check name, subset, split, "
            "revision and network access"
        ) from None


def _hub_dataset(source: HubText):
    import datasets

    folder = Path(source.name).expanduser()
    if not folder.is_dir():
        if source.name.startswith(("/", ".", "~")):
            raise UserError(f"{source.name}: no such folder; correct the path in the config")
        return datasets.load_dataset(
            source.name, source.subset, split=source.split, revision=source.revision, streaming=source.rows is not None
        )
    dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.DatasetDict):
        if source.split not in dataset:
            raise UserError(f"{source.name}: no split `{source.split}`; it has: {', '.join(dataset)}")
        return dataset[source.split]
    return dataset
