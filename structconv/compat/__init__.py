"""Drop-in layers for other libraries: torch, PyTorch Geometric, Hugging Face transformers."""

from __future__ import annotations

__all__: list[str] = []
