"""The options that `show` and `plan` share, and the errors for unknown ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from structconv.commands.named import Options, parse_numbers
from structconv.errors import ConfigError

__all__ = ["Once", "add_options", "no_more", "read_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --grid, --periodic, --offset, --order and --heads."""
    parser.add_argument("--grid", default="8x8", metavar="AxB", help="the grid's sizes (default: 8x8)")
    parser.add_argument("--periodic", action="store_true", help="close the grid on itself")
    parser.add_argument("--offset", action="append", default=[], metavar="A,B", help="a shift; may be repeated")
    parser.add_argument("--order", type=int, default=3, help="highest power or polynomial (default: 3)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")


def read_options(args: argparse.Namespace) -> Options:
    """Return the options, converted and checked."""
    return Options(grid=parse_numbers("--grid", args.grid, "x"), periodic=args.periodic, order=args.order,
                  heads=args.heads, offsets=tuple(parse_numbers("--offset", text, ",") for text in args.offset))


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
