"""Factor a linear map into basis and weight: find Theta for a given basis, or the best pair.

A linear map Phi (M, N, P, Q), y_nq = sum_mp Phi_mnpq x_mp, is a convolution over a basis A (K, M, N) when
Phi = sum_k A_k (outer) Theta_k, eq. 7 of J.-M. Andreoli, *Convolution, attention and structure embedding*, 2019. So is
any tensor of shape S T over K tensors of shape S: `tensors.compose(A, Theta)`, which `decompose` undoes.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.bases.base import Basis
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.primitives.functions import sum_dtype
from structconv.shapes import check_alike, check_choice, check_positive

__all__ = ["Decomposition", "Factorization", "decompose", "factorize"]

Method = Literal["auto", "svd", "randomized"]
_OVERSAMPLING, _POWER_ITERATIONS, _FULL_LIMIT = 10, 4, 512


class Decomposition(NamedTuple):
    """Theta (K, *T) of a tensor over a given basis, and ||Phi - sum_k A_k (outer) Theta_k|| / ||Phi||."""

    theta: Tensor
    residual: float

    def __repr__(self) -> str:
        return f"Decomposition(theta={_sizes('KPQ', self.theta)}, residual={self.residual:.3g})"


class Factorization(NamedTuple):
    """Basis (K, M, N) and Theta (K, P, Q) of a linear map, and ||Phi - sum_k A_k (outer) Theta_k|| / ||Phi||."""

    basis: Tensor
    theta: Tensor
    residual: float

    def __repr__(self) -> str:
        return (f"Factorization(basis={_sizes('KMN', self.basis)}, theta={_sizes('KPQ', self.theta)}, "
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


def _sizes(letters: str, tensor: Tensor) -> str:
    sizes = map(str, tensor.shape)
    if tensor.dim() == len(letters):
        sizes = map("=".join, zip(letters, sizes, strict=True))
    return f"({', '.join(sizes)}) {str(tensor.dtype).removeprefix('torch.')}"
