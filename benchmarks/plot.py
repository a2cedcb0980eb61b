"""Ratios by size: how each peer compares as graphs grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import Line
from structconv.errors import ConfigError

__all__ = ["SIZES", "check", "draw"]

#: Numbers of edges of a sweep.
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: str) -> Path:
    """The picture's path; `ConfigError` for a format that cannot be drawn, or without matplotlib."""
    from importlib.util import find_spec

    picture = Path(path)
    if picture.suffix not in _SUFFIXES:
        raise ConfigError("benchmarks", f"--plot must end in one of {', '.join(_SUFFIXES)}", repr(path))
    if find_spec("matplotlib") is None:
        raise ConfigError("benchmarks", "--plot needs matplotlib", "not installed",
                          "Install it: pip install 'structconv[pictures]'.")
    return picture


def draw(path: Path, lines: Sequence[Line]) -> None:
    """A panel a swept case: the ratio of each peer over the number of edges, forward dashed, both solid."""
    from matplotlib.figure import Figure

    curves: dict[str, dict[tuple[str, str], list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if "ns_per_edge" in line.extra and line.edges and line.ratio is not None and line.peer is not None:
            name = f"{line.peer}, huge pages" if line.huge_pages else line.peer
            curves[line.case][name, line.phase].append((line.edges, line.ratio))
    figure = Figure(figsize=(4.2 * max(len(curves), 1), 3.6), layout="constrained")
    panels = figure.subplots(1, max(len(curves), 1), squeeze=False, sharey=True)[0]
    for panel, (case, by_peer) in zip(panels, curves.items(), strict=False):
        colors: dict[str, str] = {}
        for (peer, phase), points in by_peer.items():
            color = colors.setdefault(peer, f"C{len(colors)}")
            edges, ratios = zip(*sorted(points), strict=True)
            panel.plot(edges, ratios, "o-" if phase == "both" else "o--", color=color, markersize=3,
                       label=f"{peer}, {phase}")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(title=case, xlabel="edges", xscale="log", yscale="log")
        panel.legend(fontsize="x-small")
    panels[0].set_ylabel("the peer's time over ours")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
