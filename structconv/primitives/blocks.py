"""A computation in blocks that are computed again in the backward: the memory of one block, the results of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.functions import apply, pulled_back, transformed
from structconv.shapes import check_choice, sum_tensors

__all__ = ["recompute_blocks"]

BlockFunction = Callable[..., Tensor]
Reduce = Literal["cat", "sum"]


def recompute_blocks(fn: BlockFunction, tensors: Sequence[Tensor], blocks: Sequence[Any], *,
                     reduce: Reduce, dim: int = -2) -> Tensor:
    """Concatenate or add fn(block, *tensors) over the blocks, with the graph of one block at a time.

    The forward runs without a graph. The backward runs each block again, with the autocast state of the forward,
    and adds its gradients up. Time: one more forward; memory: inputs, result, and the intermediates of one block.

    Args:
        fn: a pure function of the block and `tensors`; random numbers depend only on a seed among them.
        tensors: the arguments of fn; gradients reach those that require one and are used.
        blocks: the first arguments of fn. If they are slices of `dim` of the result, in order and without gaps, pieces
            are written into one preallocated result; otherwise they are concatenated at the end.
        reduce: "cat" along `dim`, or "sum".
        dim: dimension of the pieces along which they are concatenated.

    Returns:
        The same numbers as one plain loop over the blocks.

    fn runs in the caller's graph, which stores its intermediates, in these cases: a single block, a compiler traces,
    functional transforms, forward derivatives, or fn reads a tensor outside of `tensors` that requires a gradient. A
    backward that is itself differentiated (create_graph=True) stores all graphs.

    Raises:
        ConfigError: there are no blocks, or `reduce` is unknown.
        ShapeError: the first piece has the length of its slice, and a later one does not.
    """
    check_choice("recompute_blocks", "reduce", reduce, ("cat", "sum"))
    if len(blocks) == 0:
        raise ConfigError("recompute_blocks", "blocks must hold at least one block", "none")
    if len(blocks) == 1:
        return fn(blocks[0], *tensors)
    traced = torch.compiler.is_compiling() or transformed(*tensors)
    first = fn(blocks[0], *[t.detach() for t in tensors]) if torch.is_grad_enabled() and not traced else None
    if traced or (first is not None and first.requires_grad):
        pieces = [fn(block, *tensors) for block in blocks]
        return torch.cat(pieces, dim) if reduce == "cat" else sum_tensors(pieces)
    return apply(_Blocks, fn, blocks, reduce, dim, [first], *tensors)


def _sum_blocks(pieces: Iterator[Tensor]) -> Tensor:
    total = next(pieces) + next(pieces)
    for piece in pieces:
        total += piece
    return total


def _cat_blocks(pieces: Iterator[Tensor], blocks: Sequence[Any], dim: int) -> tuple[Tensor, list[int]]:
    """The pieces together, and how long they are."""
    size, first = _covered(blocks), next(pieces)
    if size is None or first.shape[dim] != blocks[0].stop:
        parts = [first, *pieces]
        return torch.cat(parts, dim), [piece.shape[dim] for piece in parts]
    shape = list(first.shape)
    shape[dim] = size
    result = first.new_empty(shape)
    result.narrow(dim, 0, blocks[0].stop).copy_(first)
    del first
    for block, piece in zip(blocks[1:], pieces, strict=True):
        if piece.shape[dim] != block.stop - block.start:
            raise ShapeError("recompute_blocks", f"the piece of {block} must have that many entries in dim {dim}",
                             tuple(piece.shape))
        result.narrow(dim, block.start, piece.shape[dim]).copy_(piece)
    return result, [block.stop - (block.start or 0) for block in blocks]


def _covered(blocks: Sequence[Any]) -> int | None:
    """Last stop of slices that cover 0 .. stop one after the other, else None."""
    end = 0
    for block in blocks:
        if not isinstance(block, slice) or block.step not in (None, 1) or (block.start or 0) != end:
            return None
        if block.stop is None or block.stop < end:
            return None
        end = block.stop
    return end


class _Blocks(torch.autograd.Function):
    """Blocks without a graph in the forward, one graph at a time in the backward."""

    @staticmethod
    def forward(ctx: Any, fn: BlockFunction, blocks: Sequence[Any], reduce: Reduce, dim: int,
                first: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.fn, ctx.blocks, ctx.dim, ctx.lengths = fn, blocks, dim, None
        ctx.autocast = _autocast_state(tensors)
        ctx.save_for_backward(*tensors)
        pieces = (fn(block, *tensors) if ready is None else ready
                  for block, ready in itertools.zip_longest(blocks, _handed_over(first)))
        if reduce == "sum":
            return _sum_blocks(pieces)
        result, ctx.lengths = _cat_blocks(pieces, blocks, dim)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # a second derivative follows
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[5:]
        parts = [grad] * len(ctx.blocks) if ctx.lengths is None else grad.split(ctx.lengths, ctx.dim)
        sums: list[Tensor | None] = [None] * len(tensors)
        for block, part in zip(ctx.blocks, parts, strict=True):
            with torch.autocast(**ctx.autocast):
                result = pulled_back(partial(ctx.fn, block), tensors, needed, [part])
            sums = [_accumulate(total, new, again) for total, new in zip(sums, result, strict=True)]
        return None, None, None, None, None, *sums


def _handed_over(ready: list[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield the items of a list and remove them from it."""
    while ready:
        yield ready.pop()


def _accumulate(total: Tensor | None, new: Tensor | None, again: bool) -> Tensor | None:
    """Add, in place unless a graph is kept; the first one is copied, for autograd may hand out what it still uses."""
    if new is None:
        return total
    if total is None:
        return new.clone()
    return total + new if again else total.add_(new)


def _autocast_state(tensors: Sequence[Tensor]) -> dict[str, Any]:
    device = tensors[0].device.type if tensors else "cpu"
    return {"device_type": device, "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device), "cache_enabled": torch.is_autocast_cache_enabled()}
