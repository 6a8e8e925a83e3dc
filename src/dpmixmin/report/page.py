"""The page that people read: ``index.html``.

It is one file: inline CSS and SVG, no script, nothing loaded. All text is escaped. Its order is: what is guaranteed,
what came out, the figures, how settings were chosen, what is not covered, where the files are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from dpmixmin.config import Config
from dpmixmin.report import tables, words
from dpmixmin.report.figures import Images
from dpmixmin.report.tables import AFTER, BEFORE, MACRO, NAMES, Measurements, Settings, Stat

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --paper: #ffffff; --link: #0b5cad }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #3a424b; --paper: #15191e; --link: #7cb8f5 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 66rem; margin: 0 auto; padding: 1rem 1rem 3rem }
h1 { font-size: 1.6rem; margin: .5rem 0 1rem }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line) }
p, li { max-width: 46rem; overflow-wrap: anywhere }
a { color: var(--link) }
.lead { font-size: 1.05rem }
.note, figcaption, small { color: var(--soft); font-size: .85rem }
.banner { max-width: none; background: #b00020; color: #fff; padding: .8rem 1rem; border-radius: 6px;
  font-weight: 700 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 }
tbody th { font-weight: 400; white-space: nowrap }
td { white-space: nowrap }
td small { display: block; font-size: .72rem; line-height: 1.1 }
.scores tr.first > * { border-top: 2px solid var(--line) }
figure { margin: 1.2rem 0 }
.card { background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem }
.card svg { display: block; width: 100%; min-width: 34rem; max-width: 52rem; height: auto; margin: auto }
.files { padding-left: 1.1rem }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --link: #000 }
  body { font-size: 11pt }
  .scroll { overflow: visible }
  .card svg { min-width: 0 }
  .banner { border: 2px solid #b00020; color: #b00020; background: #fff }
  figure, tr { break-inside: avoid }
  h2 { break-after: avoid }
}
"""


