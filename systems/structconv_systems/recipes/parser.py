"""The bi-affine parser (Dozat and Manning 2017) beside one with additive scores: UAS and LAS."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from structconv.pictures import basis_png
from structconv_systems.data.conllu import Sentence, read_conllu
from structconv_systems.data.words import Vocabulary
from structconv_systems.models.parser import Parser as Model
from structconv_systems.models.tokens import PAD
from structconv_systems.recipes.base import Batches, BatchTask, Finished, Job, Parts, Run, Study, jobs_of
from structconv_systems.recipes.options.sequences import Parser

__all__ = ["RUNNER", "ParserTask", "network"]

_MOST_LETTERS = 20


@dataclass(frozen=True, kw_only=True)
class Vocabularies:
    """The vocabularies of the training sentences."""

    words: Vocabulary
    tags: Vocabulary
    relations: Vocabulary
    letters: Vocabulary

    @classmethod
    def of(cls, sentences: Sequence[Sentence], least: int) -> Self:
        return cls(words=Vocabulary.of((sentence.forms for sentence in sentences), least=least),
                   tags=Vocabulary.of(sentence.upos for sentence in sentences),
                   relations=Vocabulary.of(sentence.relations for sentence in sentences),
                   letters=Vocabulary.of(form for sentence in sentences for form in sentence.forms))


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """A sentence as numbers (N,), and letters (N, L)."""

    words: Tensor
    tags: Tensor
    letters: Tensor
    heads: Tensor
    relations: Tensor


def network(recipe: Parser, sizes: Vocabularies, scores: str = "biaffine") -> Model:
    """Build the model, by its scores of heads."""
    return Model(len(sizes.words), len(sizes.tags) if recipe.tags else None, len(sizes.relations),
                 characters=len(sizes.letters), embed=recipe.embed, hidden=recipe.hidden, layers=recipe.layers,
                 arc=recipe.arc, label=recipe.label, dropout=recipe.dropout, scores=scores)


class ParserTask(BatchTask):
    """Cross-entropy of heads and relations; LAS, the share of words with both right, chooses the weights."""

    model: Model
    metric, higher = "val_las", True

    def __init__(self, recipe: Parser, sizes: Vocabularies, parts: Parts[list[Numbered]], scores: str, seed: int
                 ) -> None:
        self.parts = parts
        lengths = [len(sentence.words) for sentence in parts["train"]]
        super().__init__(network(recipe, sizes, scores), recipe, Batches(lengths, cost=recipe.batch_words, seed=seed))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        words, tags, letters, heads, relations = _padded([self.parts["train"][i] for i in samples])
        count = float((words != PAD).sum())
        return self.model.loss(words, tags, heads, relations, letters) * count, count

    def figures(self, part: str) -> dict[str, float]:
        """Measure UAS and LAS in percent of all words, marks included, as is usual for Universal Dependencies."""
        sentences = sorted(self.parts[part], key=lambda sentence: len(sentence.words))
        right, both, count = 0, 0, 0
        for first in range(0, len(sentences), 64):
            words, tags, letters, heads, relations = _padded(sentences[first:first + 64])
            predicted, labels = self.model.parse(words, tags, letters)
            exist = words != PAD
            hit = (predicted == heads) & exist
            right, both = right + int(hit.sum()), both + int((hit & (labels == relations)).sum())
            count += int(exist.sum())
        return {f"{part}_uas": 100 * right / count, f"{part}_las": 100 * both / count}


def _padded(sentences: Sequence[Numbered]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pad words, tags (B, N), letters (B, N, L), heads and relations (B, N) with 0."""
    rows = [[getattr(sentence, name) for sentence in sentences] for name in ("words", "tags", "heads", "relations")]
    words, tags, heads, relations = (pad_sequence(row, batch_first=True, padding_value=PAD) for row in rows)
    longest = max(sentence.letters.shape[1] for sentence in sentences)
    letters = words.new_zeros(*words.shape, longest)
    for place, sentence in enumerate(sentences):
        letters[place, :sentence.letters.shape[0], :sentence.letters.shape[1]] = sentence.letters
    return words, tags, letters, heads, relations


def _numbered(sizes: Vocabularies, sentence: Sentence) -> Numbered:
    letters = [torch.tensor(sizes.letters.encode(form[:_MOST_LETTERS])) for form in sentence.forms]
    return Numbered(words=torch.tensor(sizes.words.encode(sentence.forms)),
                    tags=torch.tensor(sizes.tags.encode(sentence.upos)), heads=torch.tensor(sentence.heads),
                    relations=torch.tensor(sizes.relations.encode(sentence.relations)),
                    letters=pad_sequence(letters, batch_first=True, padding_value=PAD))


def _jobs(recipe: Parser, run: Run | None) -> list[Job]:
    files = {"train": recipe.train, "val": recipe.valid, "test": recipe.test}
    parts = {part: read_conllu(recipe.path(file)) for part, file in files.items()}
    if recipe.sentences:
        parts["train"] = parts["train"][:recipe.sentences]
    sizes = Vocabularies.of(parts["train"], recipe.least)
    numbered = {name: [_numbered(sizes, sentence) for sentence in sentences] for name, sentences in parts.items()}
    task = partial(ParserTask, sizes=sizes, parts=Parts(numbered, of="sentences"))
    return [job for name, scores in ((recipe.name, "biaffine"), ("additive", "additive"))
            for job in jobs_of(recipe, name, partial(task, scores=scores), ParserTask)]


def _finish(recipe: Parser, finished: Finished) -> None:
    task = finished.task(recipe.name)
    finished.run.draw("heads.png", _picture(task), "Heads of the words of a test sentence: probabilities, best tree, "
                      "treebank. Rows: head, 0 is the root and m the word m; columns: word, from 0.")


@torch.no_grad()
def _picture(task: ParserTask) -> bytes:
    """Draw the heads of the words of a test sentence: probabilities, best tree, treebank."""
    sentences = task.parts["test"]
    chosen = next((sentence for sentence in sentences if 9 <= len(sentence.words) <= 14), sentences[0])
    words, tags, letters, heads, _ = _padded([chosen])
    scores, _ = task.model(words, tags, letters)
    predicted, _ = task.model.parse(words, tags, letters)
    trees = [F.one_hot(tree[0], scores.shape[1]).mT for tree in (predicted, heads)]
    return basis_png(torch.stack([scores[0].softmax(0), *trees]), ["heads, by probability", "best tree", "treebank"],
                     x_label="word", y_label="head (0: root)")


RUNNER = Study(jobs=_jobs, columns={"test_uas": "UAS, %", "test_las": "LAS, %"}, finish=_finish).runner
