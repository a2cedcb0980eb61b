"""The weights of a learnt basis, by one operator where attention along edges is recognised."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.attention import weights_at
from structconv.bases.base import Basis
from structconv.bases.linear import Scaled
from structconv.kernels import additive_attention, sparse_attention
from structconv.kernels.sparse_attention import EdgeAttention

__all__ = ["weights_of"]


def weights_of(basis: Basis, dtype: torch.dtype) -> Tensor:
    """The entries where they count: (..., K, E) along the basis's edges in their order, else (..., K, M, N).

    Attention along edges takes one pass over them, (E, K) in memory, also with additive scores; its gradients go
    through tensors of that size. The weights are those that are applied: where there is dropout, after it.
    """
    if isinstance(basis, Scaled) and not isinstance(basis.factor, Tensor):
        return weights_of(basis.child, dtype) * basis.factor
    for recognise in (sparse_attention.recognise, additive_attention.recognise):
        form = recognise(basis)
        if isinstance(form, EdgeAttention):
            return form.weights().to(dtype)
    return weights_at(basis, dtype)