def index_html(measured: Measurements, settings: dict[str, Settings], images: Images) -> str:
    """Return the page."""
    config = measured.config
    title = f"{config.experiment}: DP-MixMin report"
    banner = config.privacy.insecure_seed is not None
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="banner" role="alert">{escape(words.NOT_PRIVATE)}</p>' if banner else "",
        f'<p class="lead">{escape(words.guarantee(config))}</p>',
        _paragraph(words.spent(measured)),
        _result(measured),
        _scores(measured),
        "<h2>Figures</h2>",
        *(_figure(name, caption, images) for name, caption in words.CAPTIONS.items()),
        _mixtures(measured),
        _twice(measured),
        _settings(config, settings),
        _not_covered(config, settings),
        _files(measured),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _paragraph(text: str, kind: str = "plain") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a plain table whose first column names the row."""
    head = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _result(measured: Measurements) -> str:
    if not {"dp_mixmin", "uniform"} <= set(measured.methods):
        return ""
    found = words.comparisons(measured)
    rows = [
        [
            "before" if c.stage == BEFORE else "after",
            f"{c.epsilon:g}",
            tables.name_tasks(c.tasks),
            str(c.seeds),
            f"{c.first:.3f}",
            f"{c.second:.3f}",
            f"{c.difference:+.4f}",
            "—" if c.error is None else f"{c.error:.4f}",
            c.reading(),
        ]
        for c in found
    ]
    heads = ("fine-tuning", "ε", "tasks", "seeds", "DP-MixMin", "Uniform", "difference", "standard error", "reading")
    note = (
        "Macro test AUC on the tasks and seeds that both methods have. “Clearly” means that the 95 % t-interval of "
        "the difference over seeds excludes zero; the seeds re-partition one dataset, so this describes these runs."
    )
    lead = "".join(_paragraph(sentence, "lead") for sentence in words.headline(found))
    table = _grid(heads, rows) if rows else ""
    return f"<h2>Result</h2>{lead}{table}{_paragraph(note, 'note')}"


def _scores(measured: Measurements) -> str:
    """Return the paper-style table: methods by task, epsilons before and after fine-tuning."""
    cells = {(row["task"], row["method"], row["epsilon"]): row for row in tables.table(measured).rows(named=True)}
    epsilons, methods, lines = measured.epsilons, measured.methods, []
    for task in (*measured.tasks, MACRO):
        for method in methods:
            first = method == methods[0]
            line = f'<th scope="rowgroup" rowspan="{len(methods)}">{escape(task)}</th>' if first else ""
            line += f'<th scope="row">{escape(NAMES[method])}</th>'
            for part in ("before", "after"):
                best = [
                    max(cells[task, m, e][f"{part}_mean"] or 0 for m in methods if m != "mixmin") for e in epsilons
                ]
                rows = [cells[task, method, e] for e in epsilons]
                stats = [Stat(row[f"{part}_mean"], row[f"{part}_sd"], row[f"{part}_n"]) for row in rows]
                strong = [method != "mixmin" and stat.mean == top for stat, top in zip(stats, best, strict=True)]
                once = part == "before" and method != "dp_mixmin" and len(set(stats)) == 1
                line += _score(stats[0], all(strong), len(stats)) if once else "".join(map(_score, stats, strong))
            lines.append(f'<tr class="{"first" if first else "other"}">{line}</tr>')
    heads = "".join(f'<th scope="col">ε = {e:g}</th>' for _ in (BEFORE, AFTER) for e in epsilons)
    span = f'colspan="{len(epsilons)}" scope="colgroup"'
    return (
        '<h2>Test AUC</h2><div class="scroll"><table class="scores"><thead>'
        '<tr><th rowspan="2" scope="col">task</th><th rowspan="2" scope="col">pretraining</th>'
        f"<th {span}>before fine-tuning</th><th {span}>after fine-tuning</th></tr><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>{_paragraph(_scores_note(measured), 'note')}"
    )


def _scores_note(measured: Measurements) -> str:
    text = "Test AUC, mean ± standard deviation over n seeds; bold: the highest mean, the non-private method left out."
    if "dp_mixmin" in measured.methods:
        text += " Before fine-tuning only DP-MixMin depends on ε."
        text += " All methods but DP-MixMin fine-tune on the records of the mixing part too."
    text += " A macro row averages over the tasks that all methods measured at this ε have"
    sets = []
    for e in measured.epsilons:
        tasks = measured.shared_tasks(AFTER, measured.present_methods(AFTER, e), [e])
        sets += [f"{tables.name_tasks(tasks)} at ε = {e:g}"] if tasks else []
    return text + (f"; after fine-tuning {words.join(sets, 'and')}." if sets else ".")


def _score(stat: Stat, strong: bool, span: int = 1) -> str:
    across = f' colspan="{span}"' if span > 1 else ""
    if stat.mean is None:
        return f"<td{across}>—</td>"
    text = f"<b>{stat.text()}</b>" if strong else stat.text()
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
    return f"<h2>How close the private mixtures are</h2>{_grid(heads, rows)}{_paragraph(note, 'note')}"


def _twice(measured: Measurements) -> str:
    rows = [
        [row["task"], NAMES[row["method"]], f"{row['epsilon']:g}", f"{row['chosen_mean']:.3f}",
         f"{row['twice_mean']:.3f}", f"{row['difference']:+.4f}", str(row["n"])]
        for row in tables.twice(measured).rows(named=True)
    ]  # fmt: skip
    if not rows:
        return ""
    heads = ("task", "pretraining", "ε", "chosen steps", "twice the steps", "difference", "seeds")
    note = "Test AUC at the same ε with twice the chosen steps: was a method cut short? Not part of any other number."
    return f"<h2>Twice the steps</h2>{_grid(heads, rows)}{_paragraph(note, 'note')}"


def _settings(config: Config, settings: dict[str, Settings]) -> str:
    declared = [name for name, found in settings.items() if found.chosen["chosen_by"] == "user_declared"]
    text = "No settings were read."
    if settings:
        text = (
            f"Settings were chosen at ε = {config.tune.epsilon:g} on public stand-in tasks (held-out public records "
            "that pose as the sensitive task), with the same number of candidates for every method; no private score "
            "was used. The choice serves every ε."
        )
    if settings and len(declared) == len(settings):
        text = "All settings were given in the config; nothing was tuned."
    items = [words.describe_settings(name, found) for name, found in settings.items()]
    return f"<h2>How settings were chosen</h2>{_paragraph(text)}{_list(items) if items else ''}"


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
    return f"<h2>What is not covered</h2>{_list(items)}"


def _files(measured: Measurements) -> str:
    methods = measured.methods
    links = [
        ("summary.csv", "every number of this page, one long table"),
        ("table.csv", "the table of test AUCs"),
        ("mixtures.csv", "distances between mixtures"),
        *([("twice.csv", "the check with twice the steps")] if len(tables.twice(measured)) else []),
        ("summary.txt", "the short text version"),
        *((f"{name}.svg", "figure, also as .png") for name in words.CAPTIONS),
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
    items = "".join(
        f'<li><a href="{escape(to)}"><code>{escape(to)}</code></a> {escape(what)}</li>' for to, what in links
    )
    return f'<h2>Files</h2><ul class="files">{items}</ul>'
