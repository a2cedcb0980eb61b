"""Common functions of the kernels: rows of a program, dropout, the end of a softmax, the launch, and what a backward
pass reads of each output."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from structconv.primitives.hashing import Drop
from structconv.primitives.native.indices import Csr, narrow
from structconv.primitives.triton.splits import Parts, parts, tile

__all__ = ["Rows", "begin", "dot_rows", "drop_arguments", "end_softmax", "enter", "fold", "generator", "kept", "launch",
           "load_row", "load_rows", "mix", "raised", "recalled", "span", "step", "strides", "write_part",
           "write_softmax", "write_sums"]

_FIRST, _SECOND, _GOLDEN = tl.constexpr(0x21F0AAAD), tl.constexpr(0x735A2D97), tl.constexpr(0x1E3779B9)
_LOW = tl.constexpr(0xFFFFFFFF)


# -- on the GPU ---------------------------------------------------------------------------------------------------

@triton.jit
def span(program: tl.tensor, indptr: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor,
         LENGTH: tl.constexpr) -> Any:
    """(row, first slot, last slot + 1, whether this is the whole row): the first `parts` programs take parts of rows
    longer than LENGTH, the others a row each, those of long rows nothing. LENGTH 0: there are no long rows."""
    if LENGTH == 0:
        row = program.to(tl.int64)
        start, end, whole = tl.load(indptr + row), tl.load(indptr + row + 1), program >= 0
    else:
        part = program < parts
        row = tl.where(part, tl.load(part_row + program, mask=part, other=0), program - parts).to(tl.int64)
        first, stop = tl.load(indptr + row), tl.load(indptr + row + 1)
        whole = (program >= parts) & (stop - first <= LENGTH)
        start = tl.where(part, tl.load(part_start + program, mask=part, other=0), first)
        end = tl.where(part, tl.minimum(start + LENGTH, stop), tl.where(whole, stop, start))
    return row, start, end, whole


@triton.jit
def begin(indptr: tl.tensor, part_row: tl.tensor, part_start: tl.tensor, parts: tl.tensor, blocks: tl.tensor,
          LENGTH: tl.constexpr, HB: tl.constexpr) -> Any:
    """(program, its heads, and what `span` says of it), for `blocks` programs a row, of HB heads each."""
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, start, end, whole = span(program, indptr, part_row, part_start, parts, LENGTH)
    return program, block * HB + tl.arange(0, HB), row, start, end, whole


@triton.jit
def step(index: tl.tensor, at: tl.tensor, end: tl.tensor, BE: tl.constexpr) -> Any:
    """(slots, which of them are of the row, what the edges there join it to), BE of them."""
    slot = at + tl.arange(0, BE)
    listed = slot < end
    return slot, listed, tl.load(index + slot, mask=listed, other=0).to(tl.int64)


@triton.jit
def raised(peak: tl.tensor, score: tl.tensor) -> Any:
    """A running softmax (heads,) that meets scores (edges, heads): (the new peak, what earlier sums shrink by, the
    weights of these). All scores -inf weigh nothing and shrink nothing to NaN."""
    top = tl.maximum(peak, tl.max(score, axis=0))
    base = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.exp(peak - base), tl.exp(score - base[None, :])


@triton.jit
def recalled(score: tl.tensor, real: tl.tensor) -> tl.tensor:
    """The weights exp(score - peak - log total) of a backward pass, zero where there is no edge."""
    return tl.where(real, tl.exp(tl.where(real, score, 0.0)), 0.0)


@triton.jit
def mix(state: tl.tensor, key: tl.tensor) -> tl.tensor:
    """`structconv.primitives.hashing._mix` on uint32."""
    state = (state ^ (state >> 16)) * _FIRST
    state = state ^ key
    state = (state ^ (state >> 15)) * _SECOND
    return state ^ (state >> 15)


@triton.jit
def fold(index: tl.tensor) -> tl.tensor:
    """An int64 as 32 bits, the upper half stirred in."""
    return (index & _LOW).to(tl.uint32) ^ (((index >> 32) & _LOW).to(tl.uint32) * _FIRST)


@triton.jit
def enter(state: tl.tensor, key: tl.tensor, index: tl.tensor) -> Any:
    """Take one more index into the generator."""
    return mix(state ^ index, key), mix(key ^ index ^ _GOLDEN, state)


@triton.jit
def generator(seed: tl.tensor, head: tl.tensor, batch_heads: tl.tensor) -> Any:
    """The states of `hash_uniform(seed, head // batch_heads, head % batch_heads, .)`, one a head."""
    value = tl.load(seed)
    low, high = (value & _LOW).to(tl.uint32), ((value >> 32) & _LOW).to(tl.uint32)
    state, key = enter(mix(low, high), mix(high ^ _GOLDEN, low), (head // batch_heads).to(tl.uint32))
    return enter(state, key, (head % batch_heads).to(tl.uint32))


@triton.jit
def kept(state: tl.tensor, key: tl.tensor, pair: tl.tensor, p: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Return the factors of the weights (edges, heads): 0 with probability p, else `factor`; `pair` is m N + n."""
    random = mix(state[None, :] ^ fold(pair)[:, None], key[None, :]) >> 8
    return tl.where(random.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= p, factor, 0.0)


