"""The recipes by name: their options, and the modules that run them; no torch."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from structconv.errors import ConfigError
from structconv.train.config import Recipe, from_json, option

if TYPE_CHECKING:
    from structconv.train.interrupt import Interrupt
    from structconv.train.progress import Progress
    from structconv.train.run import Run

__all__ = ["RECIPES", "CompareDigits", "Cora", "CoraCheb", "CoraGAT", "CoraGCN", "Entry", "Runner",
           "entry_named", "recipe_of"]


SOURCE = "The files are in the folder data of github.com/kimiyoung/planetoid."


@dataclass(frozen=True, kw_only=True)
class Cora(Recipe):
    """What the three Cora recipes share."""

    paper: ClassVar[str]
    data: str = option("", "folder with the raw Planetoid files ind.cora.*")
    seeds: int = option(10, "trainings, with seeds 0, 1, ...", minimum=1)
    verify: bool = option(True, "hold the files against their published SHA-256")
    learning_rate: float = option(0.01, "of Adam", minimum=0)
    weight_decay: float = option(5e-4, "L2 penalty", minimum=0)
    epochs: int = option(200, "at most", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (Path(self.data) / "ind.cora.x").is_file():
            raise ConfigError(self.name, "data must name the folder with the Planetoid files ind.cora.*",
                              repr(self.data) if self.data else "none", f"Give it with --data DIR. {SOURCE}")
        object.__setattr__(self, "data", str(Path(self.data).resolve()))


@dataclass(frozen=True, kw_only=True)
class CoraGCN(Cora):
    """Kipf and Welling (2017), section 5.2."""

    name = "cora-gcn"
    paper = "81.5"
    hidden: int = option(16, "units of the first layer", minimum=1)
    dropout: float = option(0.5, "share of inputs and hidden units dropped", minimum=0, below=1)
    window: int = option(10, "validation losses that early stopping averages", minimum=1)


@dataclass(frozen=True, kw_only=True)
class CoraCheb(CoraGCN):
    """Kipf and Welling (2017), table 3: Chebyshev filter with K = 2, three polynomials."""

    name = "cora-cheb"
    paper = "81.2"
    order: int = option(2, "highest degree of the Chebyshev polynomials", minimum=0)


@dataclass(frozen=True, kw_only=True)
class CoraGAT(Cora):
    """Velickovic et al. (2018), section 3.3."""

    name = "cora-gat"
    paper = "83.0 ± 0.7"
    learning_rate: float = option(0.005, "of Adam", minimum=0)
    heads: int = option(8, "attention heads of the first layer", minimum=1)
    hidden: int = option(8, "channels of each head", minimum=1)
    dropout: float = option(0.6, "share of inputs, hidden units and attention dropped", minimum=0, below=1)
    epochs: int = option(2000, "at most", minimum=1)
    patience: int = option(100, "validations without a better loss or accuracy before stopping", minimum=1)


DIGIT_BASES = ("identity", "shifts", "separable", "gcn", "chebyshev", "attention", "mixed")


@dataclass(frozen=True, kw_only=True)
class CompareDigits(Recipe):
    """One small network on the 8x8 digits through seven bases."""

    name = "digits"
    bases: tuple[str, ...] = option(DIGIT_BASES, "which of the seven, a,b,c")
    seeds: int = option(3, "trainings of each, with seeds 0, 1, ...", minimum=1)
    channels: int = option(24, "of the hidden layers", minimum=1)
    epochs: int = option(20, "passes over the training images", minimum=1)
    batch_size: int = option(64, "images in a step", minimum=1)
    learning_rate: float = option(0.01, "of Adam at its peak", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bases or not set(self.bases) <= set(DIGIT_BASES) or len(set(self.bases)) < len(self.bases):
            raise ConfigError(self.name, f"bases must be some of {', '.join(DIGIT_BASES)}, each once",
                              ",".join(self.bases) or "none")


class Runner(Protocol):
    """What the module of a recipe offers."""

    def execute(self, recipe: Any, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
        """Do, or continue, all the trainings of a run; returns its summary, ready for JSON."""

    def evaluate(self, recipe: Any, run: Run, progress: Progress) -> dict[str, Any]:
        """Measure the final weights of a run again; returns its summary."""

    def show(self, recipe: Any, summary: dict[str, Any]) -> None:
        """Print a summary for people."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe, the verb that starts it, and the module that runs it."""

    recipe: type[Recipe]
    verb: str
    module: str
    summary: str

    def runner(self) -> Runner:
        """The module that runs the recipe; imports torch."""
        return cast(Runner, import_module(self.module))


_CITATION, _DIGITS = "structconv.train.citation", "structconv.train.comparison"

RECIPES: dict[str, Entry] = {entry.recipe.name: entry for entry in (
    Entry(recipe=CompareDigits, verb="compare", module=_DIGITS,
          summary="8x8 digits through seven bases: accuracy, parameters, flops, time, receptive field"),
    Entry(recipe=CoraGCN, verb="train", module=_CITATION,
          summary="graph convolution on Cora (Kipf and Welling 2017)"),
    Entry(recipe=CoraCheb, verb="train", module=_CITATION,
          summary="Chebyshev filters on Cora (Defferrard et al. 2016, in Kipf and Welling's setting)"),
    Entry(recipe=CoraGAT, verb="train", module=_CITATION,
          summary="graph attention on Cora (Velickovic et al. 2018)"),
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
