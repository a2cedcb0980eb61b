"""Attention of Luong et al. (2015): perplexity and BLEU by score, and by where it looks."""

from functools import partial

import torch

from structconv.pictures import basis_png
from structconv_systems.models.luong import Luong as Model
from structconv_systems.recipes.base import Finished, Job, Progress, Run, Study
from structconv_systems.recipes.options.sequences import Luong
from structconv_systems.recipes.translation import Translator, telling, translation_jobs, translator

__all__ = ["RUNNER", "network"]

_NONE = "none"


def network(recipe: Luong, vocabulary: int, row: str = "global-general") -> Model:
    """Build the model of a row of the table."""
    window, _, score = row.rpartition("-") if row != _NONE else ("global", "", None)
    return Model(vocabulary, vocabulary, embed=recipe.channels, hidden=recipe.channels, layers=recipe.layers,
                 score=score, window=window, radius=None if window == "global" else recipe.radius,
                 length=recipe.longest + 1 if score == "location" else None, input_feeding=recipe.input_feeding,
                 dropout=recipe.dropout)


def _jobs(recipe: Luong, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {row: partial(network, recipe, row=row) for row in recipe.rows})


def _finish(recipe: Luong, finished: Finished) -> None:
    """Draw the attention of each row of the table while it reads the reference of a test sentence."""
    tasks = finished.tasks()
    first = tasks[recipe.rows[0]]
    pairs = first.parts["test"]
    place = telling(pairs.text)
    source, target = pairs.sources[place], pairs.targets[place][:-1]
    with torch.no_grad():
        weights = {row: task.model.alignment(source, target).mT for row, task in tasks.items() if row != _NONE}
    if weights:
        source_words, target_words = (" ".join(piece.strip() for piece in first.subwords.pieces(tokens))
                                      for tokens in (source, pairs.targets[place][1:]))
        picture = basis_png(torch.stack(list(weights.values())), list(weights), x_label="target subword",
                            y_label="source subword")
        finished.run.draw("alignments.png", picture, f"Attention in a test sentence by each model. Rows: source "
                          f"subwords ({source_words}); columns: target subwords ({target_words}); each column sums to "
                          "1.")


def _use(recipe: Luong, run: Run, progress: Progress, beam: int | None = None) -> Translator:
    """Return the translator of the table's last row."""
    row = recipe.rows[-1]
    return translator(partial(network, row=row), f"{row}/seed-0", recipe, run, progress, beam)


RUNNER = Study(jobs=_jobs, columns={"test_perplexity": "perplexity", "test_bleu": "BLEU"},
               finish=_finish, use=_use).runner
