"""`Cache`: the results that depend only on x, stored for many calls: keys, values, the terms of additive scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from structconv import torch_compat as private
from structconv.bases.tree import Shared, tensor
from structconv.derived import Reused
from structconv.errors import ConfigError, ShapeError, StructureError, text_of
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.masks import Mask
from structconv.mechanisms.reach import reach_of, reads_all_inputs
from structconv.planning.plan import Plan, plans_version
from structconv.planning.precision import autocast_dtype, cast
from structconv.planning.problem import BoundRun, Call
from structconv.shapes import check_alike, check_entries, check_tensor
from structconv.structures.graph import Graph
from structconv.structures.output_positions import OutputPositions
from structconv.structures.supports import DenseMask, Padding, Window
from structconv.structures.values import FrozenValue, altered, field_names, fields
from structconv.weights import Weight

__all__ = ["Cache"]

#: (x (..., M, P), position of the first) -> the results of each entry, a leaf.
Make = Callable[[Tensor, int], Any]


class GrowingTensor:
    """Rows along one axis, counted from the end: new ones come at the end, old ones are dropped at the beginning.

    Without gradients they are written in place into `storage`, which has room for as many again: O(1) a row.
    """

    def __init__(self, rows: Tensor, axis: int) -> None:
        self._axis = axis
        self._replace(rows)

    def _replace(self, entries: Tensor) -> None:
        self.storage, self._inference = entries, entries.is_inference()
        self._view: Tensor | None = entries
        self._start, self._stop = 0, entries.shape[self._axis]

    def __len__(self) -> int:
        return self._stop - self._start

    def entries(self) -> Tensor:
        """All rows."""
        if self._view is None:
            self._view = self.storage.narrow(self._axis, self._start, len(self))
        return self._view

    @property
    def concatenates(self) -> bool:
        """True if appending makes a new tensor, through which gradients pass."""
        return torch.is_grad_enabled() or self.storage.requires_grad

    def append(self, entries: Tensor) -> None:
        if self.concatenates:
            with torch.enable_grad():
                self._replace(torch.cat([self.entries(), entries], self._axis))
            return
        self.reserve(entries.shape[self._axis])
        self.fill(entries)

    def reserve(self, count: int) -> None:
        """Append `count` rows whose numbers are written later, by `fill`."""
        if self._stop + count > self.storage.shape[self._axis] or self._inference != torch.is_inference_mode_enabled():
            self._grow(count)
        self._stop, self._view = self._stop + count, None

    def fill(self, entries: Tensor) -> None:
        """Write the last rows."""
        count = entries.shape[self._axis]
        self.storage.narrow(self._axis, self._stop - count, count).copy_(entries)

    def drop(self, count: int) -> None:
        """Remove the first `count` rows."""
        self._start, self._view = self._start + count, None

    def cut(self, count: int) -> None:
        """Remove all rows after the first `count`."""
        self._stop, self._view = self._start + count, None

    def copy(self) -> GrowingTensor:
        return GrowingTensor(self.entries().clone(), self._axis)

    def reorder(self, index: Tensor) -> None:
        """Give sample b of the batch the rows of sample index[b]; the reserved room stays."""
        self.storage, self._view = self.storage.index_select(0, index), None
        self._inference = self.storage.is_inference()

    def _grow(self, count: int) -> None:
        live = self.entries()
        shape = list(live.shape)
        shape[self._axis] = 2 * (len(self) + count)
        storage = live.new_empty(shape)
        storage.narrow(self._axis, 0, len(self)).copy_(live)
        self.storage, self._inference, self._start, self._stop = storage, storage.is_inference(), 0, len(self)


class CachedEntries(NamedTuple):
    """A method that computes results of x, their stored rows, and the number of heads that share each stored head."""

    make: Make
    rows: GrowingTensor
    repeats: int

    def entries(self) -> Tensor | Shared:
        """The rows, as the method returns them."""
        return self.rows.entries() if self.repeats == 1 else Shared(self.rows.entries(), self.repeats)


class PendingEntries:
    """The last entries x of a `Cache`, from position `start` on: the stored rows have room for their results."""

    def __init__(self, x: Tensor, start: int, entries: Sequence[CachedEntries], dtype: torch.dtype | None) -> None:
        self.x, self.start, self._entries, self._dtype, self._done = x, start, entries, dtype, False
        self._results: dict[GrowingTensor, Any] = {}

    def computed(self, own: CachedEntries) -> Any:
        """The last rows of stored entries, computed by their method; where heads share rows, the shared ones."""
        with self._as_appended():
            result = self._result(own)
        return result.x if type(result) is Shared else result

    def entries_of(self, stored: Tensor) -> CachedEntries | None:
        """The entries that are stored as this tensor, with room for the last rows; `None` if there are none."""
        for own in self._entries:
            if own.rows.entries() is stored:
                return own
        return None

    def _result(self, own: CachedEntries) -> Any:
        """The results of x by a method, which is called once: a module in it may have hooks."""
        if own.rows not in self._results:
            self._results[own.rows] = own.make(self.x, self.start)
        return self._results[own.rows]

    def mark_written(self) -> None:
        """Note that a kernel has written the results."""
        self._done = True

    def compute(self) -> None:
        """Compute and write the results, unless that has been done."""
        if not self._done:
            with self._as_appended():
                for own in self._entries:
                    own.rows.fill(_stored(self._result(own), own.make, self.x, self._dtype)[0])
            self._done = True

    def _as_appended(self) -> AbstractContextManager[object]:
        """Autocast as it was when x was appended: a plan, which computes pending entries too, runs without."""
        return nullcontext() if self._dtype is None else torch.autocast(self.x.device.type, self._dtype)


class Cache:
    """x as a layer has prepared it: `layer(prepared, z=z)` is `layer(x, z=z)`, without what depends only on x.

    Made by `Conv.prepare` of x (..., M, P), of sequences in a nested tensor as their entries with `Samples`. It is
    valid for that layer and for its current parameters and buffers: a call after they change raises an error, unless
    they change through `.data` or in inference mode, which torch does not count. Masks are read again in each call.

    Example:

        >>> from structconv import Causal, Conv, DotProduct
        >>> layer = Conv(DotProduct(2, 4).masked(keep=Causal()).softmax(), 8, 8)
        >>> x = torch.randn(1, 6, 8)
        >>> prepared = layer.prepare(x[:, :5])
        >>> torch.allclose(layer.step(prepared, x[:, 5:]), layer(x)[:, 5:], atol=1e-5)
        True
        >>> prepared.length
        6
    """

    def __init__(self, layer: Any, x: Tensor, structure: Any, reach: int | None) -> None:
        names = layer.call_names
        check_tensor(names.owner, names.x, x)
        check_entries(names.owner, x, channels=layer.in_channels, name=names.x)
        numbers, dtype = next(layer.parameters(), None), autocast_dtype(x)
        if numbers is not None:
            check_alike(names.owner, cast(x, dtype), cast(numbers, dtype), name=names.x,
                        other_name="the layer's parameters")
        self.structure, self.layer = structure, layer
        #: M, if the structure determines it.
        self.expected_inputs = None if structure is None else layer.mechanism._input_entries(structure)
        self._reach, self._dtype = reach, dtype
        self._constants: tuple[Weight, Tensor | None] | None = None
        self._weight_calls = private.PlainCalls(tuple(layer.weight.modules()))
        #: The last entries, if their results are still to be computed.
        self.pending: PendingEntries | None = None
        self._bound: BoundStep | None = None
        self._tried_plan: Plan | None = None
        #: Further results that calls share.
        self.reused = Reused()
        #: Number of first entries that were dropped, because no later output reads them.
        self.dropped = 0
        x = cast(x, self._dtype)
        self._x = GrowingTensor(x.clone(), -2)
        makers: list[Make] = [getattr(module, name) for module in layer.mechanism.modules()
                              if isinstance(module, Mechanism) for name in module.sources]
        if layer.weight().tensors:
            makers.append(layer._heads)
        self._entries: dict[tuple[int, str], CachedEntries] = {}
        for make in makers:
            computed, repeats, axis = _stored(make(x, 0), make, x, self._dtype)
            self._entries[_key(make)] = CachedEntries(make, GrowingTensor(computed, axis), repeats)
        self._versions: list[tuple[Any, str, Any, int | None]] = [
            (tensors, name, own, None if own is None or own.is_inference() else own._version)
            for tensors in _read_by(layer) for name, own in tensors.items()]

    @property
    def x(self) -> Tensor:
        """The inputs that are not dropped, (..., M, P)."""
        return self._x.entries()

    @property
    def length(self) -> int:
        """The number of entries so far, which is the position of the next."""
        return self.dropped + len(self._x)

    @property
    def nbytes(self) -> int:
        """The bytes of the stored rows, without the reserved room."""
        return sum(rows.entries().nbytes for rows in self._rows())

    def heads(self, unread: bool = False) -> Tensor | None:
        """x Theta_k, or x V_k where Theta_k = V_k O_k: (..., K, M, D); `unread` as in `of`."""
        make = self.layer._heads
        return self.of(make, unread) if _key(make) in self._entries else None

    def of(self, make: Make, unread: bool = False) -> Any:
        """Return the results of a mechanism's method for each input; with `unread`, without pending ones."""
        if not unread:
            self.compute_pending()
        stored = self._entries.get(_key(make))
        if stored is None:
            return tensor(make(self.x, self.dropped))
        return stored.entries() if unread else tensor(stored.entries())

    def constants(self) -> tuple[Weight, Tensor | None]:
        """Theta and b; without gradients they are the same for all calls, unless a module of the weight has hooks."""
        if torch.is_grad_enabled() or not self._weight_calls:
            return self.layer._constants()
        if self._constants is None:
            self._constants = self.layer._constants()
        return self._constants

    def append(self, x: Tensor) -> Cache:
        """Append entries (..., m, P) in place, after dropping those that no later output reads.

        Raises:
            ShapeError: x of other leading dimensions, channels or dtype. ConfigError: see `check`.
        """
        first = self.length
        try:
            self.reserve(x)
            self.compute_pending()
        except BaseException:
            self._cut(first)
            raise
        return self

    def reserve(self, x: Tensor) -> Tensor:
        """Append x, but leave its results pending unless gradients pass through them: a kernel computes them in
        passing, or they are computed at the first use. Returns x, contiguous."""
        self.check()
        self.compute_pending()
        stored = self._x.storage
        check_tensor("Cache.append", "x", x)
        check_entries("Cache.append", x, channels=stored.shape[-1])
        x = cast(x.contiguous(), self._dtype)
        if x.shape[:-2] != stored.shape[:-2] or x.dtype != stored.dtype:
            lead = "".join(f"{size}, " for size in stored.shape[:-2])
            raise ShapeError("Cache.append", f"x must be {stored.dtype} of shape ({lead}m, P={stored.shape[-1]})",
                             f"{x.dtype} {text_of(x.shape)}", "Entry t is x[..., t:t + 1, :].")
        start, entries = self.length, tuple(self._entries.values())
        concatenates = self._x.concatenates or True in [own.rows.concatenates for own in entries]
        results = None if not concatenates else [
            _stored(own.make(x, start), own.make, x, self._dtype)[0] for own in entries]
        unread = 0 if self._reach is None else max(len(self._x) - self._reach, 0)
        for rows in self._rows() if unread else ():
            rows.drop(unread)
        self.dropped += unread
        self._x.append(x)
        if results is None:
            for own in entries:
                own.rows.reserve(x.shape[-2])
            self.pending = PendingEntries(x, start, entries, self._dtype)
        else:
            for own, result in zip(entries, results, strict=True):
                own.rows.append(result)
        return x

    def run_bound(self) -> Tensor | None:
        """y of the pending entry, by the plan to which steps are bound; `None` if they are not bound."""
        if self._bound is None or self.pending is None:
            return None
        y = self._bound(self.pending.x, self.pending.start)
        if y is not None:
            self.pending.mark_written()
        return y

    def bind(self, plan: Plan, call: Call, structure: Any) -> None:
        """Bind later steps to the plan that has run such a call, where its kernel can."""
        tried = plan is self._tried_plan or private.watched()
        if not tried and (structure is None or structure is self.structure):
            self._bound, self._tried_plan = BoundStep.of(self.layer, plan, call, self.structure, self._reach), plan

    def reorder(self, index: Tensor) -> Cache:
        """Replace sample b by sample index[b], in place, (B,) integers: beams continue from the selected ones.

        Paddings, tables of pairs and weights of edges move with their samples.

        Raises:
            ShapeError: x without a batch. ConfigError: a mask in the layer itself that has a part for each sample.
        """
        samples = self.x.shape[0]
        if self.x.dim() < 3:
            raise ShapeError("Cache.reorder", "x must have shape (B, ..., M, P)", tuple(self.x.shape))
        whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() == 1
        if not whole or (index.is_cpu and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < samples):
            raise ConfigError("Cache.reorder", f"index must be integers (B,) below {samples}", repr(index))
        lead = self.x.dim() - 2
        if any(of_samples(part.mask, index, lead) is not part.mask for part in self.layer.modules()
               if isinstance(part, Mask)):
            raise ConfigError("Cache.reorder", "masks of each sample must be given in the call, not in the layer",
                              repr(self.layer.mechanism), "Say layer.prepare(x, structure).")
        self.structure = of_samples(self.structure, index, lead)
        for rows in self._rows():
            rows.reorder(index)
        return self

    def truncate(self, length: int) -> Cache:
        """Forget all entries from position `length` on, in place: those of a draft that was not accepted.

        Raises:
            ConfigError: a length out of range, or outputs that would read entries that were dropped since.
        """
        least = self.dropped if self.dropped == 0 or self._reach is None else self.dropped + self._reach
        if type(length) is not int or not least <= length <= self.length:
            raise ConfigError("Cache.truncate", f"length must be in [{least}, {self.length}]", length,
                              "Of a draft behind a sliding window make a copy first: prepared.copy()."
                              if least else "")
        return self._cut(length)

    def _cut(self, length: int) -> Cache:
        """`truncate` without its check; results of pending entries that are forgotten are not computed."""
        if self.pending is not None and self.pending.start >= length:
            self.pending = None
        for rows in self._rows():
            rows.cut(length - self.dropped)
        return self

    def copy(self) -> Cache:
        """A copy for the same layer, to which entries are appended independently."""
        self.compute_pending()
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other._x, other._bound, other._tried_plan, other.reused = self._x.copy(), None, None, Reused()
        other._entries = {key: own._replace(rows=own.rows.copy()) for key, own in self._entries.items()}
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.copy()

    def check(self) -> None:
        """Raise `ConfigError` if the layer would prepare x differently now."""
        for tensors, name, own, version in self._versions:
            if tensors.get(name) is not own or (version is not None and own._version != version):
                raise ConfigError("Cache", "the layer's parameters and buffers must be those with which it was "
                                  "prepared", f"another {name}", "Prepare x again: layer.prepare(x).")
        if autocast_dtype(self.x) != self._dtype:
            raise ConfigError("Cache", "autocast must be as it was", f"{self._dtype or 'none'} before",
                              "Prepare x again: layer.prepare(x).")

    def check_reach(self, first: int, structure: Any) -> None:
        """Raise `ConfigError` if an output at this position, or a mask of the call, reads inputs that are gone."""
        reach = self._reach if structure is self.structure else reach_of(self.layer.mechanism, structure)
        if reach is None or first - reach < self.dropped:
            raise ConfigError("Cache", "outputs must read none of the inputs that are gone", repr(self),
                              f"Output {first} reads the inputs from {reach} before it on. For masks that reach "
                              "further, make the cache from these inputs too.")

    def compute_pending(self) -> None:
        """Compute and write the pending results, if there are any."""
        if self.pending is not None:
            self.pending.compute()
            self.pending = None

    def _rows(self) -> list[GrowingTensor]:
        self.compute_pending()
        return [self._x, *[own.rows for own in self._entries.values()]]

    def __repr__(self) -> str:
        gone = f", of which {self.dropped} are gone" if self.dropped else ""
        return f"Cache({self.length} entries{gone}, {self.nbytes} bytes)"


