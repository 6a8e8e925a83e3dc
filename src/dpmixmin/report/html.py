"""The parts that the page is made of: its style, paragraphs, lists, plain tables. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --paper: #ffffff; --link: #0b5cad }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #3a424b; --paper: #15191e; --link: #7cb8f5 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 66rem; margin: 0 auto; padding: 1rem 1rem 3rem }
h1 { font-size: 1.6rem; margin: .5rem 0 1rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem }
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
.levels td div small { display: inline }
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


def paragraph(text: str, kind: str = "plain") -> str:
    """Return a paragraph, or nothing for no text."""
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def bullets(items: Iterable[str]) -> str:
    """Return a list."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a plain table whose first column names the row."""
    head = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
