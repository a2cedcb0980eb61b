"""Pages of runs: one HTML file without scripts or links, with pictures as base64; and validation curves."""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from structconv_systems.plots import seeds_png
from structconv_systems.train.run import Run

__all__ = ["CURVES", "figure", "page", "paragraph", "section", "table", "training_curves"]

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
    """Return a whole page from pieces of HTML made by the functions of this module."""
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
            f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n" + "\n".join(parts)
            + "\n</body>\n</html>\n")


def section(title: str, parts: Sequence[str]) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain texts; the first column names the rows."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def figure(image: bytes, caption: str, kind: str = "png") -> str:
    """Return an embedded PNG or GIF with its caption, which screen readers read too."""
    data = base64.b64encode(image).decode()
    return (f'<figure><img alt="{escape(caption, quote=True)}" src="data:image/{kind};base64,{data}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>")


#: The caption of validation curves.
CURVES = ("{} while training: a curve for each seed, a color for each group; left over steps, right over minutes (the "
          "step times the mean time of a step of this training, with validation).")

_Points = list[tuple[float, float]]


def training_curves(run: Run, seconds: Mapping[str, float], titles: Mapping[str, str] | None = None
                    ) -> dict[str, bytes]:
    """Return a PNG for each validation figure that a training has more than once, by the name of the figure.

    Args:
        seconds: how long each training took, by its name. titles: names of groups for people.
    """
    points: dict[str, dict[str, _Points]] = defaultdict(lambda: defaultdict(list))
    last: dict[str, int] = {}
    for line in run.metrics:
        last[line["job"]] = line["step"]
        for metric, value in line.items():
            if metric.startswith("val_") and value is not None:
                points[metric][line["job"]].append((line["step"], value))
    pictures = {}
    for metric, jobs in points.items():
        steps, minutes = (defaultdict(list) for _ in range(2))
        for job, curve in jobs.items():
            if len(curve) > 1:
                group, (x, y) = job.partition("/")[0], zip(*curve, strict=True)
                title = (titles or {}).get(group, group)
                steps[title].append((x, y))
                minutes[title].append(([seconds[job] / 60 * step / last[job] for step in x], y))
        if steps:
            pictures[metric] = seeds_png({"step": steps, "minutes": minutes}, y_label=metric.replace("_", " "))
    return pictures
