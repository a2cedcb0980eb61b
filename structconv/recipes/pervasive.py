"""Pervasive attention (Elbayad et al. 2018) beside RNNsearch, trained on the same pairs: BLEU of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from structconv.models.pervasive import Pervasive as Model
from structconv.models.rnnsearch import RNNsearch
from structconv.recipes.options.sequences import Pervasive
from structconv.recipes.rnnsearch import telling
from structconv.recipes.translation import translation_jobs, translator, write_translations
from structconv.train.progress import Progress
from structconv.train.run import Run
from structconv.train.study import Job, Study, firsts, parameters_of, trained

__all__ = ["RUNNER", "beside", "network"]

_OURS, _BESIDE = "pervasive", "rnnsearch"


def network(recipe: Pervasive, vocabulary: int) -> Model:
    """The recipe's model."""
    return Model(vocabulary, vocabulary, embed=recipe.channels, channels=recipe.pairs, layers=recipe.layers,
                 growth=recipe.growth, hidden=recipe.hidden, kernel=recipe.kernel, pooling=recipe.pooling,
                 positions=recipe.positions, dropout=recipe.dropout)


def beside(recipe: Pervasive, vocabulary: int) -> RNNsearch:
    """The model that it is compared with."""
    return RNNsearch(vocabulary, vocabulary, embed=recipe.channels, hidden=recipe.channels, dropout=recipe.dropout)


def _jobs(recipe: Pervasive, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {_OURS: partial(network, recipe), _BESIDE: partial(beside, recipe)})


def _lead(means: dict[str, float]) -> float:
    return means[_OURS] - means[_BESIDE]


def _finish(recipe: Pervasive, run: Run, jobs: Sequence[Job], progress: Progress) -> dict[str, Any]:
    """Parameters of both, translations, and where the greatest values stand while a sentence is translated."""
    first = {name: trained(job, run, progress) for name, job in firsts(jobs).items()}
    text, own = first[_OURS].corpus.parts["test"].text, first[_OURS].translator
    if recipe.pooling != "attention":
        source = telling(text)
        run.write("pictures/alignment.png", own.alignment(source, *own.translate([source])))
    return {"parameters": {name: parameters_of(task) for name, task in first.items()},
            **write_translations(run, own.translate(text.source), text.target)}


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"},
               contrast=(_lead, "BLEU of pervasive attention over RNNsearch"), finish=_finish,
               use=partial(translator, network, f"{_OURS}/seed-0")).runner
