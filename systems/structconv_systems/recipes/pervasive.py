"""Pervasive attention (Elbayad et al. 2018) beside RNNsearch, trained on the same pairs: BLEU of both."""

from functools import partial
from typing import Any

from structconv_systems.models.pervasive import Pervasive as Model
from structconv_systems.recipes.base import Finished, Job, Run, Study, parameters_of
from structconv_systems.recipes.options.sequences import Pervasive
from structconv_systems.recipes.rnnsearch import network as rnnsearch
from structconv_systems.recipes.translation import translation_jobs, translator, write_translated

__all__ = ["RUNNER", "network"]

_OURS, _BESIDE = "pervasive", "rnnsearch"


def network(recipe: Pervasive, vocabulary: int) -> Model:
    """Build the model."""
    return Model(vocabulary, vocabulary, embed=recipe.channels, channels=recipe.pairs, layers=recipe.layers,
                 growth=recipe.growth, hidden=recipe.hidden, kernel=recipe.kernel, pooling=recipe.pooling,
                 positions=recipe.positions, dropout=recipe.dropout)


def _jobs(recipe: Pervasive, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {_OURS: partial(network, recipe), _BESIDE: partial(rnnsearch, recipe)})


def _finish(recipe: Pervasive, finished: Finished) -> dict[str, Any]:
    """Count parameters, write translations, and draw where the maxima of the channels lie."""
    tasks = finished.tasks()
    return {"parameters": {name: parameters_of(task) for name, task in tasks.items()},
            **write_translated(finished.run, tasks[_OURS], weights=(
                "shares of channels with their maximum there" if recipe.pooling != "attention" else ""))}


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"}, finish=_finish,
               use=partial(translator, network, f"{_OURS}/seed-0")).runner
