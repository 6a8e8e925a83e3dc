"""Private texts and models are read with the tokenizer that made their ids, or not at all: else the budget is spent
on other texts than the statement is about.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dpmixmin import artifacts
from dpmixmin.data import corpora, split, tokenizer
from dpmixmin.data.text_records import TextRecords
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths
from dpmixmin.privacy.ledger import PARTS, Derive
from dpmixmin.sections import Private

PATHS = Paths("exp")


def publish_tokenizer(text: str) -> None:
    manifest = artifacts.manifest("x", config={}, code="", parents=[])
    artifacts.publish(PATHS.tokenizer(), tokenizer.files(tokenizer.train([text], 300)), manifest)


@pytest.fixture
def wanted(tmp_path, ledger, monkeypatch):
    """The partition of a run that has a tokenizer, records made with it, and their split."""
    monkeypatch.chdir(tmp_path)
    publish_tokenizer("one text with words and words of words")
    table = {"kind": "text", "path": "letters.jsonl"}
    private = Private(name="letters", table=table, unit="who", nominal_units=10)
    wanted = split.partition(ledger.keys, private, 0)
    records = TextRecords(np.array(["r"]), np.array(["u"]), ["words"], [np.arange(3, dtype=np.int32)])
    dealt = pa.table({"record": ["r"], "unit": ["u"], "part": ["mixing"]})
    names = {"ids": wanted.ids, "partition": wanted.name}
    with ledger.open(PARTS, Derive()):
        for folder, name, content, more in (
            (PATHS.records(), "records", records.to_arrow(), corpora.made_with(PATHS)),
            (PATHS.split(0), "split", dealt, {}),
        ):
            manifest = artifacts.manifest(
                "x", config={}, code="", parents=[], private=True, partition={**names, **more}
            )
            artifacts.publish(folder, {f"{name}.parquet": artifacts.parquet_bytes(content)}, manifest)
    artifacts.unrestrict_for_tests()
    return wanted


def test_texts_of_this_tokenizer_are_read(wanted, ledger):
    with ledger.open(("mixing",), Derive()) as access:
        assert split.open_part(access, PATHS, wanted, 0).text == ["words"]


def test_texts_of_another_tokenizer_are_refused(wanted, ledger):
    publish_tokenizer("quite another text")
    with (
        ledger.open(("mixing",), Derive()) as access,
        pytest.raises(UserError, match="made with other tokenizer than this config and ledger have"),
    ):
        split.open_part(access, PATHS, wanted, 0)


def test_a_model_of_another_tokenizer_is_refused(wanted):
    folder = "results/exp/public/pretrained/x"
    files = {"tokenizer.json": b"{}", "model.safetensors": b""}
    artifacts.publish(folder, files, artifacts.manifest("x", config={}, code="", parents=[]))
    with pytest.raises(UserError, match="made with another tokenizer"):
        corpora.check_tokenizer(PATHS, folder)
