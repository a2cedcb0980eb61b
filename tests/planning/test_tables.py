"""A plan's table in a notebook."""

import re

import torch

from structconv import Conv, DotProduct, Grid, Shifts


def test_a_notebook_shows_the_table_that_is_printed():
    made = Conv(DotProduct(heads=2, dim=4).softmax() | Shifts([-1, 1]), 8, 8).plan(torch.randn(20, 8),
                                                                                 structure=Grid(20))
    shown = made._repr_html_()
    printed = str(made)
    assert shown.count("<table>") == shown.count("</table>") == 1 + len(made.parts)
    for candidate in made.candidates:
        assert f">{candidate.path}</td>" in shown
    words = re.sub(r"<[^>]*>", " ", shown).replace("&lt;", "<").replace("&gt;", ">").replace("&#x27;", "'").split()
    assert words == printed.replace("&amp;", "&").split()
    assert "measured ms" not in shown


def test_words_of_the_problem_are_escaped():
    made = Conv(DotProduct().map(lambda t: t).softmax(), 4, 4).plan(torch.randn(5, 4))
    assert "<lambda>" not in made._repr_html_()
