"""Pictures: what is drawn where, read back from the PNG, and the terminal's characters."""

import io
from unittest import mock

import numpy as np
import torch
from matplotlib import image

from structconv import Graph, pictures
from structconv.bases import Dense, Identity, Sparse
from structconv.pictures import basis_png, matrix_text


def dark_share(png: bytes) -> float:
    """Without the color bar."""
    pixels = image.imread(io.BytesIO(png))[:, :-int(110 * pictures.BAR)]
    opaque_black = (pixels[..., :3].max(-1) < 0.2) & (pixels[..., 3] > 0.9)
    return float(opaque_black.mean())


def test_a_full_matrix_is_dark_and_an_empty_one_is_not():
    assert dark_share(basis_png(np.ones((1, 10, 10)))) > 0.4
    assert dark_share(basis_png(np.zeros((1, 10, 10)))) == 0


def test_a_matrix_has_a_color_bar_to_its_largest_value_and_axes_that_say_what_they_are():
    with mock.patch.object(pictures, "to_png", lambda figure: figure):
        figure = basis_png(np.stack([np.eye(3), 4 * np.eye(3)]), x_label="column", y_label="row")
    first, second, bar, other = figure.axes
    assert (bar.get_ylim(), other.get_ylim()) == ((0, 1), (0, 4))
    assert (first.get_xlabel(), second.get_ylabel()) == ("column", "row")


def test_single_entries_of_a_large_matrix_stay_visible():
    matrix = np.zeros((3000, 3000))
    matrix[np.arange(3000), np.arange(3000)] = 1
    assert dark_share(basis_png(matrix)) > 0.001


def test_small_matrices_take_two_characters_an_entry():
    assert matrix_text(np.eye(3, k=1)) == "··██··\n····██\n······"


def test_large_ones_take_half_a_character_and_fit():
    assert matrix_text(np.eye(60)).splitlines()[:2] == ["▀▄" + "·" * 58, "··▀▄" + "·" * 56]
    lines = matrix_text(np.eye(201), columns=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0][0] != "·"


def test_weights_are_grey_levels_of_the_largest():
    assert matrix_text([[0, 0.25, 0.5, 0.75, 1, -1]]) == "··░░▒▒▓▓████"
    assert matrix_text([[0.3, 0.3], [0, 0.3]]) == "████\n··██"
    wide = np.tile([0.0, 0.2, 1.0], (60, 20))
    assert set(matrix_text(wide)) == {"·", "░", "█", "\n"}
    assert matrix_text([[float("nan"), float("inf"), 1.0, 0.0]]) == "██████··"


def test_a_notebook_draws_small_bases_and_prints_large_ones():
    assert Identity(512)._repr_png_().startswith(b"\x89PNG")
    nodes = torch.arange(60_000)
    large = Sparse(Graph(torch.stack([nodes, nodes.flip(0)])))
    assert large._repr_png_() is None
    assert repr(large) == "Sparse(K=1, M=60000, N=60000, E=60000, values=ones)"
    assert Dense(torch.zeros(1).expand(64, 8, 512, 512))._repr_png_() is None
    assert Dense(torch.eye(4).expand(3, 2, 4, 4))._repr_png_().startswith(b"\x89PNG")
