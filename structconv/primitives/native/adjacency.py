"""`Adjacency`: the edges of a graph as a layer reads them, built in one native pass and not by operators of tensors.

For kernels that run whole layers: they read the edges in the order of the slots, with degrees, normalization and
self-loops in their values, and compute nothing that the layer does not use. The edges by source are made from those by
target when a gradient first asks for them, so a later change of the edges does not reach a gradient under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.derived import cached, derived
from structconv.errors import ShapeError
from structconv.primitives.functions import pulled_back
from structconv.primitives.native import dispatch
from structconv.primitives.native.indices import LIMIT, unseen
from structconv.primitives.native.loader import Core
from structconv.primitives.products import FULL_WIDTH, LEAST_NUMBERS, LEAST_PRODUCTS, outer, product

__all__ = ["Adjacency", "adjacency_of", "attend", "build_adjacency", "convolve", "convolve_with_self",
           "first_loop", "first_wrong_edge", "gather_maxima", "gather_sums", "is_direct", "unchanged"]

_NORMALIZATIONS = {None: 0, "row": 1, "sym": 2}  # see Normalization in src/api.h
_INTEGERS = frozenset((torch.int32, torch.int64))


class Side(NamedTuple):
    """One sealed layout with its values: kernels check the seal and not the indices."""

    tensor: Tensor
    rows: int
    columns: int


class Adjacency:
    """Edges between M inputs and N outputs, by target and, when a gradient asks for them, by source."""

    __slots__ = ("__weakref__", "_by_source", "by_target")

    def __init__(self, by_target: Side) -> None:
        self.by_target = by_target
        self._by_source: Side | None = None

    def by_source(self) -> Side:
        """Return the edges by source. O(E) once."""
        if self._by_source is None:
            tensor, rows, columns = self.by_target
            self._by_source = Side(_core().transpose(tensor), columns, rows)
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
    tensor, bad = kernels.adjacency(index, inputs, outputs, loops, square, _NORMALIZATIONS[normalize], weights)
    return None if bad >= 0 else Adjacency(Side(tensor, outputs, inputs))


def first_wrong_edge(kernels: Core, index: Tensor, inputs: int, outputs: int, samples: Any = None) -> int:
    """The first edge (2, E) on the CPU that is out of range, or joins two samples, or -1. One pass."""
    starts = (None, None) if samples is None else (samples.input_starts, samples.output_starts)
    if private.watched(profilers=False):
        return int(private.outside_modes(lambda: kernels.edges(index, inputs, outputs, *starts)))
    return int(kernels.edges(index, inputs, outputs, *starts))


def first_loop(kernels: Core, index: Tensor) -> int:
    """The first edge (2, E) on the CPU from an entry to itself, or -1; remembered. One pass."""
    return cached(index, "first loop", lambda: int(unseen(lambda: kernels.first_loop(index))))


def adjacency_of(index: Tensor, inputs: int, outputs: int, *, loops: bool = False, square: bool = True,
                 normalize: str | None = None, weights: Tensor | None = None) -> Adjacency | None:
    """`build_adjacency`, remembered for as long as edges and weights stay; `None` where no kernel can read them."""
    if not index.is_cpu or index.dtype not in _INTEGERS or max(inputs, outputs, index.shape[1] + outputs) >= LIMIT:
        return None
    kernels = dispatch.Loaded.core if dispatch.Loaded.asked else dispatch.kernels()
    if kernels is None:
        return None
    key = "adjacency", inputs, outputs, loops, square, normalize

    def build() -> Adjacency | None:
        return build_adjacency(kernels, index, inputs, outputs, loops=loops, square=square, normalize=normalize,
                               weights=weights)

    return cached(index, key, build) if weights is None else derived((index, weights), key, build)


# -- a layer as one node ------------------------------------------------------------------------------------------

#: (x, theta, bias) -> y by differentiable operators.
Composed = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_direct(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if a kernel may read x (M, ..., C), and only autograd records or transforms the layer."""
    if (is_compiling() or private.transforms_active() or private.dispatch_modes() or private.function_modes()
            or private.forward_level() >= 0 or private.tracing() is not None):
        return False
    for t in (x, *others):
        if t is not None and (type(t) not in _PLAIN or t.dtype is not torch.float32 or not t.is_cpu
                              or t.shape[-1] > dispatch.MAX_CHANNELS):
            return False
    return not (x.numel() == 0 or x.shape[0] >= LIMIT or private.is_functional(x) or private.is_batched(x))


