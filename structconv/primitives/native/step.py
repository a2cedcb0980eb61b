"""Calls the kernel of src/step.cpp: a step of decoding by attention, projections and all, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.loader import Core

__all__ = ["Heads", "Turn", "attention_step", "core_for"]


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
    """The kernels, if they can take these as they lie: contiguous float32 on the CPU."""
    for t in tensors:
        if t is not None and not (t.is_contiguous() and t.is_cpu and t.dtype is torch.float32 and not t.is_neg()):
            return None
    return kernels()


def attention_step(core: Core, query: Heads, key: Heads, value: Heads, keys: Tensor, values: Tensor, output: Tensor,
                   bias: Tensor | None, scale: float, added: Tensor | None, turn: Turn, position: int) -> Tensor:
    """y = sum_k softmax_m(scale <q_k, key_km> + added_km) value_km O_k + b, for an output that attends to M entries.

    Args:
        query, key, value: one entry each, of which key and value are written to the last row of keys and values.
        keys, values: (B, G, M, D) and (B, G', M, C), channels contiguous, each shared by consecutive heads.
        output: (Q, K C). bias: (Q) or None.
        added: (K, M), entries contiguous, or None.
        turn: how query and key are rotated, if they are multiplied here. position: of the entry.

    Returns:
        (B, Q). 2 B (K D (P' + M) + G D P + G' C P + K C (M + Q)) flops, of which the matrices are read once for all B.
    """
    y: Tensor = core.attention_step(*query, *key, *value, keys, values, output, bias, scale, added, *turn, position)
    return y
