"""Visibility: the inputs that a call with masks reads, as values and in scores.

An input that no output can reach may hold anything, NaN included, so it is cleared before it is multiplied. Masks are
local: a mask hides inputs from the scores below it, up to the next normalization, and from the values only where the
weights that it leaves are zero. An input may therefore be cleared for the values and still be read by a score: in
`a.softmax().masked(keep=mask)` the softmax runs over all inputs.

An input may also be left out of every pair by a graph, a window or an order. Kernels do not read its weight, but the
gradient of a projection multiplies it by zero, and zero times NaN is NaN. Such inputs are looked for only if x holds a
number that is not finite (`cleared_by_pairs`).

A set of inputs is represented by the frozenset of masks that they all pass; the empty set means all inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.errors import StructureError
from structconv.primitives.functions import finite

__all__ = ["BY_INPUTS", "BY_PAIRS", "EVERY_INPUT", "InputSet", "Masks", "Visibility", "cleared_by_pairs", "visibility"]

#: How masks may hide an input, as bits: they list inputs; their pairs leave an input out.
BY_INPUTS, BY_PAIRS = 1, 2

InputSet = frozenset[int]
EVERY_INPUT: InputSet = frozenset()


class Masks:
    """The masks of one call, each as booleans (..., M, N or 1), evaluated once; with `all_pairs` those of pairs too."""

    def __init__(self, all_pairs: bool = False) -> None:
        self._all_pairs = all_pairs
        self._masks: dict[int, Tensor | None] = {}
        self._joined: dict[InputSet, Tensor] = {}
        self._unions: dict[frozenset[InputSet], InputSet] = {}

    def keeps(self, mask: Any, inputs: Any) -> InputSet:
        """The inputs that a `Mask` keeps for some output."""
        key = id(mask)
        if key not in self._masks:
            self._masks[key] = mask.reached(inputs) if self._all_pairs else mask.pairs(inputs)
        return EVERY_INPUT if self._masks[key] is None else frozenset((key,))

    def any(self, sets: Iterable[InputSet]) -> InputSet:
        """The inputs in at least one of the sets."""
        different = frozenset(sets)
        if EVERY_INPUT in different:
            return EVERY_INPUT
        return next(iter(different)) if len(different) == 1 else self._union(different)

    def for_any_output(self, inputs: InputSet) -> InputSet:
        """The inputs in the set, in pairs with any output: before a composition, whose outputs are others."""
        return inputs if inputs == EVERY_INPUT else self._union(frozenset((inputs,)))

    def _union(self, sets: frozenset[InputSet]) -> InputSet:
        """The union as the inputs of one more mask."""
        if sets not in self._unions:
            union = torch.stack(torch.broadcast_tensors(*[self._tensor(inputs) for inputs in sets])).any(0)
            key = -1 - len(self._masks)
            self._masks[key], self._unions[sets] = union.unsqueeze(-1), frozenset((key,))
        return self._unions[sets]

    def tensor(self, inputs: InputSet) -> Tensor | None:
        """The set as booleans (..., M); `None` for all inputs."""
        return None if inputs == EVERY_INPUT else self._tensor(inputs)

    def _tensor(self, inputs: InputSet) -> Tensor:
        if inputs not in self._joined:
            tables: list[Any] = [self._masks[key] for key in sorted(inputs)]
            self._joined[inputs] = functools.reduce(torch.logical_and, tables).any(-1)
        return self._joined[inputs]


class Visibility(NamedTuple):
    """The inputs that are read as values, and those that scores read: booleans (..., M), or `None` for all."""

    values: Tensor | None
    scores: Tensor | None

    def cleared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., M, P) with zeros in place of other inputs: for the values, and for the scores."""
        values = _cleared(x, self.values)
        return values, values if self.scores is self.values else _cleared(x, self.scores)

    def outputs(self, x: Tensor) -> Tensor:
        """x as the content of outputs: an input that no score reads is still an output, unless it is not finite."""
        if self.scores is None:
            return x
        visible = self.scores.unsqueeze(-1) | x.isfinite().all(-1, keepdim=True)
        return torch.where(visible, x, torch.zeros((), dtype=x.dtype, device=x.device))


def visibility(mechanism: Any, inputs: Any, all_pairs: bool = False) -> Visibility:
    """The visible inputs (..., M) of a call, by the masks of the expression; with `all_pairs` also by their pairs,
    which costs a pass over these."""
    masks = Masks(all_pairs)
    _, reached = mechanism._visible_inputs(inputs, masks)
    needed = mechanism._needed_inputs(inputs, masks, EVERY_INPUT)
    values, scores = masks.tensor(reached), masks.tensor(masks.any(needed) if needed else reached)
    for visible in (values, scores):
        if visible is not None and visible.shape[-1] != inputs.num_inputs:
            raise StructureError("masked", f"masks must have length M={inputs.num_inputs}", visible.shape[-1])
    return Visibility(values, scores)


def cleared_by_pairs(mechanism: Any, inputs: Any, values: Tensor) -> tuple[Tensor, Tensor]:
    """x as the values and as the scores read it, with zeros in the place of inputs that are in no pair."""
    if finite(inputs.x):
        return values, inputs.x
    visible = visibility(mechanism, inputs, all_pairs=True)
    if values is inputs.x:
        return visible.cleared(values)
    return _cleared(values, visible.values), _cleared(inputs.x, visible.scores)


def _cleared(x: Tensor, visible: Tensor | None) -> Tensor:
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return x if visible is None else torch.where(visible.unsqueeze(-1), x, zero)
