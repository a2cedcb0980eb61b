"""How far back outputs see: what no later output sees need not be kept in decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

from structconv.mechanisms.expression import Mechanism, Position
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN, Mask
from structconv.mechanisms.operations import Operation
from structconv.mechanisms.samples import NORMALISING
from structconv.mechanisms.scores import Uniform
from structconv.structures.graph import Graph
from structconv.structures.masks import And, Or
from structconv.structures.supports import Causal, Support, Window

__all__ = ["sees_all", "sight"]

#: Places before its own; `None` where it is not bounded.
Reach = int | None
#: Steps that leave a zero zero, and no other pair there.
_PLAIN = frozenset(("multiply", "scaled", "softcap", "leaky_relu", "dropout", "mix"))


class _Seen(NamedTuple):
    """Of an expression: where its pairs exist, where they are not zero, and where those are that were normalised."""

    existing: Reach
    counting: Reach
    normalised: Reach = 0


def sight(mechanism: Mechanism, structure: Any) -> Reach:
    """How many places before its own an output sees at most; `None` where that is not bounded, or where something
    counts places from the first input."""
    parts = [part for part in mechanism.modules() if isinstance(part, Mechanism) and not isinstance(part, Operation)]
    masks = [_support(part, structure) for part in mechanism.modules() if isinstance(part, Mask)]
    by_offset = all(part.batching in ("pairs", "offsets") for part in parts) and all(map(_by_offset, masks))
    if not by_offset or any(isinstance(part, Position) for part in mechanism.modules()):
        return None
    seen = _seen(mechanism, structure)
    return _furthest([seen.counting, seen.normalised])


def sees_all(mechanism: Mechanism, structure: Any) -> bool:
    """Whether no mask leaves anything out for an output at the last place, wherever that is."""
    masks = [part for part in mechanism.modules() if isinstance(part, Mask)]
    return all(part.keeps and isinstance(_support(part, structure), Causal | None) for part in masks)


def _seen(mechanism: Any, structure: Any) -> _Seen:
    if isinstance(mechanism, Uniform):
        return _Seen(_reach(mechanism.window), _reach(mechanism.window))
    if not isinstance(mechanism, Operation):
        return _Seen(None, None)
    seen = _Seen(*map(_furthest, zip(*(_seen(operand, structure) for operand in mechanism.mechanisms()), strict=True)))
    masks = iter(mechanism._masks())
    for step in mechanism.steps:
        seen = _behind(seen, step.name, next(masks) if step.name == "masked" else None, structure)
    return seen


def _behind(seen: _Seen, name: str, mask: Any, structure: Any) -> _Seen:
    """The same behind one more step; a normalisation leaves zeros where pairs did not exist."""
    if name == "masked":
        reach = _reach(_support(mask, structure)) if isinstance(mask, Mask) and mask.keeps else None
        return seen._replace(existing=_nearest(seen.existing, reach), counting=_nearest(seen.counting, reach))
    if name in NORMALISING:
        return _Seen(None, seen.counting, _furthest([seen.normalised, seen.existing]))
    if name == "map":
        return seen._replace(counting=seen.existing)
    return seen if name in _PLAIN else _Seen(None, None, None)


def _support(mask: Mask, structure: Any) -> Any:
    if mask.mask in (STRUCTURE, STRUCTURE_IF_GIVEN):
        return structure if isinstance(structure, Support | Graph) else None
    return mask.mask


def _by_offset(support: Any) -> bool:
    """Whether a mask tells pairs by their offset alone."""
    if isinstance(support, And | Or):
        return _by_offset(support.first) and _by_offset(support.second)
    if isinstance(support, Window):
        return support.grid is None and support.centre is None
    return support is None or isinstance(support, Causal)


def _reach(support: Any) -> Reach:
    """How far back the inputs of a mask are at most."""
    if isinstance(support, And):
        return _nearest(_reach(support.first), _reach(support.second))
    if isinstance(support, Or):
        return _furthest([_reach(support.first), _reach(support.second)])
    if isinstance(support, Window) and support.grid is None and support.centre is None:
        (radius, dilation), = support.axes()
        return radius * dilation
    return None


def _nearest(*reaches: Reach) -> Reach:
    known = [reach for reach in reaches if reach is not None]
    return min(known) if known else None


def _furthest(reaches: Any) -> Reach:
    known = [reach for reach in reaches if reach is not None]
    return max(known) if len(known) == len(list(reaches)) else None
