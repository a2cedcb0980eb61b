"""List the pairs of windows and blocks by arithmetic, in O(number of pairs).

All lengths are computed from Python sizes, never read from a tensor, so that compilers can trace the lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.primitives.sorting import numbered_by_count

__all__ = ["Pairs", "at_most", "block_count", "block_pairs", "circle_offsets", "circle_pairs", "cross_pairs",
           "near_pairs", "product_pairs", "ranges", "window_count", "window_pairs"]

Pairs = tuple[Tensor, Tensor]


def ranges(start: Tensor, count: Tensor, step: int, total: int) -> Pairs:
    """The pairs (start[n] + step i, n) for 0 <= i < count[n], ordered by n; `total` is the sum of `count`."""
    target = numbered_by_count(count, total)
    position = torch.arange(total, device=start.device) - (count.cumsum(0) - count)[target]
    return start[target] + step * position, target


def at_most(count: int, size: int) -> int:
    """The smaller of a bound and a size; the bound in a program for any size, which must not depend on this one."""
    return count if torch.compiler.is_compiling() else min(count, size)


def window_count(num_inputs: int, num_outputs: int, radius: int, dilation: int) -> int:
    """Return the number of pairs that `window_pairs` lists. O(1)."""
    def behind(size: int) -> int:  # the sum over 0 <= i <= radius of max(size - dilation i, 0)
        count = min(max(-(-size // dilation), 0), radius + 1)
        return count * size - dilation * (count * (count - 1) // 2)

    same = min(num_inputs, num_outputs)
    before = behind(num_outputs) - behind(num_outputs - num_inputs) - same
    after = behind(num_inputs) - behind(num_inputs - num_outputs) - same
    return same + max(before, 0) + max(after, 0)  # in this form exporters find that it is at least `same`


def window_pairs(num_inputs: int, num_outputs: int, radius: int, dilation: int, device: torch.device | str | None
                 ) -> Pairs:
    """The pairs (n + dilation i, n) with |i| <= radius whose input exists, ordered by n."""
    n = torch.arange(num_outputs, device=device)
    below = (n // dilation).clamp(max=radius)
    above = torch.div(num_inputs - 1 - n, dilation, rounding_mode="floor").clamp(max=radius)
    count = (below + above + 1).clamp(min=0)
    return ranges(n - dilation * below, count, dilation, window_count(num_inputs, num_outputs, radius, dilation))


def circle_offsets(size: int, radius: int, dilation: int) -> list[int]:
    """The distinct offsets dilation i mod size with |i| <= radius: a window on a periodic axis."""
    radius = min(radius, size)
    return sorted({dilation * i % size for i in range(-radius, radius + 1)}) if size else []


def circle_pairs(size: int, radius: int, dilation: int, device: torch.device | str | None) -> Pairs:
    """The window on a periodic axis: every pair (n + o mod size, n), ordered by n."""
    offsets = torch.tensor(circle_offsets(size, radius, dilation), dtype=torch.int64, device=device)
    target = torch.arange(size, device=device).unsqueeze(1).expand(size, offsets.shape[0])
    return ((target + offsets) % max(size, 1)).flatten(), target.flatten()


def product_pairs(axes: list[Pairs], shape: tuple[int, ...]) -> Pairs:
    """The pairs of points that are a pair on every axis, as row-major entries of a grid of `shape`."""
    source, target = axes[0]
    for (axis_source, axis_target), size in zip(axes[1:], shape[1:], strict=True):
        source = (source.unsqueeze(1) * size + axis_source).flatten()
        target = (target.unsqueeze(1) * size + axis_target).flatten()
    return source, target


def block_count(num_inputs: int, num_outputs: int, size: int) -> int:
    """Return the number of pairs that `block_pairs` lists: the full blocks and the last, shorter one."""
    same = min(num_inputs, num_outputs)
    full = same // size
    count = full * size * size + min(size, num_inputs - full * size) * min(size, num_outputs - full * size)
    return same + max(count - same, 0)  # in this form exporters find that it is at least `same`


def block_pairs(num_inputs: int, num_outputs: int, size: int, device: torch.device | str | None) -> Pairs:
    """The pairs (m, n) with m // size == n // size, ordered by n."""
    start = torch.arange(num_outputs, device=device) // size * size
    count = (num_inputs - start).clamp(min=0, max=size)
    return ranges(start, count, 1, block_count(num_inputs, num_outputs, size))


def cross_pairs(inputs: Tensor, outputs: Tensor, num_inputs: int, num_outputs: int) -> Pairs:
    """All pairs of one of `inputs` with any output, and of one of `outputs` with any input, each pair once."""
    others = torch.ones(num_outputs, dtype=torch.bool, device=outputs.device)
    others[outputs] = False
    left = torch.argsort(others.int(), descending=True, stable=True)[:num_outputs - outputs.shape[0]]
    every = torch.arange(num_inputs, device=inputs.device)
    source = torch.cat([every.repeat(outputs.shape[0]), inputs.repeat(left.shape[0])])
    target = torch.cat([outputs.repeat_interleave(num_inputs), left.repeat_interleave(inputs.shape[0])])
    return source, target


def near_pairs(num_inputs: int, center: Tensor, radius: int) -> Pairs:
    """The pairs (m, n) with |m - center_n| <= radius for real centers (N,), ordered by n; reads their values."""
    first = torch.ceil(center - radius).clamp(min=0)
    last = torch.floor(center + radius).clamp(max=num_inputs - 1)
    count = (last - first + 1).clamp(min=0).nan_to_num(0).long()
    return ranges(first.nan_to_num(0, posinf=0).long(), count, 1, int(count.sum()))
