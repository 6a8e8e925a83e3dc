"""Fine-tune a language model privately: mechanism 2.

Reads: pretrained models, the method's settings, the sensitive table and the splits (finetune part; none, uniform and
mixmin read all of train, as in the paper, and so does dp_mixmin under sequential composition). Writes, per cell,
a model that plain transformers loads, its card, ``privacy.json``, ``manifest.json``: in ``released/``, or in
``study/`` when the mixture was non-private.
Spends: each cell is one ledger entry at (epsilon, delta), unless the public stand-ins chose not to fine-tune: then
the pretrained model is the result and nothing is spent here.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dpmixmin import jobs
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.finetune.charged import Kind, run_cells
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.finetune.texts import pretrained_sums
from dpmixmin.models import language, trainable
from dpmixmin.models.card import finetuned_card, pretrained_card
from dpmixmin.models.device import best
from dpmixmin.paths import GPT2_FILES, TOKENIZER_FILES
from dpmixmin.sections import METHODS


class TextModel(Kind):
    """GPT-2."""

    stage = "text_finetune"
    made = ("text_records", "split")
    device = property(lambda self: best().type)
    files = GPT2_FILES

    def sums(self, config, paths, cell, records, folder) -> ClippedSum:
        """See the base class."""
        corpora.check_tokenizer(paths, folder)
        return pretrained_sums(config, records, folder)

    def model_files(self, config, sums, folder) -> dict[str, bytes]:
        """See the base class."""
        kept = {name: Path(folder, name).read_bytes() for name in TOKENIZER_FILES}
        files = language.files(trainable.merged(sums.model), kept, "")
        return {name: files[name] for name in self.files}

    def views(self, config, cell, statement, *, trained) -> dict[str, bytes]:
        """Return the statement, and the model card that quotes it."""
        card = finetuned_card(config, cell, statement) if trained else pretrained_card(config, cell, statement, None)
        return {**super().views(config, cell, statement, trained=trained), "README.md": card.encode()}


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="method whose models are fine-tuned")
    parser.add_argument("--task", required=True, help="sensitive task")
    jobs.add_part(parser)


def run(config: Config, args) -> None:
    """Fine-tune the cells of one task and method."""
    torch.set_num_threads(config.threads)
    run_cells(TextModel(), config, method=args.method, cells=jobs.own(config, "finetuned", args))
