"""`Adjacency`: the edges of a graph as a layer reads them, built in one native pass and not by operators of tensors.

For kernels that run whole layers: they read the edges in the order of the slots, with degrees, normalization and
self-loops in their values, and compute nothing that the layer does not use. The edges by source are made from those by
target when a gradient first asks for them, so a later change of the edges does not reach a gradient under way.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.errors import ShapeError
from structconv.memo import derived, kept
from structconv.primitives.functions import pulled_back
from structconv.primitives.native import affine, calls
from structconv.primitives.native.calls import Side
from structconv.primitives.native.indices import LAYOUT, LIMIT
from structconv.primitives.native.interface import Struct, constants, integers, pointers
from structconv.primitives.native.loader import Core
from structconv.primitives.products import outer, product

__all__ = ["Adjacency", "adjacency_of", "attend", "build_adjacency", "convolve", "convolve_with_self",
           "first_wrong_edge", "gather_maxima", "gather_sums", "groups_in_order", "is_direct", "unchanged"]

_EDGES = Struct("EdgesArgs", pointers("index"), integers("row column wide edges inputs outputs samples"),
                pointers("input_starts output_starts bad"))
_ADJACENCY = Struct("AdjacencyArgs", pointers("index"),
                    integers("row column wide edges inputs outputs loops square normalize"),
                    pointers("weights indptr columns order values scales bad"))
_GROUPS = Struct("GroupsArgs", pointers("starts"), integers("groups rows"), pointers("indptr columns values bad"))
_TRANSPOSE = Struct("TransposeArgs", LAYOUT.named("layout"), pointers("values"), integers("rows"),
                    pointers("indptr columns order values_T"))
_MAXIMA = Struct("MaximaArgs", LAYOUT.named("by_target by_source"), pointers("x y grad shares grad_x"),
                 integers("channels threads"))
_NO_LAYOUT = (0,) * 5
_NONE, _ROW, _SYMMETRIC = constants(kNone=0, kRow=1, kSymmetric=2)
_NORMALIZATIONS = {None: _NONE, "row": _ROW, "sym": _SYMMETRIC}
_INTEGERS = frozenset((torch.int32, torch.int64))


class _Result(threading.local):
    """Where a kernel writes one integer; a thread has its own."""

    def __init__(self) -> None:
        self.number = ctypes.c_int64(-1)
        self.address = ctypes.addressof(self.number)


_RESULT = _Result()


class Adjacency:
    """Edges between M inputs and N outputs, by target and, when a gradient asks for them, by source."""

    __slots__ = ("__weakref__", "_by_source", "by_target")

    def __init__(self, by_target: Side) -> None:
        self.by_target = by_target
        self._by_source: Side | None = None

    def by_source(self) -> Side:
        """The same edges by source. O(E) once."""
        if self._by_source is None:
            self._by_source = _transposed(self.by_target)
        return self._by_source


def build_adjacency(kernels: Core, index: Tensor, inputs: int, outputs: int, *, loops: bool = False,
                    square: bool = True, normalize: str | None = None, weights: Tensor | None = None
                    ) -> Adjacency | None:
    """The edges (2, E) on the CPU; `None` where one is out of range, of which nobody has read more than its number.

    Args:
        loops: append a loop at each entry, after all edges.
        square: whether the inputs are the outputs, so that both have the same degrees.
        normalize: "sym", "row" or None; see `mechanisms.Adjacency`.
        weights: (E,) or with loops (E + N), contiguous float32, or none for ones.

    O(E + M + N).
    """
    edges = index.shape[1]
    slots = edges + outputs if loops else edges
    valued, ordered = normalize is not None or weights is not None, weights is not None  # weights lie by edge
    scales = (outputs if square else outputs + inputs) if valued else 0
    held = torch.empty(outputs + 1 + slots * (1 + ordered + valued) + scales, dtype=torch.int32)
    indptr = held.data_ptr()
    columns = indptr + 4 * (outputs + 1)
    order = columns + 4 * slots if ordered else 0
    values = columns + 4 * slots * (1 + ordered) if valued else 0
    kernels.adjacency(_ADJACENCY.pack(
        index.data_ptr(), *index.stride(), index.dtype is torch.int64, edges, inputs, outputs, loops, square,
        _NORMALIZATIONS[normalize], 0 if weights is None else weights.data_ptr(), indptr, columns, order, values,
        values + 4 * slots if valued else 0, _RESULT.address))
    if _RESULT.number.value >= 0:
        return None
    return Adjacency(Side((indptr, columns, order, outputs, slots), values, inputs, held))


def _transposed(side: Side) -> Side:
    _, _, ordered, rows, slots = side.layout
    inputs = side.columns
    held = torch.empty(inputs + 1 + slots * (1 + bool(ordered) + bool(side.values)), dtype=torch.int32)
    indptr = held.data_ptr()
    columns = indptr + 4 * (inputs + 1)
    order = columns + 4 * slots if ordered else 0
    values = columns + 4 * slots * (1 + bool(ordered)) if side.values else 0
    _core().transpose(_TRANSPOSE.pack(*side.layout, side.values, inputs, indptr, columns, order, values))
    return Side((indptr, columns, order, inputs, slots), values, rows, held)


def first_wrong_edge(kernels: Core, index: Tensor, inputs: int, outputs: int, samples: Any = None) -> int:
    """The first edge (2, E) on the CPU that is out of range, or joins two samples, or -1. One pass."""
    starts = (0, 0, 0) if samples is None else (samples.num_samples, samples.input_starts.data_ptr(),
                                                 samples.output_starts.data_ptr())
    kernels.edges(_EDGES.pack(index.data_ptr(), *index.stride(), index.dtype is torch.int64, index.shape[1], inputs,
                              outputs, *starts, _RESULT.address))
    return _RESULT.number.value


def groups_in_order(starts: Tensor, rows: int, *, mean: bool = False) -> Adjacency | None:
    """The edges from each row to its group, with values 1 or, for the `mean`, 1 by the number of its rows.

    `starts` (G + 1,), int64, holds the first row of each group and the number of all. Remembered for as long as they
    stay; `None` where no kernel can read them.
    """
    kernels = calls.kernels()
    readable = starts.is_cpu and starts.dtype is torch.int64 and starts.is_contiguous() and rows < LIMIT
    if kernels is None or not readable:
        return None

    def build() -> Adjacency | None:
        groups = starts.shape[0] - 1
        held = torch.empty(groups + 1 + rows * (1 + mean), dtype=torch.int32)
        indptr = held.data_ptr()
        columns = indptr + 4 * (groups + 1)
        values = columns + 4 * rows if mean else 0
        kernels.groups(_GROUPS.pack(starts.data_ptr(), groups, rows, indptr, columns, values, _RESULT.address))
        if _RESULT.number.value >= 0:
            return None
        return Adjacency(Side((indptr, columns, 0, groups, rows), values, rows, held))

    return kept(starts, ("groups", rows, mean), build)


def adjacency_of(index: Tensor, inputs: int, outputs: int, *, loops: bool = False, square: bool = True,
                 normalize: str | None = None, weights: Tensor | None = None) -> Adjacency | None:
    """`build_adjacency`, remembered for as long as edges and weights stay; `None` where no kernel can read them."""
    if not index.is_cpu or index.dtype not in _INTEGERS or max(inputs, outputs, index.shape[1] + outputs) >= LIMIT:
        return None
    kernels = calls.Loaded.core if calls.Loaded.asked else calls.kernels()
    if kernels is None:
        return None
    key = "adjacency", inputs, outputs, loops, square, normalize

    def build() -> Adjacency | None:
        return build_adjacency(kernels, index, inputs, outputs, loops=loops, square=square, normalize=normalize,
                               weights=weights)

    return kept(index, key, build) if weights is None else derived((index, weights), key, build)


# -- a layer as one node ------------------------------------------------------------------------------------------

#: (x, theta, bias) -> y by differentiable operators.
Composed = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_direct(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel may read x (M, ..., C), and nothing but autograd is to see, or to transform, the layer."""
    if is_compiling() or private.watched(profilers=False):
        return False
    for t in (x, *others):
        if t is not None and (type(t) not in _PLAIN or t.dtype is not torch.float32 or not t.is_cpu
                              or t.shape[-1] > calls.MAX_CHANNELS):
            return False
    return x.numel() > 0 and x.shape[0] < LIMIT and not private.is_wrapped(x)


