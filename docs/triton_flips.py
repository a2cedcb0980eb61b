"""A kernel in Triton, the example of `your-own-kernel.md`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from flips import Flips
from torch import Tensor

from structconv.kernels.orders import Application
from structconv.planning import Call, Problem, register

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def reverse(r: Any, y: Any, widths: Any, K: Any, HEADS: Any, N: Any, C: Any, BN: tl.constexpr,
            BC: tl.constexpr) -> None:
    """Program (b K + k, j): BN outputs of head k. r is (B, HEADS, N, C) with HEADS = 1 or K, y is (B, K, N, C)."""
    b, k = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    n, c = tl.program_id(1) * BN + tl.arange(0, BN)[:, None], tl.arange(0, BC)[None, :]
    width = tl.load(widths + k)
    m = n // width * width + width - 1 - n % width
    inside = (n < N) & (c < C)
    rows = tl.load(r + ((b * HEADS + k % HEADS) * N + m) * C + c, mask=inside)
    tl.store(y + ((b * K + k) * N + n) * C + c, rows, mask=inside)


@torch.library.custom_op("example::reversed_blocks", mutates_args=())
def reversed_blocks(r: Tensor, widths: list[int]) -> Tensor:
    """(..., K or 1, N, C) -> (..., K, N, C)."""
    r, (heads, n, c), count = r.contiguous(), r.shape[-3:], len(widths)
    y = r.new_empty(*r.shape[:-3], count, n, c)
    if y.numel():
        grid = y.shape[:-3].numel() * count, triton.cdiv(n, 32)
        reverse[grid](r, y, torch.tensor(widths, device=r.device), count, heads, n, c, 32, triton.next_power_of_2(c))
    return y


@reversed_blocks.register_fake
def _(r: Tensor, widths: list[int]) -> Tensor:
    return r.new_empty(*r.shape[:-3], len(widths), *r.shape[-2:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    back = reversed_blocks(grad, ctx.widths)  # A_k is its own transpose
    return (back.sum(-3, keepdim=True) if ctx.heads == 1 else back), None


def _setup(ctx: Any, inputs: tuple[Tensor, list[int]], output: Tensor) -> None:
    ctx.heads, ctx.widths = inputs[0].shape[-3], inputs[1]


reversed_blocks.register_autograd(_backward, setup_context=_setup)


class TritonFlips(Flips):
    """The blocks turned around by one kernel, on a GPU or in Triton's interpreter."""

    name, before = "triton flips", ("primitives", "flips")

    def match(self, problem: Problem) -> tuple[int, ...] | None:
        return super().match(problem) if problem.x.device.type == "cuda" or INTERPRETED else None

    def application(self, match: tuple[int, ...], problem: Problem) -> Application:
        return Application(partial(_reversed, list(match)))


def _reversed(widths: list[int], r: Tensor, call: Call) -> Tensor:
    return reversed_blocks(r, widths)


register(TritonFlips())
