"""`Prepared`: what a layer makes of x alone, kept for many calls: keys, values, the terms of additive scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv.bases.spec import tensor
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.sight import sight
from structconv.memo import Reused
from structconv.planning.precision import autocast_dtype, cast
from structconv.shapes import check_entries, check_tensor

__all__ = ["Prepared", "Rows"]


class Rows:
    """Entries that grow at the end, and may lose some at the beginning, along one axis from the end.

    Without gradients they are written in place into memory with room for as many again: O(1) an entry.
    """

    def __init__(self, entries: Tensor, axis: int) -> None:
        self._axis = axis
        self._hold(entries)

    def _hold(self, entries: Tensor) -> None:
        """Have these alone, without room for more."""
        self._held = entries
        self._view: Tensor | None = entries
        self._start, self._stop = 0, entries.shape[self._axis]

    def __len__(self) -> int:
        return self._stop - self._start

    def entries(self) -> Tensor:
        """All that are there."""
        if self._view is None:
            self._view = self._held.narrow(self._axis, self._start, len(self))
        return self._view

    def append(self, entries: Tensor) -> None:
        """Put these behind."""
        count = entries.shape[self._axis]
        if torch.is_grad_enabled() or self._held.requires_grad:  # what is there keeps its gradient
            with torch.enable_grad():
                self._hold(torch.cat([self.entries(), entries], self._axis))
            return
        if self._stop + count > self._held.shape[self._axis] or self._held.is_inference() != entries.is_inference():
            self._grow(count)
        self._held.narrow(self._axis, self._stop, count).copy_(entries)
        self._stop, self._view = self._stop + count, None

    def drop(self, count: int) -> None:
        """Forget so many of the first."""
        self._start, self._view = self._start + count, None

    def cut(self, count: int) -> None:
        """Forget all but so many of the first."""
        self._stop, self._view = self._start + count, None

    def copy(self) -> Rows:
        """The same in other memory."""
        return Rows(self.entries().clone(), self._axis)

    def reorder(self, index: Tensor) -> None:
        """Those of other samples of the batch."""
        self._hold(self.entries().index_select(0, index))

    def _grow(self, count: int) -> None:
        live = self.entries()
        shape = list(live.shape)
        shape[self._axis] = 2 * (len(self) + count)
        held = live.new_empty(shape)
        held.narrow(self._axis, 0, len(self)).copy_(live)
        self._held, self._start, self._stop = held, 0, len(self)


class Prepared:
    """x as a layer has prepared it: `layer(prepared, z)` is `layer(x, z)`, without what depends on x alone.

    Made by `Conv.prepare`; it is of that layer, and of its parameters as they were: a call says so where they have been
    changed since, unless through `.data` or in inference mode, which torch does not count.
    """

    def __init__(self, layer: Any, x: Tensor, structure: Any, sight: int | None) -> None:
        self.structure, self.layer = structure, layer
        self._sight, self._dtype = sight, autocast_dtype(x)
        self._sources = [getattr(module, name) for module in layer.mechanism.modules()
                         if isinstance(module, Mechanism) for name in module.sources]
        self._slots = [(module._parameters, name) for module in layer.modules() for name in module._parameters]
        self._mark = self._marked()
        self._made: dict[tuple[int, str], Rows] = {}
        #: What calls have in common beyond that.
        self.reused = Reused()
        #: How many of the first entries are gone, because no later output sees them.
        self.dropped = 0
        x = cast(x, self._dtype)
        self._x = Rows(x.clone(), -2)
        for key, made in self._makes(x, 0):
            self._made[key] = Rows(made, -2 if made.dim() > x.dim() else -1)

    @property
    def x(self) -> Tensor:
        """The inputs that are still there, (..., M, P)."""
        return self._x.entries()

    @property
    def length(self) -> int:
        """How many entries there were: the place of the next."""
        return self.dropped + len(self._x)

    @property
    def nbytes(self) -> int:
        """What is held, without the room for more."""
        return sum(rows.entries().nbytes for rows in (self._x, *self._made.values()))

    @property
    def heads(self) -> Tensor | None:
        """x Theta_k, or x V_k where Theta_k = V_k O_k: (..., K, M, D)."""
        rows = self._made.get(_HEADS)
        return None if rows is None else rows.entries()

    def append(self, x: Tensor) -> Prepared:
        """Put entries (..., m, P) behind, in place; what no later output sees is dropped before.

        Raises:
            ShapeError: x of other leading dimensions, channels or dtype. ConfigError: see `check`.
        """
        self.check()
        own = self.x
        check_tensor("Prepared.append", "x", x)
        check_entries("Prepared.append", x, channels=own.shape[-1])
        x = cast(x, self._dtype)
        if x.shape[:-2] != own.shape[:-2] or x.dtype != own.dtype:
            raise ShapeError("Prepared.append", f"x must be {own.dtype} of shape ({', '.join(map(str, own.shape[:-2]))}"
                             f"{', ' if own.dim() > 2 else ''}m, P={own.shape[-1]})", f"{x.dtype} {tuple(x.shape)}")
        unseen = 0 if self._sight is None else max(len(self._x) - self._sight, 0)
        made = self._makes(x, self.length)
        for rows in (self._x, *self._made.values()) if unseen else ():
            rows.drop(unseen)
        self.dropped += unseen
        self._x.append(x)
        for key, entries in made:
            self._made[key].append(entries)
        return self

    def reorder(self, index: Tensor) -> Prepared:
        """Sample b becomes what sample index[b] was, in place, (B,) integers: beams go on from those that were kept.

        Raises:
            ShapeError: x without a batch.
        """
        samples = self.x.shape[0]
        if self.x.dim() < 3:
            raise ShapeError("Prepared.reorder", "x must have shape (B, ..., M, P)", tuple(self.x.shape))
        whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() == 1
        if not whole or (index.is_cpu and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < samples):
            raise ConfigError("Prepared.reorder", f"index must be integers (B,) below {samples}", repr(index))
        for rows in (self._x, *self._made.values()):
            rows.reorder(index)
        return self

    def truncate(self, length: int) -> Prepared:
        """Forget all entries from place `length` on, in place: what a draft had put there and was not accepted.

        Raises:
            ConfigError: a length that is not there.
        """
        if type(length) is not int or not self.dropped <= length <= self.length:
            raise ConfigError("Prepared.truncate", f"length must be in [{self.dropped}, {self.length}]", length)
        for rows in (self._x, *self._made.values()):
            rows.cut(length - self.dropped)
        return self

    def copy(self) -> Prepared:
        """Another of the same layer, which goes on by itself."""
        twin = object.__new__(Prepared)
        twin.__dict__.update(self.__dict__)
        twin.reused = Reused()
        twin._x, twin._made = self._x.copy(), {key: rows.copy() for key, rows in self._made.items()}
        return twin

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepared:
        return self.copy()

    def of(self, function: Callable[[Tensor, int], Any]) -> Any:
        """What a method of a mechanism makes of each input."""
        rows = self._made.get(_key(function))
        return function(self.x, self.dropped) if rows is None else rows.entries()

    def check(self) -> None:
        """Raise `ConfigError` where it is no longer what the layer would make."""
        if self._marked() != self._mark:
            raise ConfigError("Prepared", "the layer's parameters must be those with which it was prepared",
                              "others", "Prepare x again: layer.prepare(x).")
        if autocast_dtype(self.x) != self._dtype:
            raise ConfigError("Prepared", "autocast must be as it was", f"{self._dtype or 'none'} before",
                              "Prepare x again: layer.prepare(x).")

    def check_seen(self, first: int, structure: Any) -> None:
        """Raise `ConfigError` where an output at this place, or a mask of the call, sees inputs that are gone."""
        reach = self._sight if structure is self.structure else sight(self.layer.mechanism, structure)
        if reach is None or first - reach < self.dropped:
            raise ConfigError("Prepared", "outputs must see none of the inputs that are gone", repr(self),
                              f"The first that are seen from place {first} would be from {reach} before it; of masks "
                              "that see further x is to be prepared with them.")

    def _marked(self) -> list[Any]:
        """The parameters, and how often each was changed."""
        held = [slots[name] for slots, name in self._slots]
        return [(id(p), p._version) for p in held if p is not None and not p.is_inference()]

    def _makes(self, x: Tensor, start: int) -> list[tuple[tuple[int, str], Tensor]]:
        """What the mechanisms, and Theta, make of these entries."""
        dtype = self._dtype
        made = [(_key(function), tensor(cast(function(x, start), dtype))) for function in self._sources]
        theta = cast(self.layer.weight(), dtype)
        return [*made, (_HEADS, theta.heads(x))] if theta.tensors else made

    def __repr__(self) -> str:
        gone = f", of which {self.dropped} are gone" if self.dropped else ""
        return f"Prepared({self.length} entries{gone}, {self.nbytes} bytes)"


_HEADS = (0, "heads")


def _key(function: Any) -> tuple[int, str]:
    return id(function.__self__), function.__name__
