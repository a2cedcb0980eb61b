"""The functional form of eq. 8, its plan, the composition of two of them (Proposition 3), and factors of linear maps.

A linear map Phi (M, N, P, Q), y_nq = sum_mp Phi_mnpq x_mp, is a convolution over a basis A (K, M, N) when
Phi = sum_k A_k (outer) Theta_k, eq. 7 of J.-M. Andreoli, *Convolution, attention and structure embedding*, 2019. So is
any tensor of shape S T over K tensors of shape S: `tensors.compose(A, Theta)`. `decompose` finds Theta for a given
basis, `factorize` the best pair.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from structconv import kernels as _kernels  # noqa: F401 - registers the kernels
from structconv.arguments import explained
from structconv.bases.base import Basis
from structconv.bases.dense import Identity
from structconv.bases.shift import Shift
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.planning.plan import Plan, plan_for, served
from structconv.planning.precision import autocast_dtype, cast_call
from structconv.planning.problem import Call
from structconv.primitives.functions import sum_dtype
from structconv.shapes import check_alike, check_choice, check_entries, check_positive
from structconv.structures.grid import Grid
from structconv.weights import Eye, Full, Weight
from structconv.weights.whole import ByHead, as_weight

__all__ = ["conv", "decompose", "factorize", "plan"]

Pair = tuple[Basis, Weight | Tensor]
Method = Literal["auto", "svd", "randomized"]
#: Of the randomized method: extra columns, power iterations, and the largest rank that "auto" leaves to "svd".
_OVERSAMPLING, _POWER_ITERATIONS, _FULL_LIMIT = 10, 4, 512


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
    size, channels = basis.size, r.shape[-1]
    known = type(size) is type(channels) is int and not torch.compiler.is_compiling()
    if not known and torch.jit.is_tracing():  # where sizes are tensors; a layer's heads and channels stay
        size, channels = int(size), int(channels)
    theta = (_by_head if known else ByHead.of)(size, channels)
    call = cast_call(Call(r.select(-3, 0), basis, theta, bias, r), autocast_dtype(r))
    return plan_for(call).run(call)


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


# -- factors of linear maps, eq. 7 --------------------------------------------------------------------------------

class Decomposition(NamedTuple):
    """Theta (K, *T) of a tensor over a given basis, and ||Phi - sum_k A_k (outer) Theta_k|| / ||Phi||."""

    theta: Tensor
    residual: float

    def __repr__(self) -> str:
        return f"Decomposition(theta={_shape_text('KPQ', self.theta)}, residual={self.residual:.3g})"


class Factorization(NamedTuple):
    """Basis (K, M, N) and Theta (K, P, Q) of a linear map, and ||Phi - sum_k A_k (outer) Theta_k|| / ||Phi||."""

    basis: Tensor
    theta: Tensor
    residual: float

    def __repr__(self) -> str:
        return (f"Factorization(basis={_shape_text('KMN', self.basis)}, theta={_shape_text('KPQ', self.theta)}, "
                f"residual={self.residual:.3g})")


@explained
def decompose(phi: Tensor, basis: Basis | Tensor) -> Decomposition:
    """Theta that writes a tensor over a given basis (Proposition 1): least squares over all indices of S.

    Theta = argmin ||Phi - sum_k A_k (outer) Theta_k||, the one of least norm where the A_k are linearly dependent. It
    is exact for every Phi when the A_k span all tensors of shape S: for a linear map all M x N matrices.

    Args:
        phi: (*S, *T), floating point; (M, N, P, Q) for a linear map. 16-bit types are computed in float32.
        basis: a basis without batch dimensions, S = (M, N), or K tensors (K, *S) of any shape S, of the dtype and
            device of `phi`.

    Returns:
        theta (K, *T) of the dtype of `phi`, and the relative residual (0 for Phi = 0) as a Python float.

    Cost: O(|S| K^2 + |S| |T| K) flops, by the singular values of the (|S|, K) matrix of the basis; |S| = M N.

    Raises:
        ShapeError: if shapes, dtypes or devices do not fit.

    Example:

        >>> from structconv import Grid, Shift, tensors
        >>> from structconv.ops import decompose
        >>> basis, theta = Shift(Grid(6), [-1, 1]), torch.randn(2, 3, 4, dtype=torch.float64)
        >>> result = decompose(tensors.compose(basis.dense(torch.float64), theta), basis)
        >>> torch.allclose(result.theta, theta)
        True
    """
    if not phi.is_floating_point():
        raise ShapeError("decompose", "phi must be a floating-point tensor of shape (*S, *T)",
                         f"{text_of(phi.shape)} {phi.dtype}")
    a_KS = basis.dense(phi.dtype).to(phi.device) if isinstance(basis, Basis) else basis
    check_alike("decompose", phi, a_KS, name="phi", other_name="basis")
    if isinstance(basis, Basis) and a_KS.dim() != 3:
        raise ShapeError("decompose", "basis must have shape (K, M, N)", tuple(a_KS.shape),
                         "It has no batch dimensions here.")
    axes = a_KS.dim() - 1
    if axes < 0 or a_KS.shape[1:] != phi.shape[:axes]:
        raise ShapeError("decompose", "basis must have shape (K, *S) and phi (*S, *T), for a linear map (K, M, N) and "
                         "(M, N, P, Q)", f"{text_of(a_KS.shape)} and {text_of(phi.shape)}")
    wide, dtype, (s_shape, t_shape) = sum_dtype(phi.dtype), phi.dtype, (phi.shape[:axes], phi.shape[axes:])
    flat = phi.to(wide).reshape(math.prod(s_shape), math.prod(t_shape))
    rows = a_KS.to(wide).reshape(a_KS.shape[0], math.prod(s_shape))
    u, s, v_T = torch.linalg.svd(rows.t(), full_matrices=False)
    keep = s > s.amax() * torch.finfo(s.dtype).eps * max(u.shape[0], v_T.shape[1]) if s.numel() else s > 0
    inverse = torch.where(keep, 1 / torch.where(keep, s, 1), 0)
    theta = v_T.t() @ (inverse.unsqueeze(1) * (u.t() @ flat))
    return Decomposition(theta.reshape(rows.shape[0], *t_shape).to(dtype), _residual(flat, rows, theta))


@explained
def factorize(phi: Tensor, *, size: int, axes: int | None = None, method: Method = "auto",
              seed: int = 0) -> Factorization:
    """Basis *and* Theta of size K that come nearest to a linear map: its principal components (eq. 7 read backwards).

    The nearest sum of K Kronecker products (C. Van Loan and N. Pitsianis, 1993): with Phi rearranged to an (M N, P Q)
    matrix U S V^T, or a tensor over any index shapes S and T to an (|S|, |T|) one, A_k = sqrt(s_k) u_k and
    Theta_k = sqrt(s_k) v_k, signed so that the largest entry of A_k is positive. No other pair of size K has a smaller
    residual, sqrt(sum over k > K of s_k^2) / ||Phi|| (Eckart, Young).

    Args:
        phi: (*S, *T), floating point; (M, N, P, Q) for a linear map. 16-bit types are computed in float32.
        size: K, at most min(|S|, |T|), which is min(M N, P Q).
        axes: how many of the first axes are those of S; a linear map has 2, and 2 for T, where it is absent.
        method: "svd", exact; "randomized", the range finder of N. Halko, P. Martinsson and J. Tropp (2011, algorithm
            4.4) with 10 extra columns and 4 power iterations, near the optimum to about (s_(K+1) / s_K)^9; "auto":
            the latter where min(|S|, |T|) > 512 and more than 4 (K + 10).
        seed: of the randomized method; the same seed gives the same factors.

    Returns:
        basis (K, *S) and theta (K, *T) of the dtype of `phi`, and the relative residual as a Python float.

    Cost: O(|S| |T| min(|S|, |T|)) flops by "svd", O(10 |S| |T| (K + 10)) by "randomized".

    Raises:
        ShapeError: if `phi` is not a floating tensor (*S, *T), (M, N, P, Q) without `axes`.
        ConfigError: if K is not in 1 .. min(|S|, |T|), `axes` is not a number of axes, or the method is unknown.

    Example:

        >>> from structconv.ops import factorize
        >>> phi = torch.randn(4, 5, 2, 3, dtype=torch.float64)             # M, N, P, Q
        >>> factorize(phi, size=6).residual < 1e-9                         # no more than P Q are needed
        True
    """
    s_shape, t_shape = _index_shapes("factorize", phi, axes)
    check_choice("factorize", "method", method, ("auto", "svd", "randomized"))
    check_positive("factorize", "size", size)
    rank = min(math.prod(s_shape), math.prod(t_shape))
    if size > rank:
        sizes = "min(M N, P Q)" if axes is None else "min(|S|, |T|)"
        raise ConfigError("factorize", f"size must be at most {sizes} = {rank}", size)
    wide, dtype = phi.to(sum_dtype(phi.dtype)), phi.dtype
    flat = wide.reshape(math.prod(s_shape), math.prod(t_shape))
    columns = size + _OVERSAMPLING
    if method == "auto":
        method = "randomized" if rank > _FULL_LIMIT and rank > 4 * columns else "svd"
    if method == "svd":
        u, s, v_T = torch.linalg.svd(flat, full_matrices=False)
    else:
        u, s, v_T = _randomized_svd(flat, min(columns, rank), seed)
    root = s[:size].sqrt().unsqueeze(1)
    left, right = u[:, :size].t() * root, v_T[:size] * root
    largest = left.gather(1, left.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1, 1).to(left.dtype)
    left, right = left * sign, right * sign
    residual = _residual(flat, left, right)
    return Factorization(left.reshape(-1, *s_shape).to(dtype), right.reshape(-1, *t_shape).to(dtype), residual)


def _randomized_svd(matrix: Tensor, columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of the matrix within the range that its powers show to random columns."""
    generator = torch.Generator().manual_seed(seed)
    probe = torch.randn(matrix.shape[1], columns, generator=generator, dtype=matrix.dtype).to(matrix.device)
    span = torch.linalg.qr(matrix @ probe).Q
    for _ in range(_POWER_ITERATIONS):
        span = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ span).Q).Q
    u, s, v_T = torch.linalg.svd(span.t() @ matrix, full_matrices=False)
    return span @ u, s, v_T


