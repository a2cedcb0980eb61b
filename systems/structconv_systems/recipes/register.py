"""The recipes by name: their options, and the modules that run them; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from structconv.errors import ConfigError, nearest
from structconv_systems.recipes.options.citation import CoraCheb, CoraGAT, CoraGCN
from structconv_systems.recipes.options.comparisons import Architectures, Pooling
from structconv_systems.recipes.options.convlstm import MovingDigits
from structconv_systems.recipes.options.dcrnn import Traffic
from structconv_systems.recipes.options.digits import CompareDigits
from structconv_systems.recipes.options.images import MnistCheb, NonLocal
from structconv_systems.recipes.options.interactions import Interactions
from structconv_systems.recipes.options.knowledge import RGCNEntities, RGCNLinks, TypedWalks
from structconv_systems.recipes.options.molecules import Molecules
from structconv_systems.recipes.options.physics import RelationalInference
from structconv_systems.recipes.options.sequences import (
    Characters,
    FixedHeads,
    Luong,
    Parser,
    Pervasive,
    RelativePositions,
    RNNSearch,
    Transformer,
)
from structconv_systems.recipes.options.series import Series
from structconv_systems.recipes.options.tsp import TSP
from structconv_systems.train.config import Recipe, from_json

if TYPE_CHECKING:
    from structconv_systems.train.run import Run
    from structconv_systems.train.study import Runner

__all__ = ["RECIPES", "Entry", "entry_named", "recipe_of"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe, the verb that starts it, the module that runs it, the chapter of the literature it belongs to, and the
    verb that uses what it trained, if there is one."""

    recipe: type[Recipe]
    verb: str
    module: str
    summary: str
    chapter: str
    use: str = ""

    def runner(self) -> Runner:
        """What runs the recipe; imports torch."""
        return cast("Runner", import_module(self.module).RUNNER)


_CITATION, _DIGITS = "structconv_systems.recipes.citation", "structconv_systems.recipes.digits"

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
    Entry(recipe=Molecules, verb="train", module="structconv_systems.recipes.molecules",
          summary="message passing predicts a number of molecules (Gilmer et al. 2017)", chapter="graphs"),
    Entry(recipe=MnistCheb, verb="train", module="structconv_systems.recipes.mnist_cheb",
          summary="Chebyshev filters on the pixels of MNIST, beside a CNN (Defferrard et al. 2016)", chapter="graphs"),
    Entry(recipe=NonLocal, verb="train", module="structconv_systems.recipes.non_local",
          summary="non-local blocks of four kinds in a small CNN (Wang et al. 2018)", chapter="structures"),
    Entry(recipe=Transformer, verb="train", module="structconv_systems.recipes.transformer",
          summary="encoder-decoder of attention translates (Vaswani et al. 2017)", chapter="sequences",
          use="translate"),
    Entry(recipe=RNNSearch, verb="train", module="structconv_systems.recipes.rnnsearch",
          summary="recurrent encoder-decoder without and with attention (Bahdanau et al. 2015)", chapter="sequences",
          use="translate"),
    Entry(recipe=Luong, verb="train", module="structconv_systems.recipes.luong",
          summary="four scores, global and local attention, input feeding (Luong et al. 2015)", chapter="sequences",
          use="translate"),
    Entry(recipe=RelativePositions, verb="train", module="structconv_systems.recipes.relative_positions",
          summary="relative positions on keys and values, by clipping, and others (Shaw et al. 2018)",
          chapter="sequences"),
    Entry(recipe=FixedHeads, verb="train", module="structconv_systems.recipes.fixed_heads",
          summary="all heads of the encoder but one replaced by shifts (Raganato et al. 2020)", chapter="sequences",
          use="translate"),
    Entry(recipe=Pervasive, verb="train", module="structconv_systems.recipes.pervasive",
          summary="convolution over the pairs of source and target, beside RNNsearch (Elbayad et al. 2018)",
          chapter="sequences", use="translate"),
    Entry(recipe=Parser, verb="train", module="structconv_systems.recipes.parser",
          summary="bi-affine dependency parser, arcs and relations (Dozat and Manning 2017)", chapter="sequences"),
    Entry(recipe=Series, verb="train", module="structconv_systems.recipes.series",
          summary="period-aware attention forecasts series with missing values (Cinar et al. 2018)",
          chapter="sequences"),
    Entry(recipe=Characters, verb="train", module="structconv_systems.recipes.characters",
          summary="causal Transformer on characters with rotary positions (Su et al. 2021)", chapter="sequences",
          use="sample"),
    Entry(recipe=Architectures, verb="train", module="structconv_systems.recipes.architectures",
          summary="convolution, recurrence and self-attention: accuracy, cost, paths (Zhang et al., Dive into Deep "
                  "Learning)", chapter="sequences"),
    Entry(recipe=Pooling, verb="train", module="structconv_systems.recipes.pooling",
          summary="sequences pooled by place, by content and by relations (Fleuret, EE-559)", chapter="sequences"),
    Entry(recipe=RelationalInference, verb="train", module="structconv_systems.recipes.nri",
          summary="infer from motion which bodies interact (Kipf et al. 2018)", chapter="physics"),
    Entry(recipe=Interactions, verb="train", module="structconv_systems.recipes.interactions",
          summary="bodies under gravity, in a box and on a string, by interaction networks (Battaglia et al. 2016)",
          chapter="physics"),
    Entry(recipe=RGCNEntities, verb="train", module="structconv_systems.recipes.rgcn_entities",
          summary="classes of entities without features by R-GCN (Schlichtkrull et al. 2018)", chapter="knowledge"),
    Entry(recipe=RGCNLinks, verb="train", module="structconv_systems.recipes.rgcn_links",
          summary="links by R-GCN with DistMult, against DistMult (Schlichtkrull et al. 2018)",
          chapter="knowledge"),
    Entry(recipe=TypedWalks, verb="train", module="structconv_systems.recipes.walks",
          summary="links by typed walks, beside single relations (Andreoli 2019)", chapter="knowledge"),
    Entry(recipe=TSP, verb="train", module="structconv_systems.recipes.tsp",
          summary="attention builds tours through points, by REINFORCE (Kool et al. 2019)", chapter="combinatorial"),
    Entry(recipe=Traffic, verb="train", module="structconv_systems.recipes.dcrnn",
          summary="diffusion convolutional recurrent network forecasts traffic (Li et al. 2018)", chapter="graphs"),
    Entry(recipe=MovingDigits, verb="train", module="structconv_systems.recipes.convlstm",
          summary="ConvLSTM forecasts videos of moving digits (Shi et al. 2015)", chapter="structures"),
)}


def entry_named(name: str) -> Entry:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; the nearest one is suggested.
    """
    if name not in RECIPES:
        raise ConfigError("structconv", f"a recipe must be one of {', '.join(RECIPES)}", repr(name),
                          nearest(name, RECIPES))
    return RECIPES[name]


def recipe_of(run: Run) -> tuple[Entry, Recipe]:
    """The recipe that a run was started with, resolved as it was then."""
    entry = entry_named(run.recipe_name)
    return entry, from_json(entry.recipe, run.config_text)
