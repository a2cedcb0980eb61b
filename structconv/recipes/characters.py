"""A causal Transformer on characters: the loss in nats on text that it has not seen, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.data.characters import Alphabet, read_characters
from structconv.data.characters import Characters as Text
from structconv.errors import DataError
from structconv.models.characters import CharacterModel
from structconv.models.decoding import sample
from structconv.recipes.options.sequences import Characters
from structconv.train.batches import Windows
from structconv.train.progress import Progress
from structconv.train.run import Run
from structconv.train.study import Job, Study, jobs_of, loaded
from structconv.train.task import BatchTask, mean_loss

__all__ = ["RUNNER", "CharactersTask", "Writer", "network", "writer"]

_ALPHABET = "alphabet.json"


def network(recipe: Characters, alphabet: int) -> CharacterModel:
    """The recipe's model."""
    return CharacterModel(alphabet, channels=recipe.channels, layers=recipe.layers, heads=recipe.heads,
                          hidden=4 * recipe.channels, dropout=recipe.dropout)


class CharactersTask(BatchTask):
    """Cross-entropy of the next character, over windows of the text that begin anywhere."""

    def __init__(self, recipe: Characters, text: Text, seed: int) -> None:
        self.recipe, self.text = recipe, text
        windows = Windows(len(text.train) - recipe.length, size=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, len(text.alphabet)), recipe, windows)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        return self._loss(self.text.train, samples)

    def figures(self, part: str) -> dict[str, float]:
        """Of windows of the text one after the other."""
        text, length = self._part(part), self.recipe.length
        starts = range(0, len(text) - length, length)
        return {f"{part}_loss": mean_loss(self._loss(text, starts[first:first + 32])
                                          for first in range(0, len(starts), 32))}

    def _part(self, part: str) -> Tensor:
        if part == "val" or not self.recipe.test:
            return self.text.validation
        path = self.recipe.path(self.recipe.test)
        text = self.text.alphabet.read(path)
        if len(text) <= self.recipe.length:
            raise DataError(path, f"more than length={self.recipe.length} characters", len(text))
        return text

    def _loss(self, text: Tensor, starts: Sequence[int]) -> tuple[Tensor, float]:
        window = torch.stack([text[start:start + self.recipe.length + 1] for start in starts])
        logits, wanted = self.model(window[:, :-1]), window[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"), float(wanted.numel())


class Writer:
    """A model and its alphabet."""

    def __init__(self, model: Any, alphabet: Alphabet) -> None:
        self._model, self._alphabet = model, alphabet

    def write(self, prompt: str, characters: int, *, temperature: float = 0.8, seed: int = 0,
              top_k: int | None = None, top_p: float | None = None) -> str:
        """A prompt, and so many characters behind it."""
        begin = self._alphabet.encode(prompt or "\n").unsqueeze(0)
        [drawn] = sample(self._model.begin(1), 1, begin=begin, end=None, most=characters, temperature=temperature,
                         top_k=top_k, top_p=top_p, generator=torch.Generator().manual_seed(seed))
        return prompt + self._alphabet.decode(drawn)


def writer(recipe: Characters, run: Run, progress: Progress) -> Writer:
    """That of a finished run."""
    alphabet = Alphabet.load(run.folder / _ALPHABET)
    return Writer(loaded(network(recipe, len(alphabet)), f"{recipe.name}/seed-0", run, progress), alphabet)


def _jobs(recipe: Characters, run: Run | None) -> list[Job]:
    text = read_characters(recipe.path(recipe.text))
    if run is not None:
        text.alphabet.save(run.folder / _ALPHABET)
    return jobs_of(recipe, recipe.name, partial(CharactersTask, recipe, text), CharactersTask)


def _finish(recipe: Characters, run: Run, jobs: Sequence[Job], progress: Progress) -> dict[str, Any]:
    """What the first training writes, in ``sample.txt`` too."""
    text = writer(recipe, run, progress).write("", recipe.sample)
    run.write("sample.txt", text + "\n")
    return {"sample": text}


RUNNER = Study(jobs=_jobs, columns={"test_loss": "nats a character"}, finish=_finish, use=writer).runner