@triton.jit
def end_softmax(program: tl.tensor, parts: tl.tensor, row: tl.tensor, whole: tl.tensor, head: tl.tensor,
                channel: tl.tensor, heads: tl.tensor, channels: tl.tensor, peak: tl.tensor, total: tl.tensor,
                share: tl.tensor, acc: tl.tensor, acc2: tl.tensor, y: tl.tensor, y2: tl.tensor, peaks: tl.tensor,
                mass: tl.tensor, stats: tl.tensor, sums: tl.tensor, AFFINE: tl.constexpr, TRAIN: tl.constexpr,
                LENGTH: tl.constexpr) -> None:
    """The end of a row, or of a part of one."""
    if whole:
        write_softmax(row, head, channel, heads, channels, peak, total, share, acc, acc2, y, y2, peaks, mass, AFFINE,
                      TRAIN)
    elif LENGTH > 0:
        if program < parts:
            write_part(program, head, channel, heads, channels, peak, total, share, acc, acc2, stats, sums, TRAIN)


@triton.jit
def write_sums(program: tl.tensor, parts: tl.tensor, row: tl.tensor, whole: tl.tensor, head: tl.tensor,
               channel: tl.tensor, heads: tl.tensor, channels: tl.tensor, acc: tl.tensor, out: tl.tensor,
               sums: tl.tensor, LENGTH: tl.constexpr) -> None:
    """Sums (heads, channels) of a row to `out`, of a part of one to `sums`."""
    inside = (head < heads)[:, None] & (channel < channels)[None, :]
    place = (tl.where(whole, row, program.to(tl.int64)) * heads + head)[:, None] * channels + channel[None, :]
    if whole:
        tl.store(out + place, acc, mask=inside)
    elif LENGTH > 0:
        if program < parts:
            tl.store(sums + place, acc, mask=inside)


@triton.jit
def write_softmax(row: tl.tensor, head: tl.tensor, channel: tl.tensor, heads: tl.tensor, channels: tl.tensor,
                  peak: tl.tensor, total: tl.tensor, share: tl.tensor, sums: tl.tensor, sums2: tl.tensor, y: tl.tensor,
                  y2: tl.tensor, peaks: tl.tensor, mass: tl.tensor, AFFINE: tl.constexpr, TRAIN: tl.constexpr) -> None:
    """End a row: sums / total, and its peak and log total, infinite for a total of zero, which gives exact zeros."""
    empty, real = total == 0, head < heads
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    at = row * heads + head
    tl.store(peaks + at + row * heads, tl.where(peak == -float("inf"), 0.0, peak), mask=real)
    logs = tl.where(empty, float("inf"), tl.log(tl.where(empty, 1.0, total)))
    tl.store(peaks + at + (row + 1) * heads, logs, mask=real)
    if AFFINE:
        tl.store(mass + at, share * inverse, mask=real)
    place = at[:, None] * channels + channel[None, :]
    inside = real[:, None] & (channel < channels)[None, :]
    tl.store(y + place, sums * inverse[:, None], mask=inside)
    if TRAIN:
        tl.store(y2 + place, sums2 * inverse[:, None], mask=inside)


