"""Attention of Luong et al. (2015): perplexity and BLEU by score, and by where it looks."""

from __future__ import annotations

from functools import partial

from structconv.models.luong import Luong as Model
from structconv.recipes.options.sequences import Luong
from structconv.recipes.translation import Corpus, TranslationTask, read_corpus, translator
from structconv.train.run import Run
from structconv.train.study import Job, Study, jobs_of

__all__ = ["RUNNER", "network"]

#: Window and score, as table 4 has them.
ROWS = [("global", "location"), ("global", "dot"), ("global", "general"), ("global", "additive"),
        ("local-m", "dot"), ("local-m", "general"), ("local-p", "dot"), ("local-p", "general")]


def network(recipe: Luong, vocabulary: int, window: str = "global", score: str = "general") -> Model:
    """The recipe's model."""
    return Model(vocabulary, vocabulary, embed=recipe.channels, hidden=recipe.channels, layers=recipe.layers,
                 score=score, window=window, radius=None if window == "global" else recipe.radius,
                 length=recipe.longest + 1 if score == "location" else None, input_feeding=recipe.input_feeding,
                 dropout=recipe.dropout)


def _jobs(recipe: Luong, run: Run | None) -> list[Job]:
    corpus = read_corpus(recipe, run)
    return [job for window, score in ROWS
            for job in jobs_of(recipe, f"{window}-{score}", partial(_task, recipe, corpus, window, score),
                               TranslationTask)]


def _task(recipe: Luong, corpus: Corpus, window: str, score: str, seed: int) -> TranslationTask:
    return TranslationTask(network(recipe, len(corpus.subwords), window, score), recipe, corpus, seed)


def _least(means: dict[str, float]) -> float:
    return min(means.values())


RUNNER = Study(jobs=_jobs, columns={"test_perplexity": "perplexity", "test_bleu": "BLEU"},
               contrast=(_least, "least perplexity of the table"),
               use=partial(translator, network, "global-general/seed-0")).runner
