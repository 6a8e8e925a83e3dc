"""The page that people read: ``index.html``.

It is one file: inline CSS and SVG, no script, nothing loaded. All text is escaped. Its order is: what is guaranteed,
what came out, the figures, how settings were chosen, what is not covered, where the files are.
"""

from __future__ import annotations

import re
from html import escape

import polars as pl

from dpmixmin.config import Config
from dpmixmin.report import audits, tables, texts, words
from dpmixmin.report.drawing import Images
from dpmixmin.report.html import CSS, bullets, grid, paragraph
from dpmixmin.report.score import Score
from dpmixmin.report.settings import Settings
from dpmixmin.report.tables import AFTER, BEFORE, NAMES, Measurements, Stat


def index_html(
    measured: Measurements, settings: dict[str, Settings], images: Images, findings: pl.DataFrame | None = None
) -> str:
    """Return the page.

    Args:
        measured: the long table.
        settings: the choices and their curves.
        images: the figures, those of the audits too.
        findings: the table of audits, or None where there were none.
    """
    config = measured.config
    title = f"{config.experiment}: DP-MixMin report"
    banner = config.privacy.insecure_seed is not None
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="banner" role="alert">{escape(words.NOT_PRIVATE)}</p>' if banner else "",
        f'<p class="lead">{escape(words.guarantee(config))}</p>',
        paragraph(words.spent(measured)),
        _result(measured),
        _scores(measured) if measured.score.over_tasks else texts.levels(measured),
        "<h2>Figures</h2>",
        *(_figure(name, caption, images) for name, caption in words.CAPTIONS[measured.score.metric].items()),
        _mixtures(measured),
        texts.epochs(measured),
        _twice(measured),
        "" if findings is None else audits.section(findings, images, _figure, config.mode, config.audit.runs),
        _settings(measured, settings),
        _not_covered(config, settings),
        _files(measured),
    ]
    return _document(title, body)


def audits_html(config: Config, findings: pl.DataFrame, images: Images) -> str:
    """Return the page of the audits alone: all that a deployment has, before it spends anything."""
    title = f"{config.experiment}: audits"
    body = [
        f"<h1>{escape(title)}</h1>",
        audits.section(findings, images, _figure, config.mode, config.audit.runs),
    ]
    return _document(title, body)


