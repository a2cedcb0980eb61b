"""`dense_additive_attention`: scores <v, act(q_n + k_m)> over all pairs, without (N, M) or (N, M, D) tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop, hash_uniform
from structconv.primitives.native import dispatch
from structconv.primitives.native.additive import (
    ACTIVATIONS,
    BLOCK,
    LOGISTIC,
    OPTIONS,
    PRODUCT,
    activate,
    as_logistic,
    check_operands,
    derivative,
)
from structconv.primitives.native.checks import check_dropout, check_numbers
from structconv.primitives.native.operator import differentiable_operator
from structconv.primitives.segments import masked_softmax
from structconv.shapes import check_choice

__all__ = ["dense_additive_attention", "factor_of"]

#: Exponents up to which a factor exp(-rate k) is a normal number, so that a product of two is right or saturates.
_FACTOR = 80.0


def dense_additive_attention(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, *, activation: str = "tanh",
                             slope: float = 0.2, causal: bool = False, dropout: float = 0.0,
                             seed: Tensor | None = None, batch_heads: int | None = None,
                             factor: Tensor | None = None) -> Tensor:
    """y_nh = sum_m p_hmn x_mh, p = softmax over m of <v_h, act(q_nh + k_mh)> (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        q, k, x, vector, activation, slope: as for `additive_attention`.
        causal: only the inputs m <= n.
        dropout, seed, batch_heads: as for `affine_attention`.
        factor: `factor_of(k, ...)` where it is at hand, as in many calls of the same k; its numbers alone are read.

    Returns:
        (N, K, C) of the dtype of x; exactly zero without inputs.

    With the factors a_n = exp(-2 q_n) and b_m = exp(-2 k_m) an activation tanh(q_n + k_m) = 2 / (1 + a_n b_m) - 1
    takes one product and one reciprocal; its absolute error stays below 2^-20, whatever cancels in q + k. Where some
    |2 q| or |2 k| is above 80, or is no number, exponentials of the sums are taken.

    Native kernels never read the pairs that `causal` leaves out; torch's operators, which stand in for other dtypes and
    devices, multiply their values by zero, through which a NaN passes.

    Cost: N M K (4 D + 2 C) flops; memory O((M + N) K (D + C)), as every pass computes the scores again. Derivatives
    of higher order go through blocks of (N, M, K, D).

    Raises:
        ShapeError: if sizes or dtypes do not fit each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    _check(q, k, x, vector, activation, slope, dropout, seed, batch_heads, causal)
    return _dense_additive_attention(q, k, x, vector, activation, slope, dropout, seed,
                                     q.shape[1] if batch_heads is None else batch_heads, causal, factor)[0]


def factor_of(k: Tensor, activation: str, slope: float) -> Tensor | None:
    """exp(-rate k), of which and that of q the activation is made; `None` where it is no normal number, or not used."""
    kind, rate, _ = as_logistic(activation, slope)
    return torch.exp(k.float() * -rate) if kind == LOGISTIC and _small(k, rate) else None


def _check(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str, slope: float, dropout: float,
           seed: Tensor | None, batch_heads: int | None, causal: bool, factor: Tensor | None = None) -> None:
    owner = "dense_additive_attention"
    if min(q.dim(), k.dim()) < 1:
        raise ShapeError(owner, "q and k must have three dimensions", f"{tuple(q.shape)} and {tuple(k.shape)}")
    check_operands(owner, k.shape[0], q.shape[0], q, k, x, vector)
    check_choice(owner, "activation", activation, ACTIVATIONS)
    check_dropout(owner, dropout, seed, batch_heads)
    if factor is not None:
        check_numbers(owner, k, factor)
        if factor.shape != k.shape or factor.dtype != torch.float32:
            raise ShapeError(owner, f"factor must have the shape {tuple(k.shape)} of k and dtype float32",
                             f"{tuple(factor.shape)} of {factor.dtype}")


# -- kernels ------------------------------------------------------------------------------------------------------

def _usable(q: Tensor, x: Tensor) -> Any:
    return dispatch.usable(x, q.shape[0]) and dispatch.usable(q, x.shape[0])


def _small(t: Tensor, rate: float) -> bool:
    if t.numel() == 0:
        return True
    least, greatest = torch.aminmax(t)  # a tenth of the time of a norm
    return rate * float(least) >= -_FACTOR and rate * float(greatest) <= _FACTOR


def _operands(q: Tensor, k: Tensor, x: Tensor, kind: int, rate: float, factor: Tensor | None
              ) -> tuple[Tensor, Tensor, Tensor, int]:
    """The kernel's view of q, k and x: factors in float32 if they exist."""
    if kind != LOGISTIC or not (_small(q, rate) and (factor is not None or _small(k, rate))):
        return q, k, x, kind
    return torch.exp(q.float() * -rate), torch.exp(k.float() * -rate) if factor is None else factor, x.float(), PRODUCT


def _forward(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str, slope: float, p: float,
             seed: Tensor | None, batch_heads: int, causal: bool, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    drop, kernels = Drop(p, seed, batch_heads), _usable(q, x)
    if kernels is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        a, b, values, kind = _operands(q, k, x, kind, parameter, factor)
        y, lse = kernels.additive_forward(None, a, b, values, vector * amplitude, kind, parameter, causal,
                                          *dispatch.drop_of(*drop))
        return y.to(x.dtype), lse
    pieces, logs = [], []
    q, k, values, vector = (t.to(sum_dtype(q.dtype)) for t in (q, k, x, vector))
    for rows in _blocks(q, k):
        scores = _scores(rows, q, k, vector, activation, slope, causal)
        lse = scores.logsumexp(-1)
        logs.append(lse.masked_fill(lse == -torch.inf, torch.inf))
        weights = torch.exp(scores - logs[-1].unsqueeze(-1)) * _kept(rows, q, k, drop)
        pieces.append(torch.einsum("nhm,mhc->nhc", weights, values))
    return torch.cat(pieces).to(x.dtype), torch.cat(logs)


def _backward(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, y: Tensor, lse: Tensor, grad: Tensor, activation: str,
              slope: float, p: float, seed: Tensor | None, batch_heads: int, causal: bool,
              factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    drop, kernels, stored = Drop(p, seed, batch_heads), _usable(q, x), (q, k, x, vector)
    if kernels is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        q, k, x, kind = _operands(q, k, x, kind, parameter, factor)
        saved = y.to(x.dtype), lse
        found = kernels.additive_backward(None, None, q, k, x, vector * amplitude, *saved, grad.to(x.dtype), kind,
                                          parameter, causal, *dispatch.drop_of(*drop))
        found = *found[:3], found[3] * amplitude
    else:
        dtype = sum_dtype(q.dtype)
        found = _gradients([t.to(dtype) for t in stored], y.to(dtype), lse, grad.to(dtype), drop, activation, slope,
                           causal)
    first, second, third, fourth = (g.to(t.dtype) for g, t in zip(found, stored, strict=True))
    return first, second, third, fourth


def _gradients(operands: Sequence[Tensor], y: Tensor, lse: Tensor, g: Tensor, drop: Drop, activation: str,
               slope: float, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, x, vector = operands
    grad_q, grad_k, grad_x, grad_vector = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in operands)
    for rows in _blocks(q, k):
        p = torch.exp(_scores(rows, q, k, vector, activation, slope, causal) - lse[rows].unsqueeze(-1))
        weights, shift = p * _kept(rows, q, k, drop), (g[rows] * y[rows]).sum(-1, keepdim=True)
        grad_x += torch.einsum("nhm,nhc->mhc", weights, g[rows])
        ds = weights * torch.einsum("nhc,mhc->nhm", g[rows], x) - p * shift
        value, rate = derivative(_sums(rows, q, k), activation, slope)
        grad_vector += torch.einsum("nhm,nmhd->hd", ds, value)
        part = ds.transpose(1, 2).unsqueeze(-1) * rate * vector
        grad_q[rows] = part.sum(1)
        grad_k += part.sum(0)
    return grad_q, grad_k, grad_x, grad_vector


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    """Blocks of outputs."""
    if isinstance(q.shape[0], torch.SymInt) or isinstance(k.numel(), torch.SymInt):  # see `additive`
        return [slice(0, q.shape[0])]
    step = max(1, BLOCK // max(1, k.numel()))
    return [slice(start, min(start + step, len(q))) for start in range(0, len(q), step)] or [slice(0, 0)]


def _sums(rows: slice, q: Tensor, k: Tensor) -> Tensor:
    """q_n + k_m, (n, M, K, D)."""
    return q[rows].unsqueeze(1) + k


def _scores(rows: slice, q: Tensor, k: Tensor, vector: Tensor, activation: str, slope: float, causal: bool) -> Tensor:
    """(n, K, M), -inf where there is no pair."""
    scores = torch.einsum("nmhd,hd->nhm", activate(_sums(rows, q, k), activation, slope),
                          vector.to(q.dtype))
    return scores.masked_fill(_absent(rows, q, k), -torch.inf) if causal else scores


def _absent(rows: slice, q: Tensor, k: Tensor) -> Tensor:
    m, n = (torch.arange(size, device=q.device) for size in (k.shape[0], q.shape[0]))
    return m > n[rows].view(-1, 1, 1)


def _kept(rows: slice, q: Tensor, k: Tensor, drop: Drop) -> Tensor | float:
    """The factors of the weights: 0 or 1 / (1 - p)."""
    if drop.p == 0 or drop.seed is None:
        return 1.0
    m, n, head = (torch.arange(size, device=q.device) for size in (k.shape[0], q.shape[0], q.shape[1]))
    head, pair = head.unsqueeze(-1), m * q.shape[0] + n[rows].view(-1, 1, 1)
    uniform = hash_uniform(drop.seed, head // drop.batch_heads, head % drop.batch_heads, pair)
    return (uniform >= drop.p).to(q.dtype) / (1 - drop.p)


def _composed(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str, slope: float, p: float,
              seed: Tensor | None, batch_heads: int, causal: bool, factor: Tensor | None) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    drop = Drop(p, seed, batch_heads)

    def of(rows: slice, q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        scores = _scores(rows, q, k, vector, activation, slope, causal)
        return torch.einsum("nhm,mhc->nhc", masked_softmax(scores, None, -1) * _kept(rows, q, k, drop), x)

    return recompute_blocks(of, [q, k, x, vector], _blocks(q, k), reduce="cat", dim=0)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, x = args[:3]
    return x.new_empty((*q.shape[:2], x.shape[2])), q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))


_dense_additive_attention = differentiable_operator(
    "dense_additive_attention", "Tensor q, Tensor k, Tensor x, Tensor vector",
    f"{OPTIONS}, bool causal, Tensor? factor", "y, lse", forward=_forward, fake=_fake, backward=_backward,
    composed=_composed, check=_check, edges=False)
