"""Shift sets that are no cuboid: products of slices on a common frame, or a window filled up with zeros."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from structconv.bases.base import Basis
from structconv.bases.shift import Shift
from structconv.kernels.grid import GridConvolution
from structconv.memo import derived
from structconv.planning.cost import Cost
from structconv.planning.rules import Problem, Rule, rule
from structconv.primitives.shifted import shift_products
from structconv.structures.grid import Grid
from structconv.theta import FullTheta, Theta


class Frame(NamedTuple):
    """Inputs and outputs laid out on one grid, on which every offset is one shift of the flat numbering.

    Args:
        before, after: what is added to the input at the two ends of each axis.
        shape: the input's size on each axis, with what is added; output n lies at n, and only the first axis may
            hold more outputs, or fewer, than this.
        outputs: the output grid's size on each axis.
        shifts: for each k, what the flat position that an output reads is ahead of its own.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    shape: tuple[int, ...]
    outputs: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The size on each axis of what is computed."""
        return self.outputs[0], *self.shape[1:]


def frame(shift: Shift) -> Frame:
    """The smallest frame on which no flat shift takes a row for another. O(K L) once a grid, remembered."""
    key = ("frame", shift.offsets, shift.padding, shift.grow)
    return derived(shift.grid, key, lambda: _frame(shift))


def _frame(shift: Shift) -> Frame:
    """Zeros need one gap between rows of an axis, as wide as the farthest offset, and none on the first axis, whose
    two ends are those of the flat numbering; any other padding needs what lies beyond both ends."""
    layout: list[tuple[int, int, int, int]] = []
    zeros = shift.padding in ("zeros", "none")
    axes = zip(cast(Grid, shift.grid).shape, shift.grow, zip(*shift.starts, strict=True), strict=True)
    for axis, (size, grow, starts) in enumerate(axes):
        out = max(size + grow, 0)
        low, high = max(0, -min(starts)), max(0, out + max(starts) - size)
        if zeros:
            low, high = 0, max(size + max(low, high), out) - size if axis else 0
        layout.append((low, high, size + low + high, out))
    before, after, shape, outputs = zip(*layout, strict=True)
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    shifts = tuple(sum((s + low) * step for s, low, step in zip(start, before, strides, strict=True))
                   for start in shift.starts)
    return Frame(before, after, shape, outputs, shifts)


@rule(Shift, "per_shift", kernel="products of slices")
class SliceProducts(Rule):
    """y = sum over k of one product with Theta_k, of a slice of x and into a slice of y; no row is gathered.

    For stride 1, on grids of any number of axes, with every padding. torch's convolution keeps the cuboids.
    """

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        shift = cast(Shift, basis)
        return (_unstrided(shift) and not GridConvolution().applies(basis, theta, x)
                and shift.num_inputs > 0 and shift.num_outputs > 0)

    def cost(self, problem: Problem) -> Cost:
        shift, theta = cast(Shift, problem.basis), problem.theta
        made = frame(shift)
        rows = math.prod(made.rows)
        passes = 1 + problem.x_grad + problem.theta_grad
        products = Cost(2 * problem.sizes.batch * rows * theta.size * theta.in_channels * theta.out_channels,
                        problem.bytes(rows * (theta.in_channels + theta.size * theta.out_channels))).repeated(passes)
        laid = rows * theta.in_channels if any(made.before) or any(made.after) else 0
        cut = rows * theta.out_channels if made.rows != made.outputs else 0
        copies = Cost(bytes=problem.bytes(2 * (laid + cut))).repeated(1 + problem.x_grad)
        return products + copies + Cost(peak_bytes=problem.bytes(laid + cut))

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        shift = cast(Shift, basis)
        made, ndim = frame(shift), cast(Grid, shift.grid).ndim
        lead = x.shape[:-2]
        image = _laid(x.reshape(math.prod(lead), *cast(Grid, shift.grid).shape, x.shape[-1]), shift.padding, made)
        weight = theta.dense().to(dtype=x.dtype, device=x.device)
        y = shift_products(image.flatten(1, ndim), weight, made.shifts, math.prod(made.rows)).unflatten(1, made.rows)
        for axis, size in enumerate(made.outputs):
            y = y.narrow(axis + 1, 0, size)
        return y.reshape(*lead, math.prod(made.outputs), y.shape[-1])


@rule(Shift, "operator_first", kernel="zero-filled window")
class ZeroFilledWindow(Rule):
    """The smallest cuboid that holds the offsets, by torch's convolution, with zeros for Theta where there is none.

    It multiplies by those zeros, so that a NaN of x reaches outputs that do not read it; hence only on request.
    """

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        shift, conv = cast(Shift, basis), GridConvolution()
        if not isinstance(shift.grid, Grid) or conv.applies(basis, theta, x):
            return False
        return conv.applies(_window(shift)[0], theta, x)

    def unasked(self, problem: Problem) -> bool:
        return False

    def cost(self, problem: Problem) -> Cost:
        window, _ = _window(cast(Shift, problem.basis))
        theta = problem.theta
        filled = FullTheta(problem.x.new_empty((window.size, theta.in_channels, theta.out_channels), device="meta"))
        return GridConvolution().cost(dataclasses.replace(problem, basis=window, theta=filled))

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        window, places = _window(cast(Shift, basis))
        weight = theta.dense().to(dtype=x.dtype, device=x.device)
        filled = weight.new_zeros(window.size, *weight.shape[1:])
        filled = filled.index_add(0, torch.tensor(places, device=x.device), weight)
        return GridConvolution().run(x, window, FullTheta(filled))


def _unstrided(shift: Shift) -> bool:
    return isinstance(shift.grid, Grid) and all(step == 1 for step in shift.stride)


def _window(shift: Shift) -> tuple[Shift, list[int]]:
    """The cuboid around the offsets, as coarse as they allow, and where each of them stands in it."""
    axes = []
    for axis in zip(*shift.offsets, strict=True):
        step = reduce(math.gcd, (number - min(axis) for number in axis))
        axes.append(range(min(axis), max(axis) + 1, max(step, 1)))
    places = [reduce(lambda at, pair: at * len(pair[0]) + pair[0].index(pair[1]), zip(axes, offset, strict=True), 0)
              for offset in shift.offsets]
    offsets = tuple(itertools.product(*axes))
    return Shift(shift.grid, offsets, shift.padding, shift.stride, shift.grow, shift.device), places


def _laid(image: Tensor, padding: str, made: Frame) -> Tensor:
    """(B, S..., P) on its frame."""
    if padding in ("zeros", "none"):
        amounts = [n for ends in zip(reversed(made.before), reversed(made.after), strict=True) for n in ends]
        return functional.pad(image, (0, 0, *amounts)) if any(amounts) else image
    for axis, (low, high) in enumerate(zip(made.before, made.after, strict=True)):
        if low or high:
            size = image.shape[axis + 1]
            image = image.index_select(axis + 1, _positions(size, low, high, padding, image.device))
    return image


def _positions(size: int, low: int, high: int, padding: str, device: torch.device) -> Tensor:
    """Which entries an axis and what lies beyond its ends are."""
    at = torch.arange(-low, size + high, device=device)
    if padding == "circular":
        return at % size
    if padding == "replicate":
        return at.clamp(0, size - 1)
    at = at % max(2 * (size - 1), 1)
    return torch.where(at < size, at, 2 * (size - 1) - at)
