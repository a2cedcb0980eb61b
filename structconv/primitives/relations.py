"""Products by relation: a sum onto distinct (entry, relation) pairs, a matrix product for each relation, and a sum
back.

y_n = sum over relations k and edges m -> n of kind k of a_e x_m Theta_k, for edges of K kinds: r_u = sum of a_e x_m
over the edges onto the pair u = (n, k), then r_u Theta_k, then y_n = their sum over k; or with pairs (m, k) the other
way round, where they are fewer. Block by block of outputs, or of inputs, whose sums r_u the backward forms again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.derived import is_plain
from structconv.errors import StructureError
from structconv.primitives.csr import sddmm, spmm, write_spmm
from structconv.primitives.functions import apply, pulled_back, transformed
from structconv.primitives.grouped import add_group_outer, group_products, write_group_products
from structconv.primitives.layout import Csr, layouts

__all__ = ["Blocks", "Counts", "Kinds", "Pairs", "blocks_of", "counts", "distinct_pairs", "relational_product",
           "values_by_block"]


class Kinds(NamedTuple):
    """Edges m -> n, each of one of K kinds.

    Args:
        source, target, kind: (E,) integers.
        num_kinds, num_inputs, num_outputs: K, M and N.
    """

    source: Tensor
    target: Tensor
    kind: Tensor
    num_kinds: int
    num_inputs: int
    num_outputs: int


class Pairs(NamedTuple):
    """The distinct (output, kind) or (input, kind) pairs of a block of entries, sorted by kind, and their edges.

    Args:
        onto: edges from inputs to pairs, by pair and by input.
        off: edges from pairs to outputs, by output and by pair.
        bounds: where each kind's pairs start, and where the last end.
        edges: which of all edges these are, in the order of the layouts; `None` for all.
    """

    onto: tuple[Csr, Csr]
    off: tuple[Csr, Csr]
    bounds: tuple[int, ...]
    edges: Tensor | None


class Counts(NamedTuple):
    """The numbers of distinct (output, kind) and (input, kind) pairs."""

    outputs: int
    inputs: int


def counts(edges: Kinds) -> Counts:
    """The numbers of distinct pairs. O(E log E)."""
    outputs, inputs = (torch.unique(entry.long() * edges.num_kinds + edges.kind).shape[0]
                       for entry in (edges.target, edges.source))
    return Counts(outputs, inputs)


def blocks_of(entries: int, blocks: int) -> list[slice]:
    """Cut the entries into at most `blocks` equal slices, at least one."""
    step = max(1, -(-entries // blocks))
    return [slice(start, min(start + step, entries)) for start in range(0, entries, step)] or [slice(0, 0)]


def distinct_pairs(edges: Kinds, of_outputs: bool, blocks: int) -> dict[int, Pairs]:
    """The pairs of `blocks` equal blocks of outputs, or of inputs, by their first entry. O(E log E).

    Raises:
        StructureError: if an edge has an end out of range.
    """
    entry = (edges.target if of_outputs else edges.source).long()
    spans = blocks_of(edges.num_outputs if of_outputs else edges.num_inputs, blocks)
    if len(spans) == 1:
        return {0: _pairs(edges, of_outputs, spans[0], None)}
    order = torch.argsort(entry, stable=True)
    last = torch.tensor([span.stop for span in spans], device=entry.device)
    ends = torch.searchsorted(entry[order], last).tolist()
    return {span.start: _pairs(edges, of_outputs, span, order[start:end])
            for span, start, end in zip(spans, [0, *ends[:-1]], ends, strict=True)}


def _pairs(edges: Kinds, of_outputs: bool, span: slice, chosen: Tensor | None) -> Pairs:
    source, target, kind = edges.source.long(), edges.target.long(), edges.kind
    if chosen is not None:
        source, target, kind = source[chosen], target[chosen], kind[chosen]
    rows = span.stop - span.start
    size = max(rows, 1)
    keys, place = torch.unique(kind * size + (target if of_outputs else source) - span.start, return_inverse=True)
    bounds = torch.searchsorted(keys, torch.arange(edges.num_kinds + 1, device=keys.device) * size)
    count, own, ends = keys.shape[0], torch.arange(keys.shape[0], device=keys.device), tuple(bounds.tolist())
    if ends[0] != 0 or ends[-1] != count:
        raise StructureError("relations", f"kinds of edges must be in [0, K={edges.num_kinds})", int(kind.max()))
    if of_outputs:
        onto, off = _layouts(source, place, edges.num_inputs, count), _layouts(own, keys % size, count, rows)
    else:
        onto = _layouts(keys % size, own, rows, count)
        off = _layouts(place, target, count, edges.num_outputs)
    return Pairs(onto, off, ends, chosen)


def _layouts(source: Tensor, target: Tensor, inputs: int, outputs: int) -> tuple[Csr, Csr]:
    return layouts(torch.stack((source, target)), inputs, outputs)


def values_by_block(values: Tensor, pairs: dict[int, Pairs]) -> dict[int, Tensor]:
    """Return the values (E,) of the edges of each block, in the block's order."""
    return {start: values.index_select(0, each.edges) for start, each in pairs.items() if each.edges is not None}


