"""Fine-tune privately: mechanism 2.

Reads: pretrained models, the method's settings, the sensitive table and the splits (finetune part; none, uniform and
mixmin read all of train, as in the paper, and so does dp_mixmin under sequential composition). Writes, per cell,
``model.safetensors``, ``privacy.json``, ``manifest.json``: in ``released/``, or in ``study/`` when the mixture was
non-private.
Spends: each cell is one ledger entry at (epsilon, delta), unless the public stand-ins chose not to fine-tune: then
the pretrained model is the result and nothing is spent here.
"""

from __future__ import annotations

import torch

from dpmixmin.config import Config
from dpmixmin.data import split
from dpmixmin.finetune.charged import Kind, run_cells
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.finetune.labels import label_sums, starting_model
from dpmixmin.models import networks
from dpmixmin.sections import METHODS


class LabelModel(Kind):
    """Small networks of one logit."""

    stage = "finetune"
    made = ("records", "split")
    files = ("model.safetensors",)

    def sums(self, config, access, paths, cell, wanted, folder) -> ClippedSum:
        """See the base class."""
        records = split.open_part(access, paths, wanted, cell.seed)
        model = starting_model(config, records.features.shape[1], folder)
        return label_sums(model, records, records.label(config.tasks[cell.task]), config)

    def model_files(self, config, sums, folder) -> dict[str, bytes]:
        """See the base class."""
        return {"model.safetensors": networks.state_bytes(sums.model)}


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="method whose models are fine-tuned")
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Fine-tune every cell of one task and method."""
    torch.set_num_threads(config.threads)
    run_cells(LabelModel(), config, args.method, args.task)
