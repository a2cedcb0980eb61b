"""Code shared by the recipes that translate: subwords, loss, perplexity, and BLEU."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from structconv.errors import DataError
from structconv.nn import cross_entropy
from structconv_systems.data.parallel import Parallel, in_a_row, read_parallel
from structconv_systems.data.subwords import Subwords
from structconv_systems.models.decoding import beam
from structconv_systems.models.tokens import BEGIN, END, PAD
from structconv_systems.plots import alignment_png
from structconv_systems.recipes.base import Batches, BatchTask, Job, Parts, Progress, Run, jobs_of, loaded, mean_loss
from structconv_systems.recipes.options.sequences import Translation

__all__ = ["TranslationTask", "Translator", "bleu", "read_corpus", "telling", "translation_jobs", "translator",
           "write_translated"]

_SUBWORDS = "subwords.json"
_MOST_MORE = 50


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Sentences as written, and as subwords."""

    text: Parallel
    sources: list[Tensor]
    targets: list[Tensor]

    def __len__(self) -> int:
        return len(self.text)


def read_corpus(recipe: Translation, run: Run | None = None) -> tuple[Subwords, Parts[Pairs]]:
    """Read the files; the subwords are those of the run, if it has any, else learned from the training files."""
    stems = {"train": recipe.train, "val": recipe.valid, "test": recipe.test}
    texts = {part: read_parallel(recipe.path(stem), recipe.from_language, recipe.to_language)
             for part, stem in stems.items()}
    if recipe.sentences:
        texts["train"] = Parallel(source=texts["train"].source[:recipe.sentences],
                                  target=texts["train"].target[:recipe.sentences])
    subwords, num_alone = _subwords(recipe, texts["train"], run), len(texts["train"])
    rows = [in_a_row(texts["train"], count) for count in range(1, recipe.in_a_row + 1)]
    texts["train"] = Parallel(source=tuple(chain.from_iterable(row.source for row in rows)),
                              target=tuple(chain.from_iterable(row.target for row in rows)))
    parts = {part: Pairs(text=text, sources=[_source(subwords, line) for line in text.source],
                         targets=[_target(subwords, line) for line in text.target]) for part, text in texts.items()}
    parts["train"] = _shorter(recipe, parts["train"], num_alone)
    return subwords, Parts(parts, of="pairs of sentences")


def _subwords(recipe: Translation, text: Parallel, run: Run | None) -> Subwords:
    path = None if run is None else run.folder / _SUBWORDS
    if path is not None and path.is_file():
        return Subwords.load(path)
    subwords = Subwords.train([*text.source, *text.target], recipe.vocabulary)
    if path is not None:
        subwords.save(path)
    return subwords


class TranslationTask(BatchTask):
    """Cross-entropy of the next subword; perplexity on ``val``; BLEU on ``test``, and on the tenth with most words.

    Args:
        model: sources (B, M) and targets (B, N) -> logits (B, N, V); its `begin` decodes.
    """

    def __init__(self, model: nn.Module, recipe: Translation, subwords: Subwords, parts: Parts[Pairs], seed: int
                 ) -> None:
        self.recipe, self.subwords, self.parts = recipe, subwords, parts
        train = parts["train"]
        lengths = [max(len(source), len(target)) for source, target in zip(train.sources, train.targets, strict=True)]
        super().__init__(model, recipe, Batches(lengths, cost=recipe.batch_tokens, seed=seed))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        return self._loss(self.parts["train"], samples, self.recipe.label_smoothing)

    def figures(self, part: str) -> dict[str, float]:
        pairs = self.parts[part]
        count = len(pairs.text)
        loss = mean_loss(self._loss(pairs, range(first, min(first + 64, count)), 0.0) for first in range(0, count, 64))
        result = {f"{part}_loss": loss, f"{part}_perplexity": math.exp(min(loss, 700.0))}
        if part == "test":
            output, target = self.translator.translate(pairs.text.source), pairs.text.target
            result["test_bleu"] = bleu(output, target)[0]
            longest = _longest(pairs.text.source)
            result["test_bleu_long"] = bleu(*([lines[place] for place in longest] for lines in (output, target)))[0]
        return result

    @property
    def translator(self) -> Translator:
        return Translator(self.model, self.subwords, self.recipe)

    def _loss(self, pairs: Pairs, samples: Sequence[int], smoothing: float) -> tuple[Tensor, float]:
        source = pad_sequence([pairs.sources[sample] for sample in samples], batch_first=True, padding_value=PAD)
        target = pad_sequence([pairs.targets[sample] for sample in samples], batch_first=True, padding_value=PAD)
        logits, expected = self.model(source, target[:, :-1]), target[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), expected.flatten(), ignore_index=PAD, reduction="sum",
                             label_smoothing=smoothing)
        return loss, float((expected != PAD).sum())


def translation_jobs(recipe: Translation, run: Run | None, networks: Mapping[str, Callable[[int], nn.Module]],
                     options: Mapping[str, Translation] | None = None) -> list[Job]:
    """Return the trainings of each group on one corpus.

    Args:
        networks: by group, a number of subwords -> its model. options: of groups that train by others than the
            recipe's.
    """
    subwords, parts = read_corpus(recipe, run)

    def task(recipe: Translation, name: str, seed: int) -> TranslationTask:
        return TranslationTask(networks[name](len(subwords)), recipe, subwords, parts, seed)

    return [job for name in networks
            for job in jobs_of((options or {}).get(name, recipe), name, partial(task, name=name), TranslationTask)]


