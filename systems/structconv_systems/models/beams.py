"""The beams of searches for several samples at once: finished results and active beams."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from structconv_systems.models.protocol import Decoding, next_logits

__all__ = ["Beams", "Search"]


class Search:
    """The results for one sample.

    Args:
        width: how many are enough. most: tokens, at most. power: a. gnmt: which penalty.
    """

    def __init__(self, width: int, most: int, power: float, gnmt: bool) -> None:
        self._width, self._most, self._power, self._gnmt = width, most, power, gnmt
        self._results: list[tuple[float, list[int]]] = []

    def normalized(self, score: float, length: int) -> float:
        """log P(y) / penalty(|y|)."""
        return score / ((5 + length) / 6 if self._gnmt else max(length, 1)) ** self._power

    def add(self, score: float, length: int, tokens: list[int]) -> None:
        """One more, unless it cannot be."""
        if score > -math.inf:
            self._results.append((self.normalized(score, length), tokens))

    def over(self, score: float) -> bool:
        """Return True if the search is finished, given the score of the likeliest active beam."""
        if not self._results:
            return False
        return len(self._results) >= self._width or max(self._results)[0] >= self.normalized(score, self._most)

    def best(self) -> list[int]:
        """The tokens of the best result."""
        return max(self._results, key=lambda result: result[0])[1]


class Beams(NamedTuple):
    """The beams of B unfinished searches.

    Args:
        scores: log P (B, W). tokens: (B, W, 1 + t), after the last one before.
    """

    searches: list[Search]
    scores: Tensor
    tokens: Tensor

    def next(self, decoding: Decoding, end: int) -> Beams:
        """Return the beams with one more token."""
        batch, width, _ = self.tokens.shape
        logits = next_logits(decoding, self.tokens[..., -1].flatten())
        scores = (logits.float().log_softmax(-1).unflatten(0, (batch, width)) + self.scores.unsqueeze(-1)).flatten(1)
        scores, index = scores.topk(min(2 * width, scores.shape[-1]))  # of 2 W at most W end, one of each beam
        beams, tokens = index // logits.shape[-1], index % logits.shape[-1]
        ended = tokens == end
        self._collect(ended[:, :width], scores, beams)
        scores, going = scores.masked_fill(ended, -torch.inf).topk(width)
        beams, tokens = beams.gather(1, going), tokens.gather(1, going)
        best = scores[:, 0].tolist()
        open_rows = [row for row, search in enumerate(self.searches) if not search.over(best[row])]
        rows = torch.tensor(open_rows, dtype=torch.int64, device=tokens.device)
        came = (rows[:, None] * width + beams[rows]).flatten()
        if came.tolist() != [*range(batch * width)] and open_rows:
            decoding.reorder(came)
        before = self.tokens.flatten(0, 1)[came].unflatten(0, (len(open_rows), width))
        return Beams([self.searches[row] for row in open_rows], scores[rows],
                      torch.cat([before, tokens[rows].unsqueeze(-1)], -1))

    def _collect(self, ended: Tensor, scores: Tensor, beams: Tensor) -> None:
        """Give each search the beams of it that end."""
        rows, ranks = ended.nonzero(as_tuple=True)
        sequences = self.tokens[rows, beams[rows, ranks], 1:].tolist()
        for row, score, tokens in zip(rows.tolist(), scores[rows, ranks].tolist(), sequences, strict=True):
            self.searches[row].add(score, len(tokens) + 1, tokens)

    def close(self) -> None:
        """Turn unfinished beams into results."""
        scores, sequences = self.scores.flatten().tolist(), self.tokens[..., 1:].flatten(0, 1).tolist()
        for row, (score, tokens) in enumerate(zip(scores, sequences, strict=True)):
            self.searches[row // self.scores.shape[-1]].add(score, len(tokens), tokens)
