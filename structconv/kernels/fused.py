"""What recognised forms of attention share: an expression that one operator computes, and how its parts are told."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.chain import altered
from structconv.bases.linear import Scaled
from structconv.bases.pairwise import Dropped, Masked, Normalised, Sum, Unary
from structconv.bases.scores import Products
from structconv.shapes import broadcast
from structconv.theta import Theta

#: (another leaf, the same expression over it, the seed of its dropout) -> the form of that expression.
Follow = Callable[[Basis, Basis, "Tensor | None"], Basis]


class Fused(Unary):
    """The expression `child` computed otherwise than node by node; it is no score that others may build on."""

    child: Basis

    @property
    def has_scores(self) -> bool:
        return False

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.child.dense(dtype)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.apply(r).sum(-3)


class FusedAttention(Fused):
    """The same by one operator on entries first; p and seed are those of its dropout."""

    p: float
    seed: Tensor | None
    scores: Basis

    def analysis(self, x: Tensor) -> Tensor:
        return self.apply(x.unsqueeze(-3).expand(*x.shape[:-2], self.size, *x.shape[-2:]))

    def biased(self, r: Tensor, bias: Tensor) -> Tensor:
        """A_k^T r_k + bias_k, with bias (K, C)."""
        return self.apply(r) + bias.unsqueeze(-2)

    def projected(self, x: Tensor, theta: Theta) -> Tensor:
        """A_k^T applied to what theta's heads make of x: (..., M, P) -> (..., K, N, D)."""
        return self.apply(theta.heads(x))

    def apply(self, r: Tensor) -> Tensor:
        lead = broadcast(r.shape[:-3], self.batch_shape)
        size = self.size
        return heads_first(self.attend(lead, entries_first(r, lead, size)), lead, size)

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        """(M, B K, C) -> (N, B K, C), with the batch folded into the heads."""
        raise NotImplementedError


def entries_first(t: Tensor, lead: tuple[int, ...], size: int) -> Tensor:
    """(..., K or 1, M, C) -> (M, B K, C)."""
    if t.shape[:-2] == (*lead, size) and t.dim() == 3:
        return t.transpose(0, 1)
    return t.expand(*lead, size, *t.shape[-2:]).reshape(math.prod(lead) * size, *t.shape[-2:]).transpose(0, 1)


def heads_first(y: Tensor, lead: tuple[int, ...], size: int) -> Tensor:
    """(N, B K, C) -> (..., K, N, C)."""
    y = y.transpose(0, 1)
    return y.unflatten(0, (*lead, size)) if lead else y


def follow_scores(form: Basis, leaf: Basis) -> Follow | None:
    """Of attention whose scores are a leaf of the expression."""
    if not isinstance(form, FusedAttention) or form.scores is not leaf:
        return None
    bare = altered(form, scores=None, child=None, seed=None)
    return lambda leaf, child, seed: altered(bare, scores=leaf, child=child, seed=seed)


def undropped(basis: Basis) -> tuple[Basis, float, Tensor | None]:
    """What is below the dropout, if there is one, and its p and seed."""
    return (basis.child, basis.p, basis.seed) if isinstance(basis, Dropped) else (basis, 0.0, None)


def softmax_over_inputs(basis: Basis) -> tuple[Normalised, float, Tensor | None] | None:
    """The softmax over the inputs below the dropout, and the dropout's p and seed; `None` where there is none."""
    weights, p, seed = undropped(basis)
    if not isinstance(weights, Normalised) or (weights.kind, weights.over) != ("softmax", "inputs"):
        return None
    return weights, p, seed


def unmasked(node: Basis) -> Basis:
    """What is below the masks."""
    while isinstance(node, Masked):
        node = node.child
    return node


def scaled_product(node: Basis) -> tuple[float, Products | None]:
    """The scale and the scores where the node is a product scaled by numbers, else `None` for the scores."""
    scale = 1.0
    while isinstance(node, Scaled) and not isinstance(node.factor, Tensor):
        scale, node = scale * node.factor, unmasked(node.child)
    return scale, node if isinstance(node, Products) else None


def product_and_bias(node: Basis, fits: Callable[[Basis], bool]) -> tuple[Basis, Basis | None]:
    """The two terms of a sum of which one is a bias that `fits`, the bias last; the node itself where none is."""
    if isinstance(node, Sum):
        for product, bias in ((node.first, node.second), (node.second, node.first)):
            if fits(bias):
                return unmasked(product), bias
    return node, None
