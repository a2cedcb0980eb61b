"""The Transformer (Vaswani et al. 2017) translates: BLEU on the test files."""

from __future__ import annotations

from functools import partial
from typing import Any

from structconv_systems.models.transformer import Transformer as Model
from structconv_systems.recipes.options.sequences import Transformer
from structconv_systems.recipes.translation import translation_jobs, translator, write_translated
from structconv_systems.train.run import Run
from structconv_systems.train.study import Finished, Job, Study

__all__ = ["RUNNER", "network"]


def network(recipe: Transformer, vocabulary: int) -> Model:
    """The recipe's model."""
    return Model(vocabulary, channels=recipe.channels, layers=recipe.layers, heads=recipe.heads, hidden=recipe.hidden,
                 dropout=recipe.dropout, norm=recipe.norm, positions=recipe.positions,
                 recompute=recipe.recompute)


def _jobs(recipe: Transformer, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {recipe.name: partial(network, recipe)})


def _finish(recipe: Transformer, finished: Finished) -> dict[str, Any]:
    return write_translated(finished.run, finished.task(recipe.name))


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"}, finish=_finish,
               use=partial(translator, network, f"{Transformer.name}/seed-0")).runner
