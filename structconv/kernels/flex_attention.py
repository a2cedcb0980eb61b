"""Dense attention on a GPU that torch's fused dot product cannot express, by FlexAttention.

Its score function computes the map of the scores and the relative terms, with gradients. Its mask holds windows, order,
blocks, padding and tables of pairs; only blocks with pairs are visited. Nothing of size (M, N) is stored. It supports
the softmax over inputs without dropout; `structconv.blocked_attention` does the others.

`torch.compile` compiles a function for each kind of problem, which takes seconds, so problems of fewer than
`LEAST_PAIRS` pairs use other kernels. So do calls on a CPU, where Flex has no gradients, calls inside a program that is
compiled as a whole, and learned terms under deterministic algorithms, because Flex sums their gradients by atomics. It
has no second derivatives, like torch's fused kernels, and no `retain_graph=True`, like most compiled programs.
`STRUCTCONV_TRITON=0` turns it off with the Triton kernels.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from structconv.bases.entrywise import Normalized
from structconv.bases.scores import Affine, Bilinear
from structconv.bases.tree import getter
from structconv.derived import derived
from structconv.kernels.blocked_attention import Blocked, BlockedAttention, fits_blocks, mapped
from structconv.kernels.expressions import (
    Term,
    all_of,
    buckets,
    diagonal,
    products,
    summands,
    table_rows,
    tables,
    terms_of_calls,
)
from structconv.kernels.orders import Application, Applied
from structconv.planning.cost import Cost
from structconv.planning.fitted import DENSE_CALLS
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem
from structconv.primitives import triton
from structconv.primitives.functions import finite
from structconv.structures.masks import And, Not, Or, Transposed, joined_by_and
from structconv.structures.supports import Blocks, Causal, DenseMask, Global, Padding, Support, Window

__all__ = ["BOOLEANS", "SIDE", "FlexAttention", "FlexScores", "Present"]

#: Devices on which Flex is used; none if torch was built without a GPU.
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
#: Outputs and inputs of a block, and booleans that are evaluated at a time to find those that have a pair.
SIDE = 128
BOOLEANS = 1 << 24
#: The first support of each kind: programs are compiled for an object, and would be again for its equals.
_FIRST: dict[Hashable, Support] = {}


class Present(NamedTuple):
    """The pairs that are in every part: supports that depend only on m and n, and functions that find the booleans
    (..., M) and (..., M, N) of the others in a basis."""

    parts: tuple[Support, ...]
    paddings: tuple[Callable[[Any], Tensor], ...]
    tables: tuple[Callable[[Any], Tensor], ...]

    @classmethod
    def of(cls, support: Support | None) -> Present | None:
        """The parts of a support's spec; `None` if one of them is of another kind."""
        parts = joined_by_and(support)
        functions = [part for part in parts if not isinstance(part, Padding | DenseMask)]
        if not all(map(_computable, functions)):
            return None
        return cls(tuple(_FIRST.setdefault(_key(part), part) for part in functions),
                   tuple(getter(part.keep) for part in parts if isinstance(part, Padding)),
                   tuple(getter(part.keep) for part in parts if isinstance(part, DenseMask)))

    @property
    def everything(self) -> bool:
        """True if no pair is absent."""
        return not any(self)

    @property
    def reflexive(self) -> bool:
        """True if every entry is known to have the pair (n, n)."""
        return all(isinstance(part, Causal | Window | Blocks) for part in self.parts) and not any(self[1:])

    def by_tensors(self, basis: Any, lead: torch.Size) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The padding (B, M) and the tables (M, N) or (B, M, N) of a batch of B = prod(lead) entries."""
        padding = all_of([find(basis) for find in self.paddings])
        padding = None if padding is None else padding.expand(*lead, -1).reshape(lead.numel(), -1)
        tables = [find(basis) for find in self.tables]
        return padding, tuple(t if t.dim() == 2 else t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:])
                              for t in tables)

    def block_mask(self, inputs: int, outputs: int, device: torch.device) -> BlockMask | None:
        """The pairs of `parts`, `None` where there are none; found once for these sizes: O(M N) booleans, a piece at a
        time."""
        if not self.parts:
            return None
        key = "block mask", tuple(map(_key, self.parts)), inputs, outputs, device
        return derived(self.parts[0], key, lambda: _block_mask(self.parts, inputs, outputs, device))


def _computable(support: Support) -> bool:
    """Return True if a support is a function of m and n without tensors, of a type that compiles."""
    if isinstance(support, And | Or):
        return _computable(support.first) and _computable(support.second)
    if isinstance(support, Not | Transposed):
        return _computable(support.kept if isinstance(support, Not) else support.of)
    if type(support) is Window:
        return support.center is None and (support.grid is None or not support.grid.periodic)
    if type(support) is Global:
        return not isinstance(support.entries, tuple)
    return type(support) in (Causal, Blocks)


def _key(support: Support) -> Hashable:
    fields = (getattr(support, field.name) for field in dataclasses.fields(support))  # type: ignore[arg-type]
    return type(support), *(_key(part) if isinstance(part, Support) else part for part in fields)


def _block_mask(parts: tuple[Support, ...], inputs: int, outputs: int, device: torch.device) -> BlockMask:
    def keep(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        kept_pairs = m >= 0
        for part in parts:
            kept_pairs = kept_pairs & part.contains(m, n)
        return kept_pairs

    pairs = _counts(parts, inputs, outputs, device)
    full = pairs == SIDE * SIDE
    return BlockMask.from_kv_blocks(*_listed((pairs > 0) & ~full), *_listed(full), BLOCK_SIZE=SIDE, mask_mod=keep,
                                    seq_lengths=(outputs, inputs))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of marked blocks in each row, (1, 1, rows), and the blocks with the marked ones first, in order,
    (1, 1, rows, columns)."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None].contiguous()


def _counts(parts: tuple[Support, ...], inputs: int, outputs: int, device: torch.device) -> Tensor:
    """Pairs in each block of SIDE outputs and SIDE inputs; those beyond the last entry do not exist."""
    rows, columns = -(-outputs // SIDE), -(-inputs // SIDE)
    m = torch.arange(columns * SIDE, device=device).unsqueeze(-1)
    step, counts = max(1, BOOLEANS // (columns * SIDE * SIDE)), []
    for first in range(0, rows, step):
        n = torch.arange(first * SIDE, min(first + step, rows) * SIDE, device=device).unsqueeze(0)
        keep = (m < inputs) & (n < outputs)
        for part in parts:
            keep = keep & part.contains(m, n)
        counts.append(keep.view(columns, SIDE, -1, SIDE).sum((1, 3)).mT)
    return torch.cat(counts)


class FlexScores(NamedTuple):
    """softmax over the inputs of gain map(terms), at the pairs that are present; `otherwise` by blocks, or `None` if
    blocks cannot compute it."""

    terms: Callable[[Any], tuple[Term, ...]]
    mapping: str
    gain: float
    present: Present
    size: int
    depth: int
    otherwise: Blocked | None

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        terms = self.terms(call.basis)
        query, key, scale = products(terms)
        inputs, outputs = key.shape[-2], query.shape[-2]
        along, rows = diagonal(terms, inputs, outputs, r), table_rows(terms)
        learned = any(t is not None and t.requires_grad for t in (along, rows))
        atomic = learned and torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled()
        if atomic or not self._suits(r, query, key):
            return self._otherwise(r, call)
        lead = torch.broadcast_shapes(r.shape[:-3], query.shape[:-3], key.shape[:-3])
        y = self._attend(r, call, lead, (query, key, scale), along, rows, terms)
        return y if self.present.everything or finite(y) else self._otherwise(r, call)

    def _suits(self, r: Tensor, query: Tensor, key: Tensor) -> bool:
        """Return True if Flex supports these dtypes, and masked inputs are finite: absent pairs are multiplied by zero.
        With `reflexive` pairs every input is read by its own output, which then is not finite."""
        operands = (r, query, key)
        if any(t.dtype not in _STORED for t in operands):
            return False
        on_diagonal = self.present.reflexive and query.shape[-2] == key.shape[-2]
        return self.present.everything or on_diagonal or all(map(finite, operands))

    def _otherwise(self, r: Tensor, call: Call) -> Tensor:
        """By blocks, or by the basis itself: both are deterministic, and neither multiplies absent pairs."""
        return call.materialized().apply(r) if self.otherwise is None else self.otherwise.apply(r, call)

    def _attend(self, r: Tensor, call: Call, lead: torch.Size, operands: tuple[Tensor, Tensor, float],
                along: Tensor | None, rows: Tensor | None, terms: tuple[Term, ...]) -> Tensor:
        query, key, scale = operands
        inputs, outputs, channels = key.shape[-2], query.shape[-2], r.shape[-1]

        def flat(t: Tensor) -> Tensor:
            return t.expand(*lead, self.size, *t.shape[-2:]).reshape(lead.numel(), self.size, *t.shape[-2:])

        query, key, values = (_widened(flat(t)) for t in (query, key, r))
        bucket = next((buckets(leaf.kind, leaf.clip, inputs, outputs, r.device) for leaf in tables(terms)), None)
        along = None if along is None else _own(flat(along.unsqueeze(-2)).squeeze(-2))
        rows = None if rows is None else _own(flat(rows))
        maps = Maps(along, rows, bucket, *self.present.by_tensors(call.basis, lead))
        kind = (self.mapping, self.gain, scale, tuple(map(id, self.present.parts)), maps.padding is None,
                tuple(t.dim() for t in maps.tables), self.size, query.shape[-1], values.shape[-1], r.dtype,
                torch.is_grad_enabled(),
                *(None if t is None else t.requires_grad for t in (query, key, values, along, rows)))
        y = _attention(r.device, kind)(query, key, values, maps, self.present.block_mask(inputs, outputs, r.device),
                                       scale, self.mapping, self.gain)
        return y[..., :channels].unflatten(0, lead) if lead else y[0, ..., :channels]


class Maps(NamedTuple):
    """The tables that the score function reads for a pair (m, n): the term (B, K, N + M - 1) of each offset m - n, the
    term (B, K, N, L) of each output and bucket, the bucket (N + M - 1,) of each offset, and booleans (B, M), and (M, N)
    or (B, M, N)."""

    along: Tensor | None
    rows: Tensor | None
    bucket: Tensor | None
    padding: Tensor | None
    tables: tuple[Tensor, ...]


def _own(t: Tensor) -> Tensor:
    """A copy in float32: torch loses the gradient of a tensor that a score function reads if it is a view."""
    return t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _widened(t: Tensor) -> Tensor:
    return F.pad(t, (0, LEAST_CHANNELS - t.shape[-1])) if t.shape[-1] < LEAST_CHANNELS else t


def _whole(query: Tensor, key: Tensor, values: Tensor, maps: Maps, blocks: BlockMask | None, scale: float,
           mapping: str, gain: float) -> Any:
    """Flex with the score gain map(score + along[m - n] + rows[n, bucket[m - n]]), -inf at masked pairs. The tensors
    are arguments, because a compiled program would hold those that the score function finds outside."""
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
    """Return the function for problems of one kind: compiled on a GPU, and plain elsewhere, where it is only tested.
    Each kind has its own code object, because a compiler stops after a few programs of one code object."""
    if device.type in UNCOMPILED:
        return _whole
    compiled = _COMPILED.get(kind)
    if compiled is None:
        own = types.FunctionType(_whole.__code__.replace(co_name=f"flex_{len(_COMPILED)}"), globals())
        compiled = _COMPILED[kind] = torch.compile(own, fullgraph=True, backend=BACKEND)
    return compiled


class FlexAttention(Applied):
    """Flex, on devices where it has gradients."""

    name, types, before = "torch.flex", (Normalized,), ("structconv.blocked_attention",)

    def match(self, problem: Problem) -> FlexScores | None:
        basis, device = problem.basis, problem.x.device
        assert isinstance(basis, Normalized)
        if device.type not in DEVICES or (basis.kind, basis.over) != ("softmax", "inputs") or is_compiling():
            return None
        if problem.relative is not None or math.prod(problem.sizes.entries(basis)) < max(LEAST_PAIRS, 1):
            return None
        parts = mapped(basis) if triton.working(device) else None
        terms = None if parts is None else summands(parts[3])
        present = Present.of(basis.child.support())
        if parts is None or terms is None or present is None or not fits_blocks(terms):
            return None
        depth = sum(leaf.depth if isinstance(leaf, Bilinear) else 2 for leaf, _ in terms
                    if isinstance(leaf, Bilinear | Affine))
        return FlexScores(terms_of_calls(terms), parts[1], parts[2], present, basis.size, depth,
                          BlockedAttention().match(problem))

    def application_cost(self, match: FlexScores, problem: Problem, channels: int, mode: str) -> Cost:
        """Count two products at the pairs of the visited blocks; for a window, its width and the sides of a block."""
        (inputs, outputs), sizes = problem.sizes.entries(problem.basis), problem.sizes
        width = min([inputs, *((part.edge_bound(inputs, outputs) or inputs * outputs) // outputs + SIDE
                               for part in match.present.parts)])
        heads = sizes.batch * match.size
        moved = heads * (inputs + outputs) * (match.depth + channels) * sizes.itemsize
        return Cost(2 * heads * outputs * width * (match.depth + channels), moved, calls=DENSE_CALLS)

    def application(self, match: FlexScores, problem: Problem) -> Application:
        return Application(match.apply)


register(FlexAttention())
