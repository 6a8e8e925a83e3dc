"""The tokenizer: any text goes in and out, no text makes the special token, plain transformers agrees."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpmixmin.data import tokenizer as tokenizers
from dpmixmin.errors import UserError

TEXTS = ["the cat sat on the mat", "Ünïcödé and\ttabs\n\n  and 12,345 numbers", "the dog sat on the cat"] * 5


@pytest.fixture(scope="module")
def trained():
    return tokenizers.train(TEXTS, 300)


def gpt2_files(folder, merges=50_000):
    """A vocabulary with GPT-2's number of entries: 256 bytes, made-up merges, the special token last."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(one, other) for one in letters for other in letters][:merges]
    entries = [*letters, *(one + other for one, other in pairs), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({entry: number for number, entry in enumerate(entries)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in pairs))
    return folder / "vocab.json", folder / "merges.txt"


# Surrogates cannot be in UTF-8: see the next test.
@given(st.text(st.characters(exclude_categories=("Cs",))))
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back_without_the_special_token(trained, text):
    ids = tokenizers.encode(trained, text)
    assert ids.dtype == np.int32
    assert tokenizers.end_of_text(trained) not in ids
    assert trained.decode(ids.tolist(), skip_special_tokens=False) == text


def test_rule_25_what_utf8_cannot_hold_does_not_raise(trained):
    ids = tokenizers.encode(trained, "mail \udce9 \ud83d end")
    assert trained.decode(ids.tolist()) == "mail ? ? end"
    assert len(tokenizers.encode(trained, "")) == 0
    assert len(tokenizers.train(["\udce9 text"], 300).encode("text").ids)


def test_text_that_looks_like_the_special_token_is_text(trained, tmp_path):
    text = "before <|endoftext|> after"
    (tmp_path / "tokenizer.json").write_bytes(tokenizers.files(trained)["tokenizer.json"])
    for found in (trained, tokenizers.load(tmp_path), tokenizers.gpt2(*gpt2_files(tmp_path))):
        ids = tokenizers.encode(found, text)
        assert tokenizers.end_of_text(found) not in ids
        assert found.decode(ids.tolist(), skip_special_tokens=False) == text


def test_training_is_reproducible_and_learns_words(trained):
    again = tokenizers.train(reversed(TEXTS), 300)
    assert tokenizers.digest(again) == tokenizers.digest(trained)
    assert tokenizers.digest(tokenizers.train(TEXTS, 290)) != tokenizers.digest(trained)
    assert trained.get_vocab_size() == 300
    assert tokenizers.end_of_text(trained) == 0
    assert len(tokenizers.encode(trained, " the cat")) == 2


def test_plain_transformers_loads_the_files_and_agrees(trained, tmp_path):
    from transformers import AutoTokenizer

    from dpmixmin.models import language
    from dpmixmin.text_sections import LanguageModel

    model = language.build(LanguageModel(layers=1, width=8, heads=1), 300, 8, 0, seed=0)
    for files in (tokenizers.files(trained), language.files(model, tokenizers.files(trained), "# Card\n")):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        plain = AutoTokenizer.from_pretrained(tmp_path)
        for text in (*TEXTS[:3], " leading", "a , b ? don't \r\n end  "):
            ids = plain(text)["input_ids"]
            assert ids == tokenizers.encode(trained, text).tolist()
            assert plain.decode(ids) == text
        assert plain.eos_token_id == plain.bos_token_id == plain("<|endoftext|>")["input_ids"][0] == 0
        assert len(plain) == 300
    assert tokenizers.digest(tokenizers.load(tmp_path)) == tokenizers.digest(trained)


def test_gpt2_has_its_entries_or_is_refused(tmp_path):
    found = tokenizers.gpt2(*gpt2_files(tmp_path))
    assert found.get_vocab_size() == 50_257
    assert tokenizers.end_of_text(found) == 50_256
    with pytest.raises(UserError, match="49,000 entries; 50,257") as caught:
        tokenizers.gpt2(*gpt2_files(tmp_path, merges=48_743))
    assert "\n" not in str(caught.value)
    (tmp_path / "merges.txt").write_text("no merges at all")
    with pytest.raises(UserError, match="not a readable vocabulary"):
        tokenizers.gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(UserError, match="not a readable vocabulary"):
        tokenizers.gpt2(tmp_path / "none.json", tmp_path / "merges.txt")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    import huggingface_hub

    def down(*args, **kwargs):
        raise OSError("a long\nstory")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", down)
    with pytest.raises(UserError, match=r"vocab.json of openai-community/gpt2 cannot be had") as caught:
        tokenizers.gpt2()
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(UserError, match="missing"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        tokenizers.load(tmp_path)
    from tokenizers import Tokenizer, models

    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(UserError, match=r"without <\|endoftext\|>"):
        tokenizers.load(tmp_path)
