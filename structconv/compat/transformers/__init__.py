"""Hugging Face models on structconv: their attention, other heads in it, and models of our layers that generate.

    from structconv.compat.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="structconv")

transformers is imported when one of these is called, or `PreparedCache` is read; it is no dependency of structconv.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from structconv.compat.transformers.heads import replace, set_structure, with_heads
from structconv.compat.transformers.interface import NAME, Registration, StructureMask, register

if TYPE_CHECKING:
    from structconv.compat.transformers.caching import PreparedCache, PreparedGenerationMixin

__all__ = ["NAME", "PreparedCache", "PreparedGenerationMixin", "Registration", "StructureMask", "register",
           "replace", "set_structure", "with_heads"]


def __getattr__(name: str) -> Any:
    """Return a class that extends one of transformers, at its first use."""
    if name not in ("PreparedCache", "PreparedGenerationMixin"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("structconv.compat.transformers.caching"), name)