def _document(title: str, body: list[str]) -> str:
    """Return a whole page, without its empty parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _result(measured: Measurements) -> str:
    if not {"dp_mixmin", "uniform"} <= set(measured.methods):
        return ""
    found, score = words.comparisons(measured), measured.score
    rows = [
        [
            "before" if c.stage == BEFORE else "after",
            f"{c.epsilon:g}",
            *([tables.name_tasks(c.tasks)] if score.over_tasks else []),
            str(c.seeds),
            score.number(c.first),
            score.number(c.second),
            c.change(),
            "—" if c.error is None else score.error(c.error),
            c.reading(),
        ]
        for c in found
    ]
    heads = ["fine-tuning", "ε", "tasks", "seeds", "DP-MixMin", "Uniform", "difference", "standard error", "reading"]
    if score.over_tasks:
        note = "Macro test AUC on the tasks and seeds that both methods have."
        clearly = "the difference over seeds"
    else:
        heads.remove("tasks")
        note = (
            "Test perplexity on the seeds that both methods have; lower is better. The difference is that of the two "
            "means, in percent of Uniform's; its standard error is that of the log-ratio over seeds."
        )
        clearly = "the log-ratio over seeds"
    note += (
        f" “Clearly” means that the 95 % t-interval of {clearly} excludes zero; the seeds re-partition one dataset, "
        "so this describes these runs."
    )
    said = words.headline(found)
    if not score.over_tasks:
        said = [text.replace(" %", "\u00a0%") for text in (*said, *words.finetuning(measured))]
    lead = "".join(paragraph(sentence, "lead") for sentence in said)
    table = grid(heads, rows) if rows else ""
    return f"<h2>Result</h2>{lead}{table}{paragraph(note, 'note')}"


def _scores(measured: Measurements) -> str:
    """Return the paper-style table: methods by task, epsilons before and after fine-tuning."""
    cells = {(row["task"], row["method"], row["epsilon"]): row for row in tables.table(measured).rows(named=True)}
    epsilons, methods, score, lines = measured.epsilons, measured.methods, measured.score, []
    for task in measured.rows_of_tables():
        for method in methods:
            first = method == methods[0]
            line = f'<th scope="rowgroup" rowspan="{len(methods)}">{escape(task)}</th>' if first else ""
            line += f'<th scope="row">{escape(NAMES[method])}</th>'
            for part in ("before", "after"):
                best = [
                    score.best(cells[task, m, e][f"{part}_mean"] for m in methods if m != "mixmin") for e in epsilons
                ]
                rows = [cells[task, method, e] for e in epsilons]
                stats = [Stat(row[f"{part}_mean"], row[f"{part}_sd"], row[f"{part}_n"]) for row in rows]
                strong = [method != "mixmin" and stat.mean == top for stat, top in zip(stats, best, strict=True)]
                once = part == "before" and method != "dp_mixmin" and len(set(stats)) == 1
                line += (
                    _score(score, stats[0], all(strong), len(stats))
                    if once
                    else "".join(_score(score, *pair) for pair in zip(stats, strong, strict=True))
                )
            lines.append(f'<tr class="{"first" if first else "other"}">{line}</tr>')
    heads = "".join(f'<th scope="col">ε = {e:g}</th>' for _ in (BEFORE, AFTER) for e in epsilons)
    span = f'colspan="{len(epsilons)}" scope="colgroup"'
    return (
        '<h2>Test AUC</h2><div class="scroll"><table class="scores"><thead>'
        '<tr><th rowspan="2" scope="col">task</th><th rowspan="2" scope="col">pretraining</th>'
        f"<th {span}>before fine-tuning</th><th {span}>after fine-tuning</th></tr><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>{paragraph(_scores_note(measured), 'note')}"
    )


def _scores_note(measured: Measurements) -> str:
    text = "Test AUC, mean ± standard deviation over n seeds; bold: the highest mean, the non-private method left out."
    if "dp_mixmin" in measured.methods:
        text += " Before fine-tuning only DP-MixMin depends on ε."
        if measured.config.privacy.composition == "parallel":
            text += " All methods but DP-MixMin fine-tune on the records of the mixing part too."
    text += " A macro row averages over the tasks that all methods measured at this ε have"
    sets = []
    for e in measured.epsilons:
        tasks = measured.shared_tasks(AFTER, measured.present_methods(AFTER, e), [e])
        sets += [f"{tables.name_tasks(tasks)} at ε = {e:g}"] if tasks else []
    return text + (f"; after fine-tuning {words.join(sets, 'and')}." if sets else ".")


def _score(score: Score, stat: Stat, strong: bool, span: int = 1) -> str:
    across = f' colspan="{span}"' if span > 1 else ""
    if stat.mean is None:
        return f"<td{across}>—</td>"
    text = f"<b>{score.show(stat)}</b>" if strong else score.show(stat)
    return f"<td{across}>{text}<small>n = {stat.n}{' (any ε)' if across else ''}</small></td>"


def _figure(name: str, caption: str, images: Images) -> str:
    """Return an inline SVG with ids of its own, so that several can share a page."""
    svg = images[f"{name}.svg"].decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f'<figure><div class="card scroll">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _mixtures(measured: Measurements) -> str:
    rows = [
        [
            NAMES[row["method"]] + ("" if row["epsilon"] is None else f", ε = {row['epsilon']:g}"),
            Stat(row["cosine_mean"], row["cosine_sd"], row["n"]).text(),
            Stat(row["l1_mean"], row["l1_sd"], row["n"]).text(),
            str(row["n"]),
        ]
        for row in tables.mixtures(measured).rows(named=True)
    ]
    if not rows:
        return ""
    note = "Distance to the non-private mixture, mean ± standard deviation over all tasks and seeds (n pairs)."
    heads = ("mixture", "cosine similarity", "L1 distance", "n")
    return f"<h2>How close the private mixtures are</h2>{grid(heads, rows)}{paragraph(note, 'note')}"


def _twice(measured: Measurements) -> str:
    score = measured.score
    rows = [
        [row["task"], NAMES[row["method"]], f"{row['epsilon']:g}", score.number(row["chosen_mean"]),
         score.number(row["twice_mean"]), score.change(row["twice_mean"], row["chosen_mean"]), str(row["n"])]
        for row in tables.twice(measured).rows(named=True)
    ]  # fmt: skip
    if not rows:
        return ""
    heads = ("task", "pretraining", "ε", "chosen steps", "twice the steps", "difference", "seeds")
    what = score.label[0].upper() + score.label[1:]
    note = f"{what} at the same ε with twice the chosen steps: was a method cut short? Not part of any other number."
    return f"<h2>Twice the steps</h2>{grid(heads, rows)}{paragraph(note, 'note')}"


def _settings(measured: Measurements, settings: dict[str, Settings]) -> str:
    config = measured.config
    declared = [name for name, found in settings.items() if found.chosen["chosen_by"] == "user_declared"]
    posing = "records" if config.text is None else "documents"
    text = "No settings were read."
    if settings:
        text = (
            f"Settings were chosen at ε = {config.tune.epsilon:g} on public stand-in tasks (held-out public {posing} "
            "that pose as the sensitive task), with the same number of candidates for every method; no private score "
            "was used. The choice serves every ε."
        )
        if config.text is not None:
            text += " One model pretrained on the other sources, uniformly, stands for every method that pretrains."
    if settings and len(declared) == len(settings):
        text = "All settings were given in the config; nothing was tuned."
    items = [words.describe_settings(name, found, measured.score) for name, found in settings.items()]
    return f"<h2>How settings were chosen</h2>{paragraph(text)}{bullets(items) if items else ''}"


def _not_covered(config: Config, settings: dict[str, Settings]) -> str:
    items = [
        "Every number on this page is a study metric, measured on private records without protection: not for release "
        "when the data is really sensitive.",
        f"{words.ONLY_RELEASE} Several tasks, seeds and epsilons on one dataset compose: publishing more than one of "
        "them costs more.",
        "Floating-point arithmetic: the proofs are about real numbers where a mechanism is not on an exact grid.",
        "Timing and other side channels of the machine that runs the mechanisms.",
    ]
    if any(found.chosen["chosen_by"] == "user_declared" for found in settings.values()):
        items.append(
            "Settings given in the config: if private records were looked at to choose them, that is not counted."
        )
    if "mixmin" in config.methods:
        items.append("MixMin (non-private) and every model built on it: study only, no guarantee.")
    return f"<h2>What is not covered</h2>{bullets(items)}"


def _files(measured: Measurements) -> str:
    methods = measured.methods
    links = [
        ("summary.csv", "every number of this page, one long table"),
        ("table.csv", f"the table of {measured.score.plural}"),
        ("mixtures.csv", "distances between mixtures"),
        *([("twice.csv", "the check with twice the steps")] if len(tables.twice(measured)) else []),
        ("summary.txt", "the short text version"),
        *((f"{name}.svg", "figure, also as .png") for name in words.CAPTIONS[measured.score.metric]),
        ("../metrics/", "the measurements of each task (study)"),
        ("../../public/settings/", "settings chosen on public stand-ins, with all candidates"),
    ]
    if "dp_mixmin" in methods:
        links += [
            ("../../released/mixtures/", "private mixtures: weights.json and privacy.json of every cell"),
            ("../../released/pretrained/", "models pretrained on private mixtures"),
        ]
    if set(methods) - {"mixmin"}:
        links.append(("../../released/finetuned/", "privately fine-tuned models and their privacy.json"))
    if "mixmin" in methods:
        links.append(("../", "study: the non-private mixtures and everything built on them"))
    if measured.config.audit.gate != "none":
        links.append(("../audits/", "audits: scores of every run, findings, and a summary of their own"))
    items = "".join(
        f'<li><a href="{escape(to)}"><code>{escape(to)}</code></a> {escape(what)}</li>' for to, what in links
    )
    return f'<h2>Files</h2><ul class="files">{items}</ul>'
