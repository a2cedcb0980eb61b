"""Long windows of shifts by fast Fourier transforms."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.shift import Shift
from structconv.kernels.grid import ConvolutionWindow, GridConvolution
from structconv.planning.cost import Cost
from structconv.planning.kernel import Kernel, register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.functions import finite
from structconv.structures.grid import Grid
from structconv.weights import Depthwise, Full
from structconv.weights.base import plus

__all__ = ["Circle", "LongConvolution"]

#: Offsets below which no transform is tried, operators called around the transforms, and the share of the machine's
#: rate at which transforms run.
FEWEST, CALLS, TRANSFORM_SHARE = 64, 20, 0.03


class Circle(NamedTuple):
    """The periodic grid, of these `sizes`, on which a window of shifts is one product of transforms: the shape of the
    inputs, and the numbers of the offsets that read an input, `read`, with the flat entry of each."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    flat_offsets: tuple[int, ...]
    read: tuple[int, ...]

    @classmethod
    def of(cls, shift: Shift) -> Circle | None:
        """Return the circle for shifts without stride whose outputs are their inputs, on one grid with zero or circular
        padding; else `None`."""
        grid = shift.grid
        if not isinstance(grid, Grid) or grid.ndim > 2 or any(shift.grow) or any(s != 1 for s in shift.stride):
            return None
        if shift.padding not in ("zeros", "circular") or len(shift.offsets) < FEWEST or not grid.num_entries:
            return None
        wraps = shift.padding == "circular"
        read = tuple(k for k, offset in enumerate(shift.offsets)
                     if wraps or all(abs(o) < size for o, size in zip(offset, grid.shape, strict=True)))
        if not read:
            return None
        reach = [max(abs(shift.offsets[k][axis]) for k in read) for axis in range(grid.ndim)]
        sizes = grid.shape if wraps else tuple(_smooth(s + r) for s, r in zip(grid.shape, reach, strict=True))
        circle = Grid(sizes)
        flat_offsets = tuple(sum(o % size * step for o, size, step in zip(shift.offsets[k], sizes, circle.strides,
                                                                    strict=True)) for k in read)
        return cls(grid.shape, sizes, flat_offsets, read)


class LongConvolution(Kernel):
    """y = F^-1 (F x F Theta) for K >= 64 offsets: O(N log N) for any K, instead of K N products.

    For one or two axes, zeros or a periodic grid, stride 1, whole and depthwise Theta. Rounding errors are relative to
    the largest numbers of x. A number that is not finite would reach every output, so that such x go through torch's
    convolution."""

    name, types, orders = "transforms", (Shift,), ("by_transforms",)

    def match(self, problem: Problem) -> Circle | None:
        shift = cast(Shift, problem.basis)
        fits = isinstance(problem.theta, Full | Depthwise) and problem.x.dtype in (
            torch.float32, torch.float64) and not problem.sizes.nominal
        return Circle.of(shift) if fits and ConvolutionWindow.of(shift) is not None else None

    def cost(self, match: Circle, problem: Problem, path: str) -> Cost:
        theta, points = problem.theta, math.prod(match.sizes)
        pairs = theta.out_channels * (theta.in_channels if isinstance(theta, Full) else 1)
        one, batch = 2.5 * points * math.log2(points + 1), problem.sizes.batch
        transforms = one * (batch * (theta.in_channels + theta.out_channels) + pairs)
        products = 4 * batch * points * pairs
        moved = 8 * problem.sizes.itemsize * points * (batch * (theta.in_channels + theta.out_channels) + pairs)
        once = Cost(transforms + products, moved, wasted=transforms * (1 / TRANSFORM_SHARE - 1), calls=CALLS)
        return once.repeated(1 + problem.x_grad + problem.theta_grad) + Cost(peak_bytes=moved)

    def compile(self, match: Circle, problem: Problem, path: str) -> Run:
        direct = GridConvolution()
        window = direct.match(problem)
        assert window is not None, "a circle is of a window"
        otherwise = direct.compile(window, problem, "operator_first")

        def run(call: Call) -> Tensor:
            return _transformed(match, call) if finite(call.x) else otherwise(call)

        return run


def _transformed(circle: Circle, call: Call) -> Tensor:
    theta = call.theta
    whole = isinstance(theta, Full)
    window: Tensor = theta.theta if whole else theta.depthwise  # type: ignore[attr-defined]
    axes = len(circle.shape)
    x = call.x.unflatten(-2, circle.shape)
    over = tuple(range(-1 - axes, -1))
    spectrum = torch.fft.rfftn(x, circle.sizes, over)
    flat_offsets = torch.tensor(circle.flat_offsets, device=window.device)
    own = window if len(circle.read) == window.shape[0] else window[list(circle.read)]
    taps = window.new_zeros(math.prod(circle.sizes), *window.shape[1:]).index_add(0, flat_offsets, own)
    response = torch.fft.rfftn(taps.unflatten(0, circle.sizes), None, tuple(range(axes)))
    if whole:
        lead = spectrum.shape[:-1 - axes]
        by_frequency = spectrum.reshape(math.prod(lead), -1, window.shape[1]).transpose(0, 1)
        y = (by_frequency @ response.flatten(0, -3)).transpose(0, 1).reshape(*lead, *response.shape[:-2], -1)
    else:
        y = (spectrum.unsqueeze(-1) * response).flatten(-2)
    y = torch.fft.irfftn(y, circle.sizes, over)
    for axis, size in zip(over, circle.shape, strict=True):
        y = y.narrow(axis, 0, size)
    return plus(y.flatten(-1 - axes, -2), call.bias)


def _smooth(least: int) -> int:
    """The smallest number from `least` on without prime factors above 5, which transforms are fast for."""
    size = max(least, 1)
    while True:
        left = size
        for prime in (2, 3, 5):
            while left % prime == 0:
                left //= prime
        if left == 1:
            return size
        size += 1


register(LongConvolution())
