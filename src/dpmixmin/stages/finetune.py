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

from dpmixmin import jobs
from dpmixmin.config import Config
from dpmixmin.finetune.charged import Kind, run_cells
from dpmixmin.finetune.dp_sgd import ClippedSum
from dpmixmin.finetune.labels import label_sums, starting_model
from dpmixmin.models import networks
from dpmixmin.models.device import best
from dpmixmin.sections import METHODS


class LabelModel(Kind):
    """Small networks of one logit."""

    stage = "finetune"
    made = ("records", "split")
    files = ("model.safetensors",)
    device = property(lambda self: best().type)

    def sums(self, config, paths, cell, records, folder) -> ClippedSum:
        """See the base class."""
        model = starting_model(config, records.features.shape[1], folder)
        return label_sums(model, records, records.label(config.tasks[cell.task]), config)

    def model_files(self, config, sums, folder) -> dict[str, bytes]:
        """See the base class."""
        return {"model.safetensors": networks.state_bytes(sums.model)}


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--method", required=True, choices=METHODS, help="method whose models are fine-tuned")
    parser.add_argument("--task", required=True, help="sensitive task")
    jobs.add_part(parser)


def run(config: Config, args) -> None:
    """Fine-tune the cells of one task and method."""
    torch.set_num_threads(config.threads)
    run_cells(LabelModel(), config, method=args.method, cells=jobs.own(config, "finetuned", args))
