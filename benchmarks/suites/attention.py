"""Dense attention: what SDPA can express, additive scores, a learned bias, and multi-head layers."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import FORWARD, PHASES, Case, Comparison, Entrant, Size, leaf
from benchmarks.rates import Work, products
from structconv import ops
from structconv.bases import scores
from structconv.bases.base import Basis
from structconv.bases.entrywise import Dropped
from structconv.bases.positions import Lookup
from structconv.nn import MultiheadAttention
from structconv.primitives.native.build import compiler
from structconv.structures import Causal, Samples

__all__ = ["CASES", "build_multihead"]


def _qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(*shape), leaf(*shape, seed=1), leaf(*shape, seed=2)


def _sdpa(causal: bool, batch: int, heads: int, dim: int, size: Size) -> Comparison:
    """softmax(q k / sqrt(D)) v, as torch's fused operator has it."""
    length = size.pick(512, 2048)
    shape = (batch, heads, length, dim)
    q, k, v = _qkv(*shape)

    def run() -> Tensor:
        basis: Basis = scores.Bilinear(q, k) * dim**-0.5
        return ops.apply((basis.masked(keep=Causal()) if causal else basis).softmax(over="inputs"), v)

    result = []
    entries: list[Any] = [("torch sdpa", partial(F.scaled_dot_product_attention, is_causal=causal), False)]
    if compiler() is not None:  # without one `torch.compile` stops on a CPU
        entries.append(("flex attention", _flex(causal), True))
    for name, operator, slow in entries:
        leaves = tuple(tensor.detach() for tensor in _qkv(*shape)) if slow else _qkv(*shape)
        result.append(Entrant(name=name, run=partial(operator, *leaves), inputs=() if slow else leaves,
                             full_only=slow, phases=(FORWARD,) if slow else PHASES))
    flops = 4.0 * batch * heads * length**2 * dim / (2 if causal else 1)
    return Comparison(ours=Entrant(name="ours", run=run, inputs=(q, k, v)), peers=tuple(result),
                      size=f"B={batch}, {heads} heads of {dim}, N={length}",
                      least=products(flops, 3.5))


