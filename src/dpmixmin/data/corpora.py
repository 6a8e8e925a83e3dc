"""The prepared public text sources: documents with their tokens, cut into training and held-out ones.

Arrow schema of ``documents.parquet``, fixed::

    document  string         hash of the content
    heldout   bool           kept out of training: loss curves
    text      string
    tokens    list<int32>    without end-of-text marks

A source that could not be had has no rows. Everything here is public.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpmixmin import artifacts
from dpmixmin.config import Config
from dpmixmin.errors import UserError
from dpmixmin.paths import Paths


@dataclass(frozen=True)
class Corpus:
    """One source.

    Attributes:
        name: its name in the config.
        train: token arrays (int32) of the training documents.
        heldout: of the held-out ones.
    """

    name: str
    train: list[np.ndarray]
    heldout: list[np.ndarray]

    @property
    def size(self) -> int:
        """Number of training tokens."""
        return sum(len(document) for document in self.train)


def documents_table(texts: list[str], tokens: list[np.ndarray], heldout: float) -> pa.Table:
    """Return the table of one source.

    Args:
        texts: its documents, each once.
        tokens: their tokens.
        heldout: share of documents that is held out; at least one, at most half of them.

    Raises:
        UserError: fewer than two documents.
    """
    if len(texts) == 1:
        raise UserError("one document: at least two are needed, to hold one out")
    names = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16] for text in texts]
    count = min(max(1, math.ceil(heldout * len(texts))), len(texts) // 2)
    chosen = set(np.argsort(names)[:count].tolist()) if texts else set()
    return pa.table(
        {
            "document": pa.array(names, pa.string()),
            "heldout": pa.array([i in chosen for i in range(len(texts))], pa.bool_()),
            "text": pa.array(texts, pa.string()),
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
        }
    )


def read(paths: Paths, name: str) -> Corpus:
    """Read one prepared source."""
    table = artifacts.read_table(f"{paths.text(name)}/documents.parquet")
    held = table["heldout"]
    return Corpus(name, _tokens(table.filter(pc.invert(held))), _tokens(table.filter(held)))


def present(config: Config, paths: Paths) -> tuple[str, ...]:
    """Return the names of the sources that could be had, in the config's order."""
    left_out = artifacts.read_json(paths.fetched())["left_out"]
    return tuple(name for name in config.sources if name not in left_out)


def source_names(config: Config, paths: Paths) -> tuple[str, ...]:
    """Return the names of the sources that are mixed: label axes, or the texts that could be had."""
    return present(config, paths) if config.text else config.sources


def tokenizer_digest(paths: Paths) -> str:
    """Return the hash of the run's tokenizer.

    Raises:
        UserError: incomplete or altered.
    """
    return artifacts.verify(paths.tokenizer())["files"]["tokenizer.json"]


def check_tokenizer(paths: Paths, folder: str) -> None:
    """Refuse a model whose tokenizer is not the run's: the same ids would mean other text.

    Raises:
        UserError: it is another one.
    """
    if artifacts.verify(folder)["files"].get("tokenizer.json") != tokenizer_digest(paths):
        raise UserError(f"{folder}: made with another tokenizer than {paths.tokenizer()}; delete it and run again")


def made_with(paths: Paths) -> dict[str, str]:
    """Return what private texts must have been made with: the run's tokenizer, or nothing where there is none."""
    return {"tokenizer": tokenizer_digest(paths)} if Path(paths.tokenizer()).is_dir() else {}


def _tokens(table: pa.Table) -> list[np.ndarray]:
    column = table["tokens"].combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.int32)
    offsets = column.offsets.to_numpy() - (column.offsets[0].as_py() if len(column.offsets) else 0)
    return [flat[start:stop] for start, stop in pairwise(offsets)]