def write_translated(run: Run, task: TranslationTask, *, weights: str = "attention weights") -> dict[str, Any]:
    """Write translations of the test sentences into ``translations.txt`` and, if the model has `weights`, draw an
    alignment; return sacrebleu's signature."""
    text, own = task.parts["test"].text, task.translator
    output = own.translate(text.source)
    run.write("translations.txt", "\n".join(output) + "\n")
    if weights:
        place = telling(text)
        run.draw("alignment.png", own.alignment(text.source[place], output[place]),
                 f"Test sentence {place + 1}: {weights}. Rows: subwords of the translation; columns: subwords of the "
                 "source; each row sums to 1.")
    return {"signature": bleu(output, text.target)[1]}


def _longest(lines: Sequence[str]) -> list[int]:
    """Return the places of the tenth of the lines with most words, in their order."""
    most = sorted(range(len(lines)), key=lambda place: -len(lines[place].split()))
    return sorted(most[:math.ceil(len(lines) / 10)])


def telling(text: Parallel) -> int:
    """Return the place of the first sentence of 9 to 14 words, which is drawn."""
    return next((place for place, line in enumerate(text.source) if 9 <= len(line.split()) <= 14), 0)


class Translator:
    """A model and its subwords, which translate lines of text."""

    def __init__(self, model: Any, subwords: Subwords, recipe: Translation) -> None:
        self._model, self._subwords, self._recipe = model, subwords, recipe

    @torch.no_grad()
    def translate(self, lines: Sequence[str]) -> list[str]:
        """Translate lines in batches of similar length; the translation of a blank line is blank."""
        recipe, sources = self._recipe, [_source(self._subwords, line) for line in lines]
        order = sorted((index for index, line in enumerate(lines) if line.strip()),
                       key=lambda index: len(sources[index]))
        output = [""] * len(lines)
        for first in range(0, len(order), 32):
            indices = order[first:first + 32]
            source = pad_sequence([sources[index] for index in indices], batch_first=True, padding_value=PAD)
            decoded = beam(self._model.begin(source), len(indices), width=recipe.beam, begin=BEGIN, end=END,
                           most=recipe.longest + _MOST_MORE, length_penalty=recipe.length_penalty,
                           normalization="length")
            for index, tokens in zip(indices, decoded, strict=True):
                output[index] = self._subwords.decode(tokens)
        return output

    @torch.no_grad()
    def alignment(self, source: str, target: str) -> bytes:
        """Draw the attention of a translation as PNG; `ConfigError` if the model has none."""
        source_tokens = _source(self._subwords, source)
        target_tokens = _target(self._subwords, target)
        pieces = (self._subwords.pieces(tokens.tolist()) for tokens in (source_tokens, target_tokens[1:]))
        return alignment_png(self._model.alignment(source_tokens, target_tokens[:-1]), *pieces,
                             x_label="source subword", y_label="target subword")


def translator(network: Callable[[Any, int], nn.Module], job: str, recipe: Translation, run: Run, progress: Progress,
               beam: int | None = None) -> Translator:
    """Return the translator of a finished training; `network` builds the model for a number of subwords."""
    subwords = Subwords.load(run.folder / _SUBWORDS)
    model = loaded(network(recipe, len(subwords)), job, run, progress, recipe.steps)
    return Translator(model, subwords, recipe if beam is None else dataclasses.replace(recipe, beam=beam))


def bleu(output: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return corpus BLEU of detokenized text (Papineni et al. 2002) by sacrebleu (Post 2018), and its signature."""
    import sacrebleu

    metric = sacrebleu.metrics.BLEU()
    return float(metric.corpus_score(list(output), [list(references)]).score), str(metric.get_signature())


def _source(subwords: Subwords, line: str) -> Tensor:
    return torch.tensor([*subwords.encode(line), END])


def _target(subwords: Subwords, line: str) -> Tensor:
    return torch.tensor([BEGIN, *subwords.encode(line), END])


def _shorter(recipe: Translation, pairs: Pairs, num_alone: int) -> Pairs:
    """Drop the pairs with a side longer than `longest`; a warning counts those of the first `num_alone`, the files."""
    indices = [index for index in range(len(pairs.text))
            if max(len(pairs.sources[index]), len(pairs.targets[index]) - 1) <= recipe.longest]
    if not indices:
        raise DataError(recipe.path(recipe.train), f"sentences of at most longest={recipe.longest} subwords", "none")
    if (left := num_alone - sum(index < num_alone for index in indices)):
        warnings.warn(f"{recipe.path(recipe.train)}: {left} of {num_alone} pairs are left out, for they have "
                      f"more than longest={recipe.longest} subwords", stacklevel=2)
    text = Parallel(source=tuple(pairs.text.source[index] for index in indices),
                    target=tuple(pairs.text.target[index] for index in indices))
    return Pairs(text=text, sources=[pairs.sources[index] for index in indices],
                 targets=[pairs.targets[index] for index in indices])
