"""The verbs that train and use systems: a plug-in of the command `structconv`; none imports torch before it runs."""

import argparse
from typing import Any

from structconv_systems.commands import recipes, reproduce, tune, use
from structconv_systems.recipes.register import RECIPES

__all__ = ["add", "listed"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verbs."""
    for group in (recipes, reproduce, tune, use):
        group.add(verbs, shared)


def listed() -> dict[str, dict[str, str]]:
    """The recipes for `structconv list`."""
    return {"recipe": {f"{entry.verb} {name}": f"{entry.chapter}: {entry.summary}"
                       for name, entry in sorted(RECIPES.items(), key=lambda item: item[1].chapter)}}
