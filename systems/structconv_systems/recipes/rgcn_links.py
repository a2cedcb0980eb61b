"""Links by an R-GCN with DistMult behind it, beside DistMult alone (Schlichtkrull et al. 2018, section 5.2)."""

import dataclasses
from functools import partial

from structconv_systems.models.rgcn import LinkPredictor
from structconv_systems.recipes.base import Job, Run, Study, jobs_of
from structconv_systems.recipes.links import COLUMNS, Facts, LinkTask
from structconv_systems.recipes.options.knowledge import RGCNLinks

__all__ = ["RUNNER"]

_RGCN, _ALONE, _TUNED = "rgcn", "distmult", "distmult-tuned"


def _task(recipe: RGCNLinks, facts: Facts, layers: int, seed: int) -> LinkTask:
    """Build the task of a model whose encoder has this number of layers; 0 is DistMult."""
    model = LinkPredictor(facts.graph.num_entities, facts.graph.num_relations, recipe.channels, layers=layers,
                          num_bases=recipe.bases or None, dropout=recipe.dropout)
    return LinkTask(recipe, facts, model, seed)


def _jobs(recipe: RGCNLinks, run: Run | None) -> list[Job]:
    facts = Facts.read(recipe, own_entities=True)
    tuned = dataclasses.replace(recipe, channels=recipe.distmult_channels, dropout=recipe.distmult_dropout)
    return [job for name, options, layers in ((_RGCN, recipe, recipe.layers), (_ALONE, recipe, 0), (_TUNED, tuned, 0))
            for job in jobs_of(options, name, partial(_task, facts=facts, layers=layers), LinkTask)]


RUNNER = Study(jobs=_jobs, columns=COLUMNS).runner
