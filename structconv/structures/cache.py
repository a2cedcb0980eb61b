"""`derived`: what is computed from a frozen structure is computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

_MEMOS: Any = WeakIdKeyDictionary()


def derived(owner: object, key: Hashable, build: Callable[[], T]) -> T:
    """`build()`, remembered under `key` for as long as `owner` lives.

    The owner is a structure (a frozen dataclass) or one of its tensors, and is known by identity. A tensor as owner
    shares the memo among all the structures that hold it: the sorted layout of an edge list serves any edge weights.

    Nothing is remembered while `torch.compile` or `torch.export` trace, nor when a tensor of the owner requires a
    gradient or is a tracer's stand-in; and what was remembered is built again once a tensor of the owner was changed
    in place. The value must not hold its owner, else neither would ever be freed. O(1) when remembered.
    """
    if torch.compiler.is_compiling():
        return build()
    tensors = _tensors(owner)
    if any(t.requires_grad or not is_plain(t) for t in tensors):
        return build()
    versions = tuple(0 if t.is_inference() else t._version for t in tensors)
    memo = _MEMOS.setdefault(owner, {})
    known = memo.get(key)
    if known is None or known[0] != versions:
        known = memo[key] = (versions, build())
    return cast(T, known[1])


def is_plain(value: object) -> bool:
    """Whether `value` is a tensor with values that Python may read: no tracer's stand-in, not on the meta device."""
    return type(value) is Tensor and not value.is_meta and not torch.compiler.is_compiling()


def _tensors(owner: object) -> list[Tensor]:
    """The tensors that `owner` is or holds, through nested structures and tuples."""
    if isinstance(owner, Tensor):
        return [owner]
    if isinstance(owner, tuple):
        return [tensor for item in owner for tensor in _tensors(item)]
    if dataclasses.is_dataclass(owner):
        return [tensor for f in dataclasses.fields(owner) for tensor in _tensors(getattr(owner, f.name))]
    return []