def unchanged(index: Tensor) -> Callable[[], None]:
    """A check that raises `RuntimeError` if the edges are changed from now on."""
    version = None if index.is_inference() else index._version

    def check() -> None:
        if private.version(index) != version:
            raise RuntimeError("edge_index was changed in place after the layer was called, and a derivative of its "
                               "gradient needs the edges as they were: change a copy")

    return check


def _core() -> Core:
    """The kernels, by which the edges of a call were sorted."""
    assert dispatch.Loaded.core is not None
    return dispatch.Loaded.core


def _check_rows(side: Side, x: Tensor) -> None:
    """Raise `ShapeError` unless x has the rows that the edges begin at."""
    if x.shape[0] != side.columns:
        raise ShapeError("Conv", f"x must have shape (..., M={side.columns}, P)", tuple(x.shape),
                         "Entries are dim -2, channels dim -1.")


def sums(side: Side, x: Tensor, more: Tensor | None = None) -> Tensor:
    """y_n = sum of values_e x_m over the edges m -> n of one side, plus more_n: (M, C) and (N, C) -> (N, C)."""
    _check_rows(side, x)
    y: Tensor = _core().sums(side.tensor, x, more)
    return y


def _is_small(side: Side, theta: Tensor) -> bool:
    """Return True if torch's own products are the fastest, so that a kernel may call them: see `products.product`."""
    *_, p, q = theta.shape
    numbers = max(side.rows, side.columns) * max(p, q)
    return numbers < LEAST_NUMBERS or (min(p, q) >= FULL_WIDTH and numbers * max(p, q) < LEAST_PRODUCTS)


