"""The recipes by name: their options, and the modules that run them; no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from structconv.errors import ConfigError
from structconv.recipes.options.citation import CoraCheb, CoraGAT, CoraGCN
from structconv.recipes.options.digits import CompareDigits
from structconv.train.config import Recipe, from_json

if TYPE_CHECKING:
    from structconv.train.interrupt import Interrupt
    from structconv.train.progress import Progress
    from structconv.train.run import Run
    from structconv.train.study import Job

__all__ = ["RECIPES", "BatchRunner", "Entry", "Runner", "entry_named", "recipe_of"]


class Runner(Protocol):
    """What the module of a recipe offers."""

    def execute(self, recipe: Any, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
        """Do, or continue, all the trainings of a run; returns its summary, ready for JSON."""

    def evaluate(self, recipe: Any, run: Run, progress: Progress) -> dict[str, Any]:
        """Measure the final weights of a run again; returns its summary."""

    def show(self, recipe: Any, summary: dict[str, Any]) -> None:
        """Print a summary for people."""


class BatchRunner(Runner, Protocol):
    """What the module of a recipe trained on batches offers as well."""

    def jobs(self, recipe: Any) -> list[Job]:
        """Its trainings, data read."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe, the verb that starts it, the module that runs it, and the chapter of the literature it belongs to."""

    recipe: type[Recipe]
    verb: str
    module: str
    summary: str
    chapter: str

    def runner(self) -> Runner:
        """The module that runs the recipe; imports torch."""
        return cast(Runner, import_module(self.module))


_CITATION, _DIGITS = "structconv.recipes.citation", "structconv.recipes.digits"

RECIPES: dict[str, Entry] = {entry.recipe.name: entry for entry in (
    Entry(recipe=CompareDigits, verb="compare", module=_DIGITS,
          summary="8x8 digits through seven bases: accuracy, parameters, flops, time, receptive field",
          chapter="structures"),
    Entry(recipe=CoraGCN, verb="train", module=_CITATION,
          summary="graph convolution on Cora (Kipf and Welling 2017)", chapter="graphs"),
    Entry(recipe=CoraCheb, verb="train", module=_CITATION,
          summary="Chebyshev filters on Cora (Defferrard et al. 2016, in Kipf and Welling's setting)",
          chapter="graphs"),
    Entry(recipe=CoraGAT, verb="train", module=_CITATION,
          summary="graph attention on Cora (Velickovic et al. 2018)", chapter="graphs"),
)}


def entry_named(name: str) -> Entry:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; the nearest one is suggested.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        raise ConfigError("structconv", f"a recipe must be one of {', '.join(RECIPES)}", repr(name),
                          f"Did you mean {near[0]!r}?" if near else "")
    return RECIPES[name]


def recipe_of(run: Run) -> tuple[Entry, Recipe]:
    """The recipe that a run was started with, resolved as it was then."""
    entry = entry_named(run.recipe_name)
    return entry, from_json(entry.recipe, run.config_text)
