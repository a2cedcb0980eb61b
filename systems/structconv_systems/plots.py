"""Plots of runs as PNG: images, curves, alignments of tokens, and forecasts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from structconv.errors import ShapeError
from structconv.pictures import BAR, INK, as_array, color_bar, framed, panels, to_png

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["alignment_png", "curves_png", "forecast_png", "growth_png", "images_png", "seeds_png"]

_Curve = tuple[Sequence[float], Sequence[float]]


def images_png(images: Sequence[ArrayLike], titles: Sequence[str] = ()) -> bytes:
    """Draw small images in a row, each on its own scale with a color bar."""
    figure, axes = panels(len(images), 1.2, left=0.1, right=BAR)
    for k, (axis, image) in enumerate(zip(axes, images, strict=True)):
        color_bar(axis, axis.imshow(as_array(image), cmap="magma", interpolation="nearest"))
        axis.set_title(titles[k] if k < len(titles) else "", fontsize=7, color=INK)
        axis.set_xticks([])
        axis.set_yticks([])
    return to_png(figure)


def curves_png(curves: Mapping[str, _Curve], *, x_label: str, y_label: str, logarithmic: bool = False,
               dashed: Mapping[str, _Curve] | None = None) -> bytes:
    """Draw named curves, each (x values, y values), in one frame.

    Args:
        logarithmic: if True, both axes are. dashed: further curves, in the colors of those of the same name.
    """
    figure, (axis,) = panels(1, 6.0, aspect=0.55, left=0.75)
    for name, (x, y) in curves.items():
        [line] = axis.plot(x, y, label=name, linewidth=1.4)
        if dashed and name in dashed:
            axis.plot(*dashed[name], linewidth=1.0, linestyle="--", color=line.get_color())
    if logarithmic:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xlabel(x_label, color=INK, fontsize=8)
    axis.set_ylabel(y_label, color=INK, fontsize=8)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, framealpha=0.0, labelcolor=INK)
    return to_png(figure)


def growth_png(sizes: Sequence[int], rows: Mapping[str, Mapping[str, Any]], predicted: str, *, x_label: str,
               y_label: str) -> bytes:
    """Draw ``seconds`` of each row over the sizes and, dashed, its `predicted` costs, scaled to the last time."""
    curves, dashed = {}, {}
    for name, row in rows.items():
        scale = 1e3 * row["seconds"][-1] / row[predicted][-1]
        curves[name] = sizes, [1e3 * seconds for seconds in row["seconds"]]
        dashed[name] = sizes, [scale * number for number in row[predicted]]
    return curves_png(curves, x_label=x_label, y_label=y_label, logarithmic=True, dashed=dashed)


def seeds_png(frames: Mapping[str, Mapping[str, Sequence[_Curve]]], *, y_label: str) -> bytes:
    """Draw frames side by side, by the label of x; the curves of a group have one color and one entry in the legend."""
    names = list(dict.fromkeys(name for groups in frames.values() for name in groups))
    figure, axes = panels(len(frames), 3.6, aspect=0.7, left=0.7, below=0.5,
                          right=0.4 + 0.06 * max(map(len, names), default=0))
    for axis, (x_label, groups) in zip(axes, frames.items(), strict=True):
        for name, curves in groups.items():
            style = divmod(names.index(name), 10)
            for place, (x, y) in enumerate(curves):
                axis.plot(x, y, label="_" * (place > 0) + name, linewidth=0.8, color=f"C{style[1]}",
                          linestyle=("-", "--", ":")[style[0] % 3])
        axis.set_xlabel(x_label, color=INK, fontsize=8)
        axis.set_ylabel(y_label, color=INK, fontsize=8)
        axis.grid(alpha=0.25)
    axes[-1].legend(*axes[0].get_legend_handles_labels(), fontsize=7, framealpha=0.0, labelcolor=INK,
                    loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return to_png(figure)


def alignment_png(weights_NM: ArrayLike, source: Sequence[str], target: Sequence[str], *,
                  x_label: str = "source", y_label: str = "target") -> bytes:
    """Draw the weight of each source token (column) for each target token (row), white at 0, black at 1.

    Args:
        weights_NM: array or CPU tensor (N, M), rows that sum to 1. source: the M tokens. target: the N tokens.
        x_label: what the source tokens are. y_label: what the target tokens are.

    Raises:
        ShapeError: the numbers of tokens do not match the weights.
    """
    array = as_array(weights_NM)
    if array.shape != (len(target), len(source)):
        raise ShapeError("alignment_png", f"weights must have shape (N={len(target)}, M={len(source)})", array.shape)
    above, beside = (0.45 + 0.065 * max(map(len, tokens), default=0) for tokens in (source, target))
    figure, (axis,) = panels(1, 1.2 + 0.25 * len(source), aspect=(1 + len(target)) / (1 + len(source)),
                              headroom=max(above, 0.6), left=max(beside, 1.0), right=BAR)
    color_bar(axis, axis.imshow(array, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto"))
    plain: dict[str, Any] = {"fontsize": 7, "color": INK, "parse_math": False}
    axis.set_xticks(range(len(source)), _printable(source), rotation=90, **plain)
    axis.set_yticks(range(len(target)), _printable(target), **plain)
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xlabel(x_label, fontsize=8, color=INK)
    axis.set_ylabel(y_label, fontsize=8, color=INK)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # what the font lacks is drawn as a box
        return to_png(figure)


def forecast_png(history: ArrayLike, futures: Mapping[str, ArrayLike], weights_RM: ArrayLike, *, y_label: str) -> bytes:
    """Draw a series, its continuations by name, and below them the weights of R rows for M equal parts of it.

    Args:
        history: array or CPU tensor (T,), NaN where nothing was observed. futures: continuations of the series.
        weights_RM: (R, M), each row on its own scale from white at 0 to black.

    Raises:
        ShapeError: `history` is not a vector, or `weights_RM` is not a matrix.
    """
    past, weights = as_array(history), as_array(weights_RM)
    if past.ndim != 1 or weights.ndim != 2:
        raise ShapeError("forecast_png", "history must be (T,) and weights (R, M)", f"{past.shape}, {weights.shape}")
    figure, (upper, lower) = _stacked(8.0, (2.2, 0.25 + 0.08 * len(weights)))
    upper.plot(range(1 - len(past), 1), past, color=INK, linewidth=1.0)
    for name, future in futures.items():
        values = as_array(future)
        upper.plot(range(1, len(values) + 1), values, label=name, linewidth=1.2)
    upper.set_ylabel(y_label, color=INK, fontsize=8)
    upper.legend(fontsize=6, framealpha=0.0, labelcolor=INK, loc="best")
    color_bar(lower, lower.imshow(
        weights / weights.max(-1, keepdims=True, initial=1e-30), cmap="Greys", vmin=0, vmax=1, aspect="auto",
        interpolation="nearest", extent=(0.5 - len(past), 0.5, len(weights) + 0.5, 0.5)))
    lower.set_ylabel("attention", color=INK, fontsize=8)
    lower.set_xlabel("readings since the last one", color=INK, fontsize=8)
    lower.set_xlim(upper.get_xlim())
    return to_png(figure)


def _printable(words: Sequence[str]) -> list[str]:
    return ["".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in word)
            for word in words]


def _stacked(inches: float, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Return a figure with framed panels of these heights, one above the other."""
    from matplotlib.figure import Figure

    left, gap, below = 0.6, 0.25, 0.45
    width, height = inches + left + BAR, sum(heights) + gap * len(heights) + below
    figure, top = Figure(figsize=(width, height)), height
    axes = []
    for own in heights:
        top -= own + gap
        axes.append(figure.add_axes((left / width, (top + gap / 2) / height, inches / width, own / height)))
    return figure, [framed(axis) for axis in axes]
