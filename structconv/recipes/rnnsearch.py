"""Recurrent translation without and with attention (Bahdanau et al. 2015): BLEU of both, by length, and alignments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from structconv.data.parallel import Parallel
from structconv.models.rnnsearch import RNNsearch as Model
from structconv.recipes.options.sequences import RNNSearch
from structconv.recipes.translation import bleu, translation_jobs, translator, write_translations
from structconv.train.progress import Progress
from structconv.train.run import Run
from structconv.train.study import Job, Study, firsts, trained

__all__ = ["RUNNER", "joined", "network", "telling"]

_WITHOUT, _WITH = "without-attention", "with-attention"


def network(recipe: RNNSearch, vocabulary: int, attention: bool) -> Model:
    """The recipe's model."""
    return Model(vocabulary, vocabulary, embed=recipe.channels, hidden=recipe.channels, dropout=recipe.dropout,
                 attention=attention)


def joined(text: Parallel, count: int) -> Parallel:
    """Sentences made of `count` neighbours each, for longer ones than any that was trained on."""
    source, target = (tuple(" ".join(side[first:first + count]) for first in range(0, len(side) - count + 1, count))
                      for side in (text.source, text.target))
    return Parallel(source=source, target=target)


def _jobs(recipe: RNNSearch, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {_WITHOUT: partial(network, recipe, attention=False),
                                          _WITH: partial(network, recipe, attention=True)})


def _gain(means: dict[str, float]) -> float:
    return means[_WITH] - means[_WITHOUT]


def _finish(recipe: RNNSearch, run: Run, jobs: Sequence[Job], progress: Progress) -> dict[str, Any]:
    """BLEU of one, two, three and four test sentences in a row, and a sentence's alignment, by the first trainings."""
    first = {name: trained(job, run, progress) for name, job in firsts(jobs).items()}
    test, own = first[_WITH].corpus.parts["test"].text, first[_WITH].translator
    lengths: dict[str, dict[int, float]] = {name: {} for name in first}
    for count in range(1, 5):
        progress.phase(f"translating {count} sentences in a row")
        text = joined(test, count)
        output = {name: task.translator.translate(text.source) for name, task in first.items()}
        for name, lines in output.items():
            lengths[name][count] = bleu(lines, text.target)[0]
        if count == 1:
            said = write_translations(run, output[_WITH], text.target)
    source = telling(test)
    run.write("pictures/alignment.png", own.alignment(source, *own.translate([source])))
    return {"bleu_by_sentences_in_a_row": lengths, **said}


def telling(text: Parallel) -> str:
    """The first sentence of middling length, to be drawn."""
    return next((line for line in text.source if 9 <= len(line.split()) <= 14), text.source[0])


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"},
               contrast=(_gain, "BLEU gained by attention"), finish=_finish,
               use=partial(translator, partial(network, attention=True), f"{_WITH}/seed-0")).runner
