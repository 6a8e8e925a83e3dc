"""DP-SGD on texts: a record is one or more rows of tokens, a unit one or more records.

The clipped object is the unit's mean over its (at most G_ULS) records of a step of the gradient of the record's mean
loss per token (DP-MixMin paper, section 5.2): a long record, cut into windows, counts as one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from dpmixmin.config import Config
from dpmixmin.data import tokenizer
from dpmixmin.data.text_records import TextRecords
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.models import language, trainable
from dpmixmin.models.device import best
from dpmixmin.models.language import next_token_loss, windows


def pretrained_sums(
    config: Config, records: TextRecords, folder: str, make: Callable[..., ClippedSum] = ClippedSum
) -> ClippedSum:
    """Return the sums of clipped unit gradients of a pretrained model.

    Args:
        config: context, what is trainable, records per step, physical batch.
        records: in the order of (unit, record), with the tokens of the model's tokenizer.
        folder: of the pretrained model and its tokenizer.
        make: the class, or what stands for it in an audit.
    """
    model = trainable.choose(language.load(folder), config.finetune.trainable).to(best())
    return text_sums(model, records, tokenizer.end_of_text(tokenizer.load(folder)), config, make)


def text_sums(
    model: nn.Module,
    records: TextRecords,
    end_of_text: int,
    config: Config,
    make: Callable[..., ClippedSum] = ClippedSum,
) -> ClippedSum:
    """Return the sums of clipped unit gradients of a language model.

    Args:
        model: GPT-2; trainable parameters are those with ``requires_grad``.
        records: in the order of (unit, record).
        end_of_text: id that starts every row.
        config: context, records per step, physical batch.
        make: the class, or what stands for it in an audit.
    """
    units, index = records.units()
    tokens, lengths, record = _rows(records.tokens, config, end_of_text)
    totals = np.bincount(record, weights=lengths, minlength=len(records))
    weight = lengths / np.maximum(totals[record], 1)
    return make(
        model,
        tokens,
        lengths,
        index[record],
        units,
        config.finetune.physical_batch,
        loss=next_token_loss,
        examples=_examples(config.text.context, end_of_text),
        names=records.names(),
        records_per_step=config.private.records_per_step,
        row_record=record,
        row_weight=weight,
        trim=_trim,
    )


def _rows(sequences: list[np.ndarray], config: Config, end_of_text: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return padded rows (n, context + 1), their lengths in scored tokens, and each row's record index."""
    context, rows, lengths, record = config.text.context, [], [], []
    for number, sequence in enumerate(sequences):
        cut = sequence[:context] if config.text.long_records == "truncate" else sequence
        for ids, length in windows(cut, context, end_of_text):
            rows.append(ids)
            lengths.append(length)
            record.append(number)
    tokens = np.full((len(rows), context + 1), end_of_text, dtype=np.int64)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)] = ids
    return tokens, np.asarray(lengths, dtype=np.int64), np.asarray(record, dtype=np.int64)


def _examples(context: int, end_of_text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three made-up, public rows of different lengths for the check of the gradients."""
    width = min(context, 12) + 1
    tokens = torch.randint(0, 256, (3, width), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = end_of_text
    return tokens, torch.tensor([width - 1, 3, 1])


def _trim(tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the padding that no row of a chunk needs; a chunk of empty texts keeps a token, which the model asks for."""
    return tokens[:, : int(lengths.max().clamp(min=1)) + 1], lengths
