"""Eq. 8 for layers whose parameters go by other names: the basis and Theta are values of the call.

Under autocast the dtypes are those of torch's operators, by which PyTorch Geometric computes: products with parameters
have autocast's dtype; sums, softmax and biases that of type promotion. So sums of products with float32 weights of the
edges are float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from structconv import kernels as _kernels  # noqa: F401 - registers the kernels
from structconv import torch_compat as private
from structconv.bases.algebra import draw_seed
from structconv.bases.base import OPERATORS, Basis
from structconv.bases.entrywise import Dropped, Masked, Normalized
from structconv.bases.linear import Scaled
from structconv.bases.scores import Additive, Bilinear, EdgeScore
from structconv.bases.sparse import Sparse
from structconv.compat.attending import drop_weights
from structconv.kernels.additive_attention import known
from structconv.kernels.sparse_attention import sorted_edges
from structconv.nn.direct import FEW_NUMBERS, must_be_planned
from structconv.planning.plan import plan_for
from structconv.planning.precision import autocast_dtype, cast, cast_call, promoted_dtype
from structconv.planning.problem import Call
from structconv.primitives.edge_attention import additive_attention, as_logistic, bilinear_attention
from structconv.primitives.native.dispatch import drop_of
from structconv.primitives.native.layer import attend_additive, attend_bilinear, weigh_rows
from structconv.primitives.native.node import is_direct
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


def sum_heads(rows: Tensor, basis: Sparse) -> Tensor:
    """y = sum_k A_k^T h_k, of rows h (..., M, K C) that hold the heads side by side; one node where a kernel can."""
    values, graph = basis.values, basis.graph
    if type(values) is Tensor and rows.dim() == 2 and is_direct(rows, values) and not private.any_autocast():
        values = values.unsqueeze(0) if values.dim() == 1 else values
        edges = sorted_edges(graph, rows.shape[0], graph.num_outputs, numbered=True) if values.dim() == 2 else None
        if edges is not None:
            return weigh_rows(edges.adjacency, edges.layouts, values, rows)
    dtype = promoted_dtype(rows, basis) if private.any_autocast() else None
    return cast(basis, dtype).synthesis(cast(rows, dtype).unflatten(-1, (basis.size, -1)).movedim(-2, -3))


def is_few(graph: Graph, size: int, width: int = 1) -> bool:
    """Return True if a layer may form `size` numbers for each edge, and `size` rows of `width` for each entry, which
    are few, and apply them without a plan."""
    few = max(graph.num_edges, graph.num_inputs * width) * size <= FEW_NUMBERS
    return few and not (is_compiling() or must_be_planned(Sparse))


def _attend_few(values: Tensor, scores: Any, graph: Graph, dropout: float) -> Tensor | None:
    """`attend` to few rows by the node that a plan takes, without the plan, which takes longer; else `None`."""
    size, kind, inner = scores.size, type(scores), scores.child if type(scores) is Scaled else scores
    if (values.dim() != 2 or dropout >= 1 or max(values.numel(), graph.num_edges * size) > FEW_NUMBERS
            or must_be_planned(Dropped if dropout else Normalized) or not is_direct(values)):
        return None
    node: Any = attend_bilinear
    operator: Any = bilinear_attention
    others: tuple[Any, ...]
    if type(inner) is Bilinear:
        scale = 1.0 if inner is scores else scores.factor
        query, key, others, operator = inner.query, inner.key, (None, scale), partial(operator, scale=scale)
    elif kind is Additive and (name := known(scores.activation)) is not None and name[0] == "leaky_relu":
        query, key, others = scores.target, scores.source, (scores.vector, *as_logistic(*name)[:2])
        node, operator = attend_additive, partial(additive_attention, activation=name[0], slope=name[1])
    elif kind is EdgeScore and scores.graph is graph:
        query, key = (values.new_zeros(()).expand(size, n, 1) for n in (graph.num_outputs, graph.num_inputs))
        others = scores.values, 1.0
    else:
        return None
    edges = sorted_edges(graph, values.shape[0], graph.num_outputs, numbered=kind is EdgeScore)
    if edges is None or query.dim() != 3 or not is_direct(query, key, others[0]):
        return None
    seed = draw_seed() if dropout else None
    operator = partial(edges.apply, partial(operator, dropout=dropout, seed=seed, batch_heads=size))
    y: Tensor = node(edges.adjacency, operator, query.transpose(0, 1), key.transpose(0, 1),
                     values.view(len(values), size, -1), *others, *drop_of(dropout, seed, size))
    return y.flatten(1)


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
    if added is None and not weights and (few := _attend_few(values, scores, graph, dropout)) is not None:
        return plus(few, bias), None
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
