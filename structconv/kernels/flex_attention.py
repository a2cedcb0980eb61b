"""Dense attention on a GPU that torch's fused dot product cannot express, by FlexAttention.

The scores' map and their relative terms, learnt ones with their gradients, are its score function; windows, order,
blocks, padding and tables of pairs its mask, of which it visits the blocks that have pairs. Nothing of size (M, N) is
held. Softmax over the inputs without dropout, as Flex has no others; those stay with `structconv.blocked_attention`.

It is a function that `torch.compile` makes for each kind of problem, which takes seconds, so problems of fewer than
`LEAST_PAIRS` pairs are left to the other kernels. So is everything on a CPU, where Flex has no gradients, everything
inside a program that is being compiled as a whole, and, where the user asks for deterministic algorithms, learnt terms:
Flex adds up their gradients by atomics. Like torch's fused kernels it has no derivatives of second order, and like
most programs that torch compiles it passes back once: not with `retain_graph=True`.
`STRUCTCONV_TRITON=0` turns it off with the Triton kernels.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from structconv.bases.base import Basis, value
from structconv.bases.pairwise import Normalised
from structconv.bases.scores import Affine, Bilinear
from structconv.kernels import blocked_attention, dense_attention
from structconv.kernels.dense_attention import finite
from structconv.kernels.flex_masks import SIDE, Present
from structconv.kernels.forms import register_form
from structconv.kernels.fused import Fused
from structconv.kernels.terms import Term, buckets, diagonal, products, sum_terms, table_rows, tables
from structconv.planning.cost import Cost
from structconv.planning.counts import DENSE_CALLS, Sizes, application_cost
from structconv.primitives import triton

#: Devices that Flex is offered for; none where torch was built without a GPU.
DEVICES = ("cuda",) if torch.version.cuda or torch.version.hip else ()
#: Devices where Flex is evaluated as it is written, with (M, N) scores: where it is tested, and not offered.
UNCOMPILED = ("cpu",)
BACKEND = "inductor"
#: Pairs (m, n) from which on compiling is worth while.
LEAST_PAIRS = 1 << 18
#: Channels of a head, at least; with fewer, zeros are added.
LEAST_CHANNELS = 16
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_MAPS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "identity": None, "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp}
_COMPILED: dict[Hashable, Callable[..., Tensor]] = {}


@value
class FlexAttention(Fused):
    """softmax over the inputs of gain map(terms), at the pairs that are present; `child` is the same."""

    child: Basis
    terms: tuple[Term, ...]
    mapping: str
    gain: float
    present: Present

    def analysis(self, x: Tensor) -> Tensor:
        return self.apply(x.unsqueeze(-3))

    def apply(self, r: Tensor) -> Tensor:
        along = diagonal(self.terms, self.num_inputs, self.num_outputs, r)
        rows = table_rows(self.terms)
        learnt = any(t is not None and t.requires_grad for t in (along, rows))
        if learnt and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled():
            return self._otherwise(r)
        y = self._attend(r, along, rows)
        return y if self.present.everything or finite(y) else self._otherwise(r)

    def _otherwise(self, r: Tensor) -> Tensor:
        """In blocks, or as the expression is written: deterministic, and apart from what is not finite."""
        blocked = blocked_attention.recognise(self.child)
        return (self.child if blocked is None or not blocked_attention.suits(blocked, r) else blocked).apply(r)

    def _attend(self, r: Tensor, along: Tensor | None, rows: Tensor | None) -> Tensor:
        lead = torch.broadcast_shapes(r.shape[:-3], self.batch_shape)
        inputs, outputs, channels = self.num_inputs, self.num_outputs, r.shape[-1]

        def flat(t: Tensor) -> Tensor:
            return t.expand(*lead, self.size, *t.shape[-2:]).reshape(lead.numel(), self.size, *t.shape[-2:])

        query, key, scale = products(self.terms)
        dtype = _dtype(query, key, r)
        query, key, values = (_widened(flat(t.to(dtype))) for t in (query, key, r))
        bucket = next((buckets(leaf.kind, leaf.clip, inputs, outputs, r.device) for leaf in tables(self.terms)), None)
        along = None if along is None else _own(flat(along.unsqueeze(-2)).squeeze(-2))
        rows = None if rows is None else _own(flat(rows))
        maps = Maps(along, rows, bucket, *self.present.by_tensors(lead))
        kind = (self.mapping, self.gain, scale, self.present.kind, self.size, query.shape[-1], values.shape[-1], dtype,
                torch.is_grad_enabled(),
                *(None if t is None else t.requires_grad for t in (query, key, values, along, rows)))
        with torch.autocast(r.device.type, enabled=False):
            y = _attention(r.device, kind)(query, key, values, maps, self.present.block_mask(inputs, outputs, r.device),
                                           scale, self.mapping, self.gain)
        return y[..., :channels].unflatten(0, lead) if lead else y[0, ..., :channels]


class Maps(NamedTuple):
    """What the score function reads of a pair (m, n).

    Args:
        along: (B, K, N + M - 1), the term of each offset m - n.
        rows: (B, K, N, L), the term of each output at each bucket.
        bucket: (N + M - 1,), that of each offset.
        padding: (B, M) booleans.
        tables: (M, N) or (B, M, N) booleans.
    """

    along: Tensor | None
    rows: Tensor | None
    bucket: Tensor | None
    padding: Tensor | None
    tables: tuple[Tensor, ...]


def _dtype(*tensors: Tensor) -> torch.dtype:
    """What torch's fused attention would take these in."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _own(t: Tensor) -> Tensor:
    """A copy in float32: torch loses the gradient of what a score function reads where that is a view."""
    return t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _widened(t: Tensor) -> Tensor:
    return F.pad(t, (0, LEAST_CHANNELS - t.shape[-1])) if t.shape[-1] < LEAST_CHANNELS else t


