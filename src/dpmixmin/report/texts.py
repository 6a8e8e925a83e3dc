"""What the page says of language models alone: perplexities as in the DP-MixMin paper's table 1, epochs per source."""

from __future__ import annotations

from html import escape

from dpmixmin.report import tables, words
from dpmixmin.report.html import grid, paragraph
from dpmixmin.report.score import Score
from dpmixmin.report.tables import AFTER, BEFORE, NAMES, Measurements, Stat


def levels(measured: Measurements) -> str:
    """Return the form of the DP-MixMin paper's table 1, per token and per unit: methods by epsilon."""
    score, unit = measured.score, measured.config.private.unit
    parts = [f"<h2>{score.label.capitalize()}</h2>"]
    parts += [paragraph(" ".join(words.about_texts(measured)))]
    for title, metric in (("Per token", score.metric), (f"Averaged per {unit}", score.per_unit)):
        parts += [f"<h3>{escape(title)}</h3>{_level_table(measured, metric)}"]
    note = (
        "Mean ± standard deviation over n seeds, lower is better; bold: the lowest mean of a column, the non-private "
        "method left out."
    )
    if "dp_mixmin" in measured.methods:
        note += " Without fine-tuning only DP-MixMin depends on ε, that of its mixture."
    if "dp_mixmin" in measured.methods and measured.config.privacy.composition == "parallel":
        note += " All methods but DP-MixMin fine-tune on the records of the mixing part too."
    parts += [paragraph(note, "note"), _added(measured)]
    return "".join(parts)


def _level_table(measured: Measurements, metric: str) -> str:
    def stat(stage: str, method: str, epsilon: float | None) -> Stat:
        found = [measured.scores(stage, task, method, epsilon, metric) for task in measured.tasks]
        return Stat.of(value for scores in found for value in scores.values())

    score, epsilons, lines = measured.score, measured.epsilons, []
    before = {m: [stat(BEFORE, m, e) for e in (epsilons if m == "dp_mixmin" else (None,))] for m in measured.methods}
    after = {m: [stat(AFTER, m, e) for e in epsilons] for m in measured.methods}
    private = [method for method in measured.methods if method != "mixmin"]
    lowest = score.best(found.mean for method in private for found in before[method])
    tops = [score.best(after[method][i].mean for method in private) for i in range(len(epsilons))]
    for method in measured.methods:
        leads = [f"ε = {e:g}: " for e in epsilons] if len(before[method]) > 1 else [""]
        levels = zip(before[method], leads, strict=True)
        cells = ["".join(_level(score, found, method in private and found.mean == lowest, to) for found, to in levels)]
        cells += [_level(score, found, method in private and found.mean == top)
                  for found, top in zip(after[method], tops, strict=True)]  # fmt: skip
        cells = [f'<th scope="row">{escape(NAMES[method])}</th>', *(f"<td>{cell}</td>" for cell in cells)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = ("pretraining", "no fine-tuning", *(f"ε = {e:g}" for e in epsilons))
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return (
        f'<div class="scroll"><table class="levels"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _level(score: Score, stat: Stat, strong: bool, lead: str = "") -> str:
    if stat.mean is None:
        return f"<div>{escape(lead)}—</div>"
    text = f"<b>{score.show(stat)}</b>" if strong else score.show(stat)
    return f"<div>{escape(lead)}{text} <small>n = {stat.n}</small></div>"


def _added(measured: Measurements) -> str:
    """Return what private fine-tuning adds to each method at each epsilon, good or bad."""
    rows = []
    for method in measured.methods:
        found = [tables.finetuning(measured, method, epsilon) for epsilon in measured.epsilons]
        if any(found):
            rows.append([NAMES[method], *("—" if c is None else f"{c.change()}: {c.reading()}" for c in found)])
    if not rows:
        return ""
    note = "The same model after private fine-tuning against before, on the seeds that have both; negative is better."
    heads = ("pretraining", *(f"ε = {e:g}" for e in measured.epsilons))
    return f"<h3>What private fine-tuning adds</h3>{grid(heads, rows)}{paragraph(note, 'note')}"


def epochs(measured: Measurements) -> str:
    """Return how often each method's pretraining read each source."""
    found = {(row["source"], row["method"], row["epsilon"]): Stat(row["mean"], row["sd"], row["n"])
             for row in tables.epochs(measured).rows(named=True)}  # fmt: skip
    columns = [pair for pair in tables.mixture_columns(measured) if any(key[1:] == pair for key in found)]
    if not found:
        return ""

    def cell(source: str, pair: tuple) -> str:
        stat = found.get((source, *pair))
        return "—" if stat is None else stat.text(2) if source else f"{stat.mean:,.0f}"

    rows = [[source or "tokens in all", *(cell(source, pair) for pair in columns)]
            for source in (*measured.sources, "") if any(key[0] == source for key in found)]  # fmt: skip
    heads = ("source", *(NAMES[m] + ("" if e is None else f", ε = {e:g}") for m, e in columns))
    note = (
        "Epochs: how many times pretraining read the kept text of each public source, mean ± standard deviation over "
        "seeds. Far above 1 a source was repeated."
    )
    return f"<h2>How often each source was read</h2>{grid(heads, rows)}{paragraph(note, 'note')}"
