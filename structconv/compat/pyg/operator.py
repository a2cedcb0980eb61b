"""Eq. 8 for layers whose parameters go by other names: the basis and Theta are values of the call.

Under autocast the dtypes are those of torch's operators, by which PyTorch Geometric computes: products with parameters
have autocast's dtype; sums, softmax and biases that of type promotion. So sums of products with float32 weights of the
edges are float32.
"""

from __future__ import annotations

from torch import Tensor

from structconv import kernels as _kernels  # noqa: F401 - registers the kernels
from structconv import torch_compat as private
from structconv.bases.base import OPERATORS, Basis
from structconv.bases.entrywise import Masked, Normalized
from structconv.bases.scores import EdgeScore
from structconv.compat.attending import drop_weights
from structconv.planning.plan import plan_for
from structconv.planning.precision import autocast_dtype, cast, cast_call, promoted_dtype
from structconv.planning.problem import Call
from structconv.structures.graph import Graph
from structconv.structures.supports import EdgeSupport
from structconv.weights import EyeBlocks, Weight
from structconv.weights.base import plus

__all__ = ["apply", "attend", "sum_heads"]


def apply(x: Tensor, basis: Basis, theta: Weight, bias: Tensor | None = None) -> Tensor:
    """y = sum_k A_k^T x Theta_k + b by the planner's choice."""
    call = Call(x, basis, theta, bias)
    if private.any_autocast():
        if theta.tensors:
            call = cast_call(call._replace(bias=None), autocast_dtype(x))
            return plus(plan_for(call).run(call), bias)
        call = cast_call(call, promoted_dtype(x, basis, bias))
    return plan_for(call).run(call)


def sum_heads(rows: Tensor, basis: Basis) -> Tensor:
    """y = sum_k A_k^T h_k, of rows h (..., M, K C) that hold the heads side by side."""
    size = basis.size
    dtype = promoted_dtype(rows, basis) if private.any_autocast() else None
    heads = cast(rows, dtype).unflatten(-1, (size, -1)).movedim(-2, -3)
    return cast(basis, dtype).synthesis(heads)


def attend(values: Tensor, heads: Tensor, scores: Basis, graph: Graph, *, added: Tensor | None = None,
           bias: Tensor | None = None, dropout: float = 0.0, weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """Apply the softmax of `scores` along the edges into each output to `values`, head by head.

    Args:
        values: (M, K D). heads: the same by heads, (K, M, D), shared with the scores where those read it.
        added: to the scores of each edge (E,).
        dropout: on the weights.
        weights: return them too, (E, K) in the order of the edges, after dropout.

    Returns:
        y (N, K D) and the weights, or `None`.
    """
    if added is not None:
        scores = OPERATORS["add"](scores, EdgeScore(graph, added.to(values.dtype).unsqueeze(0)))
    basis: Basis = Normalized(Masked(scores, EdgeSupport(graph)), "softmax", "inputs")
    basis = drop_weights(basis, dropout) if dropout else basis
    theta = EyeBlocks._over({"size": heads.shape[-3], "channels": values.shape[-1]})
    call = Call(values, basis, theta, bias, heads)
    if private.any_autocast():
        call = cast_call(call, promoted_dtype(values, heads, basis, bias))
    plan = plan_for(call)
    y = plan.run(call)
    return y, plan.weights(call).mT if weights else None