def _whole(query: Tensor, key: Tensor, values: Tensor, maps: Maps, blocks: BlockMask | None, scale: float,
           mapping: str, gain: float) -> Any:
    """Flex with the score gain map(score + along[m - n] + rows[n, bucket[m - n]]), -inf where a tensor says so.

    The tensors are arguments: what the score function closed over outside would be a part of the program.
    """
    fn, first, (along, rows, bucket, padding, tables) = _MAPS[mapping], query.shape[-2] - 1, maps

    def score_mod(score: Tensor, b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        if along is not None:
            score = score + along[b, h, m - n + first]
        if rows is not None and bucket is not None:
            score = score + rows[b, h, n, bucket[m - n + first]]
        score = score if fn is None else fn(score)
        score = score if gain == 1.0 else score * gain
        if padding is not None:
            score = torch.where(padding[b, m], score, -torch.inf)
        for table in tables:
            score = torch.where(table[m, n] if table.dim() == 2 else table[b, m, n], score, -torch.inf)
        return score

    return flex_attention(query, key, values, score_mod, blocks, scale=scale)


def _attention(device: torch.device, kind: Hashable) -> Callable[..., Tensor]:
    """What computes problems of one kind: compiled on a GPU, as it is elsewhere, where it is only tested.

    Each kind has a code object of its own, because a compiler counts the programs that it makes from one, and gives up
    after a few.
    """
    if device.type in UNCOMPILED:
        return _whole
    made = _COMPILED.get(kind)
    if made is None:
        own = types.FunctionType(_whole.__code__.replace(co_name=f"flex_{len(_COMPILED)}"), globals())
        made = _COMPILED[kind] = torch.compile(own, fullgraph=True, backend=BACKEND)
    return made


def recognise(basis: Basis) -> FlexAttention | None:
    """The basis as what Flex computes; `None` where it is something else, elsewhere, small, or fused by torch."""
    if not DEVICES or not isinstance(basis, Normalised) or (basis.kind, basis.over) != ("softmax", "inputs"):
        return None
    if torch.compiler.is_compiling() or basis.num_inputs * basis.num_outputs < max(LEAST_PAIRS, 1):
        return None
    device = basis.device
    if device.type not in DEVICES or not triton.working(device):
        return None
    found = blocked_attention.mapped(basis)
    terms = None if found is None else sum_terms(found[3])
    if found is None or terms is None or not blocked_attention.fitting(terms):
        return None
    present = Present.of(basis.child.support())
    if present is None or dense_attention.recognise(basis) is not None:
        return None
    return FlexAttention(basis, terms, found[1], found[2], present)


def suits(form: Basis, r: Tensor) -> bool:
    """Whether Flex takes these types, and what a mask leaves out is finite: absent pairs are multiplied by zero. What
    order or a window leaves out for one entry is seen by another, and found in the result."""
    assert isinstance(form, FlexAttention)
    held = [r, *(t for leaf, _ in form.terms
                 for t in ((leaf.query, leaf.key) if isinstance(leaf, Bilinear) else
                           (leaf.source, leaf.target) if isinstance(leaf, Affine) else ()))]
    if any(t.dtype not in _STORED for t in held):
        return False
    seen = form.present.reflexive and form.num_inputs == form.num_outputs
    return form.present.everything or seen or all(finite(t) for t in held)


@application_cost(FlexAttention)
def _application(basis: FlexAttention, sizes: Sizes, channels: int, mode: str) -> Cost:
    """Two products at the pairs of the visited blocks, of which a window has its width and the sides of a block."""
    inputs, outputs = sizes.entries(basis)
    width = min([inputs, *((part.edge_bound(inputs, outputs) or inputs * outputs) // outputs + SIDE
                           for part in basis.present.parts)])
    depth = sum(leaf.query.shape[-1] if isinstance(leaf, Bilinear) else 2 for leaf, _ in basis.terms
                if isinstance(leaf, Bilinear | Affine))
    heads = sizes.batch * basis.size
    moved = heads * (inputs + outputs) * (depth + channels) * sizes.itemsize
    return Cost(2 * heads * outputs * width * (depth + channels), moved, calls=DENSE_CALLS)


register_form("torch.flex", recognise, Normalised, suits=suits, priced=True)
