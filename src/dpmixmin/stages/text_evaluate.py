"""Measure language models on the test part: study only, not for release.

Reads: every model and mixture, the sensitive table and the splits (test part). Writes:
``study/metrics/task=…/metrics.parquet``, one row per number: perplexity per token and averaged over users, before and
after fine-tuning; how often pretraining read each source; what mixtures weigh and how close they are to the
non-private one; the epsilon spent.
"""

from __future__ import annotations

import torch

from dpmixmin import artifacts
from dpmixmin.cells import Cell
from dpmixmin.config import Config
from dpmixmin.data import corpora
from dpmixmin.data.text_records import TextRecords
from dpmixmin.measuring import measure
from dpmixmin.metrics import perplexities
from dpmixmin.models.language import load
from dpmixmin.models.scoring import score
from dpmixmin.paths import Paths


def add_arguments(parser) -> None:
    """Add the stage's options."""
    parser.add_argument("--task", required=True, help="sensitive task")


def run(config: Config, args) -> None:
    """Measure every cell."""
    torch.set_num_threads(config.threads)
    paths = Paths(config.experiment)

    def values(cell: Cell, records: TextRecords) -> dict[str, float]:
        corpora.check_tokenizer(paths, cell.folder(paths))
        scores = score(load(cell.folder(paths)), records.tokens, config.text)
        found = perplexities(scores, records.units())
        if cell.stage == "pretrained":
            sampled = artifacts.read_json(f"{cell.folder(paths)}/sampled.json")
            found["tokens"] = sampled["tokens"]
            found |= {f"epochs_{name}": epochs for name, epochs in sampled["epochs"].items()}
        return found

    measure(config, args.task, "text_evaluate", values)
