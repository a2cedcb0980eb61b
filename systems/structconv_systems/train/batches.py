"""Batches of samples of similar length; seed and step alone decide them, so that checkpoints store no position."""

from collections.abc import Sequence

import torch

from structconv.errors import ConfigError

__all__ = ["Batches", "Windows", "generator"]


def generator(seed: int, number: int) -> torch.Generator:
    """Return the generator that the seed of a training and a number, of a step or a pass, decide."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + number)


class Batches:
    """The samples of each training step.

    Samples are sorted by length, with equal lengths in random order, and split into batches of similar padded cost,
    which come in random order. Every pass has the same number of batches.

    Args:
        lengths: lengths of the samples; in a batch each counts like the longest.
        cost: greatest cost of a batch: samples times the longest length. A longer sample is a batch of its own.
        seed: seed of the order.

    Raises:
        ConfigError: there are no samples.

    Example:

        >>> from structconv_systems.train.batches import Batches
        >>> batches = Batches([3, 5, 2, 4], cost=10, seed=0)                   # samples by their lengths
        >>> len(batches), sorted(batches.at(1) + batches.at(2))[:2]
        (2, [0, 1])
    """

    def __init__(self, lengths: Sequence[int], *, cost: int, seed: int) -> None:
        if not lengths:
            raise ConfigError("Batches", "there must be samples", "none")
        self._lengths, self._seed = list(lengths), seed
        self._cuts = _cuts(sorted(lengths), cost)
        self._pass: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        """Batches in a pass over the samples."""
        return len(self._cuts)

    def at(self, step: int) -> list[int]:
        """The samples of step number `step`, from 1."""
        number, place = divmod(step - 1, len(self))
        if number != self._pass[0]:
            random = generator(self._seed, number)
            order: list[int] = torch.randperm(len(self._lengths), generator=random, device="cpu").tolist()
            samples = sorted(order, key=self._lengths.__getitem__)
            cuts = [self._cuts[batch] for batch in torch.randperm(len(self), generator=random, device="cpu").tolist()]
            self._pass = number, [samples[first:end] for first, end in cuts]
        return self._pass[1][place]


def _cuts(lengths: list[int], cost: int) -> list[tuple[int, int]]:
    """Return the begin and the end of each batch among sorted lengths."""
    cuts, first = [], 0
    for place, length in enumerate(lengths):
        if place > first and (place - first + 1) * length > cost:
            cuts.append((first, place))
            first = place
    return [*cuts, (first, len(lengths))]


class Windows:
    """Random starts of the samples of a step in a long sequence.

    Args:
        starts: number of possible starts. size: samples in a batch. seed: of the draws.

    Raises:
        ConfigError: the sequence is too short for a sample.

    Example:

        >>> from structconv_systems.train.batches import Windows
        >>> windows = Windows(100, size=4, seed=0)
        >>> len(windows.at(1)), windows.at(1) == windows.at(1)
        (4, True)
    """

    def __init__(self, starts: int, *, size: int, seed: int) -> None:
        if starts < 1:
            raise ConfigError("Windows", "the sequence must be longer than a sample", f"{starts} places to begin at")
        self._starts, self._size, self._seed = starts, size, seed

    def at(self, step: int) -> list[int]:
        """Return the starts of the samples of step number `step`, from 1."""
        starts: list[int] = torch.randint(self._starts, (self._size,), generator=generator(self._seed, step),
                                          device="cpu").tolist()
        return starts
