"""bench: the benchmarks of a clone of the repository, which are in no wheel."""

from __future__ import annotations

import argparse
import runpy
from importlib.util import find_spec
from typing import Any

from structconv.errors import ConfigError

__all__ = ["add"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb; the benchmarks have the parser of its other options, and their help."""
    parser = verbs.add_parser("bench", help="time the layers against other libraries, in a clone of the repository",
                              parents=[shared], add_help=False, allow_abbrev=False)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    if find_spec("benchmarks") is None:
        raise ConfigError("structconv bench", "the package benchmarks must be importable", "none",
                          'Clone the repository and run there: pip install -e ".[all]" -e systems.')
    words = [*rest, *(f"--{name}" for name in ("json", "debug") if getattr(args, name))]
    return int(runpy.run_module("benchmarks.__main__")["main"](words))
