"""Sparse products as torch operators: edge lists times dense rows, and edge-wise dot products, their adjoint.

The operators are closed under differentiation: the backward of each calls the others or itself with the two ends
of the edges exchanged, so derivatives of any order work, and none ever holds an (E, C) tensor. They are opaque to
`torch.compile` and `torch.export`: one node in the graph, whatever the number of heads or edges.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.errors import ShapeError, text_of
from structconv.primitives import triton
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_columns, check_edges, check_numbers
from structconv.primitives.native.indices import Csr
from structconv.primitives.operator import EDGES, by_layouts, define
from structconv.shapes import check_entries

__all__ = ["edge_product", "sddmm", "spmm", "spmm_add", "write_spmm"]

_GATHER_BYTES = 16 * 2**20


# -- public functions ---------------------------------------------------------------------------------------------

def spmm(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, *, sum_heads: bool = False) -> Tensor:
    """Sparse product y_n = sum of values_e x_m over the edges e: m -> n.

    Leading dimensions of `values` and `x` broadcast, and only what differs is computed: x is taken sample by sample as
    it lies where rows of values stand each for some samples in a row; else dimensions along which they are constant are
    folded into the channels of one product. `x` shared by several rows of values is never copied. With `sum_heads` the
    last leading dimension (K, dim -3 of x) is summed as the products are formed, without a (..., K, N, C) tensor.

    Args:
        by_target: edges grouped by output entry n (N + 1 pointers).
        by_source: the same edges grouped by input entry m (M + 1 pointers); read by the backward only.
        values: (..., E) in the original order of the edges, or None for ones.
        x: (..., M, C); float64, float32, or a 16-bit type, which is computed in float32. Two dtypes are promoted as
            in `values * x`.
        sum_heads: sum over the last leading dimension.

    Returns:
        (..., N, C), or without the last leading dimension. Outputs with no edge are exactly zero; an input with no
        edge into n has no influence on y_n, be it NaN.

    Cost: 2 E C flops a row of values; memory beyond the output O(E K).

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
    """
    if x.dim() < 2 or x.shape[-2] != by_source.indptr.shape[0] - 1:
        check_entries("spmm", x, entries=by_source.indptr.shape[0] - 1, letters="MC")
    if values is not None and values.dtype is not x.dtype:
        values, x = _promote(values, x)
    edges = by_target.indices.shape[0]
    if values is not None and (values.dim() < 1 or values.shape[-1] != edges):
        raise ShapeError("spmm", f"values must have shape (..., E={edges})", tuple(values.shape))
    if sum_heads:
        if x.dim() < 3 and (values is None or values.dim() < 2):
            raise ShapeError("spmm", "sum_heads needs a leading dimension in values or x", tuple(x.shape))
        reduced = _sum_constant_heads(values, x)
        if reduced is not None:
            return spmm(by_target, by_source, *reduced)
    # With one channel it is faster to fold the samples into channels.
    apart = x.shape[-1] > 1 and not sum_heads and (values is None or _light(values, x))
    if (values is None or values.dim() == 1) and (x.dim() == 2 or (x.dim() == 3 and apart)):
        return edge_product(*by_target, *by_source, values, x, 1 if x.dim() == 2 else x.shape[0])
    values_lead = () if values is None else tuple(values.shape[:-1])
    values_VE = values if values is None else _rows_of(values, edges)
    x_lead = tuple(x.shape[:-2])
    if apart and _follow(values_lead, x_lead):
        rows, lead = math.prod(x_lead), (1,) * (len(values_lead) - len(x_lead)) + x_lead
        y = edge_product(*by_target, *by_source, values_VE, x.reshape(rows, *x.shape[-2:]), rows)
        return y.reshape(*lead, *y.shape[-2:])
    folding = _Folding(values_lead, x_lead)
    y = edge_product(*by_target, *by_source, values_VE, folding.fold(x), folding.rows(sum_heads))
    return folding.unfold(y, x.shape[-1], sum_heads)


def spmm_add(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, z: Tensor | None = None, *,
             alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """y = alpha A^T x + beta z in one pass: the step of a three-term recurrence, at the cost of the product alone.

    Args:
        by_target, by_source: the two layouts of the edges m -> n.
        values: (E,) or (V, E) in the order of the edges, or None for ones.
        x: (M, C) or (V, M, C).
        z: of the shape of the result, or None.
        alpha, beta: numbers; beta 0 ignores z.

    Returns:
        (N, C), or (V, N, C) where x has three dimensions. Differentiable any number of times.

    Cost: 2 V E C flops; no memory beyond the result.

    Raises:
        ShapeError: if sizes do not fit.
    """
    x_VMC = x.unsqueeze(0) if x.dim() == 2 else x
    z_VNC = z.unsqueeze(0) if z is not None and z.dim() == 2 else z
    _check_addend(by_target, by_source, values, x_VMC, z_VNC)
    y = _spmm_add(*by_target, *by_source, values, x_VMC, None if beta == 0 else z_VNC, alpha, beta)
    return y.squeeze(0) if x.dim() == 2 else y


def write_spmm(y: Tensor, by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, *, alpha: float = 1.0,
               beta: float = 0.0) -> None:
    """y = alpha A^T x + beta y in memory that is there already, which saves the page faults of a fresh result.

    For kernels that go through a structure in parts; no gradient is recorded.

    Args:
        y: (N, C) or (V, N, C), contiguous, and apart from x.
        by_target, by_source: the two layouts of the edges m -> n.
        values: (E,) in the order of the edges, or None for ones.
        x: (M, C) or (V, M, C).
        alpha, beta: numbers; with beta 0 what y held has no influence.

    Raises:
        ShapeError: if sizes do not fit.
    """
    x_VMC, outputs = x.unsqueeze(0) if x.dim() == 2 else x, by_target.indptr.shape[0] - 1
    if y.shape != (*x.shape[:-2], outputs, x.shape[-1]) or y.dtype != x.dtype or not y.is_contiguous():
        raise ShapeError("write_spmm", f"y must be contiguous of shape (..., N={outputs}, C={x.shape[-1]}), as x is",
                         f"{text_of(y.shape)} of {y.dtype}")
    kernels = dispatch.usable(x_VMC, by_target.indices.shape[0])
    if kernels is not None and x.numel():
        rows, z = x_VMC.shape[0], y if beta else None
        dispatch.spmm(kernels, by_target, values, x_VMC, z, rows, rows, alpha, beta, out=y.view(rows, *y.shape[-2:]))
        return
    with torch.no_grad():
        y.copy_(spmm_add(by_target, by_source, values, x, y, alpha=alpha, beta=beta))


def sddmm(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor) -> Tensor:
    """Sampled product: s_e = <q_n, k_m> for every edge e: m -> n, the adjoint of `spmm` in its values.

    Args:
        by_target: edges grouped by output entry n (N + 1 pointers).
        by_source: the same edges grouped by input entry m (M + 1 pointers); read by the backward only.
        q: (..., N, D), one row an output entry.
        k: (..., M, D), one row an input entry; leading dimensions of q and k broadcast.

    Returns:
        (..., E) in the original order of the edges.

    Cost: 2 E D flops a row; memory beyond the output at most 16 MiB, never (E, D).

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
    """
    check_entries("sddmm", q, entries=by_target.indptr.shape[0] - 1, letters="ND", name="q")
    check_entries("sddmm", k, entries=by_source.indptr.shape[0] - 1, channels=q.shape[-1], letters="MD", name="k")
    q, k = _promote(q, k)
    lead = _broadcast("sddmm", tuple(q.shape[:-2]), tuple(k.shape[:-2]))
    q_VND, k_VMD = _flatten_rows(q, lead), _flatten_rows(k, lead)
    scores = _sddmm(*by_target, *by_source, q_VND, k_VMD, math.prod(lead))
    return scores.reshape(*lead, scores.shape[-1])


# -- leading dimensions -------------------------------------------------------------------------------------------

def _promote(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _broadcast(owner: str, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast two tuples of leading sizes."""
    length = max(len(first), len(second))
    padded = [(1,) * (length - len(sizes)) + sizes for sizes in (first, second)]
    if any(a != b and a != 1 and b != 1 for a, b in zip(*padded, strict=True)):
        raise ShapeError(owner, "leading dimensions must broadcast", f"{first} and {second}")
    return tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))


