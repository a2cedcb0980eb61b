"""The weights of attention along edges, which the attention operators apply without holding them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import leaky_relu

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import additive, bilinear, dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.dispatch import edges_of
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.loader import Core
from structconv.primitives.native.operator import differentiable_operator
from structconv.primitives.segments import segment_softmax
from structconv.shapes import check_choice

__all__ = ["additive_weights", "affine_weights", "bilinear_weights"]

_TERMS, _PRODUCTS, _ACTIVATIONS = 0, 1, 2  # see Scores in src/api.h


def affine_weights(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, *, slope: float = 0.2,
                   dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """p_ke of `affine_attention`: softmax over the edges into n of leaky_relu(s_mk + t_nk), after its dropout.

    Args: as there.

    Returns:
        (K, E) in the order of the edges, of the dtype that 16-bit numbers are summed in. Natively its memory is (E, K).

    Cost: natively an exponential and one read and write for each of E K numbers, and what the scores take. Derivatives
    of any order are taken of torch's operators with (K, E) tensors, and only where they are asked for.

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
        ConfigError: for a negative slope, a p outside [0, 1), or dropout without a seed.
    """
    _check_affine(by_target, by_source, source, target, slope, dropout, seed, batch_heads)
    return _affine_weights(*by_target, *by_source, source, target, slope, dropout, seed,
                           source.shape[1] if batch_heads is None else batch_heads).t()


def bilinear_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, bias: Tensor | None = None, *,
                     scale: float = 1.0, dropout: float = 0.0, seed: Tensor | None = None,
                     batch_heads: int | None = None) -> Tensor:
    """p_he of `bilinear_attention`: softmax over the edges into n of scale <q_nh, k_mh> + b_he, after its dropout.

    Args: as there.

    Returns, cost: as for `affine_weights`.

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for a p outside [0, 1), or dropout without a seed.
    """
    _check_bilinear(by_target, by_source, q, k, bias, scale, dropout, seed, batch_heads)
    return _bilinear_weights(*by_target, *by_source, q, k, bias, scale, dropout, seed,
                             q.shape[1] if batch_heads is None else batch_heads).t()


def additive_weights(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, vector: Tensor, *,
                     activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                     seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """p_he of `additive_attention`: softmax over the edges into n of <v_h, act(q_nh + k_mh)>, after its dropout.

    Args: as there.

    Returns, cost: as for `affine_weights`.

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    _check_additive(by_target, by_source, q, k, vector, activation, slope, dropout, seed, batch_heads)
    return _additive_weights(*by_target, *by_source, q, k, vector, activation, slope, dropout, seed,
                             q.shape[1] if batch_heads is None else batch_heads).t()


def _check_affine(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, slope: float, dropout: float,
                  seed: Tensor | None, batch_heads: int | None) -> None:
    for name, tensor, layout in (("source", source, by_source), ("target", target, by_target)):
        count = layout.indptr.shape[0] - 1
        if tensor.dim() != 2 or tensor.shape != (count, source.shape[-1]) or tensor.dtype != source.dtype:
            raise ShapeError("affine_weights", f"{name} must have shape ({count}, K) and the dtype of source",
                             f"{tuple(tensor.shape)} of {tensor.dtype}")
    if slope < 0:
        raise ConfigError("affine_weights", "slope must be at least 0", slope)
    check_dropout("affine_weights", dropout, seed, batch_heads)


