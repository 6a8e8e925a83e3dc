"""The proxies of text: one GPT-2 per public source, trained on that source alone (DP-MixMin paper, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpmixmin.models import language
from dpmixmin.pretrain.language import Curve, train
from dpmixmin.pretrain.packing import MixtureSampler
from dpmixmin.privacy.access import Progress
from dpmixmin.text_sections import LanguageModel

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def train_proxy(
    source: str,
    blocks: np.ndarray,
    heldout: np.ndarray,
    settings: LanguageModel,
    *,
    vocabulary: int,
    end_of_text: int,
    state: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[GPT2LMHeadModel, Curve]:
    """Train the proxy of one source. All proxies start from the same weights (the seed is the settings').

    Args:
        source: its name, for messages.
        blocks: from ``packing.pack``, int32 of shape (n, context + 1).
        heldout: blocks that are not trained on.
        settings: network and training.
        vocabulary: entries of the tokenizer.
        end_of_text: id of the special token.
        state: see ``pretrain.language.train``.
        say: takes progress lines.

    Raises:
        UserError: the source has no block; nothing is held out although ``patience`` is set.
    """
    sampler = MixtureSampler({source: blocks}, [1.0], settings.batch, settings.seed, settings.max_epochs)
    model = language.build(settings, vocabulary, sampler.context, end_of_text, settings.seed)
    curve = train(model, sampler, {source: heldout}, settings, state=state, say=say)
    return model, curve


def score(
    models: Sequence[GPT2LMHeadModel],
    sequences: Sequence[np.ndarray],
    context: int,
    stride: int,
    long: Literal["windows", "truncate"],
    batch: int = 32,
) -> np.ndarray:
    """Return log p_i of every token of records under every proxy.

    Args:
        models: the k proxies.
        sequences: ids of each record; for PRIVATE records, those of one unit (see ``language.token_logprobs``).
        context: see there.
        stride: see there.
        long: see there.
        batch: see there.

    Returns:
        float32 of shape (tokens, k) in nats, the records one after the other; with ``long: truncate`` a record has
        ``min(T, context)`` rows.
    """
    columns = [language.token_logprobs(model, sequences, context, stride, long, batch) for model in models]
    if not sequences:
        return np.zeros((0, len(models)), dtype=np.float32)
    return np.stack([np.concatenate(parts) for parts in columns], axis=1)
