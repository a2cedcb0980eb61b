"""A causal Transformer on characters with rotary, sinusoidal or learned positions: the test loss, and a sample."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from structconv.analysis.layers import layer_bases
from structconv.errors import DataError
from structconv.nn import cross_entropy
from structconv.pictures import basis_png
from structconv_systems.data.characters import Alphabet, read_characters
from structconv_systems.models.characters import CharacterModel
from structconv_systems.models.decoding import sample
from structconv_systems.recipes.base import BatchTask, Parts, Progress, Run, Windows, mean_loss
from structconv_systems.recipes.options.sequences import Characters
from structconv_systems.train.study import Finished, Job, Study, jobs_of, loaded

__all__ = ["RUNNER", "CharactersTask", "Writer", "network", "writer"]

_ALPHABET = "alphabet.json"
_DRAWN = 64


def network(recipe: Characters, alphabet: int, window: int | None = None, positions: str = "rotary") -> CharacterModel:
    """Build the model; each character attends to all before it, or to a window."""
    return CharacterModel(alphabet, channels=recipe.channels, layers=recipe.layers, heads=recipe.heads,
                          hidden=4 * recipe.channels, dropout=recipe.dropout, window=window, positions=positions,
                          length=recipe.length)


class CharactersTask(BatchTask):
    """Cross-entropy of the next character, over windows that begin anywhere in the text."""

    def __init__(self, recipe: Characters, text: Parts[Tensor], alphabet: int, positions: str, seed: int) -> None:
        self.recipe, self.parts = recipe, text
        windows = Windows(len(text["train"]) - recipe.length, size=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, alphabet, positions=positions), recipe, windows)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        return self._loss(self.parts["train"].unfold(0, self.recipe.length + 1, 1)[torch.tensor(samples)])

    def figures(self, part: str) -> dict[str, float]:
        """Measure consecutive windows of the text; the last one may be shorter."""
        text, length = self.parts[part], self.recipe.length
        windows = text.unfold(0, length + 1, length)
        tail = text[len(windows) * length:].unsqueeze(0)
        batches = [*windows.split(32), *([tail] if tail.shape[1] > 1 else [])]
        return {f"{part}_loss": mean_loss(map(self._loss, batches))}

    def _loss(self, window: Tensor) -> tuple[Tensor, float]:
        logits, target = self.model(window[:, :-1]), window[:, 1:]
        return cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), float(target.numel())


class Writer:
    """A trained model and its alphabet."""

    def __init__(self, model: Any, alphabet: Alphabet) -> None:
        self._model, self._alphabet = model, alphabet

    def write(self, prompt: str, characters: int, *, temperature: float = 0.8, seed: int = 0,
              top_k: int | None = None, top_p: float | None = None) -> str:
        """Continue a prompt by this number of characters; without a prompt, begin a new line."""
        known = self._alphabet.characters
        begin = self._alphabet.encode(prompt or ("\n" if "\n" in known else known[0])).unsqueeze(0)
        [drawn] = sample(self._model.begin(1), 1, begin=begin, end=None, most=characters, temperature=temperature,
                         top_k=top_k, top_p=top_p, generator=torch.Generator().manual_seed(seed))
        return prompt + self._alphabet.decode(drawn)


def writer(recipe: Characters, run: Run, progress: Progress) -> Writer:
    """Return the writer of a finished run; its context is as long as in training."""
    alphabet = Alphabet.load(run.folder / _ALPHABET)
    model = network(recipe, len(alphabet), window=recipe.length)
    return Writer(loaded(model, f"{recipe.name}/seed-0", run, progress, recipe.steps), alphabet)


def _jobs(recipe: Characters, run: Run | None) -> list[Job]:
    path, known = recipe.path(recipe.text), None if run is None else run.folder / _ALPHABET
    text = read_characters(path, alphabet=Alphabet.load(known) if known and known.is_file() else None)
    parts = {"train": text.train, "val": text.validation, "test": text.test}
    if recipe.test:
        path = recipe.path(recipe.test)
        parts["test"] = text.alphabet.read(path)
    if (least := min(len(parts["val"]), len(parts["test"]))) <= recipe.length:
        raise DataError(path, f"more than length={recipe.length} characters to validate and to test", least)
    if known and not known.is_file():
        text.alphabet.save(known)
    groups = {recipe.name: "rotary", "sinusoidal": "sinusoidal", "learned": "learned"}
    task = partial(CharactersTask, text=Parts(parts, of="characters"), alphabet=len(text.alphabet))
    return [job for name, positions in groups.items()
            for job in jobs_of(recipe, name, partial(task, positions=positions), CharactersTask)]


def _finish(recipe: Characters, finished: Finished) -> dict[str, Any]:
    """Sample a text from the first training, also into ``sample.txt``, and draw the attention of its last heads."""
    text = writer(recipe, finished.run, finished.progress).write("", recipe.sample)
    finished.run.write("sample.txt", text + "\n")
    finished.run.draw("heads.png", _heads(finished.task(recipe.name)),
                      "Attention of the last layer's heads at the beginning of the validation text. Rows: characters "
                      "that are read; columns: characters that read; each column sums to 1.")
    return {"sample": text}


def _heads(task: CharactersTask) -> bytes:
    """Draw the heads of the last layer over the beginning of the validation text."""
    bases = layer_bases(task.model, task.parts["val"][:min(task.recipe.length, _DRAWN)].unsqueeze(0))
    matrices = list(bases.values())[-1][0].dense().flatten(0, -3)
    return basis_png(matrices, [f"head {number}" for number in range(len(matrices))],
                     x_label="reading character", y_label="read character")


RUNNER = Study(jobs=_jobs, columns={"test_loss": "nats a character"}, finish=_finish, use=writer).runner
