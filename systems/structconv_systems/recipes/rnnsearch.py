"""Recurrent translation without and with attention (Bahdanau et al. 2015): BLEU of both, by length, and alignments."""

from functools import partial
from typing import Any

from structconv_systems.data.parallel import in_a_row
from structconv_systems.models.rnnsearch import RNNsearch as Model
from structconv_systems.recipes.base import Finished, Job, Run, Study
from structconv_systems.recipes.options.sequences import RNNSearch, Translation
from structconv_systems.recipes.translation import bleu, translation_jobs, translator, write_translated

__all__ = ["RUNNER", "network"]

_WITHOUT, _WITH = "without-attention", "with-attention"


def network(recipe: Translation, vocabulary: int, attention: bool = True) -> Model:
    """Build the model, also for the recipes that compare others with it."""
    return Model(vocabulary, vocabulary, embed=recipe.channels, hidden=recipe.channels, dropout=recipe.dropout,
                 attention=attention)


def _jobs(recipe: RNNSearch, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {_WITHOUT: partial(network, recipe, attention=False),
                                          _WITH: partial(network, recipe)})


def _finish(recipe: RNNSearch, finished: Finished) -> dict[str, Any]:
    """Measure BLEU of one to four test sentences in a row, and draw an alignment."""
    tasks = finished.tasks()
    test = tasks[_WITH].parts["test"].text
    lengths = {name: {1: finished.groups[name]["test_bleu"]["mean"]} for name in tasks}
    for count in range(2, 5):
        finished.progress.phase(f"translating {count} sentences in a row")
        text = in_a_row(test, count)
        for name, task in tasks.items():
            lengths[name][count] = bleu(task.translator.translate(text.source), text.target)[0]
    return {"bleu_by_sentences_in_a_row": lengths, **write_translated(finished.run, tasks[_WITH])}


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_bleu_long": "BLEU of the longest tenth",
                                    "test_perplexity": "perplexity"},
               finish=_finish, use=partial(translator, network, f"{_WITH}/seed-0")).runner
