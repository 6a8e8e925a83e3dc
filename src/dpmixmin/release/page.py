"""``statement.md``: the statement as one page for a person, a pure function of ``statement.json``.

Every number is rounded up, never down: the page claims no more than the statement.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

HOW_TUNED = {
    "none": "No settings were chosen.",
    "public_standin": "All settings were chosen on public stand-in tasks; no private score was used.",
    "user_declared": "Settings were declared by the owner, who says that no score on private records helped.",
    "private_uncharged": "NOT PRIVATE: settings were chosen on private scores without charge.",
}

WHAT = {"mixture": "the mixture weights", "finetuned": "the fine-tuned model", "evaluation": "the metrics"}


def up(value: float | None) -> str:
    """Return a number with four significant digits, rounded up; None is infinity."""
    if value is None or math.isinf(value):
        return "infinite"
    if value <= 0:
        return "0"
    scale = 10.0 ** (math.floor(math.log10(value)) - 3)
    # A value with four digits already must not gain one from the division's rounding.
    return f"{math.ceil(value / scale * (1 - 1e-12)) * scale:.4g}"


def render(statement: dict[str, Any]) -> str:
    """Return the page."""
    bundle, dataset, privacy = statement["bundle"], statement["dataset"], statement["privacy"]
    blocks = [
        f"# Privacy statement: {bundle['experiment']}, task {bundle['task']}",
        f"Made on {bundle['created']} by dpmixmin {bundle['versions']['dpmixmin']} from the sensitive dataset "
        f"`{dataset['name']}` (ledger {dataset['id']}). Stamp: {privacy['stamp']}. In a line: {privacy['headline']}.",
        *_protected(dataset, privacy["entries"], statement["config"]),
        *_numbers(statement),
        *_made(privacy, bundle),
        "## What is not covered",
        *_bullets(privacy["not_covered"]),
        "## How settings were chosen",
        f"{HOW_TUNED[privacy['tuning']]} (`tuning: {privacy['tuning']}`)",
        *_data(statement),
        "## How to verify",
        "`python -m dpmixmin verify FOLDER` (with the version above) derives every number on this page again from the "
        "public parameters in statement.json; it needs no private data and no other file. `sha256sum -c SHA256SUMS` "
        "checks the files alone. statement.schema.json describes each field.",
    ]
    return "\n\n".join(_wrap(block) for block in blocks) + "\n"


def _wrap(block: str) -> str:
    if block.startswith(("#", "|", "- ")):
        return block
    return textwrap.fill(block, 119, break_long_words=False, break_on_hyphens=False)


def _bullets(points: list[str]) -> list[str]:
    return ["\n".join(f"- {point}" for point in points)]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _protected(dataset: dict[str, Any], entries: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    unit, head = dataset["unit"], "## What is protected, and from whom"
    if not entries:
        return [
            head,
            "Everything about the sensitive dataset: nothing in this bundle was computed from its records, so it "
            f"tells nothing about any {unit}. What the owner's machine holds is not in here.",
        ]
    what = "One record" if unit == "record" else f"All records of one {unit} together"
    limit = "" if unit == "record" else f" ({_limit(dataset['max_records_per_unit'], config)})"
    return [
        head,
        f"{what}{limit}: that it is in the dataset at all, and everything it says. Protected from anyone who sees "
        "this bundle, whatever else they know (all other records included), by noise. The noise rests on the "
        "operating system's generator and, in bulk (a model's noise, the coins of sampling), on AES-256 under keys "
        "that the system drew: whoever can predict the one or break the other is not covered. Not protected from "
        "whoever can read the owner's machine: the private folders and the ledger are not in here and stay secret.",
    ]


def _limit(kept: int, config: dict[str, Any]) -> str:
    """Say how many records of a unit count at most."""
    in_a_step = config["private"]["records_per_step"]
    if in_a_step is None or in_a_step >= kept:
        return f"at most {kept} of them enter a step"
    return f"at most {kept} of them are kept, and at most {in_a_step} enter a step"


def _numbers(statement: dict[str, Any]) -> list[str]:
    privacy, cap = statement["privacy"], statement["cap"]
    chain, total, unit = privacy["guarantee"], privacy["dataset_total"], statement["dataset"]["unit"]
    groups = privacy["curve"]["group_epsilon"] if privacy["curve"] else {}
    rows = [
        ("this bundle", up(chain["epsilon"]), up(chain["delta"]), f"one {unit} more or less"),
        *(
            (f"this bundle, {name.replace('_', '-')}", up(other["epsilon"]), up(other["delta"]), other["condition"])
            for name, other in privacy["other_adjacencies"].items()
        ),
        *(
            (f"this bundle, {members} units", up(epsilon), up(chain["delta"]), f"{members} units more or less")
            for members, epsilon in groups.items()
        ),
        ("everything charged so far", up(total["epsilon"]), up(total["delta"]), f"one {unit} more or less"),
        ("the owner's cap", up(cap["epsilon"]), up(cap["delta"]), f"spent: {up(cap['spent'])}"),
    ]
    return ["## The guarantee", _table(("of", "epsilon", "delta", "neighbours"), rows), _meaning(statement)]


def _meaning(statement: dict[str, Any]) -> str:
    privacy, dataset = statement["privacy"], statement["dataset"]
    chain, unit = privacy["guarantee"], dataset["unit"]
    if not privacy["entries"]:
        return (
            "Meaning: this bundle costs nothing. The line `everything charged so far` is about other releases from "
            "the dataset."
        )
    share = (math.exp(min(chain["epsilon"], 700)) + chain["delta"]) / (1 + math.exp(min(chain["epsilon"], 700)))
    return (
        f"Meaning: an attacker who holds it equally likely that one {unit} is in the data or not, and then sees this "
        f"bundle, guesses right with probability at most {up(min(share, 1.0))} (1/2 is pure chance). Delta is the "
        "probability by which epsilon may fail; it should be below 1 over the number of units, publicly estimated at "
        f"{dataset['nominal_units']}. Several bundles from one dataset compose: for them the line `everything charged "
        "so far` counts. privacy.curve in statement.json gives other pairs of epsilon and delta."
    )


def _made(privacy: dict[str, Any], bundle: dict[str, Any]) -> list[str]:
    rows = [
        (
            WHAT.get(entry["cell"]["stage"], entry["cell"]["stage"]),
            entry["mechanism"],
            ", ".join(entry["parts"]),
            up(entry["epsilon"]),
            _parameters(entry),
        )
        for entry in privacy["entries"]
    ]
    counted = "they count" if privacy["aborted_attempts_charged"] else "they do not count: nothing of them was written"
    aborted = (
        f" {privacy['aborted_attempts']} attempts died before ({counted})." if privacy["aborted_attempts"] else ""
    )
    how = f"Method {bundle['method']}; "
    how += f"accountant: {privacy['curve']['accountant']}; " if privacy["curve"] else ""
    how += f"composition: {privacy['guarantee']['composition']}.{aborted} "
    how += f"Other charged releases from this dataset: {len(privacy['other_entries'])}."
    head = ("released", "mechanism", "parts read", "target epsilon", "parameters")
    return ["## How it was made", how, *([_table(head, rows)] if rows else [])]


def _parameters(entry: dict[str, Any]) -> str:
    names = {
        "clip": "clip",
        "noise_multiplier": "noise multiplier",
        "steps": "steps",
        "sampling_rate": "sampling rate",
    }
    return ", ".join(f"{text} {entry[key]:.6g}" for key, text in names.items() if key in entry)


def _data(statement: dict[str, Any]) -> list[str]:
    points = [
        f"public {table['name']}, for {table['used_for']}: licence {table['licence']}"
        for table in statement["data"]["tables"]
    ]
    left_out, tokenizer = statement["data"].get("left_out"), statement["data"].get("tokenizer")
    if left_out:
        points.append(f"left out, because they could not be had: {', '.join(left_out)}")
    if tokenizer:
        points.append(f"the tokenizer that weights and model belong to: SHA-256 {tokenizer}")
    licence = statement["config"]["private"]["table"]["licence"]
    points.append(f"sensitive `{statement['dataset']['name']}`: not included; licence {licence}")
    return ["## Data and licences", *_bullets(points)]
