"""The options of the verbs `show` and `plan`, the mechanisms that they know by name, and the errors for unknown ones.

Nothing is imported before a mechanism is built.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from structconv.errors import ConfigError, nearest

if TYPE_CHECKING:
    from structconv.mechanisms import Mechanism
    from structconv.structures import Graph, Grid

__all__ = ["NAMED", "Named", "Once", "Options", "add_options", "find", "no_more", "read_options"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a mechanism on the command line."""

    grid: tuple[int, ...] = (8, 8)
    periodic: bool = False
    offsets: tuple[tuple[int, ...], ...] = ()
    order: int = 3
    heads: int = 4

    @property
    def entries(self) -> int:
        """M, the number of points of the grid."""
        return math.prod(self.grid)

    def structure(self, on_graph: bool) -> Grid | Graph:
        """The grid, or the graph of its neighboring points."""
        from structconv.structures import Grid

        grid = Grid(self.grid, periodic=self.periodic)
        return grid.graph() if on_graph else grid


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --grid, --periodic, --offset, --order and --heads."""
    parser.add_argument("--grid", default="8x8", metavar="AxB", help="the grid's sizes (default: 8x8)")
    parser.add_argument("--periodic", action="store_true", help="close the grid on itself")
    parser.add_argument("--offset", action="append", default=[], metavar="A,B", help="a shift; may be repeated")
    parser.add_argument("--order", type=int, default=3, help="highest power or polynomial (default: 3)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")


def read_options(args: argparse.Namespace) -> Options:
    """Return the options, converted and checked."""
    return Options(grid=_numbers("--grid", args.grid, "x"), periodic=args.periodic, order=args.order,
                  heads=args.heads, offsets=tuple(_numbers("--offset", text, ",") for text in args.offset))


def _numbers(flag: str, text: str, separator: str) -> tuple[int, ...]:
    """``8x10`` or ``2,-4`` as integers."""
    try:
        return tuple(int(word) for word in text.split(separator))
    except ValueError:
        raise ConfigError("structconv", f"{flag} must be integers joined by {separator!r}", repr(text)) from None


@dataclass(frozen=True, kw_only=True)
class Named:
    """A mechanism with a summary; `on_graph` if it reads the pixel graph instead of the grid."""

    summary: str
    build: Callable[[Options], Mechanism]
    on_graph: bool = False


def _mechanisms() -> Any:
    from structconv import mechanisms

    return mechanisms


def _shift(options: Options) -> Mechanism:
    offsets = options.offsets or ((1,) * len(options.grid),)
    if any(len(offset) != len(options.grid) for offset in offsets):
        raise ConfigError("structconv", f"an offset must have one number for each axis of the grid {options.grid}",
                          offsets, "Write --grid 8x10 --offset 2,4.")
    return _mechanisms().Shifts(list(offsets))


def _gat(options: Options) -> Mechanism:
    from structconv.mechanisms.masks import STRUCTURE

    scores = _mechanisms().BiAffine(heads=options.heads, bilinear=False).leaky_relu(0.2)
    return scores.masked(keep=STRUCTURE).softmax()


def _causal(options: Options) -> Mechanism:
    from structconv.structures.supports import Causal

    return _mechanisms().DotProduct(heads=options.heads, dim=8).scaled().masked(keep=Causal()).softmax()


def _windowed(options: Options) -> Mechanism:
    from structconv.structures import Grid
    from structconv.structures.supports import Window

    scores = _mechanisms().DotProduct(heads=options.heads, dim=8).scaled()
    return scores.masked(keep=Window(2, grid=Grid(options.grid))).softmax()


NAMED: dict[str, Named] = {
    "identity": Named(summary="every entry to itself", build=lambda o: _mechanisms().Identity()),
    "shift": Named(summary="shifts of the grid by --offset (repeatable)", build=_shift),
    "cuboid": Named(summary="all shifts of a window of 3 on each axis",
                    build=lambda o: _mechanisms().Cuboid((3,) * len(o.grid), padding="zeros")),
    "pool": Named(summary="average over blocks of 2 on each axis", build=lambda o: _mechanisms().Pool(2)),
    "adjacency": Named(summary="symmetrically normalized pixel graph with self-loops", on_graph=True,
                       build=lambda o: _mechanisms().Adjacency(normalize="sym", self_loops=True)),
    "chebyshev": Named(summary="Chebyshev polynomials of the pixel graph's Laplacian, up to --order", on_graph=True,
                       build=lambda o: _mechanisms().Chebyshev(order=o.order)),
    "walk": Named(summary="powers of the random walk on the pixel graph, up to --order", on_graph=True,
                  build=lambda o: _mechanisms().Powers(o.order, walk="forward")),
    "attention": Named(summary="scaled dot-product attention of random entries, --heads heads",
                       build=lambda o: _mechanisms().DotProduct(heads=o.heads, dim=8).scaled().softmax()),
    "gcn": Named(summary="the adjacency of GCN: normalized by degrees, with self-loops", on_graph=True,
                 build=lambda o: NAMED["adjacency"].build(o)),
    "gat": Named(summary="GAT: additive attention of random entries along the pixel graph's edges, --heads heads",
                 on_graph=True, build=_gat),
    "causal": Named(summary="dot-product attention of random entries to those before and to itself, --heads heads",
                    build=_causal),
    "window-attention": Named(summary="the same within a window of radius 2", build=_windowed),
    "mixed": Named(summary="attention beside the shifts of a window",
                   build=lambda o: NAMED["attention"].build(o) | NAMED["cuboid"].build(o)),
}


def find(name: str) -> Named:
    """Return the mechanism of that name, or a `ConfigError` that suggests the nearest one."""
    if name not in NAMED:
        raise ConfigError("structconv", f"a basis must be one of {', '.join(NAMED)}", repr(name),
                          nearest(name, NAMED))
    return NAMED[name]


class Once(argparse.Action):
    """An option that is given once."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} must be given once")
        setattr(namespace, self.dest, values)


def no_more(verb: str, rest: Sequence[str]) -> None:
    """Raise `ConfigError` if the command line has arguments that the verb does not know."""
    if rest:
        raise ConfigError(f"structconv {verb}", "every argument must be known", " ".join(rest),
                          f"See structconv {verb} --help.")
