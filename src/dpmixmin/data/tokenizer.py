"""The tokenizer: byte-level BPE trained on PUBLIC text, or GPT-2's (docs/rules.md, rule 10).

It is a :class:`tokenizers.Tokenizer` whose one special token, ``<|endoftext|>``, stands before every document. No text
can produce it: a text that contains those characters is encoded as characters. So an id sequence has exactly the
document boundaries that the code put there, whatever a private record says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpmixmin.artifacts import json_bytes
from dpmixmin.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
GPT2_ENTRIES = 50_257
GPT2_HUB = "openai-community/gpt2"


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on public text; it depends on the counts of words only, not on the order of the texts.

    Args:
        texts: PUBLIC documents.
        vocabulary: entries at most, the 256 bytes and the special token (id 0) included. Little text gives fewer:
            ``tokenizer.get_vocab_size()`` says how many.
    """
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_valid(text) for text in texts), trainer)
    return tokenizer


def gpt2(vocab: Path | None = None, merges: Path | None = None) -> Tokenizer:
    """Return GPT-2's tokenizer, whose special token has id 50,256.

    Args:
        vocab: ``vocab.json`` (or ``encoder.json``); without the two files, they come from the Hugging Face hub.
        merges: ``merges.txt`` (or ``vocab.bpe``).

    Raises:
        UserError: the files cannot be had or read, or have not GPT-2's 50,257 entries.
    """
    from tokenizers import models

    if vocab is None or merges is None:
        vocab, merges = _from_hub("vocab.json"), _from_hub("merges.txt")
    try:
        tokenizer = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
    except Exception:  # the library raises bare exceptions for unreadable, malformed and unmatched files
        raise UserError(
            f"text.tokenizer: {vocab} and {merges} are not a readable vocabulary and its merges; correct the paths"
        ) from None
    entries = tokenizer.get_vocab_size()
    if entries != GPT2_ENTRIES or tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(
            f"text.tokenizer.vocab: {vocab} is not GPT-2's ({entries:,} entries; {GPT2_ENTRIES:,} with {END_OF_TEXT} "
            "expected); give GPT-2's vocab.json and merges.txt, or `kind: bpe`"
        )
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(GPT2_HUB, name))
    except Exception as error:  # offline, proxies, rate limits, missing: each its own exception; one fix
        raise UserError(
            f"text.tokenizer: {name} of {GPT2_HUB} cannot be had from the hub ({type(error).__name__}); give local "
            "files as vocab and merges, or `kind: bpe`"
        ) from None


def _byte_level(model) -> Tokenizer:
    """Return GPT-2's treatment of text around a BPE: bytes as letters, words with the space before them."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the special token."""
    return tokenizer.token_to_id(END_OF_TEXT)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return a text's ids, int32 of shape (tokens,): a function of this text and the tokenizer (rule 25).

    Never raises and never gives the special token: ``<|endoftext|>`` in a text is thirteen characters, and what
    UTF-8 cannot hold (halves of surrogate pairs, from broken mail) becomes ``?``.
    """
    # A property of the object that its file does not keep; without it, text that looks like the token becomes it.
    tokenizer.encode_special_tokens = True
    return np.asarray(tokenizer.encode(_valid(text), add_special_tokens=False).ids, dtype=np.int32)


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that plain ``transformers.AutoTokenizer.from_pretrained(folder)`` loads.

    It then encodes and decodes as here, but for one thing: in a prompt, ``<|endoftext|>`` IS the special token, as
    everybody expects of GPT-2.
    """
    config = {
        # The class that takes tokenizer.json as it is, in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json_bytes(config)}


def load(folder: str | Path) -> Tokenizer:
    """Load the ``tokenizer.json`` of :func:`files`.

    Raises:
        UserError: missing, not a tokenizer, or one without ``<|endoftext|>``.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run the stage that makes it") from None
    except Exception:  # the library raises bare exceptions
        raise UserError(f"{path}: not a tokenizer; delete it and run again") from None
    if end_of_text(tokenizer) is None:
        raise UserError(f"{path}: a tokenizer without {END_OF_TEXT}; use one that this package made")
    return tokenizer


def digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 that names a tokenizer: proxies and weights of different ones are never combined."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