def _flex(causal: bool) -> Any:
    """FlexAttention, compiled at its first call; on a CPU torch gives it no backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = cache(lambda: torch.compile(flex_attention))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled()(q, k, v, block_mask=mask(q.shape[-2]))

    @cache
    def mask(length: int) -> Any:
        if not causal:
            return None
        return create_block_mask(lambda b, h, n, m: n >= m, None, None, length, length, device="cpu")

    return run


def _additive(dim: int, size: Size) -> Comparison:
    """softmax over m of v^T tanh(q_n + k_m), N = 4096; the peer holds the (N, N, D) sums where they fit."""
    length = size.pick(512, 4096)
    q, k, v = _qkv(1, length, dim)
    vector = leaf(1, dim, seed=3)
    q_peer, k_peer, v_peer = _qkv(1, length, dim)
    vector_peer = leaf(1, dim, seed=3)

    def run() -> Tensor:
        return ops.apply(scores.Additive(k, q, vector).softmax(over="inputs"), v)

    def broadcast() -> Tensor:
        raw = torch.tanh(q_peer.unsqueeze(-2) + k_peer.unsqueeze(-3)) @ vector_peer.unsqueeze(-1)
        return raw.squeeze(-1).softmax(-1) @ v_peer

    return Comparison(ours=Entrant(name="ours", run=run, inputs=(q, k, v, vector)), size=f"N={length}, D={dim}",
                      peers=(Entrant(name="torch broadcast", run=broadcast, needs=12.0 * length**2 * dim,
                                     inputs=(q_peer, k_peer, v_peer, vector_peer)),))


def _bias(heads: int, dim: int, clip: int, size: Size) -> Comparison:
    """A learned bias for each clipped distance, with gradients; SDPA takes it as a materialized (K, N, N) tensor."""
    length = size.pick(1024, 8192)
    shape = (1, heads, length, dim)
    (q, k, v), table = _qkv(*shape), leaf(heads, 1, 2 * clip + 1, seed=3)
    peer, table_peer = _qkv(*shape), leaf(heads, 1, 2 * clip + 1, seed=3)
    position = torch.arange(length)
    bucket = (position[None, :] - position[:, None]).clamp_(-clip, clip).add_(clip)

    def run() -> Tensor:
        basis = scores.Bilinear(q, k) * dim**-0.5 + Lookup(table, "clip", clip, length, length)
        return ops.apply(basis.softmax(over="inputs"), v)

    def materialized() -> Tensor:
        bias = table_peer[:, 0][:, bucket]
        return F.scaled_dot_product_attention(*peer, attn_mask=bias[None])

    return Comparison(ours=Entrant(name="ours", run=run, inputs=(q, k, v, table)),
                      size=f"{heads} heads of {dim}, N={length}, {2 * clip + 1} distances",
                      peers=(Entrant(name="torch sdpa", run=materialized, inputs=(*peer, table_peer),
                                     needs=24.0 * heads * length**2),))


def _linear(heads: int, dim: int, size: Size) -> Comparison:
    """Linear attention with the feature map elu + 1 (Katharopoulos et al. 2020), written without its re-association."""
    length = size.pick(1024, 8192)
    shape = (1, heads, length, dim)
    ours, pairs, written = (_qkv(*shape) for _ in range(3))

    def run() -> Tensor:
        q, k, v = ours
        return ops.apply(scores.Bilinear(F.elu(q) + 1, F.elu(k) + 1).normalize("sum"), v)

    def dense() -> Tensor:
        weights = (F.elu(pairs[0]) + 1) @ (F.elu(pairs[1]) + 1).mT
        return weights / weights.sum(-1, keepdim=True) @ pairs[2]

    def by_hand() -> Tensor:
        q, k = F.elu(written[0]) + 1, F.elu(written[1]) + 1
        return q @ (k.mT @ written[2]) / (q @ k.sum(-2).unsqueeze(-1))

    return Comparison(ours=Entrant(name="ours", run=run, inputs=ours), size=f"{heads} heads of {dim}, N={length}",
                      peers=(Entrant(name="torch dense", run=dense, inputs=pairs, needs=24.0 * heads * length**2),
                             Entrant(name="torch by hand", run=by_hand, inputs=written)))


def _mapped(heads: int, dim: int, size: Size) -> Comparison:
    """relu(q k / sqrt(D)) divided by its sum: a normalization that no fused operator has."""
    length = size.pick(1024, 4096)
    shape = (1, heads, length, dim)
    ours, theirs = _qkv(*shape), _qkv(*shape)

    def run() -> Tensor:
        q, k, v = ours
        return ops.apply((scores.Bilinear(q, k) * dim**-0.5).relu().normalize("sum"), v)

    def dense() -> Tensor:
        q, k, v = theirs
        weights = torch.relu(q @ k.mT * dim**-0.5)
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total == 0, 1, total) @ v

    return Comparison(ours=Entrant(name="ours", run=run, inputs=ours), size=f"{heads} heads of {dim}, N={length}",
                      peers=(Entrant(name="torch dense", run=dense, inputs=theirs, needs=24.0 * heads * length**2),))


def _dropped(heads: int, dim: int, size: Size) -> Comparison:
    """Training with a tenth of the weights dropped. Each drops others, so that the numbers cannot agree."""
    length = size.pick(512, 2048)
    shape = (1, heads, length, dim)
    ours, fused, written = (_qkv(*shape) for _ in range(3))
    seed = torch.tensor(0)

    def run() -> Tensor:
        q, k, v = ours
        return ops.apply(Dropped((scores.Bilinear(q, k) * dim**-0.5).softmax(over="inputs"), 0.1, seed), v)

    def dense() -> Tensor:
        q, k, v = written
        return F.dropout((q * dim**-0.5 @ k.mT).softmax(-1), 0.1) @ v

    return Comparison(ours=Entrant(name="ours", run=run, inputs=ours),
                      size=f"{heads} heads of {dim}, N={length}, p=0.1",
                      peers=(Entrant(name="torch sdpa", inputs=fused, needs=24.0 * heads * length**2,
                                     run=partial(F.scaled_dot_product_attention, *fused, dropout_p=0.1)),
                             Entrant(name="torch dense", run=dense, inputs=written, needs=24.0 * heads * length**2)),
                      tolerance=math.inf)


def build_multihead(batch: int, length: int, channels: int, heads: int) -> Comparison:
    """The multi-head layer on itself, against torch's and against its parts written out."""
    module = nn.MultiheadAttention(channels, heads, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(module)
    x, x_module, x_parts = (leaf(batch, length, channels) for _ in range(3))
    weight, bias, out = module.in_proj_weight, module.in_proj_bias, module.out_proj

    def parts() -> Tensor:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2)
                   for part in F.linear(x_parts, weight, bias).chunk(3, -1))
        return out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    parameters = tuple(module.parameters())
    return Comparison(
        ours=Entrant(name="ours", run=lambda: ours(x), inputs=(x,), parameters=tuple(ours.parameters())),
        peers=(Entrant(name="torch mha", run=lambda: module(x_module, x_module, x_module, need_weights=False)[0],
                       inputs=(x_module,), parameters=parameters),
               Entrant(name="torch sdpa", run=parts, inputs=(x_parts,), parameters=parameters)),
        size=f"B={batch}, N={length}, {channels} channels, {heads} heads",
        least=_multihead_least(batch, length, channels))