def _residual(flat: Tensor, basis: Tensor, theta: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(flat.detach()))
    return float(torch.linalg.vector_norm((flat - basis.t() @ theta).detach())) / norm if norm else 0.0


def _index_shapes(owner: str, phi: Tensor, axes: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """S, the first `axes` axes, and T; (M, N) and (P, Q) of a linear map."""
    if axes is not None and (type(axes) is not int or axes < 0):
        raise ConfigError(owner, "axes must be an integer >= 0, the number of axes of S", repr(axes))
    if not phi.is_floating_point() or (phi.dim() != 4 if axes is None else phi.dim() < axes):
        expected = "(M, N, P, Q)" if axes is None else f"(*S, *T) with {axes} axes of S"
        raise ShapeError(owner, f"phi must be a floating-point tensor of shape {expected}",
                         f"{text_of(phi.shape)} {phi.dtype}",
                         "For other index shapes pass axes=, the number of axes of S." if axes is None else "")
    first = 2 if axes is None else axes
    return tuple(phi.shape[:first]), tuple(phi.shape[first:])


def _shape_text(letters: str, tensor: Tensor) -> str:
    sizes = map(str, tensor.shape)
    if tensor.dim() == len(letters):
        sizes = map("=".join, zip(letters, sizes, strict=True))
    return f"({', '.join(sizes)}) {str(tensor.dtype).removeprefix('torch.')}"
