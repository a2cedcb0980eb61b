"""Pictures of bases: the K matrices side by side as a PNG, and one matrix in the characters of a terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from structconv.errors import ShapeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["BAR", "INK", "as_array", "basis_png", "color_bar", "framed", "matrix_text", "panels", "to_png"]

_MOST_PANELS = 16
_MOST_CELLS = 360
#: The color of frames, ticks and words.
INK = "#808080"
_LEFT, _BELOW = 0.4, 0.35
#: Inches that a color bar needs at the right of a panel.
BAR = 0.5
_GREYS = "·░▒▓█"


def basis_png(dense_KMN: ArrayLike, titles: Sequence[str] = (), *, panel_inches: float = 2.0,
              x_label: str = "output n", y_label: str = "input m") -> bytes:
    """The K matrices of a basis as one PNG; row m is an input entry, column n an output entry.

    Each panel has its own scale, with a color bar: from white at zero to black at its largest value or, where there
    are negative values, from blue by white at zero to red. At most 16 panels are drawn. A matrix of more than 360 rows
    or columns is drawn in cells, each with its value of largest magnitude, so that single entries stay visible.
    The background is transparent and the lettering grey, for light and dark pages.

    Args:
        dense_KMN: array or CPU tensor (K, M, N), or (M, N).
        titles: one a matrix; missing ones read ``A_k``.
        panel_inches: the width of a panel.
        x_label: what a column is. y_label: what a row is.

    Raises:
        ShapeError: `dense_KMN` has another number of axes.
    """
    array = as_array(dense_KMN)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        raise ShapeError("basis_png", "dense must have shape (K, M, N)", array.shape)
    shown = array[:_MOST_PANELS]
    cut = len(array) > len(shown)
    figure, axes = panels(len(shown), panel_inches, headroom=0.25 if cut else 0.0, left=_LEFT + 0.1, right=BAR,
                          below=_BELOW + 0.1)
    for k, (axis, matrix_MN) in enumerate(zip(axes, shown, strict=True)):
        low, high, colors = _scale(matrix_MN)
        if matrix_MN.size:
            color_bar(axis, axis.imshow(
                _cells(matrix_MN), cmap=colors, vmin=low, vmax=high, interpolation="nearest",
                extent=(-0.5, matrix_MN.shape[1] - 0.5, matrix_MN.shape[0] - 0.5, -0.5)))
        axis.set_xlabel(x_label, fontsize=7, color=INK)
        axis.set_ylabel(y_label, fontsize=7, color=INK)
        axis.set_title(titles[k] if k < len(titles) else f"A$_{{{k + 1}}}$", fontsize=8, color=INK)
    if cut:
        figure.suptitle(f"{len(shown)} of {len(array)}", fontsize=8, color=INK)
    return to_png(figure)


def matrix_text(matrix_MN: ArrayLike, *, columns: int = 80) -> str:
    """A matrix in block characters, from `·` at zero by `░▒▓` to `█` at the largest magnitude.

    Matrices of at most half as many columns as there are take two characters an entry; larger ones take half a
    character, two rows to a line; those too wide are drawn in larger cells. Of entries that share a character the
    largest is drawn; where all that are not zero are alike, each is drawn as its half.

    Args:
        matrix_MN: array or CPU tensor (M, N).
        columns: how many characters a line may have.
    """
    levels = _levels(as_array(matrix_MN))
    if 2 * levels.shape[1] <= min(columns, 48):
        return "\n".join("".join(2 * _GREYS[level] for level in row) for row in levels)
    levels = _cells(levels.astype(float), columns).astype(int)
    halves = {(4, 0): "▀", (0, 4): "▄"} if set(levels.flat) <= {0, 4} else {}
    pairs = [(levels[m], levels[m + 1] if m + 1 < len(levels) else 0 * levels[m]) for m in range(0, len(levels), 2)]
    return "\n".join("".join(halves.get((up, down)) or _GREYS[max(up, down)]
                             for up, down in zip(*(row.tolist() for row in pair), strict=True)) for pair in pairs)


def _levels(matrix: NDArray[np.float64]) -> NDArray[np.int64]:
    """Magnitudes in quarters of the largest finite one, rounded up: 0 for zeros, 4 for what is not finite."""
    import numpy as np

    size = np.where(np.isfinite(matrix), np.abs(matrix), np.inf)
    largest = size.max(where=np.isfinite(size), initial=0.0) or 1.0
    quarters: NDArray[np.int64] = np.ceil(np.minimum(4 * size / largest, 4) * (1 - 1e-6)).astype(int)
    return quarters


def as_array(values: ArrayLike) -> NDArray[np.float64]:
    """Numbers, or a tensor on any device, as an array."""
    import numpy as np

    detached = values.detach().cpu().double() if hasattr(values, "detach") else values
    return np.asarray(detached, dtype=float)


def _cells(matrix: NDArray[np.float64], most: int = _MOST_CELLS) -> NDArray[np.float64]:
    """`matrix` with at most `most` rows and columns: each cell the value of largest magnitude in its block."""
    import numpy as np

    size = max(math.ceil(side / most) for side in matrix.shape) if matrix.size else 1
    if size == 1:
        return matrix
    rows, columns = (math.ceil(side / size) for side in matrix.shape)
    padded = np.zeros((rows * size, columns * size))
    padded[:matrix.shape[0], :matrix.shape[1]] = matrix
    blocks = padded.reshape(rows, size, columns, size).transpose(0, 2, 1, 3).reshape(rows, columns, -1)
    largest = np.abs(blocks).argmax(-1)
    return np.take_along_axis(blocks, largest[..., None], -1)[..., 0]


def _scale(array: NDArray[np.float64]) -> tuple[float, float, str]:
    if not array.size:
        return 0.0, 1.0, "Greys"
    low, high = float(array.min()), float(array.max())
    if low < 0:
        most = max(-low, high)
        return -most, most, "RdBu_r"
    return 0.0, high or 1.0, "Greys"


def panels(count: int, inches: float, *, aspect: float = 1.0, headroom: float = 0.0,
           left: float = _LEFT, right: float = 0.1, below: float = _BELOW) -> tuple[Any, list[Any]]:
    """A figure with `count` framed axes, at most eight a row; without pyplot, so no global state is touched. Each has
    the same place for its ticks and title: laying out by content would draw everything twice."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / 8) or 1
    columns = math.ceil(count / rows) or 1
    cell_width, cell_height = inches + left + right, inches * aspect + below + 0.25
    width, height = columns * cell_width, rows * cell_height + headroom
    figure = Figure(figsize=(width, height))
    axes = []
    for k in range(count):
        row, column = divmod(k, columns)
        low = (rows - 1 - row) * cell_height + below
        axes.append(figure.add_axes(((column * cell_width + left) / width, low / height, inches / width,
                                     inches * aspect / height)))
    return figure, [framed(axis) for axis in axes]


def color_bar(axis: Any, image: Any) -> None:
    """Draw the scale of an image's colors at the right of its panel, for which there must be `BAR` inches."""
    figure, box = axis.figure, axis.get_position(original=True)
    inch = 1 / figure.get_figwidth()
    bar = figure.colorbar(image, cax=framed(figure.add_axes((box.x1 + 0.06 * inch, box.y0, 0.07 * inch, box.height))))
    bar.ax.tick_params(labelsize=5)
    bar.outline.set_edgecolor(INK)


def framed(axis: Any) -> Any:
    """The axis with small ticks and a grey frame."""
    axis.tick_params(labelsize=6, colors=INK, length=2)
    axis.patch.set_alpha(0.0)
    for spine in axis.spines.values():
        spine.set_color(INK)
    return axis


def to_png(figure: Any) -> bytes:
    """The figure as a PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, transparent=True, metadata={"Software": None})
    return buffer.getvalue()
