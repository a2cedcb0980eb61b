"""Attention along edges by the native operators: affine scores (GAT) and scaled dot products, with or without bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.base import Basis, value
from structconv.bases.linear import Scaled
from structconv.bases.pairs import exact_graph
from structconv.bases.pairwise import Dropped, LeakyReLU, Normalised, Sum
from structconv.bases.scores import EdgeScore, Products, ProjectedAffine, ProjectedBilinear, Terms
from structconv.kernels import window_attention
from structconv.kernels.forms import register_form
from structconv.kernels.fused import (
    Follow,
    FusedAttention,
    entries_first,
    follow_scores,
    heads_first,
    product_and_bias,
    scaled_product,
    softmax_over_inputs,
    unmasked,
)
from structconv.primitives.layout import Csr
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.joint import joint_attention
from structconv.primitives.native.projected import projected_attention, terms
from structconv.primitives.native.weights import affine_weights, bilinear_weights
from structconv.primitives.products import product
from structconv.structures.graph import Graph
from structconv.theta import HeadBlocksTheta, LowRankTheta, Theta


class EdgeAttention(FusedAttention):
    """Attention along the edges of `graph`."""

    graph: Graph

    def weights(self) -> Tensor:
        """What is applied, (..., K, E) in the order of the edges."""
        lead = torch.Size(self.batch_shape)
        return self.weigh(lead).unflatten(0, (*lead, self.size))

    def weigh(self, lead: tuple[int, ...]) -> Tensor:
        """(B K, E)."""
        raise NotImplementedError

    def layouts(self) -> tuple[Csr, Csr]:
        """The edges by output and by input: looked up once for this form, and for those that follow it."""
        known = None if is_compiling() else self.__dict__.get("known_layouts")
        if known is None:
            known = self.graph.by_target(), self.graph.by_source()
            if not is_compiling():
                self.__dict__["known_layouts"] = known
        return known


@value
class AffineEdges(EdgeAttention):
    """softmax over edges of leaky_relu(source_m + target_n)."""

    child: Basis
    graph: Graph
    p: float
    seed: Tensor | None
    scores: Terms
    slope: float

    def apply(self, r: Tensor) -> Tensor:
        scores = self.scores
        if isinstance(scores, ProjectedAffine) and r is scores.x:
            return self._projected(scores, None)
        return super().apply(r)

    def biased(self, r: Tensor, bias: Tensor) -> Tensor:
        scores = self.scores
        if isinstance(scores, ProjectedAffine) and r is scores.x and r.dtype in (torch.float32, torch.float64):
            return self._projected(scores, bias)
        return super().biased(r, bias)

    def _projected(self, scores: ProjectedAffine, bias: Tensor | None) -> Tensor:
        """What is applied to the very entries that the scores are linear in."""
        lead = scores.batch_shape
        x, z, of_source, of_target = self._rows(scores, lead)
        y = projected_attention(*self.layouts(), x, of_source, of_target, z,
                                None if bias is None else _by_head(bias, lead), slope=self.slope, dropout=self.p,
                                seed=self.seed, batch_heads=scores.size)
        return heads_first(y, lead, scores.size)

    def _rows(self, scores: ProjectedAffine, lead: tuple[int, ...]) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """x (M, B K, C), z (N, B K, C) or none for x, and the two vectors (B K, C)."""
        x = entries_first(scores.x, lead, scores.size)
        z = None if scores.z is scores.x else entries_first(scores.z, lead, scores.size)
        of_source, of_target = (_by_head(t, lead) for t in (scores.of_source, scores.of_target))
        return x, z, of_source, of_target

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        return affine_attention(*self.layouts(), *self._terms(lead), v,
                                slope=self.slope, dropout=self.p, seed=self.seed, batch_heads=self.size)

    def weigh(self, lead: tuple[int, ...]) -> Tensor:
        return affine_weights(*self.layouts(), *self._terms(lead), slope=self.slope,
                              dropout=self.p, seed=self.seed, batch_heads=self.size)

    def _terms(self, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(M, B K) and (N, B K)."""
        if isinstance(self.scores, ProjectedAffine):
            return terms(*self._rows(self.scores, lead))
        source, target = (entries_first(t.unsqueeze(-1), lead, self.size).squeeze(-1)
                          for t in (self.scores.source, self.scores.target))
        return source, target


