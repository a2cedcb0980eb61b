"""Softmax attention of all pairs in one operator: our kernel, or torch's with the second derivatives that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from structconv import torch_compat as private
from structconv.primitives.functions import Result, pulled_back
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native.dispatch import NO_DROP, Drop, Loaded, kernels
from structconv.primitives.native.node import PLAIN, is_direct
from structconv.primitives.segments import masked_softmax

__all__ = ["all_pairs", "exact_attention", "fused_attention", "is_readable"]

_MASKS = torch.bool, torch.float32


def fused_attention(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
                    ) -> tuple[Tensor, bool]:
    """softmax_m(scale <query_n, key_m> + mask) values_m, and whether pairs that do not exist have reached nothing.

    Args:
        query, key, values: (B, K, N, D), (B, K', M, D), (B, K', M, C); K / K' consecutive heads share a key.
        mask: booleans or numbers, broadcast to (B, K, N, M), or none.
        causal: pairs m <= n alone. A scale of 0 or below is then multiplied into the query: torch's kernels multiply
            the -inf of the other pairs by it, which gives NaN.

    By `exact_attention`, or by `torch.nn.functional.scaled_dot_product_attention`, in which weights of zero multiply
    what does not exist. On a CPU a backward that is itself differentiated computes all pairs again, in O(M N) memory.
    """
    exact: Tensor | None = exact_attention(query, key, values, mask, causal, scale)
    if exact is not None:
        return exact, True
    if causal and mask is not None:
        later = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        mask, causal = mask & ~later if mask.dtype == torch.bool else mask.masked_fill(later, -torch.inf), False
    if causal and scale <= 0:
        query, scale = query * scale, 1.0
    depth, channels = query.shape[-1], values.shape[-1]
    if depth != channels:
        query, key, values = (F.pad(t, (0, max(depth, channels) - t.shape[-1])) for t in (query, key, values))
    y = _by_torch(query, key, values, mask, causal, scale)
    return y if depth <= channels else y[..., :channels], False


# -- our kernel -----------------------------------------------------------------------------------------------------

def exact_attention(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float,
                    drop: Drop = NO_DROP, weighted: bool = False) -> Any:
    """`fused_attention` by the native kernel, also with dropout; `None` for what it does not take.

    What a pair that does not exist would read, NaN included, reaches nothing, in either pass. An output without pairs
    is zero. Float32 on a CPU, up to 256 channels. Memory O(N) beside the results; the backward makes the scores again.
    With `weighted` also the weights (B, K, N, M), whose own gradient is computed operator by operator.
    """
    if not (is_direct(query) and type(key) in PLAIN and type(values) in PLAIN and key.is_cpu and values.is_cpu):
        return None  # asked first: a compiler does not trace what loads the kernels
    core = Loaded.core if Loaded.asked else kernels()
    if core is None or (mask is not None and not (query.dim() == key.dim() == 4 and is_readable(
            mask, query.shape, key.shape[2]))):
        return None
    if torch.is_grad_enabled() and private.any_requires_grad(query, key, values, mask):
        found = _exact(query, key, values, mask, (causal, scale, *drop[:2]), weighted)
        return None if type(found) is tuple and found[0] is None else found
    y, _, weights = core.attention_forward(query, key, values, mask, causal, scale, drop[0], drop[1], False, weighted)
    return (y, weights) if weighted and y is not None else y


def is_readable(mask: Tensor, shape: Sequence[int], inputs: int) -> bool:
    """Return True if the kernel can read the mask as a table of the pairs of queries of this shape (B, K, N, D)."""
    if not (type(mask) in PLAIN and mask.is_cpu and mask.dtype in _MASKS and not mask.is_neg()
            and mask.layout is torch.strided and 1 < mask.dim() <= 4):
        return False
    sizes = inputs, shape[2], shape[1], shape[0]
    return all(own in (1, size) for own, size in zip(reversed(mask.shape), sizes, strict=False))


class _Exact(torch.autograd.Function):
    """The kernel, for what it takes: y, or y and the weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, options: tuple[Any, ...],
                weighted: bool) -> Any:
        y, total, weights = Loaded.core.attention_forward(  # type: ignore[union-attr]
            query, key, values, mask, *options, True, weighted)
        if y is None:
            return (None, None) if weighted else None
        ctx.save_for_backward(query, key, values, mask, total)
        ctx.kept = options, Result(y)
        if not weighted:
            return y
        ctx.set_materialize_grads(False)
        return y, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_weights: Tensor | None = None) -> tuple[Any, ...]:
        """The gradients of query, key, values and mask: by the kernel, unless they are differentiated again, or the
        weights have a gradient."""
        tensors, (options, result) = ctx.saved_tensors, ctx.kept
        if grad is of_weights is None:
            return (None,) * 6
        if (grad is None or of_weights is not None or torch.is_grad_enabled() or private.is_functional(grad)
                or private.is_batched(grad)):
            causal, scale, *drop = options
            others = () if of_weights is None else (of_weights,)
            composed = partial(_pairs_and_weights if others else all_pairs, causal=causal, scale=scale, drop=drop)
            gradients = pulled_back(composed, tensors[:4], ctx.needs_input_grad[:4], [grad, *others])
        else:
            y = result.take()
            if y is None:
                y = Loaded.core.attention_forward(*tensors[:4], *options, False, False)[0]  # type: ignore[union-attr]
            query, key, values, mask, total = tensors
            gradients = Loaded.core.attention_backward(  # type: ignore[union-attr]
                query, key, values, mask, y, total, grad, *options, ctx.needs_input_grad[3])
        return *gradients, None, None


