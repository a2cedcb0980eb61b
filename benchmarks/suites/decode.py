"""Decoding step by step: the attention of RNNsearch over prepared states, and multi-head attention over cached keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import FORWARD, Case, Comparison, Entrant, copied, entrant, leaf
from structconv.mechanisms import Additive, DotProduct, Rotary
from structconv.nn import Conv, MultiheadAttention
from structconv.structures import Causal
from structconv.weights import Eye, LowRank

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
    """All steps of one decoder, which gets one state in each (Bahdanau et al. 2015)."""
    ours: Any = Conv(Additive(dim).softmax(), entries, entries, weight=Eye(), bias=False, other_channels=states)
    peer = _Additive(entries, states, dim)
    own = ours.attention
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
    """One more token after `length` tokens: with keys and values stored in place, and concatenated at each step."""
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


def _llama(length: int, channels: int = 512, heads: int = 8, groups: int = 2) -> Comparison:
    """One more token in the attention of a Llama: rotary positions, and keys that four heads share."""
    depth, shared = channels // heads, heads // groups
    scores = DotProduct(heads, depth, shared_by=shared, rotary=Rotary(layout="half")).scaled()
    ours: Any = Conv(scores.masked(keep=Causal()).softmax(), channels, channels, weight=LowRank(depth, shared),
                     bias=False).eval()
    dot, theta = ours.attention, ours.weight
    weights = [part.weight for part in (dot.query, dot.key, theta.value, theta.output)]
    x, token = leaf(1, length, channels), leaf(1, 1, channels, seed=1)
    with torch.no_grad():
        cache = ours.prepare(x)
        ours.step(cache, token)

    def step() -> Tensor:
        cache.truncate(length)
        y: Tensor = ours.step(cache, token)
        return y

    steps = {"torch in place": _in_place(x, token, weights, heads, groups)}
    if find_spec("transformers"):
        steps["transformers"] = _transformers(x, token, weights, heads, groups)
    return Comparison(ours=Entrant(name="ours", run=step, phases=(FORWARD,)),
                      peers=tuple(Entrant(name=name, run=run, phases=(FORWARD,)) for name, run in steps.items()),
                      size=f"B=1, {length} before, {channels} channels, {heads} heads, {groups} of keys, rotary")


def _in_place(x: Tensor, token: Tensor, weights: Sequence[Tensor], heads: int, groups: int) -> Callable[[], Tensor]:
    """The step in plain torch: angles from a table, keys and values stored in place, torch's fused attention."""
    query, key, value, output = weights
    length, depth = x.shape[1], x.shape[2] // heads
    angle = torch.arange(length + 1).unsqueeze(-1) * 10000.0 ** (-torch.arange(0, depth, 2) / depth)
    cos, sin = angle.cos(), angle.sin()

    def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = t.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def by_heads(t: Tensor, weight: Tensor, count: int) -> Tensor:
        return F.linear(t, weight).unflatten(-1, (count, depth)).transpose(1, 2)

    with torch.no_grad():
        keys = turned(by_heads(torch.cat([x, token], 1), key, groups), cos, sin)
        values = by_heads(torch.cat([x, token], 1), value, groups).contiguous()

    def step() -> Tensor:
        at = cos[length:length + 1], sin[length:length + 1]
        keys[:, :, length:] = turned(by_heads(token, key, groups), *at)
        values[:, :, length:] = by_heads(token, value, groups)
        y = F.scaled_dot_product_attention(turned(by_heads(token, query, heads), *at), keys, values, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), output)

    return step


def _transformers(x: Tensor, token: Tensor, weights: Sequence[Tensor], heads: int, groups: int) -> Callable[[], Tensor]:
    """The step of the library's own module, with its rotary embedding and its cache."""
    from transformers import DynamicCache, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=x.shape[-1], num_attention_heads=heads, num_key_value_heads=groups,
                         num_hidden_layers=1, attn_implementation="sdpa")
    layer, rotary, cache = LlamaAttention(config, 0).eval(), LlamaRotaryEmbedding(config), DynamicCache(config=config)
    for own, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj), weights, strict=True):
        copied(own.weight, weight)
    name = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"

    def attended(t: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + t.shape[1]).unsqueeze(0)
        y: Tensor = layer(t, rotary(t, positions), None, **{name: cache})[0]
        return y

    def step() -> Tensor:
        cache.crop(-1)
        return attended(token, x.shape[1])

    with torch.no_grad():
        attended(torch.cat([x, token], 1), 0)
    return step


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
    _case("llama-step-64", lambda: _llama(64)),
    _case("llama-step-1000", lambda: _llama(1000)),
)
