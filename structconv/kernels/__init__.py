"""Kernels: each computes eq. 8 for one kind of basis. Importing the package registers them."""

from __future__ import annotations

from structconv.kernels import (
    additive_attention,
    attention_step,
    blocked_attention,
    composite,
    conditioned,
    dense_attention,
    flex_attention,
    grid,
    joined,
    long_convolution,
    neighbors,
    orders,
    polynomial,
    reassociation,
    relational,
    samples,
    shifts,
    small_attention,
    sparse_attention,
    sparse_product,
    window_attention,
)
from structconv.planning.kernel import complete
from structconv.primitives.decompositions import enlist

__all__ = ["additive_attention", "attention_step", "blocked_attention", "composite", "conditioned", "dense_attention",
           "flex_attention", "grid", "joined", "long_convolution", "neighbors", "orders", "polynomial", "reassociation",
           "relational", "samples", "shifts", "small_attention", "sparse_attention", "sparse_product",
           "window_attention"]

complete()
enlist()
