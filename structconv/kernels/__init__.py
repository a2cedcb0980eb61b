"""Kernels: what runs a path for one type of basis. Importing the package registers them."""

from __future__ import annotations

from structconv.kernels import composite, dense_attention, grid, relational, shifts, sparse_attention
from structconv.kernels.reference import reference

__all__ = ["composite", "dense_attention", "grid", "reference", "relational", "shifts", "sparse_attention"]