def _read_by(layer: Any) -> list[dict[str, Any]]:
    """The parameters and the buffers that entries depend on: no masks, nor the buffers of a module that trains."""
    modules: list[nn.Module] = list(layer.modules())
    return [*(module._parameters for module in modules),
            *(module._buffers for module in modules if not isinstance(module, Mask) and not module.training)]


def _key(make: Any) -> tuple[int, str]:
    if not isinstance(make, MethodType):
        raise ConfigError("of_x", "it must be given a method of the mechanism that its `sources` names",
                          getattr(make, "__name__", repr(make)),
                          "What is made of x before the call is known by its name: write def keys(self, x, start).")
    return id(make.__self__), make.__name__


def _stored(result: Any, make: Make, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, int, int]:
    """The result of a method for x, cast to the dtype for storage; the number of heads that share each; the axis of
    entries."""
    result, repeats = cast(result, dtype), 1
    if type(result) is Shared:
        result, repeats = result.x, result.repeats
    rows = tensor(result)
    axis = -2 if rows.dim() > x.dim() else -1
    if rows.shape[axis] != x.shape[-2]:
        owner, method = type(make.__self__).__name__, make.__name__  # type: ignore[attr-defined]
        raise ShapeError(owner, f"{method} must return (..., K, M) or (..., K, M, D) for M={x.shape[-2]} inputs",
                         tuple(rows.shape))
    return rows, repeats, axis


