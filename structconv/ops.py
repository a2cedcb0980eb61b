"""The functional form of eq. 8, its plan, and the composition of two of them (Proposition 3)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from structconv import kernels as _kernels  # noqa: F401 - registers the kernels
from structconv.arguments import explained
from structconv.bases.base import Basis
from structconv.bases.dense import Identity
from structconv.bases.shift import Shift
from structconv.errors import ConfigError, ShapeError
from structconv.factorization import decompose, factorize
from structconv.planning.plan import Plan, plan_for, served
from structconv.planning.precision import autocast_dtype, cast_call
from structconv.planning.problem import Call
from structconv.shapes import check_entries
from structconv.structures.grid import Grid
from structconv.weights import Eye, Full, Weight
from structconv.weights.whole import ByHead, as_weight

__all__ = ["conv", "decompose", "factorize", "plan"]

Pair = tuple[Basis, Weight | Tensor]


@explained
def conv(x: Tensor, basis: Basis, theta: Weight | Tensor, *, path: str | None = None, plan: Plan | None = None,
         max_bytes: int | None = None) -> Tensor:
    """y = sum_k A_k^T x Theta_k (Andreoli 2019, eq. 8): the structured convolution.

    Args:
        x: (..., M, P), floating; leading dimensions broadcast with those of the basis.
        basis: A, (..., K, M, N).
        theta: Theta, a tensor (K, P, Q) or a `Weight` over tensors (`Full.of(tensor)`), with x's dtype and device.
        path: the order of the products: "channels_first", "structure_first", "operator_first", and "between" for a
            `LowRank`, "per_part" for `a | b`. By default the planner chooses.
        plan: a plan made before for a call of this kind, which is run unchanged.
        max_bytes: bytes that the path may hold beside its arguments and its result.

    Returns:
        (..., N, Q). Cost and memory: see `plan`.

    Raises:
        ShapeError: if entries, channels, sizes K, dtypes or devices do not fit.
        ConfigError: if there is no such path for this basis and Theta, or both `path` and `plan` are given.

    Example:

        >>> from structconv import Grid, Shift, conv
        >>> basis, theta = Shift(Grid(5), [-1, 2]), torch.randn(2, 3, 4)
        >>> conv(torch.randn(5, 3), basis, theta).shape
        torch.Size([5, 4])
    """
    call = _call(x, basis, theta)
    if plan is None:
        plan = plan_for(call, path=path, max_bytes=max_bytes)
    elif path is not None:
        raise ConfigError("conv", "at most one of path= and plan= must be given", f"path={path!r} and a plan")
    elif not isinstance(plan, Plan):
        raise ConfigError("conv", "plan must be a Plan", type(plan).__name__,
                          "Make one by structconv.plan(x, basis, theta).")
    elif plan.served != served(call):
        raise ConfigError("conv", f"plan must be for {type(basis).__name__} and {type(call.theta).__name__} of these "
                          "sizes", plan.problem, "Make one by structconv.plan(x, basis, theta).")
    return plan.run(call)


@explained
def plan(x: Tensor, basis: Basis, theta: Weight | Tensor, *, path: str | None = None,
         max_bytes: int | None = None) -> Plan:
    """Return the plan by which `conv` computes eq. 8 for these shapes: order, kernel, cost, rejected paths; `print` it.

    Arguments and errors are those of `conv`. Nothing is computed, unless `planning.autotune` is on: then the paths
    within three times the cheapest are timed, once per class of shapes.

    Example:

        >>> from structconv import Grid, Shift, plan
        >>> chosen = plan(torch.randn(5, 3), Shift(Grid(5), [-1, 2]), torch.randn(2, 3, 4))
        >>> chosen.path in ("channels_first", "structure_first", "operator_first")
        True
    """
    return plan_for(_call(x, basis, theta), path=path, max_bytes=max_bytes)


def apply(basis: Basis, r: Tensor, bias: Tensor | None = None) -> Tensor:
    """A_k^T r_k + bias_k for each head, (..., K or 1, M, C), (K, C) or none -> (..., K, N, C), by the planner's choice.
    """
    call = _applied(basis, r, bias)
    return plan_for(call).run(call)


def _applied(basis: Basis, r: Tensor, bias: Tensor | None) -> Call:
    """The call of a basis whose heads come as they are."""
    size, channels = basis.size, r.shape[-1]
    known = type(size) is type(channels) is int and not torch.compiler.is_compiling()
    if not known and torch.jit.is_tracing():  # where sizes are tensors; a layer's heads and channels stay
        size, channels = int(size), int(channels)
    theta = (_by_head if known else ByHead.of)(size, channels)
    return cast_call(Call(r.select(-3, 0), basis, theta, bias, r), autocast_dtype(r))


_by_head = lru_cache(ByHead.of)


@explained
def compose_pairs(first: Pair, second: Pair) -> Pair:
    """One (basis, Theta) that does what `first`, then `second`, do (Andreoli 2019, Proposition 3).

    A_(k'K''+k'') = A'_k' A''_k'' and Theta_(k'K''+k'') = Theta'_k' Theta''_k'', so K = K' K''. Equal products are
    merged, their Theta summed: of shifts where the product of two is a shift also at the border (padding "none", or
    "circular" on a grid that the first stride divides), and with an `Identity` of one matrix. Two 3x3 windows become
    25 shifts.

    Returns:
        (basis, Theta); Theta is `Eye` where both are, else whole: K P Q numbers.

    Raises:
        ShapeError: if the outputs or channels of the first are not the inputs of the second.
    """
    (basis, theta), (after, weight) = (first[0], as_weight(first[1])), (second[0], as_weight(second[1]))
    for name, count, expected, one, other in (
            ("entries", basis.num_outputs, after.num_inputs, "N", "M"),
            ("channels", theta.out_channels, weight.in_channels, "Q", "P")):
        if count != expected:
            raise ShapeError("compose", f"second must take the {one}={count} output {name} of first",
                             f"{other}={expected}")
    for pair_basis, pair_theta in ((basis, theta), (after, weight)):
        _check_size("compose", pair_basis, pair_theta)
    merged = _shift_product(basis, after) if isinstance(basis, Shift) and isinstance(after, Shift) else None
    if merged is not None:
        return _summed(*merged, theta, weight)
    product = _product(theta, weight)
    if isinstance(basis, Identity) and basis.size == 1:
        return after, product
    if isinstance(after, Identity) and after.size == 1:
        return basis, product
    return basis @ after, product


def _call(x: Tensor, basis: Basis, theta: Weight | Tensor) -> Call:
    theta = as_weight(theta)
    _check_size("Conv", basis, theta)
    check_entries("Conv", x, entries=None if torch.compiler.is_compiling() else basis.num_inputs,
                  channels=theta.in_channels)
    return cast_call(Call(x, basis, theta), autocast_dtype(x))


def _check_size(owner: str, basis: Basis, theta: Weight) -> None:
    if basis.size != theta.size:
        raise ShapeError(owner, f"theta must have the basis's size K={basis.size}", f"K={theta.size} in {theta!r}")


def _product(first: Weight, second: Weight) -> Weight:
    """Theta_(k'K''+k'') = Theta'_k' Theta''_k''."""
    if isinstance(first, Eye) and isinstance(second, Eye):
        return Eye.of(first.size * second.size, first.channels)
    return Full.of(_products(first, second))


def _products(first: Weight, second: Weight) -> Tensor:
    like = (*first.tensors, *second.tensors)[0]
    a, b = (theta.dense().to(dtype=like.dtype, device=like.device) for theta in (first, second))
    return (a.unsqueeze(1) @ b).flatten(0, 1)


def _summed(shift: Shift, index: list[int], first: Weight, second: Weight) -> tuple[Basis, Weight]:
    """The distinct shifts with the products of Theta', Theta'', those of equal shift added up."""
    if shift.size == len(index):
        return shift, _product(first, second)
    if isinstance(first, Eye) and isinstance(second, Eye):
        counts = torch.bincount(torch.tensor(index), minlength=shift.size)
        return shift * counts, Eye.of(shift.size, first.channels)
    products = _products(first, second)
    slots = torch.tensor(index, device=products.device)
    return shift, Full.of(products.new_zeros(shift.size, *products.shape[1:]).index_add(0, slots, products))


def _shift_product(first: Shift, second: Shift) -> tuple[Shift, list[int]] | None:
    """The distinct products of two sets of shifts, and which of them each (k', k'') is; `None` if they are none."""
    grid, inner, following, last = first.grid, first.output_grid, second.grid, second.output_grid
    if not (isinstance(grid, Grid) and isinstance(inner, Grid) and isinstance(following, Grid)
            and isinstance(last, Grid)):
        return None
    sizes, middle = grid.shape, inner.shape
    if first.padding != second.padding or first.padding not in ("none", "circular") or middle != following.shape:
        return None
    around = first.padding == "circular"
    if around and any(n * stride % size if size else True
                      for n, stride, size in zip(middle, first.stride, sizes, strict=True)):
        return None
    number: dict[tuple[int, ...], int] = {}
    offsets: list[tuple[int, ...]] = []
    index: list[int] = []
    for one in first.offsets:
        for other in second.offsets:
            offset = tuple(d + stride * e for d, stride, e in zip(one, first.stride, other, strict=True))
            key = tuple(d % size for d, size in zip(offset, sizes, strict=True)) if around else offset
            if key not in number:
                number[key] = len(offsets)
                offsets.append(offset)
            index.append(number[key])
    stride = tuple(a * b for a, b in zip(first.stride, second.stride, strict=True))
    grow = tuple((n - 1) * step - (size - 1)
                 for n, step, size in zip(last.shape, stride, sizes, strict=True))
    return Shift(grid, tuple(offsets), first.padding, stride, grow, first.device), index
