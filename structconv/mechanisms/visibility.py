"""Visibility: the inputs that a call with masks reads, as values and in scores.

An input that no output can reach may hold anything, NaN included, so it is cleared before it is multiplied. Masks are
local: a mask hides inputs from the scores below it, up to the next normalization, and from the values only where the
weights that it leaves are zero. An input may therefore be cleared for the values and still be read by a score: in
`a.softmax().masked(keep=mask)` the softmax runs over all inputs.

A set of inputs is represented by the frozenset of masks that they all pass; the empty set means all inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.errors import StructureError

__all__ = ["EVERY_INPUT", "InputSet", "Masks", "Visibility", "visibility"]

InputSet = frozenset[int]
EVERY_INPUT: InputSet = frozenset()


class Masks:
    """The masks of one call, each as booleans (..., M, N or 1), evaluated once."""

    def __init__(self) -> None:
        self._masks: dict[int, Tensor | None] = {}
        self._joined: dict[InputSet, Tensor] = {}
        self._unions: dict[frozenset[InputSet], InputSet] = {}

    def keeps(self, mask: Any, inputs: Any) -> InputSet:
        """The inputs that a `Mask` keeps for some output."""
        key = id(mask)
        if key not in self._masks:
            self._masks[key] = mask.pairs(inputs)
        return EVERY_INPUT if self._masks[key] is None else frozenset((key,))

    def any(self, sets: Iterable[InputSet]) -> InputSet:
        """The inputs in at least one of the sets."""
        result = frozenset(sets)
        if len(result) == 1 or EVERY_INPUT in result:
            return EVERY_INPUT if EVERY_INPUT in result else next(iter(result))
        if result not in self._unions:
            union = torch.stack(torch.broadcast_tensors(*[self._tensor(own) for own in result])).any(0)
            key = -1 - len(self._masks)
            self._masks[key], self._unions[result] = union.unsqueeze(-1), frozenset((key,))
        return self._unions[result]

    def whatever_output(self, inputs: InputSet) -> InputSet:
        """The inputs in the set, of pairs with other outputs: before a composition."""
        if inputs != EVERY_INPUT and (one := frozenset((inputs,))) not in self._unions:
            key = -1 - len(self._masks)
            self._masks[key], self._unions[one] = self._tensor(inputs).unsqueeze(-1), frozenset((key,))
        return inputs if inputs == EVERY_INPUT else self._unions[one]

    def tensor(self, inputs: InputSet) -> Tensor | None:
        """The set as booleans (..., M); `None` for all inputs."""
        return None if inputs == EVERY_INPUT else self._tensor(inputs)

    def _tensor(self, inputs: InputSet) -> Tensor:
        if inputs not in self._joined:
            tables: list[Any] = [self._masks[key] for key in sorted(inputs)]
            self._joined[inputs] = functools.reduce(torch.logical_and, tables).any(-1)
        return self._joined[inputs]


class Visibility(NamedTuple):
    """The inputs that count as values, and those that the mechanism reads: booleans (..., M), or `None` for all."""

    values: Tensor | None
    scores: Tensor | None

    def cleared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., M, P) with zeros in the place of what does not count: for the values, and for the scores."""
        values = _cleared(x, self.values)
        return values, values if self.scores is self.values else _cleared(x, self.scores)

    def outputs(self, x: Tensor) -> Tensor:
        """x as the content of outputs: an input that no score reads is still an output, unless it is not finite."""
        if self.scores is None:
            return x
        visible = self.scores.unsqueeze(-1) | x.isfinite().all(-1, keepdim=True)
        return torch.where(visible, x, torch.zeros((), dtype=x.dtype, device=x.device))


def visibility(mechanism: Any, inputs: Any) -> Visibility:
    """Return the visible inputs (..., M) of a call, by the masks of the expression.

    Raises:
        StructureError: a mask has a number of inputs other than M.
    """
    masks = Masks()
    _, reached = mechanism._visible_inputs(inputs, masks)
    needed = mechanism._needed_inputs(inputs, masks, EVERY_INPUT)
    values, scores = masks.tensor(reached), masks.tensor(masks.any(needed) if needed else reached)
    for visible in (values, scores):
        if visible is not None and visible.shape[-1] != inputs.num_inputs:
            raise StructureError("masked", f"masks must have length M={inputs.num_inputs}", visible.shape[-1])
    return Visibility(values, scores)


def _cleared(x: Tensor, visible: Tensor | None) -> Tensor:
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return x if visible is None else torch.where(visible.unsqueeze(-1), x, zero)
