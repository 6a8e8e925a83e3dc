"""Pretraining a GPT-2 on a weighted mixture of the prepared texts, as stages use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa

from dpmixmin.data.corpora import Corpus
from dpmixmin.pretrain.durable import remove_empty_parents
from dpmixmin.pretrain.language import Curve, train
from dpmixmin.pretrain.packing import MixtureSampler, pack
from dpmixmin.privacy.access import Progress
from dpmixmin.ranks import Ranks
from dpmixmin.text_sections import LanguageModel, Text


def train_mixture(
    model,
    corpora: Mapping[str, Corpus],
    weights: Mapping[str, float],
    text: Text,
    settings: LanguageModel,
    end_of_text: int,
    *,
    seed: int,
    state: str | Progress,
    say: Callable[[str], None],
    ranks: Ranks | None = None,
    private: bool = False,
) -> Curve:
    """Train a model in place: documents packed to the context, a source drawn by its weight for every sequence.

    Args:
        model: from ``models.language.build``.
        corpora: the sources by name.
        weights: by source, on the simplex.
        text: context.
        settings: budget and optimiser.
        end_of_text: id of the special token.
        seed: public seed of the packing and of the draws.
        state: folder where the state is kept until the end; or a state that the caller deletes.
        say: takes the line that a saved state is gone on from.
        ranks: the processes that train together; left out, this one alone.
        private: whether the mixture was learned without privacy: then the public log has steps only (loop.py).
    """

    def packed(documents: list) -> object:
        return pack(documents, end_of_text, text.context, seed)

    blocks = {name: packed(corpora[name].train) for name in weights}
    heldout = {name: packed(corpora[name].heldout) for name in weights}
    sampler = MixtureSampler(blocks, list(weights.values()), settings.batch, seed, settings.max_epochs)
    progress = state if isinstance(state, Progress) else Progress(Path(state))
    curve = train(model, sampler, heldout, settings, state=progress, say=say, ranks=ranks, private=private)
    if progress is not state:
        progress.forget()
        remove_empty_parents(progress.folder)
    return curve


def curve_table(curve: Curve) -> pa.Table:
    """Return a curve's measurements as a table."""
    names = ("step", "tokens", "train_loss", "heldout_loss", "learning_rate")
    kinds = (pa.int64(), pa.int64(), pa.float64(), pa.float64(), pa.float64())
    return pa.Table.from_pylist(curve.rows, schema=pa.schema(list(zip(names, kinds, strict=True))))


def sampled(curve: Curve) -> dict:
    """Return how much of each source was read, and why the training ended."""
    tokens = curve.rows[-1]["tokens"] if curve.rows else 0
    return {"tokens": tokens, "epochs": curve.epochs, "stopped": curve.stopped if curve.rows else "not trained"}
