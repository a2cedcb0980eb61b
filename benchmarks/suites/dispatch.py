"""The cost of a call beside the arithmetic: layers on the smallest inputs, new graphs, and plan lookups.

Expressions are held against torch's operators, and against the layers of their parts called one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import FORWARD, Case, Comparison, Entrant, Size, copied, entrant, leaf
from benchmarks.records import Line
from benchmarks.runner import Probe, Settings, huge_pages, milliseconds, timed
from benchmarks.suites.attention import build_multihead
from benchmarks.suites.graph import build_gat, build_gcn
from benchmarks.suites.grid import build_conv2d
from benchmarks.suites.new_graphs import build_new_graphs
from structconv import bases
from structconv.bases.base import Basis
from structconv.bases.positions import bucket
from structconv.bases.scores import Bilinear
from structconv.mechanisms import ALiBi, Channels, DotProduct, Identity, Inputs, Mechanism, RelativeBias, Shifts
from structconv.nn import Conv
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call
from structconv.structures import Graph, Grid
from structconv.weights import Full, HeadBlocks
from structconv_systems.timing import alternate

__all__ = ["CASES"]

#: Sizes of the expressions.
_LENGTH, _CHANNELS, _HEADS, _DIM, _CLIP = 8, 8, 2, 4, 16


def _ring() -> Graph:
    position = torch.arange(8)
    return Graph(torch.stack([position, (position + 1) % 8]), num_nodes=8)


def _linear(size: Size) -> Comparison:
    """A layer over the identity, which is torch's linear layer."""
    ours: Any = Conv(Identity(), 8, 8)
    module = nn.Linear(8, 8)
    copied(module.weight, ours.weight.theta[0].mT, module.bias)
    x, x_peer = leaf(8, 8), leaf(8, 8)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x), size="8 entries, 8 to 8",
                      peers=(entrant("torch linear", module, lambda: module(x_peer), x_peer),))


def _lookup(kind: str, basis: Basis, settings: Settings) -> Iterator[Line]:
    """Finding a plan that was made before, next to one addition of two numbers."""
    number = torch.ones(())
    x, theta = torch.ones(basis.num_inputs, 8), Full.of(torch.ones(basis.size, 8, 8))
    call = Call(x, basis, theta)
    works: dict[str, Callable[[], object]] = {"ours": lambda: plan_for(call),
                                              "torch.add": lambda: torch.add(number, number)}
    works["ours"]()  # the first plan of a process measures the machine
    times = alternate(works, repeats=settings.rounds, seconds=settings.limit)
    own, add = times["ours"], times["torch.add"]
    yield Line(suite="dispatch", case=f"plan-lookup-{kind}", phase=FORWARD, peer="torch.add", size="remembered",
               ratio=add.median / own.median, peer_ms=milliseconds(add), huge_pages=huge_pages(),
               extra={"lookup_us": 1e6 * own.median}, **timed(own))


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


def _mixed() -> Comparison:
    """Attention beside shifts."""
    shifts, scores = Shifts([1, 0, -1]), DotProduct(_HEADS, _DIM)
    ours: Any = Conv(scores.scaled().softmax() | shifts, _CHANNELS, _CHANNELS)
    attention, window = Conv(scores.scaled().softmax(), _CHANNELS, _CHANNELS), Conv(shifts, _CHANNELS, _CHANNELS)

    def by_torch(x: Tensor) -> Tensor:
        theta = ours.weight.theta
        y = F.scaled_dot_product_attention(*_queries_and_keys(ours, x), x.unsqueeze(-3) @ theta[:_HEADS]).sum(-3)
        return y + F.conv1d(x.mT, theta[_HEADS:].permute(2, 1, 0), ours.bias, padding=1).mT

    return _comparison(ours, by_torch, attention, window)


def _alibi() -> Comparison:
    """Linear distances added to the scores."""
    distance = (torch.arange(_LENGTH) - torch.arange(_LENGTH).unsqueeze(-1)).abs()
    slopes = torch.exp2(-8.0 * torch.arange(1, _HEADS + 1) / _HEADS)
    bias = -slopes.view(-1, 1, 1) * distance
    return _attention((_scores() + ALiBi()).softmax(), lambda ours: bias)


def _relative_bias() -> Comparison:
    """T5's buckets of distances, each with a learned number, added to the scores."""
    position = torch.arange(_LENGTH)
    row = bucket("log", _CLIP, position, position.unsqueeze(-1))
    return _attention((_scores() + RelativeBias(_CLIP, buckets="log")).softmax(),
                      lambda ours: ours.position_bias.table[:, 0][:, row])


def _own() -> Comparison:
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
    if hasattr(layer, "shared_queries"):
        query = _by_head(layer.shared_queries.project(x))
        return query, query
    return _by_head(layer.attention.query(x)), _by_head(layer.attention.key(x))


def _by_head(rows: Tensor) -> Tensor:
    """(..., N, K D) -> (..., K, N, D)."""
    return rows.unflatten(-1, (_HEADS, _DIM)).transpose(-3, -2)


CASES = (
    Probe(suite="dispatch", name="plan-lookup-identity", measure=partial(_lookup, "identity", bases.Identity(8))),
    Probe(suite="dispatch", name="plan-lookup-shift",
          measure=partial(_lookup, "shift", bases.Shift(Grid((8, 8)), ((0, 0), (0, 1), (1, 0))))),
    Case(suite="dispatch", name="linear", build=_linear),
    Case(suite="dispatch", name="conv2d", build=lambda size: build_conv2d(1, 4, 4, 8, kernel_size=3, padding=1)),
    Case(suite="dispatch", name="gcn", build=lambda size: build_gcn(_ring(), 8, 8, uncached=True)),
    Case(suite="dispatch", name="gat", build=lambda size: build_gat(_ring(), 8, 2, 4)),
    Case(suite="dispatch", name="multihead", build=lambda size: build_multihead(1, 8, 8, 2)),
    Case(suite="dispatch", name="attention-beside-shifts", build=lambda size: _mixed()),
    Case(suite="dispatch", name="alibi", build=lambda size: _alibi()),
    Case(suite="dispatch", name="relative-bias", build=lambda size: _relative_bias()),
    Case(suite="dispatch", name="own-mechanism", build=lambda size: _own()),
    Case(suite="dispatch", name="gcn-new-graphs", build=lambda size: build_new_graphs("gcn", 64)),
    Case(suite="dispatch", name="gat-new-graphs", build=lambda size: build_new_graphs("gat", 64)),
)
