"""Calls the kernel of src/step.cpp: a step of decoding by attention, projections and all, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.native.calls import kernels, pointer
from structconv.primitives.native.interface import Struct, integers, pointers, reals
from structconv.primitives.native.loader import Core

__all__ = ["Heads", "attention_step", "core_for"]

_HEADS = Struct("HeadsArgs", pointers("x weight bias"), integers("inputs depth by_rows"))
_KEPT = Struct("KeptArgs", pointers("entries"), integers("batch head row"))
_STEP = Struct("AttentionStepArgs", _HEADS.named("query key value"), _KEPT.named("keys values"),
               pointers("output bias queries sums y"), integers("batch heads entries outputs threads"), reals("scale"))


class Heads(NamedTuple):
    """One entry by heads (B, K, D): x (B, P) times a matrix, (K D, P) `by_rows` or (K, P, D), plus bias (K D); without
    a matrix x itself."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    by_rows: bool = True

    def pack(self, depth: int) -> tuple[int, ...]:
        """As the interface has it."""
        weight, bias = self.weight, self.bias
        return (self.x.data_ptr(), 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
                self.x.shape[-1], depth, self.by_rows)


def core_for(*tensors: Tensor | None) -> Core | None:
    """The kernels, if they can take these as they lie: contiguous float32 on the CPU."""
    for t in tensors:
        if t is not None and not (t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() and not t.is_neg()):
            return None
    return kernels()


def attention_step(core: Core, query: Heads, key: Heads, value: Heads, keys: Tensor, values: Tensor, output: Tensor,
                   bias: Tensor | None, scale: float) -> Tensor:
    """y = sum_k softmax_m(scale <q_k, key_km>) value_km O_k + b, for one output that sees all M entries.

    Args:
        query, key, value: one entry each, of which key and value are written to the last row of keys and values.
        keys, values: (B, K, M, D) and (B, K, M, C), channels contiguous.
        output: (K, C, Q). bias: (Q) or None.

    Returns:
        (B, Q). 2 B (K D (P' + P) + K C (P + Q) + K M (D + C)) flops, of which the matrices are read once for all B.
    """
    (batch, heads, entries, depth), channels, columns = keys.shape, values.shape[-1], output.shape[-1]
    y, scratch = keys.new_empty(batch, columns), keys.new_empty(batch * heads * (depth + channels))
    core.attention_step(_STEP.pack(
        *query.pack(depth), *key.pack(depth), *value.pack(channels), keys.data_ptr(), *keys.stride()[:3],
        values.data_ptr(), *values.stride()[:3], output.data_ptr(), pointer(bias), scratch.data_ptr(),
        scratch.data_ptr() + 4 * batch * heads * depth, y.data_ptr(), batch, heads, entries, columns,
        torch.get_num_threads(), scale))
    return y
