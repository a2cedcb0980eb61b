"""Links by typed walks in a knowledge graph, beside single relations (Andreoli 2019, section 2.2)."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from structconv.errors import ConfigError
from structconv_systems.models.walks import WalkScores, check_size, entries
from structconv_systems.plots import alignment_png
from structconv_systems.recipes.base import Finished, Job, Run, Study, jobs_of
from structconv_systems.recipes.links import COLUMNS, Facts, LinkTask, consecutive
from structconv_systems.recipes.options.knowledge import TypedWalks
from structconv_systems.train.stopping import Last

__all__ = ["RUNNER", "WalkTask"]

_WALKS, _SINGLE = "walks", "relations"
_LENGTHS = {_WALKS: 2, _SINGLE: 1}
#: Walks of a relation in the summary; rows and columns of the picture.
_FIRST, _ROWS, _COLUMNS = 5, 40, 25
#: Numbers that the scores of a step take, in about a minute of one core.
_LONGEST = 1 << 32


class WalkTask(LinkTask):
    """Score each training triple in the graph without it; the weights of walks shrink in each step, and most reach 0.
    """

    model: WalkScores

    def __init__(self, recipe: TypedWalks, facts: Facts, length: int, seed: int) -> None:
        self.recipe = recipe
        super().__init__(recipe, facts, WalkScores(facts.graph.num_relations, length=length), seed)

    def split(self, samples: Sequence[int]) -> list[Sequence[int]]:
        both = self.entries(self.facts.parts["train"][list(samples)][:, ::2].flatten()).view(-1, 2).sum(-1)
        return [samples[first:end] for first, end in pairwise(accumulate(consecutive(both), initial=0))]

    def trained(self, questions: Tensor) -> Tensor:
        scores: Tensor = self.model(self.facts.graph, questions[:, :2], questions[:, 2])
        return scores

    def entries(self, heads: Tensor) -> Tensor:
        return entries(self.facts.graph, heads, self.model.length)

    def train_step(self, step: int) -> dict[str, float]:
        figures = super().train_step(step)
        self.model.shrink(self.recipe.sparsity * self.optimizer.optimizer.param_groups[0]["lr"])
        return figures


def _jobs(recipe: TypedWalks, run: Run | None) -> list[Job]:
    facts = Facts.read(recipe, own_entities=False)
    check_size(facts.graph)
    _check_step(recipe, facts)
    return [job for name, length in _LENGTHS.items()
            for job in jobs_of(recipe, name, partial(WalkTask, facts=facts, length=length), WalkTask, Last)]


def _check_step(recipe: TypedWalks, facts: Facts) -> None:
    """Raise `ConfigError` if a step would take much longer than a minute."""
    triple = 2 * float(entries(facts.graph, facts.parts["train"][:, ::2].flatten()).double().mean())
    step, most = recipe.batch_size * recipe.accumulate * triple, int(_LONGEST / triple / recipe.accumulate)
    if step > _LONGEST:
        raise ConfigError(recipe.name, f"the scores of a step must take at most {_LONGEST:,} numbers, about a minute",
                          f"{step:,.0f}, about {step / _LONGEST:,.3g} minutes",
                          f"Give --batch-size {most}." if most else "Use a smaller graph.")


def _finish(recipe: TypedWalks, finished: Finished) -> dict[str, Any]:
    """Return and draw the walks with the greatest weights by relation."""
    task = finished.task(_WALKS)
    graph = task.facts.graph
    chosen, weights = task.model.learned(graph)
    names, walks = list(graph.relations[:graph.num_relations // 2]), [".".join(walk) for walk in chosen]
    weights = weights.mT[:len(names)]
    most = weights.amax(0).topk(min(_ROWS, len(walks))).indices
    shown = weights[:_COLUMNS, most].mT.clamp(min=0)
    if len(most):
        finished.run.draw("walks.png", alignment_png(
            shown / shown.amax().clamp(min=1e-9), names[:_COLUMNS],
            [walks[place].replace("^-1", "⁻¹") for place in most.tolist()], x_label="relation", y_label="walk"),
            "Learned weights of walks, as shares of the greatest; negative ones as 0. Rows: walks, as relations along "
            "the way (⁻¹: against its direction); columns: the relation that a walk speaks for.")
    return {"walks": {name: {walks[place]: round(float(row[place]), 3) for place in
                             row.topk(min(_FIRST, len(walks))).indices.tolist()}
                      for name, row in zip(names, weights, strict=True)}}


RUNNER = Study(jobs=_jobs, columns=COLUMNS, finish=_finish).runner
