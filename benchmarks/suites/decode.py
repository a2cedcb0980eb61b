"""Decoding step by step: the attention of RNNsearch over prepared states, and multi-head attention over cached keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import FORWARD, Case, Comparison, Entrant, entrant
from benchmarks.suites.graph_peers import copied, leaf
from structconv.mechanisms import Additive
from structconv.nn import Conv, MultiheadAttention
from structconv.structures import Causal
from structconv.weights import Eye

__all__ = ["CASES"]


class _Additive(nn.Module):
    """RNNsearch's attention as it is written in plain torch, over keys that are projected once."""

    def __init__(self, entries: int, states: int, dim: int) -> None:
        super().__init__()
        self.key, self.query = nn.Linear(entries, dim, bias=False), nn.Linear(states, dim)
        self.vector = nn.Parameter(torch.randn(dim) / dim**0.5)

    def step(self, keys: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """The context of states z (B, 1, P')."""
        weights = torch.softmax(torch.tanh(self.query(z) + keys) @ self.vector, -1)
        return weights.unsqueeze(-2) @ x


def _rnnsearch(batch: int, length: int, steps: int, entries: int = 512, states: int = 256, dim: int = 256
               ) -> Comparison:
    """All steps of one decoder, whose states are given one after the other (Bahdanau et al. 2015)."""
    scores = Additive(dim)
    ours = Conv(scores.softmax(), entries, entries, weight=Eye(), bias=False, other_channels=states)
    peer = _Additive(entries, states, dim)
    own = next(part for part in ours.modules() if isinstance(part, Additive))
    for parameter, number in ((peer.key.weight, own.source.weight), (peer.query.weight, own.target.weight),
                              (peer.query.bias, own.target.bias), (peer.vector, own.vector.flatten())):
        copied(parameter, number)
    x, z, x_peer, z_peer = (leaf(batch, n, c, seed=seed) for _ in range(2)
                            for seed, (n, c) in enumerate(((length, entries), (steps, states))))

    def run() -> Tensor:
        cache = ours.prepare(x)
        return torch.cat([ours(cache, z=z[:, t:t + 1]) for t in range(steps)], 1)

    def run_peer() -> Tensor:
        keys = peer.key(x_peer)
        return torch.cat([peer.step(keys, x_peer, z_peer[:, t:t + 1]) for t in range(steps)], 1)

    return Comparison(ours=entrant("ours", ours, run, x, z), peers=(entrant("torch", peer, run_peer, x_peer, z_peer),),
                      size=f"B={batch}, M={length}, {steps} steps, {entries} and {states} channels, D={dim}")


def _cached(batch: int, length: int, channels: int = 512, heads: int = 8) -> Comparison:
    """One more token after so many: with keys and values stored in place, and joined again at each step."""
    module = nn.MultiheadAttention(channels, heads, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(module)
    x, token = leaf(batch, length, channels), leaf(batch, 1, channels, seed=1)
    with torch.no_grad():
        cache = ours.prepare(x, structure=Causal())
        ours.step(cache, token)
        _, k, v = _projected(module, x, heads)
        room = [torch.cat([t, torch.zeros_like(t)], -2) for t in (k, v)]

    def step() -> Tensor:
        cache.truncate(length)
        y: Tensor = ours.step(cache, token)
        return y

    def attended(keep: Callable[[int, Tensor], Tensor]) -> Tensor:
        q, *new = _projected(module, token, heads)
        keys, values = (keep(i, t) for i, t in enumerate(new))
        return module.out_proj(F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2))

    def written(i: int, t: Tensor) -> Tensor:
        room[i][:, :, length:length + 1] = t
        return room[i][:, :, :length + 1]

    def joined(i: int, t: Tensor) -> Tensor:
        return torch.cat([(k, v)[i], t], -2)

    return Comparison(ours=Entrant(name="ours", run=step, phases=(FORWARD,)),
                      peers=(Entrant(name="torch in place", run=lambda: attended(written), phases=(FORWARD,)),
                             Entrant(name="torch cat", run=lambda: attended(joined), phases=(FORWARD,))),
                      size=f"B={batch}, {length} before, {channels} channels, {heads} heads")


def _projected(module: nn.MultiheadAttention, x: Tensor, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)]


def _case(name: str, build: Callable[[], Comparison]) -> Case:
    return Case(suite="decode", name=name, build=lambda size: build())


CASES = (
    _case("rnnsearch-20-steps", lambda: _rnnsearch(16, 40, 20)),
    _case("cached-step-64", lambda: _cached(1, 64)),
    _case("cached-step-1000", lambda: _cached(1, 1000)),
    _case("cached-step-batch", lambda: _cached(16, 200)),
)
