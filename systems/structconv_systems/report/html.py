"""One HTML file with everything in it: no script, no link to anywhere, pictures as base64, light and dark."""

import base64
from collections.abc import Sequence
from html import escape

__all__ = ["figure", "page", "paragraph", "section", "table"]

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c1e21; --soft: #5f6670; --paper: #ffffff; --line: #d9dde3; --mark: #f2f5f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #9aa3ae; --paper: #16181c; --line: #343a42; --mark: #1f2329; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p, figcaption { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tbody tr:hover { background: var(--mark); }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption { font-size: .88rem; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page; `parts` are pieces of HTML made by the functions of this module."""
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n" + "\n".join(parts)
            + "\n</body>\n</html>\n")


def section(title: str, parts: Sequence[str]) -> str:
    """A heading and what belongs to it."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts; the first column names the rows."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def figure(image: bytes, caption: str, kind: str = "png") -> str:
    """A PNG or GIF, embedded, with its caption, which is also what a screen reader reads."""
    data = base64.b64encode(image).decode()
    return (f'<figure><img alt="{escape(caption, quote=True)}" src="data:image/{kind};base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>")
