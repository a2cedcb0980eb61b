"""The numbers that a backward pass reads for each output: D_n = <g_n, y_n> with lse_n, and more for affine scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.hashing import Drop
from structconv.primitives.native.indices import Csr, narrow
from structconv.primitives.triton.common import launch, load_row, strides
from structconv.primitives.triton.tiles import tile

__all__ = ["dot_rows", "drop_arguments"]


@triton.jit
def _pack(indptr: tl.tensor, grad: tl.tensor, y: tl.tensor, y2: tl.tensor, lse: tl.tensor, target: tl.tensor,
          mass: tl.tensor, packed: tl.tensor, grad_target: tl.tensor, blocks: tl.tensor, heads: tl.tensor,
          channels: tl.tensor, g_row: tl.tensor, g_head: tl.tensor, AFFINE: tl.constexpr, HB: tl.constexpr,
          BC: tl.constexpr) -> None:
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    head, channel = block * HB + tl.arange(0, HB), tl.arange(0, BC)
    real, at = head < heads, row * heads + head
    filled = tl.load(indptr + row) < tl.load(indptr + row + 1)
    g = load_row(grad, row, head, channel, heads, channels, g_row, g_head)
    out = load_row(y, row, head, channel, heads, channels, heads * channels, channels)
    d = tl.where(filled, tl.sum(g * out, axis=1), 0.0)
    first = packed + row * (2 + AFFINE) * heads + head
    if AFFINE:
        out2 = load_row(y2, row, head, channel, heads, channels, heads * channels, channels)
        result = tl.sum(g * out2, axis=1) - d * tl.load(mass + at, mask=real, other=0.0)
        tl.store(grad_target + at, tl.where(filled, result, 0.0), mask=real)
        tl.store(first, tl.load(target + at, mask=real, other=0.0), mask=real)
        first += heads
    tl.store(first, tl.load(lse + at, mask=real, other=0.0), mask=real)
    tl.store(first + heads, d, mask=real)


def dot_rows(by_target: Csr, grad: Tensor, y: Tensor, lse: Tensor,
             affine: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """(N, 2, K) of lse and D; with affine = (y2, target, mass, grad target) (N, 3, K) of target, lse and D.

    D is zero where an output has no edges. With `affine`, grad target = <g, y2> - D mass is written as well.
    """
    y2, target, mass, grad_target = affine or (y, lse, lse, lse)
    rows, heads, channels = y.shape
    packed = lse.new_empty((rows, 2 if affine is None else 3, heads))
    size = tile(heads, channels)
    launch(_pack, rows * size.blocks, size.warps, narrow(by_target.indptr), grad, y, y2, lse, target, mass, packed,
           grad_target, size.blocks, heads, channels, *strides(grad), AFFINE=affine is not None, HB=size.heads,
           BC=size.channels)
    return packed


def drop_arguments(drop: Drop, device: torch.device) -> tuple[Tensor, float, float, int, bool]:
    """Seed on the device, so that nobody waits for it; p; what a kept weight is multiplied by; heads of a batch entry;
    whether anything falls."""
    if drop.p == 0 or drop.seed is None:
        return torch.zeros((), dtype=torch.int64, device=device), 0.0, 1.0, 1, False
    seed = drop.seed.to(device, torch.int64, non_blocking=True)
    return seed, drop.p, 1.0 / (1.0 - drop.p), max(drop.batch_heads, 1), True