class Blocks(NamedTuple):
    """The pairs of each span of outputs or inputs, and their common arguments.

    Args:
        pairs: the pairs by the first entry of their span.
        spans: spans of outputs or of inputs.
        of_outputs: True for spans of outputs.
        batch: the number of elements of the batch that are folded into the channels.
        num_outputs: N.
        weights: the values in each span (`values_by_block`), if they need no gradient.
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
        """Return the first row of each type, with a row for each pair and element of the batch."""
        return [self.batch * bound for bound in pairs.bounds]

    def scratch(self, like: Tensor, channels: int) -> Tensor:
        """Rows for the pairs of any one span, (U B, channels): each span uses the same, since fresh memory is slow."""
        return like.new_empty(self.batch * max(pairs.bounds[-1] for pairs in self.pairs.values()), channels)

    def rows(self, pairs: Pairs, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of these pairs, (U B, C), and as (U, B C)."""
        count = pairs.bounds[-1]
        rows = scratch[:count * self.batch]
        return rows, rows.view(count, self.batch * scratch.shape[1])


def relational_product(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
    """sum over the edges of a_e x_m Theta_k, (N, B Q).

    Args:
        blocks: the pairs, see there.
        x_MC: (M, B P), the batch folded into the channels.
        theta_KGPQ: (K, G, P / G, Q / G), matrices of G blocks on the diagonal.
        values: a, (E,), or None for ones.

    Any order of derivatives. Cost: 2 E P + 2 U P Q / G + 2 U Q flops for U pairs. Memory: that of one block, at most
    O(U (P + Q)), and never (N, K, C) or (E, C); under functional transforms and forward derivatives that of all blocks.
    """
    if transformed(x_MC, theta_KGPQ, values) or not (is_compiling() or is_plain(x_MC)):
        return _composed(blocks, x_MC, theta_KGPQ, values)
    return apply(_Relational, blocks, x_MC, theta_KGPQ, values)


class _Relational(torch.autograd.Function):
    """Block by block, so that the rows of pairs stay within the cache; the backward forms them again."""

    @staticmethod
    def forward(ctx: Any, blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(x_MC, theta_KGPQ, values)
        return _forward(blocks, x_MC, theta_KGPQ, values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or transformed(grad, *saved):
            return None, *pulled_back(partial(_composed, ctx.blocks), saved, needed, [grad])
        x_MC, theta_KGPQ, values = saved
        return None, *_backward(ctx.blocks, x_MC, theta_KGPQ, values, grad, needed)


def _composed(blocks: Blocks, x_MC: Tensor, theta_KGPQ: Tensor, values: Tensor | None) -> Tensor:
    """Compute the product by differentiable operators, whose graph stores the pairs of all blocks."""
    pieces = []
    for span in blocks.spans:
        pairs = blocks.pairs[span.start]
        weights = blocks.values_at(span, values)
        r_UP = spmm(*pairs.onto, weights, x_MC) if blocks.of_outputs else spmm(*pairs.onto, None, x_MC[span])
        count, q = pairs.bounds[-1], _out_channels(theta_KGPQ)
        rows_UP = r_UP.reshape(count * blocks.batch, _in_channels(theta_KGPQ))
        r_UQ = group_products(rows_UP, theta_KGPQ, blocks.bounds(pairs)).reshape(count, blocks.batch * q)
        pieces.append(spmm(*pairs.off, None if blocks.of_outputs else weights, r_UQ))
    return torch.cat(pieces)[:blocks.num_outputs] if blocks.of_outputs else sum(pieces[1:], pieces[0])


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
    """Return the gradients of x, Theta and the values; the gradient of x is accumulated block by block."""
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
            products = group_products(rows_UP, theta_KGPQ, blocks.bounds(pairs)).view(back_UQ.shape)
            _place(grad_values, pairs, sddmm(*pairs.off, grad, products))
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


def _place(grad_values: Tensor, pairs: Pairs, grads: Tensor) -> None:
    if pairs.edges is None:
        grad_values.copy_(grads)
    else:
        grad_values.index_copy_(0, pairs.edges, grads)
