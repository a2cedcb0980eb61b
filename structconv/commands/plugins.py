"""Verbs of other distributions, found by the entry points of the group `structconv.commands`.

An entry point names a module. Its `add(verbs, shared)` adds the verbs. Its `listed()`, if it has one, returns what
`structconv list` prints of it: for each kind a summary of each command. Neither imports torch.
"""

from __future__ import annotations

import argparse
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from structconv.errors import ConfigError

__all__ = ["add", "listed", "plugins"]

_GROUP = "structconv.commands"
_DISTRIBUTION = "structconv-systems"
_VERBS = ("compare", "train", "resume", "evaluate", "reproduce", "translate", "sample")


@cache
def plugins() -> tuple[Any, ...]:
    """The modules of verbs that installed distributions bring."""
    return tuple(point.load() for point in sorted(entry_points(group=_GROUP)))


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verbs of all plug-ins; those of structconv-systems are refused with advice if it is not installed."""
    for plugin in plugins():
        plugin.add(verbs, shared)
    for verb in _VERBS:
        if verb not in verbs.choices:
            parser = verbs.add_parser(verb, parents=[shared], add_help=False, allow_abbrev=False)
            parser.set_defaults(run=_refuse)


def listed() -> dict[str, dict[str, str]]:
    """Return the summaries that plug-ins list: of each command, by kind."""
    return {kind: named for plugin in plugins() if hasattr(plugin, "listed")
            for kind, named in plugin.listed().items()}


def _refuse(args: argparse.Namespace, rest: list[str]) -> int:
    raise ConfigError(f"structconv {args.verb}", f"the distribution {_DISTRIBUTION} must be installed", "none",
                      f"Install it: pip install {_DISTRIBUTION}.")