_exact: Callable[..., Any] = private.bound_apply(_Exact)


# -- torch's kernel -------------------------------------------------------------------------------------------------

def _by_torch(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    if mask is not None and mask.requires_grad and not torch.compiler.is_compiling() and not query.numel():
        return all_pairs(query, key, values, mask, causal=causal, scale=scale)  # torch gives the mask no gradient
    shared = True if key.shape[1] != query.shape[1] else False  # noqa: SIM210 - sizes may be tensors, or symbols
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
            composed = partial(all_pairs, mask=mask, causal=causal, scale=scale)
            return *pulled_back(composed, (query, key, values), ctx.needs_input_grad[:3], [grad]), None, None, None
        grads = private.flash_attention_backward(grad, query, key, values, y, total, 0.0, causal, attn_mask=mask,
                                                 scale=scale)
        return *grads, None, None, None


_fused: Callable[..., Tensor] = private.bound_apply(_Fused)


def all_pairs(*tensors: Tensor | None, **options: Any) -> Tensor:
    """`exact_attention` by differentiable operators."""
    return _pairs_and_weights(*tensors, **options)[0]  # type: ignore[arg-type]


def _pairs_and_weights(query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float,
                       drop: Drop = NO_DROP) -> tuple[Tensor, Tensor]:
    """By differentiable operators; keys and values without any pair may be anything."""
    shared, (outputs, inputs) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    if shared > 1:
        key, values = key.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    absent = torch.ones(outputs, inputs, dtype=torch.bool, device=query.device).triu(1) if causal else None
    added = None if mask is None or mask.dtype == torch.bool else mask
    if mask is not None:
        missing = ~mask if added is None else added == -torch.inf
        absent = missing if absent is None else absent | missing
    if absent is not None:
        key, values = (t.masked_fill(absent.all(-2).unsqueeze(-1), 0) for t in (key, values))
    scores = query @ key.mT * scale
    scores = scores if added is None else scores + added
    weights = masked_softmax(scores, None if absent is None else ~absent, -1)
    if drop[0]:
        batch, head, n, m = (torch.arange(size, device=query.device).view(-1, *[1] * (3 - axis))
                             for axis, size in enumerate(weights.shape))
        keep = hash_uniform(torch.tensor(drop[1]), batch, head, m * outputs + n) >= drop[0]
        weights = weights * keep / (1 - drop[0])
    return weights @ values, weights