class BoundStep:
    """The steps of a layer after one that a plan computed, as long as nothing in the layer changes.

    Args:
        layer: the layer. run: (entry x, its position) -> y.
    """

    def __init__(self, layer: Any, run: BoundRun) -> None:
        self._run, self._layer, self._plans_version = run, layer, plans_version()
        self._limits = layer.path, layer.max_bytes
        modules = {module: None for module in (*layer.modules(), *layer.mechanism.modules())
                   if not isinstance(module, nn.ModuleList)}
        self._plain, self._modules = private.PlainCalls(modules), [(module, module.training) for module in modules]
        self._children = [(module._modules, name, part) for module in layer.modules()
                        for name, part in module._modules.items()]

    @classmethod
    def of(cls, layer: Any, plan: Plan, call: Call, structure: Any, reach: int | None) -> Self | None:
        """Bind such a step; return `None` if a mask may exclude pairs of a later one, or its kernel cannot."""
        unchanged_forward = type(layer).forward is type(layer).computes
        if plan.bind is None or not unchanged_forward or not reads_all_inputs(layer.mechanism, structure, reach):
            return None
        run = plan.bind(call)
        return None if run is None else cls(layer, run)

    def __call__(self, x: Tensor, position: int) -> Tensor | None:
        """y (..., 1, Q) of the pending entry x at a position; `None` if it must be computed as any other call."""
        if self._plans_version != plans_version() or (self._layer.path, self._layer.max_bytes) != self._limits:
            return None
        if not self._plain:
            return None
        for children, name, part in self._children:
            if children.get(name) is not part:
                return None
        for module, training in self._modules:
            if module.training is not training:
                return None
        return self._run(x, position)


