"""Filtered ranks of the right answers among all, with mean ranks for ties."""

import torch
from torch import Tensor

from structconv.errors import ShapeError

__all__ = ["KnownAnswers", "filtered_ranks", "numbers_between", "ranking_figures"]


def filtered_ranks(scores: Tensor, answers: Tensor, known: Tensor) -> Tensor:
    """Return the rank of each answer, from 1, among the answers that are not known to be right.

        rank = 1 + (how many score more) + (how many others score the same) / 2

    is the mean rank over all orders of equals, so that equal scores give the middle rank. NaN counts as the lowest
    score.

    Args:
        scores: (B, N) of all answers. answers: (B,), which are ranked. known: (B, N), right answers to leave out; the
            ranked ones may be among them.

    Returns:
        (B,), float64 (Bordes et al. 2013, section 4.2, filtered).

    Raises:
        ShapeError: sizes do not match.
    """
    if scores.shape != known.shape or answers.shape != scores.shape[:1]:
        raise ShapeError("filtered_ranks", "scores and known must be (B, N), answers (B,)",
                         f"{tuple(scores.shape)}, {tuple(known.shape)}, {tuple(answers.shape)}")
    own = scores.gather(-1, answers.unsqueeze(-1))
    others = ~known.scatter(-1, answers.unsqueeze(-1), True)
    above = (scores > own) | (own.isnan() & ~scores.isnan())
    equal = (scores == own) | (own.isnan() & scores.isnan())
    return 1 + (above & others).sum(-1) + (equal & others).sum(-1, dtype=torch.float64) / 2


def ranking_figures(ranks: Tensor, part: str) -> dict[str, float]:
    """Return the mean reciprocal rank and the shares of ranks up to 1, 3 and 10, in percent, with the prefix `part`."""
    hits = {f"{part}_hits_{most}": 100 * float((ranks <= most).double().mean()) for most in (1, 3, 10)}
    return {f"{part}_mrr": 100 * float(ranks.reciprocal().mean()), **hits}


def numbers_between(first: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers from first[b] to behind[b] - 1 for all b: the b of each, and the number."""
    counts = behind - first
    rows = torch.repeat_interleave(counts)
    return rows, torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts - first)[rows]


class KnownAnswers:
    """The tails known to be right for a head and a relation, from triples (head, relation, tail).

    Args:
        triples: (T, 3). num_entities, num_relations: N and K.

    O(T log T) once; a call is O(B log T + B N).
    """

    def __init__(self, triples: Tensor, num_entities: int, num_relations: int) -> None:
        self._sizes = num_entities, num_relations
        self._questions, order = self._number(triples).sort()
        self._answers = triples[order, 2]

    def __len__(self) -> int:
        return len(self._answers)

    def __call__(self, queries: Tensor) -> Tensor:
        """Map queries (B, 2 or more), whose first two columns count, to booleans (B, N)."""
        numbers = self._number(queries)
        first, behind = (torch.searchsorted(self._questions, numbers, right=right) for right in (False, True))
        rows, answer_positions = numbers_between(first, behind)
        known = torch.zeros(len(queries), self._sizes[0], dtype=torch.bool)
        known[rows, self._answers[answer_positions]] = True
        return known

    def _number(self, triples: Tensor) -> Tensor:
        return triples[:, 0] * self._sizes[1] + triples[:, 1]
