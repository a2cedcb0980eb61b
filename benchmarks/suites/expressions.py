"""Expressions on the smallest inputs: heads side by side, sums of scores, and a mechanism that the package has not.

Each is held against torch's operators, and against the layers of its parts called one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Comparison, Entrant, entrant
from benchmarks.suites.graph_peers import leaf
from structconv.bases.base import Basis
from structconv.bases.positions import bucket
from structconv.bases.scores import Bilinear
from structconv.mechanisms import ALiBi, Channels, DotProduct, Inputs, Mechanism, RelativeBias, Shifts
from structconv.nn import Conv
from structconv.weights import HeadBlocks

__all__ = ["build_alibi", "build_mixed", "build_own", "build_relative_bias"]

_LENGTH, _CHANNELS, _HEADS, _DIM, _CLIP = 8, 8, 2, 4, 16


class SharedQueries(Mechanism):
    """a_kmn = <W_k z_n, W_k x_m>, queries and keys by one projection (Kitaev et al. 2020), as a user would write it."""

    has_scores = True

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim

    @property
    def size(self) -> int:
        return self.heads

    def bind(self, channels: Channels) -> None:
        self.project = nn.Linear(channels.inputs, self.heads * self.dim, bias=False)

    def forward(self, inputs: Inputs) -> Basis:
        return Bilinear(*[_by_head(self.project(entries)) for entries in (inputs.z, inputs.x)]) * self.dim**-0.5


def build_mixed() -> Comparison:
    """Attention beside shifts."""
    shifts, scores = Shifts([1, 0, -1]), DotProduct(_HEADS, _DIM)
    ours: Any = Conv(scores.scaled().softmax() | shifts, _CHANNELS, _CHANNELS)
    attention, window = Conv(scores.scaled().softmax(), _CHANNELS, _CHANNELS), Conv(shifts, _CHANNELS, _CHANNELS)

    def by_torch(x: Tensor) -> Tensor:
        theta = ours.weight.theta
        y = F.scaled_dot_product_attention(*_queries_and_keys(ours, x), x.unsqueeze(-3) @ theta[:_HEADS]).sum(-3)
        return y + F.conv1d(x.mT, theta[_HEADS:].permute(2, 1, 0), ours.bias, padding=1).mT

    return _comparison(ours, by_torch, attention, window)


def build_alibi() -> Comparison:
    """Linear distances added to the scores."""
    distance = (torch.arange(_LENGTH) - torch.arange(_LENGTH).unsqueeze(-1)).abs()
    slopes = torch.exp2(-8.0 * torch.arange(1, _HEADS + 1) / _HEADS)
    bias = -slopes.view(-1, 1, 1) * distance
    return _attention((_scores() + ALiBi()).softmax(), lambda ours: bias)


def build_relative_bias() -> Comparison:
    """T5's buckets of distances, each with a learned number, added to the scores."""
    position = torch.arange(_LENGTH)
    row = bucket("log", _CLIP, position, position.unsqueeze(-1))
    return _attention((_scores() + RelativeBias(_CLIP, buckets="log")).softmax(),
                      lambda ours: _part(ours, RelativeBias).table[:, 0][:, row])


def build_own() -> Comparison:
    """A mechanism that the package has not."""
    return _attention(SharedQueries(_HEADS, _DIM).softmax(), lambda ours: None)


def _scores() -> Mechanism:
    return DotProduct(_HEADS, _DIM).scaled()


def _attention(mechanism: Mechanism, bias: Callable[[Any], Tensor | None]) -> Comparison:
    """Attention of these weights, whose part is attention without whatever makes it special."""
    ours: Any = Conv(mechanism, _CHANNELS, _HEADS * _DIM, weight=HeadBlocks())
    plain = Conv(_scores().softmax(), _CHANNELS, _HEADS * _DIM, weight=HeadBlocks())

    def by_torch(x: Tensor) -> Tensor:
        values = x.unsqueeze(-3) @ ours.weight.theta
        y = F.scaled_dot_product_attention(*_queries_and_keys(ours, x), values, attn_mask=bias(ours))
        return y.transpose(-3, -2).flatten(-2) + ours.bias

    return _comparison(ours, by_torch, plain)


def _comparison(ours: Any, by_torch: Callable[[Tensor], Tensor], *parts: Any) -> Comparison:
    def on_its_own(name: str, layer: nn.Module, run: Callable[[Tensor], Tensor]) -> Entrant:
        x = leaf(1, _LENGTH, _CHANNELS)
        return entrant(name, layer, lambda: run(x), x)

    return Comparison(ours=on_its_own("ours", ours, ours), peers=(on_its_own("torch sdpa", ours, by_torch),),
                      parts=tuple(on_its_own("part", part, part) for part in parts),
                      size=f"N={_LENGTH}, {_CHANNELS} channels, {_HEADS} heads of {_DIM}")


def _queries_and_keys(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K, N, D) each."""
    if any(isinstance(part, SharedQueries) for part in layer.modules()):
        query = _by_head(_part(layer, SharedQueries).project(x))
        return query, query
    scores = _part(layer, DotProduct)
    return _by_head(F.linear(x, scores.query.weight)), _by_head(F.linear(x, scores.key.weight))


def _by_head(rows: Tensor) -> Tensor:
    """(..., N, K D) -> (..., K, N, D)."""
    return rows.unflatten(-1, (_HEADS, _DIM)).transpose(-3, -2)


def _part(layer: nn.Module, kind: type) -> Any:
    return next(part for part in layer.modules() if isinstance(part, kind))
