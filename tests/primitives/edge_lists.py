"""Lists of edges to test attention on, and its softmax summed edge by edge in the dtype of its arguments."""

from __future__ import annotations

import torch

from structconv.primitives.hashing import hash_uniform
from structconv.primitives.layout import compress


class Edges:
    """An edge list with its two layouts, whose indices have `dtype`."""

    def __init__(self, source, target, m, n, dtype=torch.int64):
        self.m, self.n, self.e, self.source, self.target = m, n, len(source), source.long(), target.long()
        source, target = source.to(dtype), target.to(dtype)
        self.layouts = compress(target, source, n), compress(source, target, m)


def random_edges(m=60, n=40, e=400, dtype=torch.int64, seed=0):
    """Isolated entries on both sides, duplicates, loops, and one output with a third of all edges."""
    g = torch.Generator().manual_seed(seed)
    source, target = torch.randint(m - m // 6, (e,), generator=g), torch.randint(n - n // 6, (e,), generator=g)
    target[: e // 3] = n // 5
    source[:3], target[:3] = 1, 1
    return Edges(source[torch.randperm(e, generator=g)], target, m, n, dtype)


def edge_softmax(edges, scores, drop=None):
    """(K, E) -> (K, E) by a loop over outputs; `drop`: p, seed and the heads of one entry of a batch."""
    weights = torch.zeros_like(scores)
    for n in edges.target.unique():
        of = edges.target == n
        weights[:, of] = torch.softmax(scores[:, of], -1)
    if drop is None:
        return weights
    p, seed, heads = drop
    k = torch.arange(len(scores)).unsqueeze(-1)
    pair = edges.source * edges.n + edges.target
    return weights * (hash_uniform(seed, k // heads, k % heads, pair) >= p) / (1 - p)


def softmax_sum(edges, scores, values, drop=None):
    """sum_e p_ke v_mk."""
    messages = edge_softmax(edges, scores, drop).t().unsqueeze(-1) * values[edges.source]
    return messages.new_zeros(edges.n, *messages.shape[1:]).index_add(0, edges.target, messages)
