"""Plots: what is drawn where, read back from the PNG."""

import io
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib import image

from structconv.errors import ShapeError
from structconv_systems import plots
from structconv_systems.plots import alignment_png, curves_png, forecast_png, images_png, seeds_png


def dark_share(png: bytes) -> float:
    pixels = image.imread(io.BytesIO(png))
    opaque_black = (pixels[..., :3].max(-1) < 0.2) & (pixels[..., 3] > 0.9)
    return float(opaque_black.mean())


def test_images_and_curves():
    assert images_png([np.eye(3), np.ones((2, 2))], ["a"]).startswith(b"\x89PNG")
    plain = curves_png({"a": ([1, 2], [0.5, 0.7])}, x_label="x", y_label="y")
    assert plain.startswith(b"\x89PNG")
    dashed = curves_png({"a": ([1, 2], [0.5, 0.7])}, x_label="x", y_label="y", dashed={"a": ([1, 2], [0.6, 0.6])})
    assert dashed != plain
    assert curves_png({"a": ([1, 2], [0.5, 0.7])}, x_label="x", y_label="y", logarithmic=True) != plain


def test_the_curves_of_a_group_have_one_color_and_one_entry_in_the_legend():
    curve, other = ([1, 2], [0.5, 0.7]), ([1, 2], [0.6, 0.8])
    with mock.patch.object(plots, "to_png", lambda figure: figure):
        figure = seeds_png({"step": {"a": [curve, other], "b": [curve]}, "minutes": {"a": [curve]}}, y_label="y")
    left, right = figure.axes
    assert [line.get_color() for line in left.lines] == ["C0", "C0", "C1"]
    assert left.get_legend_handles_labels()[1] == ["a", "b"]
    assert (left.get_xlabel(), right.get_xlabel(), left.get_ylabel()) == ("step", "minutes", "y")
    assert [text.get_text() for text in right.get_legend().texts] == ["a", "b"]


def test_heat_maps_have_color_bars_and_axes_that_say_what_they_are():
    weights = np.full((2, 3), 0.5)
    with mock.patch.object(plots, "to_png", lambda figure: figure):
        drawn = {"alignment": alignment_png(weights, ["a", "b", "c"], ["d", "e"], x_label="source word"),
                 "images": images_png([weights, weights]),
                 "forecast": forecast_png([1.0, 2.0], {"forecast": [1.0]}, weights, y_label="")}
    assert {name: len(figure.axes) for name, figure in drawn.items()} == {"alignment": 2, "images": 4, "forecast": 3}
    axis = drawn["alignment"].axes[0]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("source word", "target")


def test_alignments_of_any_tokens_are_drawn():
    weights = torch.rand(2, 3).softmax(-1)
    png = alignment_png(weights, ["$a", "\x1a", "汉"], ["<b>", "c_"])
    assert png.startswith(b"\x89PNG")
    with pytest.raises(ShapeError, match=r"\(N=1, M=3\)"):
        alignment_png(weights, ["a", "b", "c"], ["d"])


def test_forecasts_are_drawn_behind_their_history_and_where_they_look_is_dark():
    history, futures = [1.0, np.nan, 3.0, 2.0], {"forecast": torch.ones(2), "last value": [2.0, 2.0]}
    all_over, nowhere = (forecast_png(history, futures, weights, y_label="reading")
                         for weights in (np.full((12, 4), 0.25), np.zeros((12, 4))))
    assert dark_share(all_over) > 0.1 > dark_share(nowhere)
    with pytest.raises(ShapeError, match=r"weights \(R, M\); got \(4,\), \(2,\)"):
        forecast_png(history, futures, [0.5, 0.5], y_label="reading")
