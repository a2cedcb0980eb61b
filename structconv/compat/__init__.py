"""Drop-in layers for torch, PyTorch Geometric and Hugging Face transformers; `convert` for whole models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structconv.compat.conversion import Report, convert, to_pyg, to_torch
    from structconv.compat.merging import merge_linear
    from structconv.primitives.decompositions import decompositions

__all__ = ["Report", "convert", "decompositions", "merge_linear", "to_pyg", "to_torch"]


_HOMES = {"decompositions": "structconv.primitives.decompositions", "merge_linear": "structconv.compat.merging"}


def __getattr__(name: str) -> Any:
    """Load a name at its first use: its modules import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "structconv.compat.conversion")
    return getattr(import_module(home), name)
