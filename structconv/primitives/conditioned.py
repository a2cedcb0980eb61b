"""`conditioned_product`: a filter for each edge, a combination of K filters by the edge's own numbers, never formed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native import dispatch
from structconv.primitives.native.dispatch import dense, edges_of, unit
from structconv.primitives.native.indices import Csr
from structconv.primitives.operator import differentiable_operator

__all__ = ["conditioned_product", "heads_of_block"]

#: Bytes of the sums of a block of heads: half of what a core has as its second cache.
_BLOCK_BYTES = 1 << 19


def conditioned_product(by_target: Csr, by_source: Csr, values: Tensor, x: Tensor, theta: Tensor) -> Tensor:
    """y_n = sum over the edges e: m -> n of x_m (sum_k values_ek Theta_k).

    Convolution whose filters an edge network makes (Simonovsky and Komodakis 2017, equation 1; Gilmer et al. 2017,
    section 5): the sums over edges are formed first, for as many heads at a time as stay within the cache, and again in
    the backward.

    Args:
        by_target, by_source: the two layouts of the edges.
        values: (E, K) in the order of the edges.
        x: (M, P). theta: (K, P, Q). One dtype; float32 runs natively on a CPU.

    Returns:
        (N, Q).

    Cost: 2 K P (E + N Q) flops, three times that backward and 2 K P E more; memory of a block of heads, (N, K', P), and
    never (E, P, Q) or (N, K, P). Derivatives of higher order hold the latter.

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
    """
    y: Tensor = _product(by_target, by_source, values, x, theta)
    return y


def heads_of_block(outputs: int, heads: int, channels: int, itemsize: int) -> int:
    """How many heads a block has."""
    return max(1, min(heads, _BLOCK_BYTES // max(1, outputs * channels * itemsize)))


# -- sums over the edges, a block of heads at a time ---------------------------------------------------------------

class _Edges(NamedTuple):
    """The operands that all blocks share."""

    by_target: Csr
    by_source: Csr
    values: Tensor
    x: Tensor

    @property
    def outputs(self) -> int:
        """N."""
        return self.by_target.indptr.shape[0] - 1

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """The heads of each block, the rows of its filters among those of all, (K P, Q), and memory (N, heads P)."""
        heads, channels = self.values.shape[1], self.x.shape[1]
        step = heads_of_block(self.outputs, heads, channels, self.x.element_size())
        memory = self.x.new_empty(self.outputs * step * channels)
        for first in range(0, heads, step):
            last = min(first + step, heads)
            wide = (last - first) * channels
            yield (slice(first, last), slice(first * channels, last * channels),
                   memory[:self.outputs * wide].view(self.outputs, wide))

    def sums(self, heads: slice, out: Tensor) -> None:
        """out[n, (k, p)] = sum over the edges into n of values_ek x_mp."""
        if (core := self._kernels()) is not None:
            core.conditioned_sums(edges_of(self.by_target, self.x.shape[0]), self.values, self.x, heads.start,
                                  heads.stop - heads.start, out)
            return
        sums = spmm(self.by_target, self.by_source, self.values[:, heads].mT, self.x)
        out.view(self.outputs, len(sums), self.x.shape[1]).copy_(sums.movedim(0, 1))

    def adjoint(self, heads: slice, grads: Tensor, grad_values: Tensor | None, grad_x: Tensor | None) -> None:
        """The gradient of the values, written, and of x, added, by those of the sums."""
        if (core := self._kernels()) is not None:
            core.conditioned_adjoint(edges_of(self.by_source, self.outputs), self.values, self.x, heads.start,
                                     heads.stop - heads.start, grads, grad_values, grad_x)
            return
        by_head = grads.view(self.outputs, heads.stop - heads.start, self.x.shape[1]).movedim(1, 0)
        if grad_values is not None:
            grad_values[:, heads] = sddmm(self.by_target, self.by_source, by_head, self.x).mT
        if grad_x is not None:
            grad_x += spmm(self.by_source, self.by_target, self.values[:, heads].mT, by_head, sum_heads=True)

    def _kernels(self) -> Any:
        native = self.x.dtype is torch.float32 and self.x.numel() and self.values.numel()
        return dispatch.usable(self.x, self.values.shape[0]) if native else None


def _edges(layouts: tuple[Tensor, ...], values: Tensor, x: Tensor) -> _Edges:
    """Over what sums well, and lies as the kernels read it."""
    dtype = sum_dtype(x.dtype)
    return _Edges(Csr(*layouts[:3]), Csr(*layouts[3:]), dense(values.to(dtype)), dense(x.to(dtype)))


# -- the operator --------------------------------------------------------------------------------------------------

def _forward(*arguments: Any) -> Tensor:
    values, x, theta = arguments[6:]
    edges = _edges(arguments[:6], values, x)
    filters = theta.to(edges.x.dtype).flatten(0, 1)
    y = edges.x.new_zeros(edges.outputs, theta.shape[2])
    for heads, rows, sums in edges.blocks():
        edges.sums(heads, sums)
        y.addmm_(sums, filters[rows])
    return y.to(x.dtype)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    values, x, theta, grad, *needed = arguments[6:]
    edges = _edges(arguments[:6], values, x)
    filters, grad = theta.to(edges.x.dtype).flatten(0, 1), unit(grad.to(edges.x.dtype))
    grad_values, grad_x, grad_filters = (torch.zeros_like(t) if need else None for t, need in zip(
        (edges.values, edges.x, filters), needed, strict=True))
    for heads, rows, sums in edges.blocks():
        if grad_filters is not None:
            edges.sums(heads, sums)
            torch.mm(sums.mT, grad, out=grad_filters[rows])
        if grad_values is not None or grad_x is not None:
            torch.mm(grad, filters[rows].mT, out=sums)
            edges.adjoint(heads, sums, grad_values, grad_x)
    return grad_values, grad_x, None if grad_filters is None else grad_filters.view(theta.shape)


def _composed(by_target: Csr, by_source: Csr, values: Tensor, x: Tensor, theta: Tensor) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    return torch.einsum("knp,kpq->nq", spmm(by_target, by_source, values.mT, x), theta)


_product = differentiable_operator(
    "conditioned_product", "values E K, x M P, theta K P Q", "", "y N Q", forward=_forward, backward=_backward,
    composed=_composed, reads_results=False, needs="values, x, theta")
