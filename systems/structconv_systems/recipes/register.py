"""The recipes by name: their options, and the modules that run them; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from structconv.errors import ConfigError, nearest
from structconv_systems.recipes.options import comparisons, graphs, images, knowledge, physics, sequences, series, tsp
from structconv_systems.train.config import Recipe, from_json

if TYPE_CHECKING:
    from structconv_systems.train.run import Run
    from structconv_systems.train.study import Runner

__all__ = ["RECIPES", "Entry", "entry_named", "recipe_of"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A recipe: its options, the verb that starts it, its module, its chapter of the literature, and the verb that uses
    what it trained, if any."""

    recipe: type[Recipe]
    verb: str
    module: str
    summary: str
    chapter: str
    use: str = ""

    def runner(self) -> Runner:
        """What runs the recipe; imports torch."""
        return cast("Runner", import_module(self.module).RUNNER)


#: The options of each recipe, the module that runs it, its chapter, and what it does.
_TABLE: tuple[tuple[type[Recipe], str, str, str], ...] = (
    (images.CompareDigits, "digits", "structures",
     "8x8 digits through seven bases: accuracy, parameters, flops, time, receptive field"),
    (graphs.CoraGCN, "citation", "graphs", "graph convolution on Cora (Kipf and Welling 2017)"),
    (graphs.CoraCheb, "citation", "graphs",
     "Chebyshev filters on Cora (Defferrard et al. 2016, in Kipf and Welling's setting)"),
    (graphs.CoraGAT, "citation", "graphs", "graph attention on Cora (Velickovic et al. 2018)"),
    (graphs.Molecules, "molecules", "graphs", "message passing predicts a number of molecules (Gilmer et al. 2017)"),
    (images.MnistCheb, "mnist_cheb", "graphs",
     "Chebyshev filters on the pixels of MNIST, beside a CNN (Defferrard et al. 2016)"),
    (images.NonLocal, "non_local", "structures", "non-local blocks of four kinds in a small CNN (Wang et al. 2018)"),
    (sequences.Transformer, "transformer", "sequences",
     "encoder-decoder of attention translates (Vaswani et al. 2017)"),
    (sequences.RNNSearch, "rnnsearch", "sequences",
     "recurrent encoder-decoder without and with attention (Bahdanau et al. 2015)"),
    (sequences.Luong, "luong", "sequences",
     "four scores, global and local attention, input feeding (Luong et al. 2015)"),
    (sequences.RelativePositions, "relative_positions", "sequences",
     "relative positions on keys and values, by clipping, and others (Shaw et al. 2018)"),
    (sequences.FixedHeads, "fixed_heads", "sequences",
     "all heads of the encoder but one replaced by shifts (Raganato et al. 2020)"),
    (sequences.Pervasive, "pervasive", "sequences",
     "convolution over the pairs of source and target, beside RNNsearch (Elbayad et al. 2018)"),
    (sequences.Parser, "parser", "sequences",
     "bi-affine dependency parser, arcs and relations (Dozat and Manning 2017)"),
    (series.Series, "series", "sequences",
     "period-aware attention forecasts series with missing values (Cinar et al. 2018)"),
    (sequences.Characters, "characters", "sequences",
     "causal Transformer on characters with rotary positions (Su et al. 2021)"),
    (comparisons.Architectures, "architectures", "sequences",
     "convolution, recurrence and self-attention: accuracy, cost, paths (Zhang et al., Dive into Deep Learning)"),
    (comparisons.Pooling, "pooling", "sequences",
     "sequences pooled by place, by content and by relations (Fleuret, EE-559)"),
    (physics.RelationalInference, "nri", "physics", "infer from motion which bodies interact (Kipf et al. 2018)"),
    (physics.Interactions, "interactions", "physics",
     "bodies under gravity, in a box and on a string, by interaction networks (Battaglia et al. 2016)"),
    (knowledge.RGCNEntities, "rgcn_entities", "knowledge",
     "classes of entities without features by R-GCN (Schlichtkrull et al. 2018)"),
    (knowledge.RGCNLinks, "rgcn_links", "knowledge",
     "links by R-GCN with DistMult, against DistMult (Schlichtkrull et al. 2018)"),
    (knowledge.TypedWalks, "walks", "knowledge", "links by typed walks, beside single relations (Andreoli 2019)"),
    (tsp.TSP, "tsp", "combinatorial", "attention builds tours through points, by REINFORCE (Kool et al. 2019)"),
    (series.Traffic, "dcrnn", "graphs",
     "diffusion convolutional recurrent network forecasts traffic (Li et al. 2018)"),
    (images.MovingDigits, "convlstm", "structures", "ConvLSTM forecasts videos of moving digits (Shi et al. 2015)"),
)
#: The verb that uses what a recipe trained.
_USES: dict[type[Recipe], str] = {sequences.Characters: "sample", **dict.fromkeys(
    (sequences.Transformer, sequences.RNNSearch, sequences.Luong, sequences.FixedHeads, sequences.Pervasive),
    "translate")}

RECIPES: dict[str, Entry] = {
    recipe.name: Entry(recipe=recipe, verb="compare" if recipe is images.CompareDigits else "train", summary=summary,
                       module=f"structconv_systems.recipes.{module}", chapter=chapter, use=_USES.get(recipe, ""))
    for recipe, module, chapter, summary in _TABLE}


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
