"""The reach of outputs: inputs beyond it need not be kept in decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

from structconv.mechanisms.expression import Mechanism, Position
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN, Mask
from structconv.mechanisms.operations import Operation
from structconv.mechanisms.samples import NORMALIZING, ZERO_PRESERVING
from structconv.mechanisms.scores import Uniform
from structconv.structures.graph import Graph
from structconv.structures.masks import And, Or
from structconv.structures.supports import Causal, Support, Window

__all__ = ["reach_of", "reads_all_inputs"]

#: A number of positions before the output's own; `None` if it is not bounded.
Reach = int | None


class _Reaches(NamedTuple):
    """The reach of an expression's pairs that exist, that are not zero, and that were normalized."""

    existing: Reach
    counting: Reach
    normalized: Reach = 0


def reach_of(mechanism: Mechanism, structure: Any) -> Reach:
    """Return how many positions before its own an output reads at most; `None` if there is no bound, or if positions
    are counted from the first input."""
    parts = [part for part in mechanism.modules() if isinstance(part, Mechanism) and not isinstance(part, Operation)]
    masks = [_support(part, structure) for part in mechanism.modules() if isinstance(part, Mask)]
    by_offset = all(part.batching in ("pairs", "offsets") for part in parts) and all(map(_by_offset, masks))
    if not by_offset or any(isinstance(part, Position) for part in mechanism.modules()):
        return None
    reaches = _reaches(mechanism, structure)
    return _longest([reaches.counting, reaches.normalized])


def reads_all_inputs(mechanism: Mechanism, structure: Any, reach: Reach) -> bool:
    """Return True if no mask hides an input from the output at the last position, whatever its number, where those
    beyond the reach are gone."""
    masks = [part for part in mechanism.modules() if isinstance(part, Mask)]
    return all(part.keeps and _keeps_all(_support(part, structure), reach) for part in masks)


def _keeps_all(support: Any, reach: Reach) -> bool:
    if isinstance(support, And):
        return _keeps_all(support.first, reach) and _keeps_all(support.second, reach)
    if isinstance(support, Window) and _by_offset(support):
        (radius, dilation), = support.axes()
        return dilation == 1 and reach is not None and radius >= reach
    return isinstance(support, Causal | None)


def _reaches(mechanism: Any, structure: Any) -> _Reaches:
    if isinstance(mechanism, Uniform):
        reach = _reach_of_support(mechanism.support)
        return _Reaches(reach, reach)
    if not isinstance(mechanism, Operation):
        return _Reaches(None, None)
    operands = [_reaches(operand, structure) for operand in mechanism.mechanisms()]
    reaches = _Reaches(*map(_longest, zip(*operands, strict=True)))
    masks = iter(mechanism._masks())
    for step in mechanism.steps:
        reaches = _after_step(reaches, step.name, next(masks) if step.name == "masked" else None, structure)
    return reaches


def _after_step(reaches: _Reaches, name: str, mask: Any, structure: Any) -> _Reaches:
    """Return the reaches after one more step; a normalization leaves zeros where pairs did not exist."""
    if name == "masked":
        reach = _reach_of_support(_support(mask, structure)) if isinstance(mask, Mask) and mask.keeps else None
        existing, counting = _shortest(reaches.existing, reach), _shortest(reaches.counting, reach)
        return reaches._replace(existing=existing, counting=counting)
    if name in NORMALIZING:
        return _Reaches(None, reaches.counting, _longest([reaches.normalized, reaches.existing]))
    if name == "map":
        return reaches._replace(counting=reaches.existing)
    return reaches if name in ZERO_PRESERVING else _Reaches(None, None, None)


def _support(mask: Mask, structure: Any) -> Any:
    if mask.mask in (STRUCTURE, STRUCTURE_IF_GIVEN):
        return structure if isinstance(structure, Support | Graph) else None
    return mask.mask


def _by_offset(support: Any) -> bool:
    """Return True if a mask depends only on the offset m - n."""
    if isinstance(support, And | Or):
        return _by_offset(support.first) and _by_offset(support.second)
    if isinstance(support, Window):
        return support.grid is None and support.center is None
    return support is None or isinstance(support, Causal)


def _reach_of_support(support: Any) -> Reach:
    """Return how many positions before the output the inputs of a mask lie at most."""
    if isinstance(support, And):
        return _shortest(_reach_of_support(support.first), _reach_of_support(support.second))
    if isinstance(support, Or):
        return _longest([_reach_of_support(support.first), _reach_of_support(support.second)])
    if isinstance(support, Window) and _by_offset(support):
        (radius, dilation), = support.axes()
        return radius * dilation
    return None


def _shortest(*reaches: Reach) -> Reach:
    known = [reach for reach in reaches if reach is not None]
    return min(known) if known else None


def _longest(reaches: Any) -> Reach:
    known = [reach for reach in reaches if reach is not None]
    return max(known) if len(known) == len(list(reaches)) else None
