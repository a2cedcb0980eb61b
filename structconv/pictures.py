"""Pictures of bases: the K matrices side by side as a PNG, and one matrix in the characters of a terminal."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from structconv.errors import ShapeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

__all__ = ["alignment_png", "basis_png", "curves_png", "forecast_png", "images_png", "matrix_text"]

_Curve = tuple[Sequence[float], Sequence[float]]

_MOST_PANELS = 16
_MOST_CELLS = 360
_INK = "#808080"
_LEFT, _BELOW = 0.4, 0.35
_GREYS = "·░▒▓█"


def basis_png(dense_KMN: ArrayLike, titles: Sequence[str] = (), *, panel_inches: float = 2.0) -> bytes:
    """The K matrices of a basis as one PNG; row m is an input entry, column n an output entry.

    Each panel has its own scale: from white at zero to black at its largest value or, where there are negative
    values, from blue by white at zero to red. At most 16 panels are drawn. A matrix of more than 360 rows or columns
    is drawn in cells, each with its value of largest magnitude, so that single entries stay visible.
    The background is transparent and the lettering grey, for light and dark pages.

    Args:
        dense_KMN: array or CPU tensor (K, M, N), or (M, N).
        titles: one a matrix; missing ones read ``A_k``.
        panel_inches: the width of a panel.

    Raises:
        ShapeError: `dense_KMN` has another number of axes.
    """
    array = _array(dense_KMN)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        raise ShapeError("basis_png", "dense must have shape (K, M, N)", array.shape)
    shown = array[:_MOST_PANELS]
    cut = len(array) > len(shown)
    figure, axes = _panels(len(shown), panel_inches, headroom=0.25 if cut else 0.0)
    for k, (axis, matrix_MN) in enumerate(zip(axes, shown, strict=True)):
        low, high, colors = _scale(matrix_MN)
        if matrix_MN.size:
            axis.imshow(_cells(matrix_MN), cmap=colors, vmin=low, vmax=high, interpolation="nearest",
                        extent=(-0.5, matrix_MN.shape[1] - 0.5, matrix_MN.shape[0] - 0.5, -0.5))
        axis.set_title(titles[k] if k < len(titles) else f"A$_{{{k + 1}}}$", fontsize=8, color=_INK)
    if cut:
        figure.suptitle(f"{len(shown)} of {len(array)}", fontsize=8, color=_INK)
    return _png(figure)


def images_png(images: Sequence[ArrayLike], titles: Sequence[str] = (), *, panel_inches: float = 1.2) -> bytes:
    """Small images in a row, each on its own scale from its least to its largest value, as one PNG."""
    figure, axes = _panels(len(images), panel_inches)
    for k, (axis, image) in enumerate(zip(axes, images, strict=True)):
        axis.imshow(_array(image), cmap="magma", interpolation="nearest")
        axis.set_title(titles[k] if k < len(titles) else "", fontsize=7, color=_INK)
        axis.set_xticks([])
        axis.set_yticks([])
    return _png(figure)


def curves_png(curves: Mapping[str, _Curve], *, x_label: str, y_label: str, logarithmic: bool = False,
               dashed: Mapping[str, _Curve] | None = None) -> bytes:
    """Named curves, each (x values, y values), in one frame, as one PNG.

    Args:
        logarithmic: both axes are.
        dashed: further curves by the names of those whose colors they have.
    """
    figure, (axis,) = _panels(1, 6.0, aspect=0.55, left=0.75)
    for name, (x, y) in curves.items():
        [line] = axis.plot(x, y, label=name, linewidth=1.4)
        if dashed and name in dashed:
            axis.plot(*dashed[name], linewidth=1.0, linestyle="--", color=line.get_color())
    if logarithmic:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xlabel(x_label, color=_INK, fontsize=8)
    axis.set_ylabel(y_label, color=_INK, fontsize=8)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, framealpha=0.0, labelcolor=_INK)
    return _png(figure)


def alignment_png(weights_NM: ArrayLike, source: Sequence[str], target: Sequence[str]) -> bytes:
    """Draw the weight of each source token (column) for each target token (row), white at 0, black at 1, as a PNG.

    Args:
        weights_NM: array or CPU tensor (N, M), rows that sum to 1.
        source: the M tokens. target: the N tokens.

    Raises:
        ShapeError: the numbers of tokens do not match the weights.
    """
    array = _array(weights_NM)
    if array.shape != (len(target), len(source)):
        raise ShapeError("alignment_png", f"weights must have shape (N={len(target)}, M={len(source)})", array.shape)
    above, beside = (0.25 + 0.065 * max(map(len, tokens), default=0) for tokens in (source, target))
    figure, (axis,) = _panels(1, 1.2 + 0.25 * len(source), aspect=(1 + len(target)) / (1 + len(source)),
                              headroom=max(above, 0.6), left=max(beside, 1.0))
    axis.imshow(array, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    plain: dict[str, Any] = {"fontsize": 7, "color": _INK, "parse_math": False}
    axis.set_xticks(range(len(source)), _printable(source), rotation=90, **plain)
    axis.set_yticks(range(len(target)), _printable(target), **plain)
    axis.xaxis.tick_top()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # what the font lacks is drawn as a box
        return _png(figure)


def forecast_png(history: ArrayLike, futures: Mapping[str, ArrayLike], weights_RM: ArrayLike, *,
                 y_label: str) -> bytes:
    """Draw a series, its continuations by name, and below them the weights of R rows for M equal parts of it.

    Args:
        history: array or CPU tensor (T,), NaN where nothing was observed.
        futures: continuations of the series, drawn in turn.
        weights_RM: (R, M), each row on its own scale from white at 0 to black.

    Raises:
        ShapeError: `history` is not a vector, or `weights_RM` is not a matrix.
    """
    past, weights = _array(history), _array(weights_RM)
    if past.ndim != 1 or weights.ndim != 2:
        raise ShapeError("forecast_png", "history must be (T,) and weights (R, M)", f"{past.shape}, {weights.shape}")
    figure, (upper, lower) = _stacked(8.0, (2.2, 0.25 + 0.08 * len(weights)))
    upper.plot(range(1 - len(past), 1), past, color=_INK, linewidth=1.0)
    for name, future in futures.items():
        values = _array(future)
        upper.plot(range(1, len(values) + 1), values, label=name, linewidth=1.2)
    upper.set_ylabel(y_label, color=_INK, fontsize=8)
    upper.legend(fontsize=6, framealpha=0.0, labelcolor=_INK, loc="best")
    lower.imshow(weights / weights.max(-1, keepdims=True, initial=1e-30), cmap="Greys", vmin=0, vmax=1, aspect="auto",
                 interpolation="nearest", extent=(0.5 - len(past), 0.5, len(weights) + 0.5, 0.5))
    lower.set_ylabel("looks at", color=_INK, fontsize=8)
    lower.set_xlabel("readings since the last one", color=_INK, fontsize=8)
    lower.set_xlim(upper.get_xlim())
    return _png(figure)


def _printable(words: Sequence[str]) -> list[str]:
    return ["".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in word)
            for word in words]


def matrix_text(matrix_MN: ArrayLike, *, columns: int = 80) -> str:
    """A matrix in block characters, from `·` at zero by `░▒▓` to `█` at the largest magnitude.

    Matrices of at most half as many columns as there are take two characters an entry; larger ones take half a
    character, two rows to a line; those too wide are drawn in larger cells. Of entries that share a character the
    largest is drawn; where all that are not zero are alike, each is drawn as its half.

    Args:
        matrix_MN: array or CPU tensor (M, N).
        columns: how many characters a line may have.
    """
    levels = _levels(_array(matrix_MN))
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


def _array(values: ArrayLike) -> NDArray[np.float64]:
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


def _panels(count: int, inches: float, *, aspect: float = 1.0, headroom: float = 0.0,
            left: float = _LEFT) -> tuple[Any, list[Any]]:
    """A figure with `count` framed axes, at most eight a row; without pyplot, so no global state is touched.

    Each panel has the same place for its ticks and title: laying out by content would draw everything twice.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(count / 8) or 1
    columns = math.ceil(count / rows) or 1
    cell_width, cell_height = inches + left + 0.1, inches * aspect + _BELOW + 0.25
    width, height = columns * cell_width, rows * cell_height + headroom
    figure = Figure(figsize=(width, height))
    axes = []
    for k in range(count):
        row, column = divmod(k, columns)
        low = (rows - 1 - row) * cell_height + _BELOW
        axes.append(figure.add_axes(((column * cell_width + left) / width, low / height, inches / width,
                                     inches * aspect / height)))
    return figure, [_framed(axis) for axis in axes]


def _stacked(inches: float, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Return a figure with framed panels of these heights and of equal width, one above the other."""
    from matplotlib.figure import Figure

    left, gap, below = 0.6, 0.25, 0.45
    width, height = inches + left + 0.1, sum(heights) + gap * len(heights) + below
    figure, top = Figure(figsize=(width, height)), height
    axes = []
    for own in heights:
        top -= own + gap
        axes.append(figure.add_axes((left / width, (top + gap / 2) / height, inches / width, own / height)))
    return figure, [_framed(axis) for axis in axes]


def _framed(axis: Any) -> Any:
    axis.tick_params(labelsize=6, colors=_INK, length=2)
    axis.patch.set_alpha(0.0)
    for spine in axis.spines.values():
        spine.set_color(_INK)
    return axis


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, transparent=True, metadata={"Software": None})
    return buffer.getvalue()
