"""Formulas as MathML, which browsers render without a script, a font or the network.

docutils converts LaTeX to MathML; this extension registers it with Sphinx as the HTML math renderer `mathml`.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml


def visit_inline(self: Any, node: nodes.math) -> None:
    """Write an inline formula."""
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    """Write a displayed formula, which scrolls by itself where the window is narrow."""
    formula = latex2mathml.tex2mathml(node.astext(), as_block=True)
    self.body.append(self.starttag(node, "div", CLASS="math", style="overflow-x: auto") + formula + "</div>")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Register the renderer; `html_math_renderer = "mathml"` in conf.py selects it."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