def _multihead_least(batch: int, length: int, channels: int) -> dict[str, Work]:
    linear, pairs = 8.0 * batch * length * channels**2, 4.0 * batch * length**2 * channels
    return {"forward": Work(flops=linear + pairs), "both": Work(flops=3 * linear + 3.5 * pairs)}


def _multihead(size: Size) -> Comparison:
    return build_multihead(2, size.pick(256, 1024), 256, 8)


def _ragged(samples: int, shortest: int, longest: int, channels: int, heads: int, size: Size) -> Comparison:
    """The multi-head layer on samples of different lengths, others in each call as far as it knows; torch's layer takes
    them one by one, for its attention on nested tensors has no backward on a CPU. The part is as many entries in equal
    samples, of which the batch has the dimensions.
    """
    module = nn.MultiheadAttention(channels, heads, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(module)
    count, draws = size.pick(max(samples // 4, 2), samples), torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draws).tolist()
    for _ in range(sum(lengths) % count):  # so that equal samples have as many entries
        lengths[lengths.index(max(lengths))] -= 1
    x, x_module = leaf(sum(lengths), channels), leaf(sum(lengths), channels)
    x_equal = leaf(count, sum(lengths) // count, channels)

    def one_by_one() -> Tensor:
        return torch.cat([module(part, part, part, need_weights=False)[0] for part in x_module.split(lengths)])

    own = tuple(ours.parameters())
    work = [_multihead_least(1, length, channels) for length in lengths]
    return Comparison(
        ours=Entrant(name="ours", run=lambda: ours(x, structure=Samples(lengths)), inputs=(x,),
                     parameters=own),
        peers=(Entrant(name="torch mha, a loop", run=one_by_one, inputs=(x_module,),
                       parameters=tuple(module.parameters())),),
        parts=(Entrant(name="equal samples", run=lambda: ours(x_equal).flatten(0, 1), inputs=(x_equal,),
                       parameters=own),),
        size=f"{count} samples of {shortest} to {longest}, {channels} channels, {heads} heads",
        least={phase: Work(flops=sum(each[phase].flops for each in work)) for phase in PHASES})


CASES = (
    Case(suite="attention", name="sdpa", build=partial(_sdpa, False, 1, 8, 64)),
    Case(suite="attention", name="sdpa-causal", build=partial(_sdpa, True, 1, 8, 64), headline=False),
    Case(suite="attention", name="additive-64", build=partial(_additive, 64)),
    Case(suite="attention", name="learned-bias", build=partial(_bias, 2, 64, 128)),
    Case(suite="attention", name="linear", build=partial(_linear, 4, 64), headline=False),
    Case(suite="attention", name="relu-sum", build=partial(_mapped, 2, 64), headline=False),
    Case(suite="attention", name="dropout", build=partial(_dropped, 8, 64), headline=False),
    Case(suite="attention", name="multihead", build=_multihead),
    Case(suite="attention", name="ragged-molecules", build=partial(_ragged, 32, 10, 30, 64, 4)),
    Case(suite="attention", name="ragged-sentences", build=partial(_ragged, 64, 10, 60, 256, 8), headline=False),
    Case(suite="attention", name="ragged-long", build=partial(_ragged, 8, 100, 400, 256, 8)),
)
