"""Attention along edges with scores <v, act(q_n + k_m)>, without (E, K, D) tensors: `additive_attention`.

`additive_weights` computes the weights. The operators take an activation as a kind and a parameter, see `as_logistic`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import DROPOUT, differentiable_operator
from structconv.shapes import check_choice

__all__ = ["ACTIVATIONS", "LOGISTIC", "PRODUCT", "additive_attention", "additive_weights", "as_logistic", "scaled"]

PIECEWISE, LOGISTIC, PRODUCT = 0, 1, 2  # see Activation in src/api.h
ACTIVATIONS = ("leaky_relu", "tanh", "sigmoid")
#: Numbers of a temporary where torch's operators stand in: 16 MB in float32.
BLOCK = 1 << 22


def additive_attention(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, *,
                       activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                       seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nh = sum over the edges m -> n of p_he x_mh, p = softmax over the edges into n of <v_h, act(q_nh + k_mh)>.

    With tanh Bahdanau et al. (2015, appendix A.1.2) restricted to the edges, with a leaky ReLU GATv2 (Brody et al.
    2022, equation 7); there k is x, and each row is gathered once. Duplicate edges count twice; an output without
    edges, or whose scores are all -inf, is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        q: (N, K, D), with k (M, K, D) and x (M, K, C), any strides, of one dtype; float32 and bfloat16 (sums in
            float32) run natively on a CPU, anything else by torch's operators with (K, E) tensors.
        vector: v, (K, D), of any floating dtype.
        activation: "leaky_relu" (with slope 0 ReLU, with slope 1 none), "tanh" or "sigmoid".
        slope: of the leaky ReLU below zero.
        dropout, seed, batch_heads: as for `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: E K (3 D + 2 C) flops, and an exponential for each of E K D activations but the leaky ReLU's. Memory
    O((M + N) K (D + C)): the backward computes the scores again by target and by source and holds nothing of the
    size of the edges. Derivatives of higher order go through (K, E) tensors and one block of (K, E, D).

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    kind, parameter, amplitude = as_logistic(activation, slope)
    y: Tensor = attend(by_target, by_source, q, k, x, scaled(vector, amplitude), kind, parameter, False, dropout, seed,
                       batch_heads)[0]
    return y


def additive_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, vector: Tensor, *,
                     activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                     seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """p_he of `additive_attention`: softmax over the edges into n of <v_h, act(q_nh + k_mh)>, after its dropout.

    Returns, cost: as for `affine_weights`. Args and Raises: as for `additive_attention`.
    """
    kind, parameter, amplitude = as_logistic(activation, slope)
    weights: Tensor = _weights(by_target, by_source, q, k, scaled(vector, amplitude), kind, parameter, dropout, seed,
                               batch_heads)
    return weights.t()


def as_logistic(activation: str, slope: float) -> tuple[int, float, float]:
    """(kind, parameter, amplitude): act(x) is amplitude r(x) and a constant, which no softmax depends on.

    r is the leaky ReLU of slope `parameter`, or 1 / (1 + exp(-parameter x)): tanh(x) = 2 / (1 + exp(-2 x)) - 1.

    Raises:
        ConfigError: for an unknown activation.
    """
    if activation == "leaky_relu":
        return PIECEWISE, slope, 1.0
    check_choice("additive_attention", "activation", activation, ACTIVATIONS)
    return (LOGISTIC, 2.0, 2.0) if activation == "tanh" else (LOGISTIC, 1.0, 1.0)


def scaled(vector: Tensor, amplitude: float) -> Tensor:
    """The vector times the amplitude of `as_logistic`."""
    return vector if amplitude == 1.0 else vector * amplitude


def check_kind(kind: int) -> None:
    """Raise `ConfigError` unless a kind of activation is one of `as_logistic`."""
    if kind not in (PIECEWISE, LOGISTIC):
        raise ConfigError("additive_attention", f"kind must be {PIECEWISE} or {LOGISTIC}", kind)


def activate(t: Tensor, kind: int, parameter: float) -> Tensor:
    """r of `as_logistic`."""
    return torch.nn.functional.leaky_relu(t, parameter) if kind == PIECEWISE else torch.sigmoid(parameter * t)


# -- by torch's operators ------------------------------------------------------------------------------------------

def _blocks(edges: int, width: int) -> list[slice]:
    if isinstance(edges, torch.SymInt):  # a program for any number of edges has no loop over them
        return [slice(0, edges)]
    step = max(1, BLOCK // max(1, width))
    return [slice(start, min(start + step, edges)) for start in range(0, edges, step)] or [slice(0, 0)]


def _scores(ends: Ends, q: Tensor, k: Tensor, vector: Tensor, kind: int, parameter: float) -> Tensor:
    """(K, E), block by block of edges."""
    def of(block: slice, q: Tensor, k: Tensor, vector: Tensor) -> Tensor:
        raw = q.index_select(0, ends.target[block]) + k.index_select(0, ends.source[block])
        return torch.einsum("ehd,hd->he", activate(raw, kind, parameter), vector.to(raw.dtype))

    blocks = _blocks(ends.source.shape[0], q.shape[1] * q.shape[2])
    return recompute_blocks(of, [q, k, vector], blocks, reduce="cat", dim=-1)


def _composed(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int,
              parameter: float, causal: bool, *dropout: Any) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.collect(ends.softmax(_scores(ends, q, k, vector, kind, parameter), *dropout), x)


def _composed_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, vector: Tensor, kind: int,
                      parameter: float, *dropout: Any) -> Tensor:
    ends = Ends(by_target, by_source)
    return ends.softmax(_scores(ends, q, k, vector, kind, parameter), *dropout).t()


#: (Csr, Csr, q, k, x, amplitude times v, kind, parameter, False, dropout, seed, batch_heads) -> y and lse.
attend = differentiable_operator(
    "additive_attention", "q N K D, k M K D, x M K C, any vector K D",
    f"int kind, float parameter, bool causal, {DROPOUT}", "y N K C, wide lse N K", kernel="additive",
    composed=_composed, check=lambda *arguments: check_kind(arguments[6]))
_weights = differentiable_operator(
    "additive_weights", "q N K D, k M K D, any vector K D", f"int kind, float parameter, {DROPOUT}",
    "wide weights E K", kernel="additive_weights", with_backward=False, composed=_composed_weights,
    check=lambda *arguments: check_kind(arguments[5]))
