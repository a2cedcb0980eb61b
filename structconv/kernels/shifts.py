"""Sets of shifts that are not a cuboid: products of slices on a common frame."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from torch import Tensor
from torch.nn import functional

from structconv.bases.shift import Shift, axis_positions
from structconv.derived import derived
from structconv.kernels.grid import ConvolutionWindow
from structconv.planning.cost import Cost
from structconv.planning.kernel import Kernel, register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.shifted import shift_products
from structconv.structures.grid import Grid

__all__ = ["Frame", "SliceProducts", "frame"]


class Frame(NamedTuple):
    """The padded grid on which each offset is one shift of the flat index.

    Fields: padding before and after each axis; the sizes of the padded input and of the outputs; for each k the index
    that an output reads minus its own. Only the first axis may have a different number of outputs.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    shape: tuple[int, ...]
    outputs: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The size of the computed result on each axis."""
        return self.outputs[0], *self.shape[1:]


def frame(shift: Shift) -> Frame:
    """The smallest frame on which no flat shift takes a row for another. O(K L) once a grid, remembered."""
    key = ("frame", shift.offsets, shift.padding, shift.grow)
    return derived(shift.grid, key, lambda: _frame(shift))


def _frame(shift: Shift) -> Frame:
    """Zeros need one gap between rows of an axis, as wide as the farthest offset, and none on the first axis, whose
    two ends are those of the flat numbering; any other padding needs the entries beyond both ends."""
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


class SliceProducts(Kernel):
    """y = sum over k of one product with Theta_k, of a slice of x and into a slice of y; no row is gathered. For stride
    1, on grids of any number of axes, with every padding. torch's convolution keeps the cuboids."""

    name, types, orders = "structconv.slices", (Shift,), ("per_shift",)

    def match(self, problem: Problem) -> Frame | None:
        shift = cast(Shift, problem.basis)
        unstrided = isinstance(shift.grid, Grid) and all(step == 1 for step in shift.stride)
        fits = unstrided and shift.num_inputs > 0 and shift.num_outputs > 0
        return frame(shift) if fits and ConvolutionWindow.of(shift) is None else None

    def cost(self, match: Frame, problem: Problem, path: str) -> Cost:
        theta, rows = problem.theta, math.prod(match.rows)
        passes = 1 + problem.x_grad + problem.theta_grad
        products = Cost(2 * problem.sizes.batch * rows * theta.size * theta.in_channels * theta.out_channels,
                        problem.bytes(rows * (theta.in_channels + theta.size * theta.out_channels))).repeated(passes)
        laid = rows * theta.in_channels if any(match.before) or any(match.after) else 0
        cut = rows * theta.out_channels if match.rows != match.outputs else 0
        copies = Cost(bytes=problem.bytes(2 * (laid + cut))).repeated(1 + problem.x_grad)
        return products + copies + Cost(peak_bytes=problem.bytes(laid + cut))

    def compile(self, match: Frame, problem: Problem, path: str) -> Run:
        shift = cast(Shift, problem.basis)
        shape, padding = cast(Grid, shift.grid).shape, shift.padding

        def run(call: Call) -> Tensor:
            x = call.x
            lead = x.shape[:-2]
            image = _laid(x.reshape(math.prod(lead), *shape, x.shape[-1]), padding, match)
            weight = call.theta.dense().to(dtype=x.dtype, device=x.device)
            y = shift_products(image.flatten(1, len(shape)), weight, match.shifts, math.prod(match.rows))
            y = y.unflatten(1, match.rows)
            for axis, size in enumerate(match.outputs):
                y = y.narrow(axis + 1, 0, size)
            y = y.reshape(*lead, math.prod(match.outputs), y.shape[-1])
            return y if call.bias is None else y + call.bias

        return run


def _laid(image: Tensor, padding: str, frame: Frame) -> Tensor:
    """(B, S..., P) with the padding of its frame."""
    if padding in ("zeros", "none"):
        amounts = [n for ends in zip(reversed(frame.before), reversed(frame.after), strict=True) for n in ends]
        return functional.pad(image, (0, 0, *amounts)) if any(amounts) else image
    for axis, (low, high) in enumerate(zip(frame.before, frame.after, strict=True)):
        if low or high:
            size = image.shape[axis + 1]
            positions, = axis_positions(size, low + size + high, 1, (-low,), padding, image.device)
            image = image.index_select(axis + 1, positions)
    return image


register(SliceProducts())
