"""Sequences generated from a seed, with known entries that determine the label."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import ConfigError
from structconv.shapes import check_choice

__all__ = ["MARKS", "NOISE", "QUESTIONS", "Labeled", "entry_channels", "labeled_entries", "temporal_order"]

#: The numbers of tokens without meaning, 0 to 3, and of marks, which follow.
NOISE, MARKS = 4, 2

#: How the entry with the label is given; see `labeled_entries`.
QUESTIONS = ("place", "content", "relation")


@dataclass(frozen=True, kw_only=True, eq=False)
class Labeled:
    """Sequences with one label each.

    Attributes:
        inputs: tokens (S, N), int64, or entries (S, N, P), float32.
        labels: (S,), int64, below the number of classes.
        positions: (S, R), positions of the entries that determine the label.

    Example:

        >>> from structconv_systems.data.generated import temporal_order
        >>> data = temporal_order(100, 20, first=2, end=10, seed=0)
        >>> data.inputs.shape, data.labels.max().item() + 1
        (torch.Size([100, 20]), 4)
    """

    inputs: Tensor
    labels: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def temporal_order(samples: int, length: int, *, first: int, end: int, seed: int) -> Labeled:
    """Generate sequences with two marks; the label is their kinds in order (Hochreiter and Schmidhuber 1997, exp. 6a).

    A sequence has noise, tokens 0 to 3, and a mark, 4 or 5, at two positions drawn from first ... end - 1. The label is
    2 a + b for marks 4 + a and 4 + b. All draws are uniform: a model that reads one mark is right half of the time, and
    one that reads none a quarter of the time.

    Args:
        samples: S. length: N. first, end: range of the marks' positions. seed: seed of all draws.

    Raises:
        ConfigError: there are fewer than two positions for the marks.

    Example:

        >>> from structconv_systems.data.generated import temporal_order
        >>> data = temporal_order(100, 20, first=2, end=10, seed=0)
        >>> data.positions.shape                              # of both marks
        torch.Size([100, 2])
    """
    if not 0 <= first <= end - 2 <= length - 2:
        raise ConfigError("temporal_order", f"two places must be in first ... end - 1, below length={length}",
                          f"{first} ... {end - 1}")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(NOISE, (samples, length), generator=generator)
    drawn = torch.rand(samples, end - first, generator=generator).argsort(-1)[:, :2]
    positions = first + drawn.sort(-1).values
    marks = torch.randint(MARKS, (samples, 2), generator=generator)
    tokens.scatter_(1, positions, NOISE + marks)
    return Labeled(inputs=tokens, labels=MARKS * marks[:, 0] + marks[:, 1], positions=positions)


def labeled_entries(question: str, samples: int, length: int, *, classes: int, seed: int) -> Labeled:
    """Generate entries with values; the label is the value of one entry, given by position, content or relation.

    An entry is [value, key, requested key, mark] (P = classes + 2 N + 1), with one-hot value and keys. Keys differ
    within a sequence. One entry is marked, and one entry, without value and key, requests the key of another. The label
    is the value of the entry at position N // 3 ("place"), of the marked entry ("content"), or of the entry with the
    requested key ("relation"). The sequences are equal for all three questions. Values are drawn uniformly.

    Args:
        question: one of `QUESTIONS`. samples: S. length: N. classes: number of values. seed: seed of all draws.

    Raises:
        ConfigError: the question is unknown, or a sequence has fewer than four entries.

    Example:

        >>> from structconv_systems.data.generated import QUESTIONS, labeled_entries
        >>> data = labeled_entries(QUESTIONS[0], 100, 10, classes=4, seed=0)
        >>> data.inputs.shape[:2], data.labels.shape
        (torch.Size([100, 10]), torch.Size([100]))
    """
    check_choice("labeled_entries", "question", question, QUESTIONS)
    if length < 4:
        raise ConfigError("labeled_entries", "length must be at least 4", length)
    generator, rows = torch.Generator().manual_seed(seed), torch.arange(samples)
    values = torch.randint(classes, (samples, length), generator=generator)
    keys, order = (torch.rand(samples, length, generator=generator).argsort(-1) for _ in range(2))
    position = torch.full((samples,), length // 3)
    marked, asking, related = (order[order != position[:, None]].view(samples, -1)[:, :3]).unbind(-1)
    one = F.one_hot(asking, length).unsqueeze(-1)
    parts = [F.one_hot(values, classes) * (1 - one), F.one_hot(keys, length) * (1 - one),
             F.one_hot(keys[rows, related], length).unsqueeze(1) * one, F.one_hot(marked, length).unsqueeze(-1)]
    decides = {"place": position, "content": marked, "relation": related}[question]
    return Labeled(inputs=torch.cat(parts, -1).float(), labels=values[rows, decides], positions=decides.unsqueeze(-1))


def entry_channels(length: int, classes: int) -> int:
    """P of `labeled_entries`."""
    return classes + 2 * length + 1