def unchanged(index: Tensor) -> Callable[[], None]:
    """A check that raises `RuntimeError` if the edges are changed from now on."""
    version = private.version(index)

    def check() -> None:
        if private.version(index) != version:
            raise RuntimeError("edge_index was changed in place after the layer was called, and a derivative of its "
                               "gradient needs the edges as they were: change a copy")

    return check


def _core() -> Core:
    """The kernels, by which the edges of a call were sorted."""
    assert calls.Loaded.core is not None
    return calls.Loaded.core


def _dense(x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None
           ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `attend` reads, as kernels read it."""
    return calls.dense(x), calls.dense(of_source), calls.dense(of_target), None if bias is None else calls.dense(bias)


def _check_rows(side: Side, x: Tensor) -> None:
    """Raise `ShapeError` unless x has the rows that the edges begin at."""
    if x.shape[0] != side.columns:
        raise ShapeError("Conv", f"x must have shape (..., M={side.columns}, P)", tuple(x.shape),
                         "Entries are dim -2, channels dim -1.")


def sums(side: Side, x: Tensor, more: Tensor | None = None) -> Tensor:
    """y_n = sum of values_e x_m over the edges m -> n of one side, plus more_n: (M, C) and (N, C) -> (N, C)."""
    x = calls.dense(x)
    _check_rows(side, x)
    y = calls.empty(x, (side.rows, x.shape[1]))
    _core().spmm(calls.SPMM.pack(*side.in_slots, side.values, x.data_ptr(), calls.pointer(more), y.data_ptr(),
                                 x.shape[0], x.shape[1], 1, 0, 1, 1, 1, 0, torch.get_num_threads(), 1.0, 1.0))
    return y


def convolve(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, structure_first: bool,
             composed: Composed) -> Tensor:
    """y = A^T x Theta + b as one node of the graph of autograd: (M, P), (1, P, Q) and (Q) or none -> (N, Q).

    Args:
        x: see `is_direct`.
        structure_first: (A^T x) Theta, or else A^T (x Theta).
        composed: the same by differentiable operators, for derivatives of the gradients.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(x, theta, bias):
        return _convolve(x, theta, bias, adjacency, structure_first, composed)
    return _forward(x, theta, bias, adjacency, structure_first)[0]


def _forward(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, structure_first: bool
             ) -> tuple[Tensor, Tensor | None]:
    """y, and A^T x where it was made."""
    if structure_first:
        r = sums(adjacency.by_target, x)
        return product(r, theta.squeeze(0), bias), r
    y = sums(adjacency.by_target, product(x, theta.squeeze(0)))
    return y if bias is None else y.add_(bias), None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, structure_first: bool,
                composed: Composed) -> Tensor:
        y, r = _forward(x, theta, bias, adjacency, structure_first)
        ctx.save_for_backward(x, theta, bias, r)
        ctx.adjacency, ctx.composed = adjacency, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, theta, bias, r = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (x, theta, bias), needed[:3], [grad]), None, None, None
        grad_x = grad_theta = None
        g = calls.dense(grad)
        if r is None and (needed[0] or needed[1]):
            g = sums(ctx.adjacency.by_source(), g)
        if needed[1]:
            grad_theta = outer(x if r is None else r, g).unsqueeze(0)
        if needed[0]:
            grad_x = product(g, theta.squeeze(0).t())
            if r is not None:
                grad_x = sums(ctx.adjacency.by_source(), grad_x)
        return grad_x, grad_theta, grad.sum(0) if needed[2] else None, None, None, None


