"""Model cards (README.md) of language models: what the model is, how it was made, and what is guaranteed.

A card says only what `privacy.json` and the released weights say.
"""

from __future__ import annotations

from dpmixmin.cells import Cell
from dpmixmin.config import Config

_WAYS = {
    "none": "a random initialisation; no pretraining",
    "uniform": "pretrained on the public sources with equal weights",
    "proportional": "pretrained on the public sources with weights proportional to their sizes",
    "mixmin": "pretrained on a mixture of public sources that was learned WITHOUT privacy",
    "dp_mixmin": "pretrained on a mixture of public sources that was learned with differential privacy (DP-MixMin)",
}


def pretrained_card(
    config: Config, cell: Cell, statement: dict, weights: dict[str, float] | None, file: str = "privacy.json"
) -> str:
    """Return the card of a model that was not fine-tuned.

    Args:
        config: the experiment.
        cell: the model's.
        statement: its ``privacy.json``.
        weights: its mixture, or None to leave it out.
        file: name of the file beside the card that holds the whole statement.
    """
    lines = [f"A GPT-2, {_WAYS[cell.method]}.", "", *_guarantee(statement, file), *_use(config)]
    if weights:
        lines += ["## Mixture", "", "| source | weight | licence |", "|---|---|---|"]
        for name, value in sorted(weights.items(), key=lambda item: -item[1]):
            lines.append(f"| {name} | {value:.4f} | {licence(config, name)} |")
        lines.append("")
    return _card(config, cell, lines)


def finetuned_card(config: Config, cell: Cell, statement: dict, file: str = "privacy.json") -> str:
    """Return the card of a fine-tuned model.

    Args:
        config: the experiment.
        cell: the model's.
        statement: its ``privacy.json``.
        file: as in :func:`pretrained_card`.
    """
    what = {
        "all": "all parameters",
        "norms": "the parameters of its LayerNorms",
        "biases": "its biases",
        "blocks": f"its last {config.finetune.trainable.blocks} blocks, final norm and (tied) head",
        "lora": f"low-rank updates of rank {config.finetune.trainable.rank}, merged into its weights",
    }[config.finetune.trainable.which]
    lines = [
        f"A GPT-2, {_WAYS[cell.method]}, then fine-tuned on sensitive text with DP-SGD "
        f"({what}; the protected unit is one {config.private.unit}).",
        "",
        *_guarantee(statement, file),
        *_use(config),
    ]
    return _card(config, cell, lines)


def licence(config: Config, source: str) -> str:
    """Return the licence of a public source: what the config declares, else what its package states."""
    from dpmixmin.data.domains import DOMAINS

    table = config.public.texts[source]
    if table.licence == "not declared" and table.kind == "packaged":
        return DOMAINS[table.domain].licence
    return table.licence


def _card(config: Config, cell: Cell, lines: list[str]) -> str:
    words = [cell.method, *([f"epsilon {cell.epsilon:g}"] if cell.epsilon is not None else []), cell.stage]
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "---", ""]
    return "\n".join([*head, f"# {config.experiment}: {', '.join(words)}", "", *lines])


def _guarantee(statement: dict, file: str) -> list[str]:
    """Return the guarantee in words; the stamp first where there is none."""
    lines = ["## Privacy", ""]
    if statement["guarantee"] is None or statement["stamp"] != "private":
        lines += [f"**{statement['stamp']}.**", ""]
    else:
        lines += [f"**{statement['headline']}.** Stated as: {statement['stated_as']}.", ""]
        lines += ["Not covered:", "", *(f"- {item}" for item in statement["not_covered"]), ""]
    return [*lines, f"The whole statement, with every release behind it, is `{file}`.", ""]


def _use(config: Config) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoTokenizer, GPT2LMHeadModel",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'model = GPT2LMHeadModel.from_pretrained(".")',
        "```",
        "",
        f"Context: {config.text.context} tokens. It is a research model, trained from scratch on little text.",
        "",
    ]
