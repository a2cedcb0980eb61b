"""Kernels: what runs a path for one type of basis. Importing the package registers them."""

from __future__ import annotations

from structconv.kernels import (
    additive_attention,
    blocked_attention,
    composite,
    dense_attention,
    flex_attention,
    grid,
    polynomial,
    reassociation,
    relational,
    shifts,
    sparse_attention,
    window_attention,
)
from structconv.kernels.reference import reference

__all__ = ["additive_attention", "blocked_attention", "composite", "dense_attention", "flex_attention", "grid",
           "polynomial", "reassociation", "reference", "relational", "shifts", "sparse_attention", "window_attention"]
