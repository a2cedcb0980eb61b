"""Relations by their distinct pairs: a sparse product onto them, one matrix product a relation, one off them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.sparse import Sparse
from structconv.bases.typed import Typed
from structconv.memo import derived
from structconv.planning.cost import Cost
from structconv.planning.counts import application
from structconv.planning.plan import Plan, decide, plan_for
from structconv.planning.rules import Problem, Rule, rule
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.functions import apply, transformed
from structconv.primitives.grouped import add_group_outer, group_products, write_group_products
from structconv.primitives.layout import Csr, compress
from structconv.primitives.native.operator import composed_gradients
from structconv.primitives.native.product import write_spmm
from structconv.shapes import check_alike
from structconv.theta import (
    EyeTheta,
    FullTheta,
    GroupedTheta,
    LowRankTheta,
    SeparableTheta,
    SharedTheta,
    Theta,
    sum_tensors,
)

#: Bytes that the rows of one block's pairs may take, before and after their matrix product. Smaller blocks hold less,
#: stay within the cache, and cost a call for each relation and block.
BLOCK_BYTES = 1 << 26
#: Blocks of outputs write their results once, where blocks of inputs add them up: worth so many more pairs.
IN_FAVOUR = 1.1
#: Channels of a diagonal block below which its product costs more than that of the whole matrix.
NARROW = 32


class Pairs(NamedTuple):
    """The distinct (output, type) or (input, type) pairs of a block of entries, sorted by type, and their edges.

    Args:
        onto: edges from inputs to pairs, by pair and by input.
        off: edges from pairs to outputs, by output and by pair.
        bounds: where each type's pairs start, and where the last end.
        edges: the basis's edges among these, in the order of the layouts; `None` for all.
    """

    onto: tuple[Csr, Csr]
    off: tuple[Csr, Csr]
    bounds: tuple[int, ...]
    edges: Tensor | None


class Counts(NamedTuple):
    """How many distinct (output, type) and (input, type) pairs a basis has."""

    outputs: int
    inputs: int


def counts(basis: Typed) -> Counts:
    """The numbers of distinct pairs. O(E log E) once, then remembered."""
    return basis.derived("numbers of pairs", lambda: Counts(
        *(torch.unique(entry * basis.count + basis.kind).shape[0]
          for entry in (basis.graph.target.long(), basis.graph.source.long()))))


def distinct_pairs(basis: Typed, of_outputs: bool, blocks: int) -> dict[int, Pairs]:
    """The pairs of so many equal blocks of outputs, or of inputs, by their first entry. O(E log E), remembered."""
    return basis.derived(("pairs", of_outputs, blocks), lambda: _distinct_pairs(basis, of_outputs, blocks))


def blocks_of(entries: int, blocks: int) -> list[slice]:
    """So many entries cut into at most so many equal blocks, at least one."""
    step = max(1, -(-entries // blocks))
    return [slice(start, min(start + step, entries)) for start in range(0, entries, step)] or [slice(0, 0)]


def _distinct_pairs(basis: Typed, of_outputs: bool, blocks: int) -> dict[int, Pairs]:
    entry = basis.graph.target if of_outputs else basis.graph.source
    spans = blocks_of(basis.num_outputs if of_outputs else basis.num_inputs, blocks)
    if len(spans) == 1:
        return {0: _pairs(basis, of_outputs, spans[0], None)}
    order = torch.argsort(entry.long(), stable=True)
    last = torch.tensor([span.stop for span in spans], device=entry.device)
    ends = torch.searchsorted(entry.long()[order], last).tolist()
    return {span.start: _pairs(basis, of_outputs, span, order[start:end])
            for span, start, end in zip(spans, [0, *ends[:-1]], ends, strict=True)}


def _pairs(basis: Typed, of_outputs: bool, span: slice, edges: Tensor | None) -> Pairs:
    source, target, kind = basis.graph.source.long(), basis.graph.target.long(), basis.kind
    if edges is not None:
        source, target, kind = source[edges], target[edges], kind[edges]
    rows = span.stop - span.start
    size = max(rows, 1)
    keys, place = torch.unique(kind * size + (target if of_outputs else source) - span.start, return_inverse=True)
    bounds = torch.searchsorted(keys, torch.arange(basis.count + 1, device=keys.device) * size)
    count, own = keys.shape[0], torch.arange(keys.shape[0], device=keys.device)
    if of_outputs:
        onto, off = _layouts(source, place, basis.num_inputs, count), _layouts(own, keys % size, count, rows)
    else:
        onto = _layouts(keys % size, own, rows, count)
        off = _layouts(place, target, count, basis.num_outputs)
    return Pairs(onto, off, tuple(bounds.tolist()), edges)


def _layouts(source: Tensor, target: Tensor, inputs: int, outputs: int) -> tuple[Csr, Csr]:
    """Edges by output and by input."""
    if max(source.shape[0], inputs, outputs) < 2**31:
        source, target = source.to(torch.int32), target.to(torch.int32)
    return compress(target, source, outputs), compress(source, target, inputs)


@rule(Typed, "per_relation", kernel="distinct pairs")
class PerRelation(Rule):
    """r_u = sum of x_m over the edges onto the pair u = (n, k), then r_u Theta_k, then y_n = their sum over k.

    Or pairs (m, k) the other way round where they are fewer. In blocks of outputs, or of inputs, whose sums r_u the
    backward forms again: the memory of one block, at most O(pairs (P + Q)), and never (N, K, C) or (E, C). The
    number of pairs depends on values, so that compiled programs take another path.
    """

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        whole = isinstance(theta, FullTheta | SeparableTheta | GroupedTheta | LowRankTheta)
        return whole and not torch.compiler.is_compiling()

    def cost(self, problem: Problem) -> Cost:
        basis, theta = cast(Typed, problem.basis), problem.theta
        p, q, edges = theta.in_channels, theta.out_channels, problem.sizes.edges(basis.graph.num_edges)
        pairs = min(_expected(edges, problem.outputs * basis.count), _expected(edges, problem.inputs * basis.count))
        once, held = problem.bytes(1), min(problem.bytes(pairs * (p + q)), 2 * BLOCK_BYTES)
        onto = Cost(2 * edges * p * problem.sizes.batch, once * (problem.inputs + pairs) * p, once * edges * p)
        off = Cost(2 * pairs * q * problem.sizes.batch, once * (problem.outputs + pairs) * q, once * pairs * q)
        theta_bytes = theta.size * p * q * problem.sizes.itemsize
        groups = theta.groups if isinstance(theta, GroupedTheta) and min(theta.theta.shape[2:]) >= NARROW else 1
        middle = Cost(2 * pairs * p * q // groups * problem.sizes.batch, once * pairs * (p + q) + theta_bytes)
        through = problem.x_grad or problem.theta_grad
        return (onto.repeated(1 + problem.x_grad + problem.theta_grad) + off.repeated(1 + through)
                + middle.repeated(1 + problem.x_grad + problem.theta_grad) + Cost(peak_bytes=held))

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        typed, found = cast(Typed, basis), counts(cast(Typed, basis))
        of_outputs = found.outputs <= IN_FAVOUR * found.inputs
        lead, batch = x.shape[:-2], math.prod(x.shape[:-2])
        x_MC = x.movedim(-2, 0).reshape(x.shape[-2], batch * x.shape[-1])
        wide = batch * (theta.in_channels + theta.out_channels) * x.element_size()
        entries = typed.num_outputs if of_outputs else typed.num_inputs
        spans = blocks_of(entries, _power_of_two(min(found) * wide / BLOCK_BYTES))
        if typed.values is not None:
            check_alike("Typed", x, typed.values, other_name="values")
        pairs = distinct_pairs(typed, of_outputs, len(spans))
        made = Blocks(pairs, spans, of_outputs, batch, typed.num_outputs, _fixed_weights(typed, of_outputs, pairs))
        y_NC = apply(_Relational, made, x_MC, _matrices(theta), typed.values)
        return y_NC.reshape(typed.num_outputs, *lead, theta.out_channels).movedim(0, -2)


class Blocks(NamedTuple):
    """The pairs of each span of outputs or inputs, and what is the same for all of them.

    Args:
        pairs: by the first entry of their span.
        spans: of outputs or of inputs.
        of_outputs: whose spans they are.
        batch: how many elements of the batch are folded into the channels.
        num_outputs: N.
        weights: the basis's values in each span, where they need no gradient.
    """

    pairs: dict[int, Pairs]
    spans: list[slice]
    of_outputs: bool
    batch: int
    num_outputs: int
    weights: dict[int, Tensor]

    def values_at(self, span: slice, values: Tensor | None) -> Tensor | None:
        """The values of a span's edges in their order."""
        edges = self.pairs[span.start].edges
        if values is None or edges is None:
            return values
        return self.weights[span.start] if self.weights else values.index_select(0, edges)

    def bounds(self, pairs: Pairs) -> list[int]:
        """Where each type's rows start, a row for each pair and element of the batch."""
        return [self.batch * bound for bound in pairs.bounds]

    def scratch(self, like: Tensor, channels: int) -> Tensor:
        """Rows for the pairs of any one span, (U B, channels): each span uses the same, since fresh memory is slow."""
        return like.new_empty(self.batch * max(pairs.bounds[-1] for pairs in self.pairs.values()), channels)

    def rows(self, pairs: Pairs, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Those of these pairs, (U B, C), and the same rows as (U, B C)."""
        count = pairs.bounds[-1]
        rows = scratch[:count * self.batch]
        return rows, rows.view(count, self.batch * scratch.shape[1])


class _Relational(torch.autograd.Function):
    """Block by block, so that the rows of pairs stay within the cache; the backward forms them again."""

    @staticmethod
    def forward(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
        compute = _composed if transformed(x_MC, theta_KGPQ, values) else _forward
        return compute(blocks, x_MC, theta_KGPQ, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.blocks, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_MC, theta_KGPQ, values = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or transformed(grad, *ctx.saved_tensors):
            return None, *composed_gradients(partial(_composed, ctx.blocks), ctx.saved_tensors, needed, grad)
        return None, *_backward(ctx.blocks, x_MC, theta_KGPQ, values, grad, needed)


def _composed(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
    """The same by differentiable operators, whose graph keeps the pairs of all blocks."""
    pieces = []
    for span in blocks.spans:
        pairs = blocks.pairs[span.start]
        weights = blocks.values_at(span, values)
        r_UP = spmm(*pairs.onto, weights, x_MC) if blocks.of_outputs else spmm(*pairs.onto, None, x_MC[span])
        count, q = pairs.bounds[-1], _out_channels(theta_KGPQ)
        rows_UP = r_UP.reshape(count * blocks.batch, _in_channels(theta_KGPQ))
        r_UQ = group_products(rows_UP, theta_KGPQ, blocks.bounds(pairs)).reshape(count, blocks.batch * q)
        pieces.append(spmm(*pairs.off, None if blocks.of_outputs else weights, r_UQ))
    return torch.cat(pieces)[:blocks.num_outputs] if blocks.of_outputs else sum_tensors(pieces)


def _forward(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
    of_outputs, x_MC = blocks.of_outputs, x_MC.contiguous()
    y_NC = x_MC.new_empty(blocks.num_outputs, blocks.batch * _out_channels(theta_KGPQ))
    sums, products = (blocks.scratch(x_MC, channels(theta_KGPQ)) for channels in (_in_channels, _out_channels))
    for number, span in enumerate(blocks.spans):
        pairs, weights = blocks.pairs[span.start], blocks.values_at(span, values)
        (rows_UP, r_UP), (rows_UQ, r_UQ) = blocks.rows(pairs, sums), blocks.rows(pairs, products)
        if of_outputs:
            write_spmm(r_UP, *pairs.onto, weights, x_MC)
        else:
            write_spmm(r_UP, *pairs.onto, None, x_MC[span])
        write_group_products(rows_UQ, rows_UP, theta_KGPQ, blocks.bounds(pairs))
        if of_outputs:
            write_spmm(y_NC[span], *pairs.off, None, r_UQ)
        else:
            write_spmm(y_NC, *pairs.off, weights, r_UQ, beta=float(number > 0))
    return y_NC


def _backward(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None, grad: Tensor,
              needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Gradients of x, Theta and the values; those towards x are added up as they are formed."""
    of_outputs, x_MC, grad = blocks.of_outputs, x_MC.contiguous(), grad.contiguous()
    grad_x = torch.empty_like(x_MC) if needed[0] else None
    grad_theta = torch.zeros_like(theta_KGPQ) if needed[1] else None
    grad_values = torch.empty_like(values) if values is not None and needed[2] else None
    rows, back = (blocks.scratch(x_MC, channels(theta_KGPQ)) for channels in (_in_channels, _out_channels))
    for number, span in enumerate(blocks.spans):
        pairs, weights = blocks.pairs[span.start], blocks.values_at(span, values)
        (rows_UP, r_UP), (rows_UQ, back_UQ) = blocks.rows(pairs, rows), blocks.rows(pairs, back)
        x_span, grad_span = (x_MC, grad[span]) if of_outputs else (x_MC[span], grad)
        onto, off = (weights, None) if of_outputs else (None, weights)
        write_spmm(back_UQ, pairs.off[1], pairs.off[0], off, grad_span)
        if grad_theta is not None or grad_values is not None:
            write_spmm(r_UP, *pairs.onto, onto, x_span)
        if grad_theta is not None:
            add_group_outer(grad_theta, rows_UP, rows_UQ, blocks.bounds(pairs))
        if grad_values is not None and not of_outputs:
            made = group_products(rows_UP, theta_KGPQ, blocks.bounds(pairs)).view(back_UQ.shape)
            _place(grad_values, pairs, sddmm(*pairs.off, grad, made))
        if grad_x is None and (grad_values is None or not of_outputs):
            continue
        write_group_products(rows_UP, rows_UQ, theta_KGPQ.mT, blocks.bounds(pairs))
        if grad_values is not None and of_outputs:
            _place(grad_values, pairs, sddmm(*pairs.onto, r_UP, x_MC))
        if grad_x is not None and of_outputs:
            write_spmm(grad_x, pairs.onto[1], pairs.onto[0], onto, r_UP, beta=float(number > 0))
        elif grad_x is not None:
            write_spmm(grad_x[span], pairs.onto[1], pairs.onto[0], onto, r_UP)
    return grad_x, grad_theta, grad_values


def _in_channels(theta_KGPQ: Tensor) -> int:
    return theta_KGPQ.shape[1] * theta_KGPQ.shape[2]


def _out_channels(theta_KGPQ: Tensor) -> int:
    return theta_KGPQ.shape[1] * theta_KGPQ.shape[3]


def _matrices(theta: Theta) -> Tensor:
    """Theta as (K, G, P / G, Q / G); blocks so narrow that a product with them is slow are filled up with zeros."""
    if isinstance(theta, GroupedTheta) and min(theta.theta.shape[2:]) >= NARROW:
        return theta.theta
    return theta.dense().unsqueeze(1)


def _fixed_weights(basis: Typed, of_outputs: bool, pairs: dict[int, Pairs]) -> dict[int, Tensor]:
    values = basis.values
    if values is None or len(pairs) == 1 or values.requires_grad:
        return {}
    edges = basis.derived("identity", _Edges)
    return derived(values, (edges, of_outputs, len(pairs)), lambda: {
        start: values.index_select(0, each.edges) for start, each in pairs.items() if each.edges is not None})


class _Edges:
    """Stands for typed edges in a key without keeping them alive."""


def _place(grad_values: Tensor, pairs: Pairs, found: Tensor) -> None:
    if pairs.edges is None:
        grad_values.copy_(found)
    else:
        grad_values.index_copy_(0, pairs.edges, found)


def _power_of_two(ratio: float) -> int:
    """The smallest power of two that is at least `ratio`, and at least 1: few numbers of blocks, few layouts."""
    return 1 << math.ceil(math.log2(ratio)) if ratio > 1 else 1


def _expected(edges: int, places: int) -> int:
    """How many of `places` so many edges are expected to occupy, were they spread at random."""
    return math.ceil(-places * math.expm1(-edges / places)) if places else 0


@rule(Typed, "mixed_first", kernel="one matrix a filter")
class MixedFirst(Rule):
    """sum_k mix_kh A_k is one matrix over all edges: H of them and H filters instead of K, for a separable Theta.

    One where all relations share Theta. O(E H) memory beside what the path over those matrices holds.
    """

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        return isinstance(theta, SeparableTheta | SharedTheta | EyeTheta)

    def cost(self, problem: Problem) -> Cost:
        basis, edges = cast(Typed, problem.basis), problem.sizes.edges(cast(Typed, problem.basis).graph.num_edges)
        filters = _filters(problem.theta)
        plan = decide(problem.part(self._nominal(problem), filters))
        numbers = edges * filters.size * problem.sizes.itemsize
        mixing = Cost(edges * filters.size, 3 * numbers).repeated(1 + problem.theta_grad)
        channels = min(problem.theta.in_channels, problem.theta.out_channels)
        learnt = isinstance(problem.theta, SeparableTheta) and problem.theta_grad
        sampled = application(Sparse(basis.graph), problem.sizes, channels).repeated(filters.size * learnt)
        return plan.cost + mixing + sampled + Cost(peak_bytes=numbers)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        mixed, filters = _mixed(cast(Typed, basis), theta), _filters(theta)
        return plan_for(x, mixed, filters).run(x, mixed, filters)

    def parts(self, problem: Problem) -> tuple[Plan, ...]:
        return (decide(problem.part(self._nominal(problem), _filters(problem.theta))),)

    @staticmethod
    def _nominal(problem: Problem) -> Sparse:
        """A basis of the mixed one's sizes."""
        basis, size = cast(Typed, problem.basis), _filters(problem.theta).size
        return Sparse(basis.graph, problem.x.new_zeros(()).expand(size, basis.graph.num_edges))


def _filters(theta: Theta) -> Theta:
    if isinstance(theta, SeparableTheta):
        return FullTheta(theta.filters)
    return EyeTheta(1, theta.in_channels) if isinstance(theta, EyeTheta) else FullTheta(
        cast(SharedTheta, theta).theta.unsqueeze(0))


def _mixed(basis: Typed, theta: Theta) -> Sparse:
    """The matrices sum_k mix_kh A_k."""
    if not isinstance(theta, SeparableTheta):
        return Sparse(basis.graph, basis.values)
    weights_HE = theta.mix.mT.index_select(1, basis.kind)
    return Sparse(basis.graph, weights_HE if basis.values is None else weights_HE * basis.values)
