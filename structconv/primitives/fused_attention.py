"""torch's fused scaled dot product attention, with second derivatives, which torch's backward lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from structconv import torch_compat as private
from structconv.primitives.functions import pulled_back
from structconv.primitives.segments import masked_softmax

__all__ = ["fused_attention"]


def fused_attention(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
                    ) -> Tensor:
    """softmax_m(scale <query_n, key_m> + mask) values_m: `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query, key, values: (B, K, N, D), (B, K', M, D), (B, K', M, D); K / K' consecutive heads share a key.
        mask: booleans or numbers, broadcast to (B, K, N, M), or none.
        causal: pairs m <= n alone, where there is no mask. A scale of 0 or below is then multiplied into the query:
            torch's kernels multiply the -inf of the other pairs by it, which gives NaN.

    On a CPU a backward that is itself differentiated computes all pairs again, in O(M N) memory.
    """
    if causal and scale <= 0:
        query, scale = query * scale, 1.0
    shared = bool(key.shape[1] != query.shape[1])  # sizes are tensors in a trace
    if not torch.is_grad_enabled() or not _by_hand(query, key, values, mask, causal, scale, shared):
        return F.scaled_dot_product_attention(query, key, values, mask, is_causal=causal, scale=scale,
                                              enable_gqa=shared)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    return _fused(query, key, values, mask, causal, scale)


def _by_hand(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float, shared: bool
             ) -> bool:
    """Return True if torch would record the operator without a second derivative."""
    if torch.compiler.is_compiling() or private.tracing() or not query.is_cpu:
        return False
    if None in (private.flash_attention, private.flash_attention_backward, private.fused_choice):
        return False
    needs_grad = query.requires_grad or key.requires_grad or values.requires_grad
    choice = needs_grad and private.fused_choice(query, key, values, mask, 0.0, causal, scale=scale,
                                                 enable_gqa=shared)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


class _Fused(torch.autograd.Function):
    """The operator on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
                ) -> Tensor:
        y, total = private.flash_attention(query, key, values, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, values, mask, y, total)
        ctx.causal, ctx.scale = causal, scale
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, values, mask, y, total = ctx.saved_tensors
        causal, scale = ctx.causal, ctx.scale
        if torch.is_grad_enabled():  # a second derivative follows
            def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return _all_pairs(q, k, v, mask, causal, scale)

            return *pulled_back(of, (query, key, values), ctx.needs_input_grad[:3], [grad]), None, None, None
        grads = private.flash_attention_backward(grad, query, key, values, y, total, 0.0, causal, attn_mask=mask,
                                                 scale=scale)
        return *grads, None, None, None


_fused: Callable[..., Tensor] = private.bound_apply(_Fused)


def _all_pairs(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, values = key.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = query @ key.mT * scale
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return masked_softmax(scores if mask is None else scores + mask, None, -1) @ values