def _check_bilinear(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, bias: Tensor | None, scale: float,
                    dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if q.dim() != 3 or q.shape[0] != outputs:
        raise ShapeError("bilinear_weights", f"q must have shape (N={outputs}, K, D)", tuple(q.shape))
    if k.shape != (inputs, *q.shape[1:]) or k.dtype != q.dtype:
        raise ShapeError("bilinear_weights", f"k must have shape {(inputs, *q.shape[1:])} and the dtype of q",
                         f"{tuple(k.shape)} of {k.dtype}")
    if bias is not None and bias.shape != (q.shape[1], by_target.indices.shape[0]):
        raise ShapeError("bilinear_weights", f"bias must have shape (K={q.shape[1]}, E={by_target.indices.shape[0]})",
                         tuple(bias.shape))
    check_dropout("bilinear_weights", dropout, seed, batch_heads)


def _check_additive(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, vector: Tensor, activation: str, slope: float,
                    dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    additive.check_operands("additive_weights", inputs, outputs, q, k, k, vector)
    check_choice("additive_weights", "activation", activation, additive.ACTIVATIONS)
    check_dropout("additive_weights", dropout, seed, batch_heads)


# -- the native kernel --------------------------------------------------------------------------------------------

class _Scores(NamedTuple):
    """The terms of edge scores: q (N, K, D) and k (M, K, D), for terms (N, K) and (M, K)."""

    kind: int
    q: Tensor
    k: Tensor
    parameter: float
    bias: Tensor | None = None
    vector: Tensor | None = None
    activation: int = 0


def _edge_weights(kernels: Core, by_target: Csr, scores: _Scores, drop: dispatch.Drop) -> Tensor:
    """(E, K), in the order of the edges."""
    kind, q, k, parameter, bias, vector, activation = scores
    if kind == _TERMS:
        q, k = q.unsqueeze(-1), k.unsqueeze(-1)
    weights: Tensor = kernels.edge_weights(edges_of(by_target, k.shape[0]), kind, q, k, bias, vector, parameter,
                                           activation, *drop)
    return weights


# -- the operators, (E, K) ----------------------------------------------------------------------------------------

def _operator(name: str, inputs: str, options: str, native: Callable[..., _Scores],
              scores: Callable[..., Tensor], check: Callable[..., None]) -> Callable[..., Tensor]:
    """structconv::name, from what says `native`ly what its scores are made of, and what computes them, (K, E)."""
    def composed(by_target: Csr, by_source: Csr, *operands: Any) -> Tensor:
        *given, p, seed, batch_heads = operands
        ends = Ends(by_target, by_source)
        found = scores(ends, *(t.to(sum_dtype(t.dtype)) if isinstance(t, Tensor) else t for t in given))
        weights = segment_softmax(found, ends.target, ends.num_outputs)
        kept = ends.kept(Drop(p, seed, batch_heads), found.shape[0])
        return (weights if kept is None else weights * kept.to(weights.dtype)).t()

    def forward(*arguments: Any) -> Tensor:
        by_target, by_source, operands = Csr(*arguments[:3]), Csr(*arguments[3:6]), arguments[6:]
        kernels = dispatch.usable(operands[0], by_target.indices.shape[0])
        if kernels is None:
            return composed(by_target, by_source, *operands).contiguous()
        return _edge_weights(kernels, by_target, native(*operands[:-3]), dispatch.drop_of(*operands[-3:]))

    def fake(*arguments: Any) -> Tensor:
        indices, first = arguments[1], arguments[6]
        return first.new_empty((indices.shape[0], first.shape[1]), dtype=sum_dtype(first.dtype))

    return differentiable_operator(name, inputs, f"{options}, float p, Tensor? seed, SymInt batch_heads", "weights",
                                   forward=forward, fake=fake, composed=composed, check=check)


def _native_additive(q: Tensor, k: Tensor, vector: Tensor, activation: str, slope: float) -> _Scores:
    kind, parameter, amplitude = additive.as_logistic(activation, slope)
    return _Scores(_ACTIVATIONS, q, k, parameter, None, vector * amplitude, kind)


_affine_weights = _operator(
    "affine_weights", "Tensor source, Tensor target", "float slope",
    lambda source, target, slope: _Scores(_TERMS, target, source, slope),
    lambda ends, source, target, slope: leaky_relu(source.t()[:, ends.source] + target.t()[:, ends.target], slope),
    _check_affine)
_bilinear_weights = _operator(
    "bilinear_weights", "Tensor q, Tensor k, Tensor? bias", "float scale",
    lambda q, k, bias, scale: _Scores(_PRODUCTS, q, k, scale, bias), bilinear.edge_scores, _check_bilinear)
_additive_weights = _operator(
    "additive_weights", "Tensor q, Tensor k, Tensor vector", "str activation, float slope", _native_additive,
    additive.edge_scores, _check_additive)
