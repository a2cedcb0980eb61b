"""The Transformer (Vaswani et al. 2017) beside an RNNsearch of the same budget: BLEU on the test files."""

import dataclasses
from functools import partial
from typing import Any

from structconv_systems.models.transformer import Transformer as Model
from structconv_systems.recipes.base import Finished, Job, Run, Study, parameters_of
from structconv_systems.recipes.options.sequences import Transformer
from structconv_systems.recipes.rnnsearch import network as rnnsearch
from structconv_systems.recipes.translation import translation_jobs, translator, write_translated

__all__ = ["RUNNER", "network"]

_BESIDE = "rnnsearch"


def network(recipe: Transformer, vocabulary: int) -> Model:
    """Build the model."""
    return Model(vocabulary, channels=recipe.channels, layers=recipe.layers, heads=recipe.heads, hidden=recipe.hidden,
                 dropout=recipe.dropout, norm=recipe.norm, positions=recipe.positions, recompute=recipe.recompute)


def _jobs(recipe: Transformer, run: Run | None) -> list[Job]:
    """The RNNsearch has a schedule of its own, and 5 % more parameters with the default options."""
    return translation_jobs(recipe, run, {recipe.name: partial(network, recipe), _BESIDE: partial(rnnsearch, recipe)},
                            options={_BESIDE: dataclasses.replace(recipe, schedule="cosine")})


def _finish(recipe: Transformer, finished: Finished) -> dict[str, Any]:
    tasks = finished.tasks()
    return {"parameters": {name: parameters_of(task) for name, task in tasks.items()},
            **write_translated(finished.run, tasks[recipe.name])}


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"}, finish=_finish,
               use=partial(translator, network, f"{Transformer.name}/seed-0")).runner