def _by_head(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(K, C) -> (B K, C)."""
    return t if not lead else t.expand(*lead, *t.shape).reshape(-1, t.shape[-1])


@value
class BilinearEdges(EdgeAttention):
    """softmax over edges of scale <query_n, key_m> + bias_e."""

    child: Basis
    graph: Graph
    p: float
    seed: Tensor | None
    scores: Products
    bias: EdgeScore | None
    scale: float

    def attend(self, lead: tuple[int, ...], v: Tensor) -> Tensor:
        query, key, bias = self._operands(lead)
        return bilinear_attention(*self.layouts(), query, key, v, bias,
                                  scale=self.scale, dropout=self.p, seed=self.seed, batch_heads=self.size)

    def weigh(self, lead: tuple[int, ...]) -> Tensor:
        query, key, bias = self._operands(lead)
        return bilinear_weights(*self.layouts(), query, key, bias,
                                scale=self.scale, dropout=self.p, seed=self.seed, batch_heads=self.size)

    def projected(self, x: Tensor, theta: Theta) -> Tensor:
        scores = self.scores
        if (not isinstance(scores, ProjectedBilinear) or x is not scores.x or x.dim() > 2 or self.batch_shape
                or not isinstance(theta, HeadBlocksTheta | LowRankTheta) or theta.values.shape[0] != self.size):
            return super().projected(x, theta)
        square = scores.z is x
        parts = [(scores.of_query.mT, scores.query_bias)] if square else []
        parts += [(scores.of_key.mT, scores.key_bias), (theta.values.transpose(0, 1).flatten(1), None)]
        query = None if square else scores.query.transpose(0, 1)
        y = joint_attention(*self.layouts(), _one_product(x, parts), query,
                            self._bias(()), heads=self.size, depth=scores.depth, scale=self.scale,
                            dropout=self.p, seed=self.seed)
        return y.transpose(0, 1)

    def _operands(self, lead: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(N, B K, D), (M, B K, D), and (B K, E) or none."""
        query, key = (entries_first(t, lead, self.size) for t in (self.scores.query, self.scores.key))
        return query, key, self._bias(lead)

    def _bias(self, lead: tuple[int, ...]) -> Tensor | None:
        if self.bias is None:
            return None
        return self.bias.values.expand(*lead, self.size, self.graph.num_edges).flatten(0, -2)


def _one_product(x: Tensor, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """x w + b for every (w, b), b of zeros where it is None, one beside the other."""
    bias = None
    if any(b is not None for _, b in parts):
        bias = torch.cat([w.new_zeros(w.shape[1]) if b is None else b for w, b in parts])
    return product(x, torch.cat([w for w, _ in parts], 1), bias)


def recognise(basis: Basis) -> EdgeAttention | None:
    """The basis as attention along edges, or `None` where it is something else or its pairs are not listed."""
    found = softmax_over_inputs(basis)
    if found is None:
        return None
    weights, p, seed = found
    node = unmasked(weights.child)
    if not isinstance(node, LeakyReLU | Terms | Products | Scaled | Sum):
        return None
    if window_attention.recognise(basis) is not None:  # which needs no list
        return None
    graph = exact_graph(weights.child)
    if graph is None:
        return None
    slope, inner = (node.negative_slope, unmasked(node.child)) if isinstance(node, LeakyReLU) else (1.0, node)
    if isinstance(inner, Terms):
        return AffineEdges(basis, graph, p, seed, inner, slope) if slope >= 0 else None
    if isinstance(node, LeakyReLU):
        return None
    product, bias = product_and_bias(
        node, lambda part: isinstance(part, EdgeScore) and part.graph.edge_index is graph.edge_index)
    scale, scores = scaled_product(product)
    if scores is None:
        return None
    return BilinearEdges(basis, graph, p, seed, scores, cast("EdgeScore | None", bias), scale)


def follow_edges(form: Basis, leaf: Basis) -> Follow | None:
    """As `follow_scores`; the layouts of the edges go along."""
    if isinstance(form, EdgeAttention):
        form.layouts()
    return follow_scores(form, leaf)


register_form("structconv.edge_attention", recognise, Normalised, Dropped, projects=True, follow=follow_edges)
