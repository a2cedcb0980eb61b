"""Negative samples for link prediction: nodes that are drawn at random."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import plain
from structconv.errors import ConfigError, ShapeError
from structconv.primitives.hashing import hash_bits
from structconv.primitives.sampling import random_below

__all__ = ["Endpoint", "Negatives"]

_MOST = 2 ** 31  # negative samples of a pair


class Negatives:
    """The kind and the number of negative samples, from the argument `name`: "binary", "triplet", a mapping with the
    keys mode, amount, src_weight and dst_weight, or PyTorch Geometric's `NegativeSampling`."""

    def __init__(self, sampling: Any, name: str = "neg_sampling") -> None:
        if isinstance(sampling, str):
            sampling = {"mode": sampling}
        read = (sampling.get if isinstance(sampling, Mapping)
                else lambda name, default=None: getattr(sampling, name, default))
        mode = read("mode")
        self.mode, self.amount = str(getattr(mode, "value", mode)), read("amount", 1)
        self.weights = read("src_weight"), read("dst_weight")
        if self.mode not in ("binary", "triplet"):
            raise ConfigError("LinkNeighborLoader", "neg_sampling must be 'binary' or 'triplet'", self.mode)
        amount = plain(self.amount)
        if type(amount) not in (int, float) or not 0 < amount < _MOST or (
                self.mode == "triplet" and amount != math.ceil(amount)):
            raise ConfigError("LinkNeighborLoader", f"{name} must have a positive amount of negative samples, an "
                              "integer for triplets", repr(amount))
        self.amount = amount


class Endpoint:
    """Nodes from which negative samples are drawn, by their weights and, with times, not later than a given time.
    `stream` makes the draws of two ends independent."""

    def __init__(self, num_nodes: int, weights: Tensor | None, times: Tensor | None, stream: int) -> None:
        self.num_nodes, self.stream, self.nodes = num_nodes, stream, None
        if weights is not None:
            weights = self._checked(weights).detach().cpu().double()
            weights = weights / weights.max()  # so that the sum is finite
            self.nodes = weights.nonzero().flatten()
        if times is not None:
            candidates = torch.arange(num_nodes) if self.nodes is None else self.nodes
            self.nodes = candidates[times[candidates].argsort(stable=True)]
        self.size = num_nodes if self.nodes is None else len(self.nodes)
        self.times = None if times is None else times[self.nodes]
        self.sums = None if weights is None else weights[self.nodes].cumsum(0)

    def _checked(self, weights: Any) -> Tensor:
        owner, name = "LinkNeighborLoader", "src_weight and dst_weight of neg_sampling"
        if not isinstance(weights, Tensor):
            raise ConfigError(owner, f"{name} must be tensors", type(weights).__name__)
        if weights.shape != (self.num_nodes,):
            raise ShapeError(owner, f"{name} must have the shape ({self.num_nodes},)", tuple(weights.shape))
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not bool((weights > 0).any()):
            raise ConfigError(owner, f"{name} must be finite and not negative, and some positive",
                              weights.tolist())
        return weights

    def draw(self, count: int, seed: int, limits: Tensor | None) -> Tensor:
        """So many nodes; where none is early enough for its limit, the earliest, of those with a weight above 0."""
        positions, stream = torch.arange(count), torch.tensor(self.stream)
        valid = torch.full((count,), self.size)
        if self.times is not None and limits is not None:
            valid = torch.searchsorted(self.times, limits, right=True).clamp(min=1)
        if self.sums is None:
            chosen = random_below(valid, seed, stream, positions)
        else:
            bits = hash_bits(torch.tensor(seed), stream, positions).double() * 2.0**-32
            chosen = torch.searchsorted(self.sums, bits * self.sums[valid - 1], right=True).clamp(max=valid - 1)
        return chosen if self.nodes is None else self.nodes[chosen]
