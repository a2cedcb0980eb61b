"""Dependency trees of sentences: spanning trees with the greatest scores."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["are_trees", "best_trees"]


def best_trees(scores: Tensor, lengths: Tensor) -> Tensor:
    """Return the head of each word in the tree with the greatest sum of scores and one word below the root.

    Args:
        scores: (B, N + 1, N), for head m and word n; the root is m = 0, and word n is the entry n + 1.
        lengths: (B) words of each sentence; entries after them are ignored.

    Returns:
        (B, N) integers, on the CPU: 0 for the root, else the number of the head from 1 on; 0 in padding.

    If the best heads of all words form a tree, it is the result; otherwise cycles are contracted (Chu and Liu 1965;
    Edmonds 1967).

    Example:

        >>> from structconv_systems.models.trees import best_trees
        >>> scores = torch.zeros(1, 3, 2)                  # the root and two words as heads, two words
        >>> scores[0, 2, 0] = scores[0, 0, 1] = 5.0
        >>> best_trees(scores, torch.tensor([2])).tolist()
        [[2, 0]]
    """
    scores, lengths = scores.detach().double().cpu(), lengths.cpu()
    words = torch.arange(scores.shape[-1])
    exist = words < lengths.unsqueeze(-1)
    others = exist.unsqueeze(2) & ~torch.eye(len(words), dtype=torch.bool)
    present = torch.cat([torch.ones_like(others[:, :1]), others], 1)
    heads = scores.masked_fill(~present, -math.inf).argmax(1) * exist
    for i in (~are_trees(heads, lengths)).nonzero().flatten().tolist():
        length = int(lengths[i])
        heads[i, :length] = _best_tree(scores[i, :length + 1, :length])
    return heads


def are_trees(heads: Tensor, lengths: Tensor) -> Tensor:
    """Return booleans (B): True if heads (B, N) form a tree with one word below the root.

    Example:

        >>> from structconv_systems.models.trees import are_trees
        >>> are_trees(torch.tensor([[2, 0, 2], [2, 1, 0]]), torch.tensor([3, 3])).tolist()      # the second has a cycle
        [True, False]
    """
    exist = torch.arange(heads.shape[1], device=heads.device) < lengths.unsqueeze(-1)
    above = torch.cat([heads.new_zeros(len(heads), 1), heads * exist], 1)
    single = ((heads == 0) & exist).sum(1) == (lengths > 0).to(lengths.dtype)
    for _ in range(max(heads.shape[1], 1).bit_length()):
        above = above.gather(1, above)
    return single & (above == 0).all(1)


def _best_tree(scores: Tensor) -> Tensor:
    """Return the heads of one sentence from its scores (N + 1, N)."""
    count = len(scores)
    table = np.full((count, count), -np.inf)
    table[:, 1:] = scores.numpy()
    np.fill_diagonal(table, -np.inf)
    numbers = table[np.isfinite(table)]
    table[0] -= count * (numbers.max() - numbers.min()) + 1  # an edge from the root costs more than others can gain
    return torch.from_numpy(_arborescence(table)[1:])


def _arborescence(table: NDArray[Any]) -> NDArray[Any]:
    """Return the heads (N) in the best tree below entry 0 by scores (N, N): contract each cycle of best heads to one
    entry, and expand it where the tree enters it. O(N^2) for each cycle."""
    contracted = []
    while True:
        heads = table.argmax(0)
        heads[0] = 0
        cycle = np.array(cycle_of(heads.tolist()))
        if not cycle.size:
            break
        others = np.setdiff1d(np.arange(len(table)), cycle)
        enters = table[np.ix_(others, cycle)] - table[heads[cycle], cycle]
        leaves = table[np.ix_(cycle, others)]
        contracted.append((heads, cycle, others, enters.argmax(1), leaves.argmax(0)))
        table = np.block([[table[np.ix_(others, others)], enters.max(1)[:, None]], [leaves.max(0), np.array(-np.inf)]])
    for inner, cycle, others, entered, left in reversed(contracted):
        opened = inner.copy()
        opened[cycle[entered[heads[-1]]]] = others[heads[-1]]
        inside = heads[:-1] == len(others)
        opened[others] = np.where(inside, cycle[left], others[np.where(inside, 0, heads[:-1])])
        heads = opened
    return heads


def cycle_of(heads: list[int]) -> list[int]:
    """Return a cycle of heads, each entry before its head; nothing if all lead to entry 0, its own head."""
    seen = [-1] * len(heads)
    seen[0] = 0
    for start in range(1, len(heads)):
        at = start
        while seen[at] < 0:
            seen[at] = start
            at = heads[at]
        if seen[at] == start:
            cycle = [at]
            while (at := heads[at]) != cycle[0]:
                cycle.append(at)
            return cycle
    return []
