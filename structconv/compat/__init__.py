"""Drop-in layers for torch, PyTorch Geometric and Hugging Face transformers; `convert` for whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structconv.compat.conversion import Report, convert, to_pyg, to_torch
    from structconv.compat.merging import merge_linear

__all__ = ["Report", "convert", "merge_linear", "to_pyg", "to_torch"]


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for: its modules import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from structconv.compat import conversion, merging

    return getattr(merging if name == "merge_linear" else conversion, name)
