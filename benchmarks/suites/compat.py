"""Drop-in layers against the layers that they replace."""

from __future__ import annotations

from benchmarks.suites import compat_pyg, compat_torch

__all__ = ["CASES"]

CASES = (*compat_torch.CASES, *compat_pyg.CASES)
