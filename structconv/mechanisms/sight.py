"""How far back outputs see: what no later output sees need not be kept in decoding."""

from __future__ import annotations

from typing import Any

from structconv.mechanisms.expression import Mechanism, Position
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN, Mask
from structconv.mechanisms.operations import Operation
from structconv.mechanisms.scores import Uniform
from structconv.structures.supports import And, Causal, Or, Support, Window

__all__ = ["sight"]


def sight(mechanism: Mechanism, structure: Any) -> int | None:
    """How many places before its own an output sees at most; `None` where that is not bounded, or where something
    counts places from the first input."""
    parts = [part for part in mechanism.modules() if isinstance(part, Mechanism) and not isinstance(part, Operation)]
    masks = [_support(part, structure) for part in mechanism.modules() if isinstance(part, Mask)]
    by_offset = all(part.batching in ("pairs", "offsets") for part in parts) and all(map(_by_offset, masks))
    predicted = any(isinstance(part, Position) for part in mechanism.modules())
    return _sight(mechanism, structure) if by_offset and not predicted else None


def _sight(mechanism: Any, structure: Any) -> int | None:
    if isinstance(mechanism, Uniform):
        return _reach(mechanism.window)
    if not isinstance(mechanism, Operation):
        return None
    operands = [_sight(operand, structure) for operand in mechanism.mechanisms()]
    found = _furthest(operands) if mechanism.join == "concat" else _nearest(operands)
    kept = [mask for mask in mechanism._masks() if isinstance(mask, Mask) and mask.keeps]
    return _nearest([found, *(_reach(_support(mask, structure)) for mask in kept)])


def _support(mask: Mask, structure: Any) -> Any:
    if mask.mask in (STRUCTURE, STRUCTURE_IF_GIVEN):
        return structure if isinstance(structure, Support) else None
    return mask.mask


def _by_offset(support: Any) -> bool:
    """Whether a mask tells pairs by their offset alone."""
    if isinstance(support, And | Or):
        return _by_offset(support.first) and _by_offset(support.second)
    if isinstance(support, Window):
        return support.grid is None and support.centre is None
    return support is None or isinstance(support, Causal)


def _reach(support: Any) -> int | None:
    """How far back the inputs of a mask are at most."""
    if isinstance(support, And):
        return _nearest([_reach(support.first), _reach(support.second)])
    if isinstance(support, Or):
        return _furthest([_reach(support.first), _reach(support.second)])
    if isinstance(support, Window) and support.grid is None and support.centre is None:
        (radius, dilation), = support.axes()
        return radius * dilation
    return None


def _nearest(reaches: list[int | None]) -> int | None:
    return min((reach for reach in reaches if reach is not None), default=None)


def _furthest(reaches: list[int | None]) -> int | None:
    return None if None in reaches else max(reach for reach in reaches if reach is not None)
