"""`{basis-picture}`: a directive that runs an expression and shows the matrices of the basis that it yields.

The code on the page is the code that is drawn. Pictures go to `_build/gallery`, named by the hash of their code.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[1] / "_build" / "gallery"


def evaluated(code: str) -> Any:
    """Run all statements, over the public names of structconv and torch, and return the value of the last."""
    import torch

    import structconv

    names: dict[str, Any] = {name: getattr(structconv, name) for name in structconv.__all__} | {"torch": torch}
    body = ast.parse(code).body
    last = body.pop()
    if not isinstance(last, ast.Expr):
        raise ValueError(f"the last line must be an expression: {code!r}")
    torch.manual_seed(0)
    exec(compile(ast.Module(body, []), "<gallery>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<gallery>", "eval"), names)


def drawn(code: str, titles: list[str]) -> str:
    """The picture of the code's basis: its name in the folder."""
    from structconv.pictures import basis_png

    place = FOLDER / f"{hashlib.sha256((code + repr(titles)).encode()).hexdigest()[:16]}.png"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(basis_png(evaluated(code).dense().detach(), titles, panel_inches=1.5))
    return place.name


class BasisPicture(SphinxDirective):
    """Code whose last line is a basis without batch dimensions; `:titles:` names its matrices, separated by ';'."""

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"titles": directives.unchanged, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        titles = [title.strip() for title in self.options.get("titles", "").split(";") if title.strip()]
        place = "/_build/gallery/" + drawn(code, titles)
        block = nodes.literal_block(code, code, language="python")
        return [block, nodes.image(uri=place, alt=self.options.get("alt", code))]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("basis-picture", BasisPicture)
    return {"parallel_read_safe": True}