def convolve(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, structure_first: bool,
             composed: Composed) -> Tensor:
    """y = sum_k A_k^T x Theta_k + b as one node of the graph of autograd: (M, P), (K, P, Q) and (Q) or none -> (N, Q).

    Args:
        x: see `is_direct`.
        adjacency: from M inputs to N K outputs, of which n K + k is output n of A_k.
        structure_first: (A^T x) Theta, or else A^T (x Theta), of one matrix.
        composed: the same by differentiable operators, for derivatives of the gradients.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(x, theta, bias):
        return _convolve(x, theta, bias, adjacency, structure_first, composed)
    return _forward(x, theta, bias, adjacency, structure_first)[0]


def _forward(x: Tensor, theta: Tensor, bias: Tensor | None, adjacency: Adjacency, structure_first: bool
             ) -> tuple[Tensor, Tensor | None]:
    """y, and A^T x where it was made."""
    side, core = adjacency.by_target, dispatch.Loaded.core
    if x.shape[0] != side.columns:
        _check_rows(side, x)
    if _is_small(side, theta):
        found: tuple[Tensor, Tensor | None] = cast(Core, core).convolve(side.tensor, x, theta, bias, structure_first)
        return found
    if structure_first:
        r, rows = sums(adjacency.by_target, x), theta.flatten(0, 1)
        return product(r.view(-1, rows.shape[0]), rows, bias), r
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
        if _is_small(ctx.adjacency.by_target, theta):
            found = _core().convolve_backward(ctx.adjacency.by_source().tensor, x, theta, r, grad, *needed[:3])
            return *found, None, None, None
        grad_x = grad_theta = None
        g, rows = dispatch.dense(grad), theta.flatten(0, 1)
        if r is None and (needed[0] or needed[1]):
            g = sums(ctx.adjacency.by_source(), g)
        if needed[1]:
            grad_theta = outer(x if r is None else r.view(-1, rows.shape[0]), g).view(theta.shape)
        if needed[0]:
            grad_x = product(g, rows.t())
            if r is not None:
                grad_x = sums(ctx.adjacency.by_source(), dispatch.dense(grad_x).view(-1, theta.shape[1]))
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
    side = adjacency.by_target
    _check_rows(side, x)
    if _is_small(side, theta):
        found: tuple[Tensor, Tensor] = _core().convolve_with_self(side.tensor, x, theta, bias, own)
        return found
    r = sums(side, x)
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
        if _is_small(ctx.adjacency.by_target, theta):
            found = _core().convolve_with_self_backward(ctx.adjacency.by_source().tensor, x, theta, r, grad, own,
                                                        *needed[:3])
            return *found, None, None, None
        grad_x = grad_theta = None
        g = dispatch.dense(grad)
        if needed[0]:
            grad_x = sums(ctx.adjacency.by_source(), product(g, theta[1 - own].t()), product(g, theta[own].t()))
        if needed[1]:
            grads = [outer(r, g), outer(x, g)]
            grad_theta = torch.stack(grads if own else grads[::-1])
        return grad_x, grad_theta, grad.sum(0) if needed[2] else None, None, None, None


_convolve_with_self = private.bound_apply(_ConvolveWithSelf)


def attend(x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None, adjacency: Adjacency, slope: float,
           drop: dispatch.Drop, composed: Callable[..., Tensor]) -> Tensor:
    """`projected_attention` among the inputs as one node: (M, K, C), twice (K, C) and (K, C) or none -> (M, K, C).

    Args:
        x: float32 on the CPU; see `is_direct`.
        drop: see `dispatch.drop_of`.
        composed: (x, of_source, of_target, bias) -> the same by differentiable operators.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(x, of_source, of_target, bias):
        return _attend(x, of_source, of_target, bias, adjacency, slope, drop, composed)
    found: tuple[Tensor, Any, Any] = _core().attend_forward(adjacency.by_target.tensor, x, of_source, of_target, bias,
                                                            slope, *drop, False)
    return found[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of_source: Tensor, of_target: Tensor, bias: Tensor | None, adjacency: Adjacency,
                slope: float, drop: dispatch.Drop, composed: Callable[..., Tensor]) -> Tensor:
        core = cast(Core, dispatch.Loaded.core)
        found = core.attend_forward(adjacency.by_target.tensor, x, of_source, of_target, bias, slope, *drop, True)
        ctx.save_for_backward(x, of_source, of_target, bias, *found)
        ctx.adjacency, ctx.slope, ctx.drop, ctx.composed = adjacency, slope, drop, composed
        y: Tensor = found[0]
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, of_source, of_target, bias, *saved = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            found = pulled_back(ctx.composed, (x, of_source, of_target, bias), needed[:4], [grad])
            return *found, None, None, None, None
        sides = ctx.adjacency
        grad_x, grads = _core().attend_backward(sides.by_target.tensor, sides.by_source().tensor, x, of_source,
                                                of_target, bias, *saved, grad, ctx.slope, *ctx.drop)
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
    return _maxima(adjacency.by_target, x)


def _maxima(side: Side, x: Tensor) -> Tensor:
    _check_rows(side, x)
    y: Tensor = _core().maxima(side.tensor, x)
    return y


class _Maxima(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, adjacency: Adjacency, composed: Callable[[Tensor], Tensor]) -> Tensor:
        y = _maxima(adjacency.by_target, x)
        ctx.save_for_backward(x, y)
        ctx.adjacency, ctx.composed = adjacency, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (x,), [True], [grad]), None, None
        sides = ctx.adjacency
        return _core().maxima_backward(sides.by_target.tensor, sides.by_source().tensor, x, y, grad), None, None


_gather_sums, _gather_maxima = private.bound_apply(_Sums), private.bound_apply(_Maxima)