@triton.jit
def write_part(program: tl.tensor, head: tl.tensor, channel: tl.tensor, heads: tl.tensor, channels: tl.tensor,
               peak: tl.tensor, total: tl.tensor, share: tl.tensor, acc: tl.tensor, acc2: tl.tensor, stats: tl.tensor,
               sums: tl.tensor, TRAIN: tl.constexpr) -> None:
    """Store the result of a part of a long row: (peak, total, share) and its sums, not yet divided."""
    part, real = program.to(tl.int64), head < heads
    at = part * 3 * heads + head
    tl.store(stats + at, peak, mask=real)
    tl.store(stats + at + heads, total, mask=real)
    tl.store(stats + at + 2 * heads, share, mask=real)
    inside = real[:, None] & (channel < channels)[None, :]
    place = (part * (1 + TRAIN) * heads + head)[:, None] * channels + channel[None, :]
    tl.store(sums + place, acc, mask=inside)
    if TRAIN:
        tl.store(sums + place + heads * channels, acc2, mask=inside)


@triton.jit
def load_row(table: tl.tensor, row: tl.tensor, head: tl.tensor, channel: tl.tensor, heads: tl.tensor,
             channels: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor) -> tl.tensor:
    """(heads, channels) of one row, as float32."""
    inside = (head < heads)[:, None] & (channel < channels)[None, :]
    place = row * stride_row + head[:, None].to(tl.int64) * stride_head + channel[None, :]
    return tl.load(table + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_rows(table: tl.tensor, rows: tl.tensor, real: tl.tensor, head: tl.tensor, channel: tl.tensor, heads: tl.tensor,
              channels: tl.tensor, stride_row: tl.tensor, stride_head: tl.tensor) -> tl.tensor:
    """(edges, heads, channels) of the rows that are `real`, as float32; zero elsewhere."""
    inside = real[:, None, None] & (head < heads)[None, :, None] & (channel < channels)[None, None, :]
    place = rows[:, None] * stride_row + head[None, :].to(tl.int64) * stride_head
    return tl.load(table + place[:, :, None] + channel[None, None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _pack(indptr: tl.tensor, grad: tl.tensor, y: tl.tensor, y2: tl.tensor, peaks: tl.tensor, target: tl.tensor,
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
    first = packed + row * (3 + AFFINE) * heads + head
    if AFFINE:
        out2 = load_row(y2, row, head, channel, heads, channels, heads * channels, channels)
        result = tl.sum(g * out2, axis=1) - d * tl.load(mass + at, mask=real, other=0.0)
        tl.store(grad_target + at, tl.where(filled, result, 0.0), mask=real)
        tl.store(first, tl.load(target + at, mask=real, other=0.0), mask=real)
        first += heads
    tl.store(first, tl.load(peaks + at + row * heads, mask=real, other=0.0), mask=real)
    tl.store(first + heads, tl.load(peaks + at + (row + 1) * heads, mask=real, other=0.0), mask=real)
    tl.store(first + 2 * heads, d, mask=real)


# -- on the host --------------------------------------------------------------------------------------------------

class Rows:
    """A layout as the kernels read it."""

    def __init__(self, layout: Csr) -> None:
        self.indptr, self.index, self.order = (narrow(index) for index in layout)
        self.count = self.indptr.shape[0] - 1
        self.edges = self.index.shape[0]
        self.parts: Parts = parts(self.indptr)

    @property
    def programs(self) -> int:
        """Rows, and parts of long rows."""
        return self.count + self.parts.total

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Return the arguments of `span`, and the index between."""
        return self.indptr, self.index, self.parts.row, self.parts.start, self.parts.total

    def buffer(self, *sizes: int) -> Tensor:
        """Return a float32 buffer for the results of the parts."""
        return torch.empty((self.parts.total, *sizes), dtype=torch.float32, device=self.indptr.device)


def launch(kernel: Any, programs: int, warps: int, *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs on the device of the first argument."""
    if programs:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=True, **constants)


def strides(*tables: Tensor) -> list[int]:
    """Return the strides of rows and of heads."""
    return [stride for table in tables for stride in table.stride()[:2]]


def dot_rows(by_target: Csr, grad: Tensor, y: Tensor, peaks: Tensor,
             affine: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """(N, 3, K) of peaks (N, 2, K) and D; with affine = (y2, target, mass, grad target) (N, 4, K), target first.

    D is zero where an output has no edges. With `affine`, grad target = <g, y2> - D mass is written as well.
    """
    y2, target, mass, grad_target = affine or (y, peaks, peaks, peaks)
    rows, heads, channels = y.shape
    packed = peaks.new_empty((rows, 3 if affine is None else 4, heads))
    size = tile(heads, channels)
    launch(_pack, rows * size.blocks, size.warps, narrow(by_target.indptr), grad, y, y2, peaks, target, mass, packed,
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
