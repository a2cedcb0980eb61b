"""Docstrings are plain text with formulas: what reStructuredText would take for markup in them is escaped.

`sum_k A_k^T x`, `(..., K, *shape)` and `a | b` stay as they are written. Left alone are `code` between backticks,
*Titles* between asterisks, examples, directives, and blocks announced by a double colon. Two arguments or errors on
one line are put on two, and the docstring of a property is left whole where napoleon would take it for "type: text".
"""

from __future__ import annotations

import inspect
import re
from typing import Any

KEPT = re.compile(r"(``.+?``|`[^`]+`|(?<![\w*])\*[A-Z][^*]*\w\*(?!\w))", re.DOTALL)
MARKUP = re.compile(r"(?<!\\)([*|]|(?<=\w)_(?!\w))")
ENUMERATOR = re.compile(r"(?m)((?:^ *|: )[A-Z])(?=\.(?:\s|$))")
ERRORS = ("ConfigError", "ShapeError", "StructureError")


def escape(text: str) -> str:
    """Escape asterisks, bars and closing underscores outside of what is kept."""
    pieces = KEPT.split(text)
    pieces[::2] = [MARKUP.sub(r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)


def plain(text: str) -> str:
    """Escape a docstring, paragraph by paragraph."""
    done: list[str] = []
    literal = False
    for block in re.split(r"(\n\s*\n)", text):
        first = block.lstrip("\n").splitlines()[0] if block.strip() else ""
        literal = literal and (not first or first[0].isspace())
        verbatim = literal or first.lstrip().startswith((">>>", ".. "))
        done.append(block if verbatim else escape(block))
        literal = literal or block.rstrip().endswith("::")
    return "".join(done)


def apart(text: str, names: tuple[str, ...]) -> str:
    """Begin a new line where a sentence is followed by one of the names and a colon."""
    if not names:
        return text
    return re.sub(rf"(?m)^( +)(.*?\.) (?=(?:{'|'.join(map(re.escape, names))}): )", r"\1\2\n\1", text)


def parameters(obj: Any) -> tuple[str, ...]:
    """The names that an `Args` section may explain."""
    try:
        return tuple(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return ()


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Handler of `autodoc-process-docstring`, before napoleon."""
    text = apart("\n".join(lines), (*parameters(obj), *ERRORS))
    lines[:] = plain(ENUMERATOR.sub(r"\1\\", text)).split("\n")
    if what in ("attribute", "property"):
        _PROPERTIES[name] = list(lines)


def restore(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Handler of `autodoc-process-docstring`, after napoleon."""
    if name in _PROPERTIES:
        lines[:] = _PROPERTIES.pop(name)


_PROPERTIES: dict[str, list[str]] = {}


def setup(app: Any) -> dict[str, Any]:
    """Run before and after napoleon (500), which adds markup of its own."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
    return {"parallel_read_safe": True}