#: Axes of a tensor after those of the batch.
_RANKS: dict[type, dict[str, int]] = {Padding: {"keep": 1}, DenseMask: {"keep": 2}, Window: {"center": 1},
                                      OutputPositions: {"positions": 1}, Graph: {"edge_weight": 1, "edge_attr": 2}}


def of_samples(structure: Any, index: Tensor, lead: int) -> Any:
    """The structure of a call, or those by name, with element index[b] of the batch as element b, (B,) integers;
    unchanged if all elements share it. x has `lead` leading dimensions; those of a structure must be known."""
    if isinstance(structure, dict):
        return {name: of_samples(own, index, lead) for name, own in structure.items()}
    if not isinstance(structure, FrozenValue):
        return structure
    values = dict(zip(field_names(structure), fields(structure), strict=True))
    ranks = _RANKS.get(type(structure))
    if ranks is not None:
        own = {name: values[name] for name, rank in ranks.items() if _has_parts(values[name], rank, lead)}
        new = {name: t.index_select(0, index.to(t.device)) for name, t in own.items()}
        return altered(structure, **new) if new else structure
    inside = {name: value for name, value in values.items() if isinstance(value, FrozenValue)}
    shape: tuple[int, ...] = getattr(structure, "batch_shape", ())
    if not inside and len(shape) == lead and shape[0] != 1:
        raise StructureError(type(structure).__name__, "a structure with a part for each element of a batch must be "
                             "given again in each call once they are reordered", repr(structure), "Give structure= in "
                             "each call.")
    changed = {name: of_samples(value, index, lead) for name, value in inside.items()}
    return altered(structure, **changed) if any(changed[name] is not inside[name] for name in inside) else structure


def _has_parts(values: Any, rank: int, lead: int) -> bool:
    """Return True if the tensor has a part for each element of the batch."""
    return isinstance(values, Tensor) and values.dim() - rank == lead and values.shape[0] != 1
