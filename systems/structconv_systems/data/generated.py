"""Sequences that are made here, from a seed: what a label depends on is known, and so what a model has to see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import ConfigError
from structconv.shapes import check_choice

__all__ = ["MARKS", "NOISE", "QUESTIONS", "Labeled", "entry_channels", "labeled_entries", "temporal_order"]

#: Tokens that say nothing, 0 to 3, and behind them the two that do.
NOISE, MARKS = 4, 2

#: What an entry whose value is asked for is told by; see `labeled_entries`.
QUESTIONS = ("place", "content", "relation")


@dataclass(frozen=True, kw_only=True, eq=False)
class Labeled:
    """Sequences and a label of each.

    Attributes:
        inputs: tokens (S, N), int64, or entries (S, N, P), float32.
        labels: (S,), int64, below the number of classes.
        places: of the entries that the label depends on, (S, R).
    """

    inputs: Tensor
    labels: Tensor
    places: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def temporal_order(samples: int, length: int, *, first: int, end: int, seed: int) -> Labeled:
    """Which two marks there are, and in which order: experiment 6a of Hochreiter and Schmidhuber (1997).

    A sequence has noise, tokens 0 to 3, and at two places drawn from first ... end - 1 a mark, 4 or 5; the label,
    2 a + b of marks 4 + a and 4 + b, is one of four. All draws are even, so that whoever sees one mark alone is right
    half of the time, and without either a quarter of it.

    Args:
        samples: S. length: N. first, end: between them the marks stand. seed: of all draws.

    Raises:
        ConfigError: there are no two places for the marks.
    """
    if not 0 <= first <= end - 2 <= length - 2:
        raise ConfigError("temporal_order", f"two places must be in first ... end - 1, below length={length}",
                          f"{first} ... {end - 1}")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(NOISE, (samples, length), generator=generator)
    drawn = torch.rand(samples, end - first, generator=generator).argsort(-1)[:, :2]
    places = first + drawn.sort(-1).values
    marks = torch.randint(MARKS, (samples, 2), generator=generator)
    tokens.scatter_(1, places, NOISE + marks)
    return Labeled(inputs=tokens, labels=MARKS * marks[:, 0] + marks[:, 1], places=places)


def labeled_entries(question: str, samples: int, length: int, *, classes: int, seed: int) -> Labeled:
    """Entries with values, of which one is asked for: by its place, by its content, or by its relation to another.

    An entry is [value, key, asked key, mark] (P = classes + 2 N + 1): a value and a key as ones among zeros, the keys
    of a sequence all different; one entry is marked, and one, with no value and no key of its own, asks for another
    entry's key. The label is the value of the entry at place N // 3 ("place"), of the marked one ("content"), or of the
    one whose key is asked for ("relation"). The sequences are the same for all three: only their labels differ. The
    values are drawn evenly; whoever knows their counts alone does best to name the commonest.

    Args:
        question: one of `QUESTIONS`. samples: S. length: N. classes: of values. seed: of all draws.

    Raises:
        ConfigError: an unknown question, or a sequence of less than four entries.
    """
    check_choice("labeled_entries", "question", question, QUESTIONS)
    if length < 4:
        raise ConfigError("labeled_entries", "length must be at least 4", length)
    generator, rows = torch.Generator().manual_seed(seed), torch.arange(samples)
    values = torch.randint(classes, (samples, length), generator=generator)
    keys, order = (torch.rand(samples, length, generator=generator).argsort(-1) for _ in range(2))
    place = torch.full((samples,), length // 3)
    marked, asking, asked = (order[order != place[:, None]].view(samples, -1)[:, :3]).unbind(-1)
    one = F.one_hot(asking, length).unsqueeze(-1)
    parts = [F.one_hot(values, classes) * (1 - one), F.one_hot(keys, length) * (1 - one),
             F.one_hot(keys[rows, asked], length).unsqueeze(1) * one, F.one_hot(marked, length).unsqueeze(-1)]
    decides = {"place": place, "content": marked, "relation": asked}[question]
    return Labeled(inputs=torch.cat(parts, -1).float(), labels=values[rows, decides], places=decides.unsqueeze(-1))


def entry_channels(length: int, classes: int) -> int:
    """P of `labeled_entries`."""
    return classes + 2 * length + 1