_convolve = private.bound_apply(_Convolve)


def convolve_with_self(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, own: int,
                       composed: Composed) -> Tensor:
    """y = A^T x Theta_(1 - own) + x Theta_own + b as one node: (N, P), (2, P, Q) and (Q) or none -> (N, Q).

    The layer of GraphSAGE (Hamilton et al. 2017), of means or sums. Args: as of `convolve`.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(x, theta, bias):
        return _convolve_with_self(x, theta, bias, adjacency, own, composed)
    return _forward_with_self(x, theta, bias, adjacency, own)[0]


def _forward_with_self(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, own: int
                       ) -> tuple[Tensor, Tensor]:
    r = sums(adjacency.by_target, x)
    return product(r, theta[1 - own], bias).add_(product(x, theta[own])), r


class _ConvolveWithSelf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, own: int,
                composed: Composed) -> Tensor:
        y, r = _forward_with_self(x, theta, bias, adjacency, own)
        ctx.save_for_backward(x, theta, bias, r)
        ctx.adjacency, ctx.own, ctx.composed = adjacency, own, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, theta, bias, r = ctx.saved_tensors
        needed, own = ctx.needs_input_grad, ctx.own
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (x, theta, bias), needed[:3], [grad]), None, None, None
        grad_x = grad_theta = None
        g = calls.dense(grad)
        if needed[0]:
            grad_x = sums(ctx.adjacency.by_source(), product(g, theta[1 - own].t()), product(g, theta[own].t()))
        if needed[1]:
            grads = [outer(r, g), outer(x, g)]
            grad_theta = torch.stack(grads if own else grads[::-1])
        return grad_x, grad_theta, g.sum(0) if needed[2] else None, None, None, None


_convolve_with_self = private.bound_apply(_ConvolveWithSelf)


def attend(x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None, adjacency: Adjacency, slope: float,
           drop: calls.Drop, composed: Callable[..., Tensor]) -> Tensor:
    """`projected_attention` among the inputs as one node: (M, K, C), twice (K, C) and (K, C) or none -> (M, K, C).

    Args:
        x: float32 on the CPU; see `is_direct`.
        drop: see `calls.drop_of`.
        composed: (x, of_source, of_target, bias) -> the same by differentiable operators.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(x, of_source, of_target, bias):
        return _attend(x, of_source, of_target, bias, adjacency, slope, drop, composed)
    tensors = _dense(x, of_source, of_target, bias)
    return affine.attend_forward(_core(), adjacency.by_target, *tensors, slope, drop, False).y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None, adjacency: Adjacency,
                slope: float, drop: calls.Drop, composed: Callable[..., Tensor]) -> Tensor:
        tensors = _dense(x, of_source, of_target, bias)
        found = affine.attend_forward(_core(), adjacency.by_target, *tensors, slope, drop, True)
        ctx.save_for_backward(x, of_source, of_target, bias, *found)
        ctx.adjacency, ctx.slope, ctx.drop, ctx.composed = adjacency, slope, drop, composed
        return found.y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, of_source, of_target, bias, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            found = pulled_back(ctx.composed, (x, of_source, of_target, bias), needed[:4], [grad])
            return *found, None, None, None, None
        tensors, sides = _dense(x, of_source, of_target, bias), ctx.adjacency
        grad_x, grads = affine.attend_backward(_core(), sides.by_target, sides.by_source(), *tensors,
                                               affine.Saved(*saved), calls.dense(grad), ctx.slope, ctx.drop)
        others = grads.unbind(0)
        return (grad_x if needed[0] else None, others[0] if needed[1] else None, others[1] if needed[2] else None,
                others[2] if needed[3] else None, None, None, None, None)


