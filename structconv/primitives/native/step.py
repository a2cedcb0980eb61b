"""Arguments of the kernel of src/step.cpp: a step of decoding by attention, projections and all."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.loader import Core

__all__ = ["Heads", "Turn", "core_for"]


_DTYPES = {torch.float32}, {torch.bfloat16}


class Heads(NamedTuple):
    """One entry by heads (B, K, D): x (B, P) times a matrix (K D, P), plus bias (K D); without a matrix x itself."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


class Turn(NamedTuple):
    """How query and key turn by the position, as in `primitives.rotation.rotate`; without rates they do not."""

    rates: Tensor | None = None
    gain: float = 1.0
    halves: bool = False


def core_for(*tensors: Tensor | None) -> Core | None:
    """The kernels, if they can take these as they lie: contiguous, on the CPU, of one dtype, float32 or bfloat16."""
    dtypes = set()
    for t in tensors:
        if t is not None:
            if not t.is_contiguous() or not t.is_cpu or t.is_neg():
                return None
            dtypes.add(t.dtype)
    return kernels() if dtypes in _DTYPES else None
