"""Shifts in the place of learned heads (Raganato et al. 2020): BLEU, parameters and speed beside attention alone."""

import time
from functools import partial
from typing import Any

import torch

from structconv.analysis.layers import layer_bases
from structconv.mechanisms import STRUCTURE_IF_GIVEN, DotProduct, Mechanism, Shifts
from structconv.pictures import basis_png
from structconv_systems.models.transformer import Transformer as Model
from structconv_systems.recipes.base import Finished, Job, Run, Study, parameters_of
from structconv_systems.recipes.options.sequences import FixedHeads
from structconv_systems.recipes.translation import TranslationTask, telling, translation_jobs, translator

__all__ = ["RUNNER", "network"]

_LEARNED, _FIXED = "learned-heads", "fixed-heads"


def network(recipe: FixedHeads, vocabulary: int, fixed: bool = True) -> Model:
    """Build the model; with `fixed` its encoder has one head of attention beside the shifts."""
    heads = 1 + len(recipe.shifts)
    return Model(vocabulary, channels=recipe.channels, layers=recipe.layers, heads=heads, hidden=recipe.hidden,
                 dropout=recipe.dropout, norm=recipe.norm, positions=recipe.positions, recompute=recipe.recompute,
                 encoder_mechanism=partial(_mixed, recipe, recipe.channels // heads) if fixed else None)


def _mixed(recipe: FixedHeads, dim: int, layer: int) -> Mechanism:
    attention = DotProduct(1, dim).scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax()
    return attention | Shifts(list(recipe.shifts), padding="zeros")


def _jobs(recipe: FixedHeads, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {_LEARNED: partial(network, recipe, fixed=False),
                                          _FIXED: partial(network, recipe, fixed=True)})


def _finish(recipe: FixedHeads, finished: Finished) -> dict[str, Any]:
    """Count parameters, time steps of both in turn, and draw the heads of the encoder."""
    tasks = finished.tasks()
    finished.run.draw("encoder.png", _heads(recipe, tasks[_FIXED]),
                      "Heads of the encoder for a test sentence. Rows: subwords that are read; columns: subwords that "
                      "read.")
    ratios = []
    for step in range(1, 22):
        times = []
        for task in (tasks[_LEARNED], tasks[_FIXED]):
            start = time.perf_counter()
            task.train_step(step)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    ratios = sorted(ratios[1:])
    return {"parameters": {name: parameters_of(task) for name, task in tasks.items()},
            "step_of_learned_over_fixed": ratios[len(ratios) // 2], "spread": [ratios[0], ratios[-1]]}


def _heads(recipe: FixedHeads, task: TranslationTask) -> bytes:
    """Draw the bases of the encoder's layers for a test sentence."""
    pairs = task.parts["test"]
    place = telling(pairs.text)
    bases = layer_bases(task.model, pairs.sources[place].unsqueeze(0), pairs.targets[place][:1].unsqueeze(0))
    heads = [(f"layer {layer}, head {head}", matrix) for layer in range(recipe.layers)
             for head, matrix in enumerate(bases[f"encoder.blocks.{layer}.attention"][0].dense().flatten(0, -3))]
    names, matrices = zip(*heads, strict=True)
    return basis_png(torch.stack(matrices), names, x_label="reading subword", y_label="read subword")


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"}, finish=_finish,
               use=partial(translator, network, f"{_FIXED}/seed-0")).runner
