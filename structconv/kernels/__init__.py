"""Kernels: each computes eq. 8 for one kind of basis. Importing the package registers them."""

from __future__ import annotations

from importlib import import_module

from structconv.planning.kernel import complete
from structconv.primitives.decompositions import enlist

__all__ = ["additive_attention", "attention_step", "blocked_attention", "composite", "conditioned", "dense_attention",
           "flex_attention", "grid", "long_convolution", "orders", "polynomial", "reassociation", "relational",
           "samples", "shifts", "small_attention", "sparse_attention", "sparse_product", "window_attention"]

for _name in __all__:
    import_module(f"{__name__}.{_name}")
complete()
enlist()
