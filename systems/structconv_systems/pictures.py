"""Pictures of points, edges and paths in the plane as PNG and SVG, and of motion as GIF.

Nothing is random or global: the same arguments give the same bytes."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from structconv.pictures import INK, as_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Drawing", "agreement", "curves", "graphs", "images_gif", "map_of", "motion_gif", "paths", "videos"]

_DPI = 110


class Drawing(NamedTuple):
    """A picture of points and lines in both formats."""

    png: bytes
    svg: bytes


def graphs(positions_N2: ArrayLike, edges: Mapping[str, ArrayLike]) -> Drawing:
    """Draw panels of the same points (N, 2), each with edges of its own: pairs (2, E), or weights (N, N) from 0 to 1,
    which set the opacity."""
    import numpy as np

    positions = as_array(positions_N2)
    figure, axes = _figure(len(edges))
    size = min(18.0, max(1.5, 1000 / max(len(positions), 1)))
    for axis, (title, values) in zip(axes, edges.items(), strict=True):
        array = np.asarray(values)
        listed = array.dtype.kind in "iu"
        pairs = array if listed else np.stack(np.nonzero(array > 0))
        for m, n in pairs.T:
            axis.plot(*positions[[m, n]].T, color="C0", alpha=1.0 if listed else float(array[m, n]), zorder=1,
                      linewidth=0.35 * size**0.5)
        axis.scatter(*positions.T, s=size, linewidths=0, color="C1", zorder=2)
        _equal(axis, title)
    return _drawn(figure)


def paths(paths_TN2: Mapping[str, ArrayLike]) -> Drawing:
    """Draw panels of the paths of N points, (T, N, 2), by title, a dot at each end, all on one scale."""
    figure, axes = _figure(len(paths_TN2))
    low, high = _bounds(list(paths_TN2.values()))
    for axis, (title, way) in zip(axes, paths_TN2.items(), strict=True):
        steps = as_array(way)
        for point in range(steps.shape[1]):
            axis.plot(*steps[:, point].T, linewidth=0.9, color=f"C{point % 10}")
            axis.scatter(*steps[-1, point], s=14, color=f"C{point % 10}")
        _equal(axis, title, low, high)
    return _drawn(figure)


def map_of(positions_N2: ArrayLike, values: Mapping[str, ArrayLike], *, label: str = "") -> Drawing:
    """Draw panels of the same points, colored by values (N,), all on one scale."""
    positions, rows = as_array(positions_N2), {k: as_array(v) for k, v in values.items()}
    figure, axes = _figure(len(rows))
    low, high = _range(rows.values())
    for axis, (title, row) in zip(axes, rows.items(), strict=True):
        drawn = axis.scatter(*positions.T, c=row, s=12, vmin=low, vmax=high, cmap="viridis")
        _equal(axis, title)
    figure.colorbar(drawn, ax=axes, shrink=0.7, label=label)
    return _drawn(figure)


def agreement(pairs: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Drawing:
    """Draw panels, by title, of measured numbers (N,) beside predicted ones (N,), the line of equality, and the root of
    the mean squared difference, all on one scale."""
    import numpy as np

    numbers = {title: np.stack([as_array(part) for part in pair], -1) for title, pair in pairs.items()}
    figure, axes = _figure(len(numbers), 2.6)
    low, high = _range(numbers.values())
    for axis, (title, points) in zip(axes, numbers.items(), strict=True):
        root = float(np.sqrt(np.square(points[:, 0] - points[:, 1]).mean()))
        axis.plot((low, high), (low, high), color=INK, linewidth=0.8, zorder=1)
        axis.scatter(*points.T, s=6, alpha=0.5, linewidths=0, zorder=2)
        _equal(axis, f"{title}: {len(points)}, RMSE {root:.2f}", np.full(2, low), np.full(2, high))
        axis.set_xlabel("measured", fontsize=7, color=INK)
    axes[0].set_ylabel("predicted", fontsize=7, color=INK)
    return _drawn(figure)


def curves(panels: Mapping[str, tuple[ArrayLike, Mapping[str, ArrayLike]]], *, x_label: str, y_label: str) -> Drawing:
    """Draw panels, by title, of x (N,) and curves (N,) by name; the first one is dashed."""
    figure, axes = _figure(len(panels), 2.6)
    for axis, (title, (x, lines)) in zip(axes, panels.items(), strict=True):
        for place, (name, y) in enumerate(lines.items()):
            axis.plot(as_array(x), as_array(y), "-" if place else "--", color=f"C{place}",
                      linewidth=1.2, label=name, zorder=2 - place)
        axis.axhline(0, color=INK, linewidth=0.5)
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=6, colors=INK, length=2)
        axis.set_xlabel(x_label, fontsize=7, color=INK)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel(y_label, fontsize=7, color=INK)
    return _drawn(figure)


def videos(frames_THW: Mapping[str, ArrayLike]) -> Drawing:
    """Draw a row of images for each video (T, H, W), by title, all on one scale of greys with a color bar."""
    import numpy as np
    from matplotlib.figure import Figure

    rows = {title: as_array(video) for title, video in frames_THW.items()}
    low, high = _range(rows.values())
    wide = max(video.shape[0] * video.shape[2] / video.shape[1] for video in rows.values())
    figure = Figure(figsize=(0.6 * wide, 0.8 * len(rows)), layout="constrained")
    for place, (title, video) in enumerate(rows.items(), 1):
        axis = figure.add_subplot(len(rows), 1, place)
        edged = np.pad(video, ((0, 0), (0, 0), (0, 1)), constant_values=high)
        drawn = axis.imshow(np.concatenate(edged, -1)[:, :-1], cmap="Greys_r", vmin=low, vmax=high)
        axis.set_title(title, fontsize=7, loc="left")
        axis.set_axis_off()
    figure.colorbar(drawn, ax=figure.axes, label="brightness")
    return _drawn(figure)


def motion_gif(paths_TN2: Mapping[str, ArrayLike], *, tail: int = 15) -> bytes:
    """Draw panels of N points that move for T steps, (T, N, 2), by title, each with a tail of its last steps."""
    ways = {title: as_array(way) for title, way in paths_TN2.items()}
    figure, axes = _figure(len(ways))
    low, high = _bounds(list(ways.values()))
    lines: list[tuple[Any, Any, Any]] = []
    for axis, (title, way) in zip(axes, ways.items(), strict=True):
        _equal(axis, title, low, high)
        for point in range(way.shape[1]):
            (line,) = axis.plot([], [], linewidth=1.0, color=f"C{point % 10}")
            (dot,) = axis.plot([], [], "o", markersize=4, color=f"C{point % 10}")
            lines.append((line, dot, way[:, point]))

    def draw(step: int) -> None:
        for line, dot, way in lines:
            line.set_data(*way[max(0, step - tail):step + 1].T)
            dot.set_data(*way[step:step + 1].T)

    return _gif(figure, draw, min(len(way) for way in ways.values()), 20)


def images_gif(frames_THW: Mapping[str, ArrayLike]) -> bytes:
    """Draw panels of videos (T, H, W), by title, all on one scale of greys."""
    videos = {title: as_array(video) for title, video in frames_THW.items()}
    figure, axes = _figure(len(videos))
    low, high = _range(videos.values())
    shown = []
    for axis, (title, video) in zip(axes, videos.items(), strict=True):
        axis.set_title(title, fontsize=8)
        axis.set_axis_off()
        shown.append((axis.imshow(video[0], cmap="Greys_r", vmin=low, vmax=high), video))

    def draw(step: int) -> None:
        for image, video in shown:
            image.set_data(video[step])

    return _gif(figure, draw, min(len(video) for video in videos.values()), 5)


def _figure(panels: int, inches: float = 2.2) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(panels * inches, inches + 0.3), layout="constrained")
    return figure, [figure.add_subplot(1, panels, place + 1) for place in range(panels)]


def _range(arrays: Collection[Any]) -> tuple[float, float]:
    return min(array.min() for array in arrays), max(array.max() for array in arrays)


def _bounds(ways: Sequence[ArrayLike]) -> tuple[Any, Any]:
    """Return the corners of the box around all finite points."""
    import numpy as np

    points = np.concatenate([as_array(way).reshape(-1, 2) for way in ways])
    points = points[np.isfinite(points).all(1)]
    return points.min(0), points.max(0)


def _equal(axis: Any, title: str, low: Any = None, high: Any = None) -> None:
    axis.set_title(title, fontsize=8)
    axis.set_aspect("equal")
    axis.tick_params(labelsize=6, colors=INK, length=2)
    if low is not None:
        margin = 0.05 * max(high - low) + 1e-9
        axis.set_xlim(low[0] - margin, high[0] + margin)
        axis.set_ylim(low[1] - margin, high[1] + margin)


def _drawn(figure: Any) -> Drawing:
    import matplotlib as mpl

    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    with mpl.rc_context({"svg.hashsalt": "structconv"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return Drawing(png.getvalue(), svg.getvalue())


def _gif(figure: Any, draw: Any, steps: int, frames_a_second: int) -> bytes:
    from matplotlib.animation import PillowWriter

    writer = PillowWriter(fps=frames_a_second)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "motion.gif"
        with writer.saving(figure, str(path), dpi=_DPI):
            for step in range(steps):
                draw(step)
                writer.grab_frame()
        return path.read_bytes()
