"""`dense_additive_attention`: scores <v, act(q_n + k_m)> over all pairs, without (N, M) or (N, M, D) tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError, text_of
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_numbers
from structconv.primitives.native.edge_attention import (
    LOGISTIC,
    activate,
    as_logistic,
    blocks_of,
    check_kind,
    scaled,
)
from structconv.primitives.native.operator import DROPOUT, differentiable_operator
from structconv.primitives.segments import masked_softmax

__all__ = ["dense_additive_attention", "factor_of"]


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
    kind, parameter, amplitude = as_logistic(activation, slope)
    y: Tensor = _attend(q, k, x, scaled(vector, amplitude), kind, parameter, causal, factor, dropout, seed,
                        batch_heads)[0]
    return y


def factor_of(k: Tensor, activation: str, slope: float) -> Tensor | None:
    """exp(-rate k), of which and that of q the activation is made; `None` where it is no normal number, or not read."""
    kind, rate, _ = as_logistic(activation, slope)
    core = dispatch.usable(k, 0) if kind == LOGISTIC else None
    return None if core is None else core.factor(k, rate)


def _check(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int, parameter: float, causal: bool,
           factor: Tensor | None, *dropout: Any) -> None:
    check_kind(kind)
    if factor is not None:
        check_numbers("dense_additive_attention", k, factor)
        if factor.shape != k.shape or factor.dtype != torch.float32:
            raise ShapeError("dense_additive_attention", f"factor must have the shape {text_of(k.shape)} of k and "
                             "dtype float32", f"{text_of(factor.shape)} of {factor.dtype}")


# -- by torch's operators ------------------------------------------------------------------------------------------

def _composed(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int, parameter: float, causal: bool,
              factor: Tensor | None, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
    """Block by block of outputs."""
    m, n, head = (torch.arange(size, device=q.device) for size in (k.shape[0], q.shape[0], q.shape[1]))

    def of(rows: slice, q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        active = activate(q[rows].unsqueeze(1) + k, kind, parameter)
        scores = torch.einsum("nmhd,hd->nhm", active, vector.to(q.dtype))
        output = n[rows].view(-1, 1, 1)
        weights = masked_softmax(scores.masked_fill(m > output, -torch.inf) if causal else scores, None, -1)
        if p > 0 and seed is not None:
            entry, own = head.unsqueeze(-1) // batch_heads, head.unsqueeze(-1) % batch_heads
            uniform = hash_uniform(seed, entry, own, m * q.shape[0] + output)
            weights = weights * ((uniform >= p).to(q.dtype) / (1 - p))
        return torch.einsum("nhm,mhc->nhc", weights, x)

    return recompute_blocks(of, [q, k, x, vector], blocks_of(q.shape[0], k.numel()), reduce="cat", dim=0)


_attend = differentiable_operator(
    "dense_additive_attention", "q N K D, k M K D, x M K C, any vector K D",
    f"int kind, float parameter, bool causal, Tensor? factor, {DROPOUT}", "y N K C, wide peaks N 2 K",
    kernel="dense_additive", composed=_composed, check=_check, edges=False)