def _rows_of(values: Tensor, edges: int) -> Tensor:
    """(..., E) -> (V, E); the same tensor if it is such, by which what is derived of it is found again."""
    if values.dim() < 3:
        return values
    sizes = math.prod(values.shape[:-1]), edges
    if type(edges) is int:
        return values.reshape(sizes)
    # `reshape` would add a guard on the strides, which a compiler does not know for any number of edges.
    return values.clone(memory_format=torch.contiguous_format).as_strided(sizes, (edges, 1))


def _flatten_rows(x: Tensor, lead: Sequence[int]) -> Tensor:
    """Flatten (..., M, C), whose leading sizes broadcast to `lead`, to (X, M, C); row v X // V belongs to row v of V.

    Trailing leading dimensions of size 1 stay shared; other repeated dimensions are copied.
    """
    sizes = (1,) * (len(lead) + 2 - x.dim()) + tuple(x.shape[:-2])
    shared = len(lead)
    while shared and sizes[shared - 1] == 1:
        shared -= 1
    prefix = tuple(lead[:shared])
    x = x.reshape(*sizes[:shared], *x.shape[-2:]).expand(*prefix, *x.shape[-2:])
    return x.reshape(math.prod(prefix), *x.shape[-2:])


def _sum_constant_heads(values: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """The product is linear: where values or x is constant along the heads, sum the other one first."""
    if values is None or values.dim() < 2 or values.shape[-2] == 1:
        row = values if values is None or values.dim() < 2 else values[..., 0, :]
        if x.dim() > 2:
            x = x.squeeze(-3) if x.shape[-3] == 1 else x.sum(-3)
        return row, x
    if x.dim() < 3 or x.shape[-3] == 1:
        return values.sum(-2), x[..., 0, :, :] if x.dim() > 2 else x
    return None


def _follow(values_lead: tuple[int, ...], x_lead: tuple[int, ...]) -> bool:
    """Return True if each row of values belongs to consecutive tables of x."""
    varied = len(values_lead)
    while varied and values_lead[varied - 1] == 1:
        varied -= 1
    return not varied or (len(values_lead) == len(x_lead) and values_lead[:varied] == x_lead[:varied])


def _light(values: Tensor, x: Tensor) -> bool:
    """Return True if the gradients of shared values, before their sum over samples, are small beside x."""
    return not values.requires_grad or (not is_compiling() and values.shape[-1] <= x.shape[-2] * x.shape[-1])


class _Folding:
    """The split of leading dimensions: those along which the values vary become rows, the others channels."""

    def __init__(self, values_lead: tuple[int, ...], x_lead: tuple[int, ...]) -> None:
        self.lead = _broadcast("spmm", values_lead, x_lead)
        rank = len(self.lead)
        values_sizes = (1,) * (rank - len(values_lead)) + values_lead
        self.x_sizes = (1,) * (rank - len(x_lead)) + x_lead
        self.unfolded = [d for d in range(rank) if values_sizes[d] != 1]
        self.folded = [d for d in range(rank) if values_sizes[d] == 1]

    def rows(self, sum_heads: bool) -> int:
        """Rows of the product, Y."""
        return math.prod([self.lead[d] for d in self.unfolded[:len(self.unfolded) - sum_heads]])

    def fold(self, x: Tensor) -> Tensor:
        """(..., M, C) -> (X, M, F C)."""
        rank, (m, c) = len(self.lead), x.shape[-2:]
        x = x.reshape(*self.x_sizes, m, c).permute(*self.unfolded, rank, *self.folded, rank + 1)
        wide = c * math.prod([self.x_sizes[d] for d in self.folded])
        x = x.reshape(*(self.x_sizes[d] for d in self.unfolded), m, wide)
        return _flatten_rows(x, [self.lead[d] for d in self.unfolded])

    def unfold(self, y: Tensor, channels: int, sum_heads: bool) -> Tensor:
        """(Y, N, F C) -> (..., N, C)."""
        unfolded = self.unfolded[:len(self.unfolded) - sum_heads]
        y = y.reshape(*(self.lead[d] for d in unfolded), y.shape[-2], *(self.lead[d] for d in self.folded), channels)
        position = {d: i for i, d in enumerate(unfolded)}
        position |= {d: len(unfolded) + 1 + i for i, d in enumerate(self.folded)}
        return y.permute(*(position[d] for d in sorted(position)), len(unfolded), y.dim() - 1)


# -- kernels ------------------------------------------------------------------------------------------------------

@cache
def _silence_beta_warning() -> None:
    """torch warns once in a process that CSR tensors are in beta; spend that warning where nobody sees it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))


def _matrix(layout: Csr, values: Tensor, columns: int) -> Tensor:
    size = (layout.indptr.shape[0] - 1, columns)
    return torch.sparse_csr_tensor(layout.indptr, layout.indices, values, size=size, check_invariants=False)


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.sparse.mm(matrix, x, "sum")
    with private.without_autocast(x.device.type):
        return matrix @ x


def _spmm_kernel(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
                 values: Tensor | None, x: Tensor, rows: int) -> Tensor:
    """Add A^T x[v X // V] to y[v rows // V] for each of V = max(W, X, rows), A of values[v W // V]; all divide V.

    values (W, E), (E,) for W = 1, or none for ones; (X, M, C) -> (rows, N, C), or (M, C) -> (N, C) if there is one of
    each.
    """
    layout, dtype = Csr(indptr, indices, order), sum_dtype(x.dtype)
    num_values = _count(values, x, rows)
    if x.numel() == 0 or rows == 0 or num_values == 0:
        return x.new_zeros(_product_shape(x, rows, indptr))
    kernels = dispatch.usable(x, indices.shape[0])
    if kernels is not None:
        return dispatch.spmm(kernels, layout, values, x, None, rows, num_values, 1.0, 0.0)
    if x.dim() == 2:
        return _spmm_kernel(*layout, indptr_T, indices_T, order_T, values, x.unsqueeze(0), rows).squeeze(0)
    if (gpu := triton.usable_product(x, indices.shape[0], rows * indptr.shape[0])) is not None:
        return gpu.spmm(layout, values, x, None, rows, num_values, 1.0, 0.0)
    check_columns("Csr", layout, x.shape[1])
    _silence_beta_warning()
    values = x.new_ones((1, *indices.shape)) if values is None else torch.atleast_2d(values)
    if values.shape[0] == 1 and x.shape[0] == rows:
        wide = _product(_matrix(layout, values[0].to(dtype).index_select(0, order), x.shape[1]),
                        x.to(dtype).movedim(0, 1).flatten(1))
        return wide.unflatten(1, (rows, x.shape[2])).movedim(1, 0).contiguous().to(x.dtype)
    x_wide = x.to(dtype).contiguous()
    repeats, repeats_x, repeats_y = (num_values // size for size in (values.shape[0], x.shape[0], rows))
    y = x.new_empty((rows, indptr.shape[0] - 1, x.shape[2]), dtype=dtype) if rows > 1 else None
    for v in range(num_values):
        row = values[v // repeats].to(dtype).index_select(0, order)
        product = _product(_matrix(layout, row, x.shape[1]), x_wide[v // repeats_x])
        if y is None:
            y = product.unsqueeze(0)
        elif v % repeats_y:
            y[v // repeats_y].add_(product)
        else:
            y[v // repeats_y].copy_(product)
    assert y is not None
    return y.to(x.dtype)


def _spmm_add_kernel(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, alpha: float,
                     beta: float) -> Tensor:
    edges = by_target.indices.shape[0]
    kernels = dispatch.usable(x, edges)
    if kernels is not None and x.shape[0]:
        z = None if z is None else z.to(x.dtype)
        return dispatch.spmm(kernels, by_target, values, x, z, x.shape[0], x.shape[0], alpha, beta)
    if x.shape[0] and (gpu := triton.usable_product(x, edges, x.shape[0] * len(by_target.indptr))) is not None:
        z = None if z is None else z.to(x.dtype)
        return gpu.spmm(by_target, values, x, z, x.shape[0], x.shape[0], alpha, beta)
    y = alpha * spmm(by_target, by_source, values, x).contiguous()
    return y if z is None else y + beta * z


def _tables(values: Tensor | None) -> int:
    """Return the number of rows of values; 1 for none, which means ones."""
    return 1 if values is None or values.dim() == 1 else values.shape[0]


def _count(values: Tensor | None, x: Tensor, rows: int) -> int:
    """V: how many products there are."""
    tables = _tables(values)
    if x.dim() == 2:
        return tables
    most = max(x.shape[0], rows)
    return most if tables == 1 else max(tables, most) if tables and most else 0


def _product_shape(x: Tensor, rows: int, indptr: Tensor) -> tuple[int, ...]:
    outputs = indptr.shape[0] - 1
    return (outputs, x.shape[1]) if x.dim() == 2 else (rows, outputs, x.shape[2])


def _sddmm_kernel(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor,
                  order_T: Tensor, q: Tensor, k: Tensor, rows: int) -> Tensor:
    """s[v, e] = <q[v Y // V][n], k[v X // V][m]> for e: m -> n and V = rows."""
    layout, dtype = Csr(indptr, indices, order), sum_dtype(q.dtype)
    if indices.shape[0] == 0 or rows == 0 or q.numel() == 0 or k.numel() == 0:
        return q.new_zeros((rows, indices.shape[0]))
    kernels = dispatch.usable(q, indices.shape[0])
    if kernels is not None:
        s: Tensor = kernels.sddmm(dispatch.edges_of(layout, k.shape[1]), q, k, rows)
        return s
    if (gpu := triton.usable_product(q, indices.shape[0], rows * indptr.shape[0])) is not None:
        return gpu.sddmm(layout, q, k, rows)
    check_columns("Csr", layout, k.shape[1])
    _silence_beta_warning()
    scores = q.new_empty((rows, indices.shape[0]))
    # torch's sampled product refuses patterns with more slots than the matrix has places (many duplicates)
    sampled = q.device.type == "cpu" and indices.shape[0] <= q.shape[1] * k.shape[1]
    dots = _pattern_dots if sampled else _gathered_dots
    repeats_q, repeats_k = rows // q.shape[0], rows // k.shape[0]
    q_wide, k_wide = q.to(dtype).contiguous(), k.to(dtype).contiguous()
    for v in range(rows):
        slots = dots(layout, q_wide[v // repeats_q], k_wide[v // repeats_k])
        scores[v].index_copy_(0, order.long(), slots.to(q.dtype))
    return scores


def _pattern_dots(layout: Csr, q: Tensor, k: Tensor) -> Tensor:
    """<q_n, k_m> in the order of the layout's slots, by torch's sampled product."""
    pattern = _matrix(layout, q.new_zeros(layout.indices.shape), k.shape[0])
    return torch.sparse.sampled_addmm(pattern, q, k.t(), beta=0.0).values()


def _gathered_dots(layout: Csr, q: Tensor, k: Tensor) -> Tensor:
    """<q_n, k_m> in the order of the layout's slots, in blocks whose gathered rows fit `_GATHER_BYTES`."""
    slots = layout.indices.shape[0]
    degrees = layout.indptr.diff()
    targets = torch.repeat_interleave(torch.arange(degrees.shape[0], device=q.device), degrees, output_size=slots)
    block = max(1, _GATHER_BYTES // (3 * q.shape[1] * q.element_size()))
    out = q.new_empty(slots)
    for start in range(0, slots, block):
        part = slice(start, start + block)
        out[part] = (q.index_select(0, targets[part]) * k.index_select(0, layout.indices[part])).sum(-1)
    return out


# -- what raw calls are checked for ------------------------------------------------------------------------------

def _check_table(owner: str, name: str, table: Tensor, entries: int) -> None:
    if table.dim() != 3 or table.shape[1] != entries:
        raise ShapeError(owner, f"{name} must have three dimensions, the second of {entries} entries",
                         tuple(table.shape))


def _check_repeats(owner: str, values: int, *shared: int) -> None:
    """Each of these many tables, or results, belongs to equally many rows of values."""
    if any((size < 1 and values) or (size > 0 and values % size) for size in shared):
        raise ShapeError(owner, f"rows of values, x and y must divide the largest of them, {values}", shared)


def _check_spmm(*arguments: Any) -> None:
    layouts, (values, x, rows) = arguments[:6], arguments[6:]
    check_numbers("spmm", x, values)
    by_target, by_source = check_edges("spmm", layouts, x)
    count = _count(values, x, rows)
    if x.dim() != 2 or rows != 1 or count != 1:
        _check_table("spmm", "x", x, by_source.indptr.shape[0] - 1)
    else:
        check_entries("spmm", x, entries=by_source.indptr.shape[0] - 1, letters="MC")
    edges = by_target.indices.shape[0]
    if values is not None and (values.dim() not in (1, 2) or values.shape[-1] != edges or values.dtype != x.dtype):
        raise ShapeError("spmm", f"values must have shape (V, E={edges}) or (E={edges},) and dtype {x.dtype}",
                         f"{text_of(values.shape)} and {values.dtype}")
    _check_repeats("spmm", count, _tables(values), x.shape[0] if x.dim() == 3 else 1, rows)


def _check_addend(by_target: Csr, by_source: Csr, values: Tensor | None, x_VMC: Tensor, z_VNC: Tensor | None) -> None:
    inputs, outputs, edges = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1, by_target.indices.shape[0]
    if x_VMC.dim() != 3 or x_VMC.shape[1] != inputs:
        raise ShapeError("spmm_add", f"x must have shape (M={inputs}, C) or (V, M={inputs}, C)", tuple(x_VMC.shape))
    rows = x_VMC.shape[0]
    if values is not None and tuple(values.shape) not in ((edges,), (1, edges), (rows, edges)):
        raise ShapeError("spmm_add", f"values must have shape (E={edges},) or (V={rows}, E)", tuple(values.shape))
    shape = (rows, outputs, x_VMC.shape[2])
    if z_VNC is not None and z_VNC.shape != shape:
        raise ShapeError("spmm_add", f"z must have shape {text_of(shape)}", tuple(z_VNC.shape))


def _check_spmm_add(*arguments: Any) -> None:
    layouts, (values, x, z, *_) = arguments[:6], arguments[6:]
    check_numbers("spmm_add", x, values, z)
    _check_addend(*check_edges("spmm_add", layouts, x), values, x, z)


def _check_sddmm(*arguments: Any) -> None:
    layouts, (q, k, rows) = arguments[:6], arguments[6:]
    check_numbers("sddmm", q, k)
    by_target, by_source = check_edges("sddmm", layouts, q)
    _check_table("sddmm", "q", q, by_target.indptr.shape[0] - 1)
    _check_table("sddmm", "k", k, by_source.indptr.shape[0] - 1)
    if q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise ShapeError("sddmm", "q and k must have the same channels and dtype",
                         f"{text_of(q.shape)} of {q.dtype}, {text_of(k.shape)} of {k.dtype}")
    _check_repeats("sddmm", rows, q.shape[0], k.shape[0])


# -- registration -------------------------------------------------------------------------------------------------

def _spmm_fake(*arguments: Any) -> Tensor:
    indptr, x, rows = arguments[0], *arguments[7:]
    return x.new_empty(_product_shape(x, rows, indptr))


def _spmm_add_fake(*arguments: Any) -> Tensor:
    indptr, x = arguments[0], arguments[7]
    return x.new_empty((x.shape[0], indptr.shape[0] - 1, x.shape[2]))


def _sddmm_fake(*arguments: Any) -> Tensor:
    indices, q, rows = arguments[1], arguments[6], arguments[8]
    return q.new_empty((rows, indices.shape[0]))


def _spmm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *others, x, _ = inputs
    ctx.members = 1 if x.dim() == 2 else x.shape[0]
    ctx.save_for_backward(*others, x if ctx.needs_input_grad[6] else None)  # else x may change, and be freed


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *layouts, values, x = ctx.saved_tensors
    ahead, back = layouts[:3], layouts[3:]
    grad_values = grad_x = None
    if ctx.needs_input_grad[6]:
        whole = (grad, x) if x.dim() == 3 else (grad.unsqueeze(0), x.unsqueeze(0))
        result = _sddmm(*ahead, *back, *whole, _count(values, whole[1], whole[0].shape[0]))
        grad_values = _summed(result, _tables(values)).view(values.shape)
    if ctx.needs_input_grad[7]:
        grad_x = edge_product(*back, *ahead, values, grad, ctx.members)
    return *(None,) * 6, grad_values, grad_x, None


def _summed(rows: Tensor, count: int) -> Tensor:
    """Sum consecutive groups of equally many rows."""
    return rows if rows.shape[0] == count else rows.view(count, rows.shape[0] // count, *rows.shape[1:]).sum(1)


def _spmm_add_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.alpha, ctx.beta = inputs[9:]
    ctx.save_for_backward(*inputs[:8])


def _spmm_add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *layouts, values, x = ctx.saved_tensors
    by_target, by_source = Csr(*layouts[:3]), Csr(*layouts[3:])
    grad_values = grad_x = grad_z = None
    if ctx.needs_input_grad[6]:
        grad_values = ctx.alpha * sddmm(by_target, by_source, grad, x)
        if values.numel() != grad_values.numel():
            grad_values = grad_values.sum(0, keepdim=True)
        grad_values = grad_values.view(values.shape)
    if ctx.needs_input_grad[7]:
        grad_x = spmm_add(by_source, by_target, values, grad, alpha=ctx.alpha)
    if ctx.needs_input_grad[8]:
        grad_z = ctx.beta * grad
    return *(None,) * 6, grad_values, grad_x, grad_z, None, None


def _spmm_add_tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
    *layouts, values, x, _, alpha, beta = arguments
    values_t, x_t, z_t = tangents[6:9]
    tangent = None if z_t is None else beta * z_t
    for a, b, moves in ((values_t, x, values_t is not None), (values, x_t, x_t is not None)):
        if moves:
            tangent = torch.ops.structconv.spmm_add(*layouts, a, b, tangent, alpha, 1.0)
    assert tangent is not None
    return tangent


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *layouts, q, k = ctx.saved_tensors
    ahead, back = layouts[:3], layouts[3:]
    grad_q = grad_k = None
    if ctx.needs_input_grad[6]:
        grad_q = edge_product(*ahead, *back, grad, k, q.shape[0])
    if ctx.needs_input_grad[7]:
        grad_k = edge_product(*back, *ahead, grad, q, k.shape[0])
    return *(None,) * 6, grad_q, grad_k, None


#: `spmm` on (V, E) or no values and x (X, M, C) or (M, C), without checks: the arguments of the kernel.
edge_product = define("spmm", f"{EDGES}, Tensor? values, Tensor x, SymInt rows", _spmm_kernel, _spmm_fake, _check_spmm,
                      backward=_spmm_backward, save=_spmm_save, linear_in=(6, 7))
_spmm_add = define("spmm_add", f"{EDGES}, Tensor? values, Tensor x, Tensor? z, float alpha, float beta",
                   by_layouts(_spmm_add_kernel), _spmm_add_fake, _check_spmm_add, backward=_spmm_add_backward,
                   save=_spmm_add_save, tangent=_spmm_add_tangent)
_sddmm = define("sddmm", f"{EDGES}, Tensor q, Tensor k, SymInt rows", _sddmm_kernel, _sddmm_fake, _check_sddmm,
                backward=_sddmm_backward, linear_in=(6, 7))