_attend = private.bound_apply(_Attend)


def gather_sums(x: Tensor, adjacency: Adjacency, composed: Callable[[Tensor], Tensor]) -> Tensor:
    """The sums of x (M, C) along the edges, weighed as these are, as one node: (N, C); see `convolve`."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _gather_sums(x, adjacency, composed)
    return sums(adjacency.by_target, x)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, composed: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.adjacency, ctx.composed = adjacency, composed
        return sums(adjacency.by_target, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, ctx.saved_tensors, [True], [grad]), None, None
        return sums(ctx.adjacency.by_source(), grad), None, None


def gather_maxima(x: Tensor, adjacency: Adjacency, composed: Callable[[Tensor], Tensor]) -> Tensor:
    """The maxima of x (M, C) over the edges into each output, 0 without any, as one node: (N, C); see `convolve`."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _gather_maxima(x, adjacency, composed)
    return _maxima(adjacency.by_target, calls.dense(x))


def _maxima(side: Side, x: Tensor) -> Tensor:
    _check_rows(side, x)
    y = calls.empty(x, (side.rows, x.shape[1]))
    _core().maxima(_MAXIMA.pack(*side.layout, *_NO_LAYOUT, x.data_ptr(), y.data_ptr(), 0, 0, 0, x.shape[1],
                                torch.get_num_threads()))
    return y


class _Maxima(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, composed: Callable[[Tensor], Tensor]) -> Tensor:
        y = _maxima(adjacency.by_target, calls.dense(x))
        ctx.save_for_backward(x, y)
        ctx.adjacency, ctx.composed = adjacency, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (x,), [True], [grad]), None, None
        sides = ctx.adjacency
        x, grad = calls.dense(x), calls.dense(grad)
        grad_x, shares = calls.empty(x, x.shape), calls.empty(y, y.shape)
        _core().maxima_backward(_MAXIMA.pack(
            *sides.by_target.layout, *sides.by_source().layout, x.data_ptr(), y.data_ptr(), grad.data_ptr(),
            shares.data_ptr(), grad_x.data_ptr(), x.shape[1], torch.get_num_threads()))
        return grad_x, None, None


_gather_sums, _gather_maxima = private.bound_apply(_Sums), private.bound_apply(_Maxima)
