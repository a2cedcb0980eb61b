"""`Mask`: a mask of an expression as a module; its tensors move, save, load and copy with the layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any, cast

from torch import Tensor, nn

from structconv.errors import StructureError
from structconv.mechanisms.naming import Named, reads_of
from structconv.mechanisms.samples import positions, within
from structconv.memo import derived
from structconv.shapes import broadcast, goes_into
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.masks import And, Not, Or
from structconv.structures.named import NamedStructures
from structconv.structures.output_positions import at_positions
from structconv.structures.samples import Samples
from structconv.structures.supports import DenseMask, Padding, Support, Window
from structconv.structures.values import FrozenValue, altered, map_tensors, tensors_in

__all__ = ["STRUCTURE", "STRUCTURE_IF_GIVEN"]


class CalledWith:
    """The structure that the layer is called with, named in an expression before it is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> CalledWith:
        return self

    def __reduce__(self) -> str:
        return self.name


STRUCTURE = CalledWith("STRUCTURE")
#: All pairs where the layer is called without one.
STRUCTURE_IF_GIVEN = CalledWith("STRUCTURE_IF_GIVEN")


class Mask(Named, nn.Module):
    """The pairs that exist: a support, a graph, a boolean tensor, or the structure of the call.

    Its tensors are buffers: they move with `.to()`, are part of `state_dict`, and are copied. A file without them
    loads, and so does a file with the buffers of a mask that was removed. Positions that it predicts are submodules.

    Args:
        mask: a `Support`, a `Graph`, booleans (..., M) of the inputs, `STRUCTURE` or `STRUCTURE_IF_GIVEN`; a string is
            the name of a structure of the call.
        kept: True if the mask holds the pairs that exist, False if it holds the pairs that do not.
    """

    _role = "mask"

    def __init__(self, mask: Any, kept: bool = True) -> None:
        super().__init__()
        if isinstance(mask, str):
            mask, self._structure_name = STRUCTURE, mask
        if isinstance(mask, Tensor):
            if mask.dim() == 2 and mask.shape[0] == mask.shape[1] > 1:
                raise StructureError("masked", "a boolean mask must be one of inputs, (..., M)", tuple(mask.shape),
                                     "Say which it is: DenseMask(mask) for pairs (..., M, N), Padding(mask) for a "
                                     "batch.")
            mask = Padding(mask)
        self._mask, self._kept = mask, kept
        for i, tensor in enumerate(tensors_in(mask)):
            self.register_buffer(f"mask{i}", tensor.contiguous())
        for i, position in enumerate(_positions(mask)):
            self.add_module(f"position{i}", position)
        self._predicts = bool(self._modules)
        self.reads: Collection[str] = {fact for position in _positions(mask) for fact in reads_of(position)} | {
            *(["structure"] if isinstance(mask, CalledWith) else []), *(["content"] if self._predicts else [])}

    @property
    def mask(self) -> Any:
        """The mask as it was passed in."""
        return self._mask

    @property
    def keeps(self) -> bool:
        """True if the mask holds the pairs that exist."""
        return self._kept

    def forward(self, inputs: Any, samples: Samples | None = None) -> Any:
        """The support, or the graph, of a call with these inputs; `None` for all pairs. Of a batch, which inputs and
        outputs are of one of its `samples`."""
        mask: Any = self._mask
        given = inputs.structure
        if type(given) is NamedStructures:
            given, inputs = self._given_by_name(inputs)
        if isinstance(mask, CalledWith):
            mask = given if type(given) is Graph or (given is None and mask is not STRUCTURE) else self._given(given)
        elif self._buffers:
            mask = self._moved()
        if self._predicts:
            mask = _at_positions(mask, iter([getattr(self, f"position{i}") for i in range(len(_positions(mask)))]),
                                 inputs)
        if isinstance(inputs.structure, Grid):
            mask = _on(mask, inputs.structure)
        sizes = inputs.x.shape[-2], inputs.z.shape[-2]
        if inputs.output_positions is not None:
            mask = at_positions(mask, inputs.output_positions, *sizes, told=self._kept)
        if samples is not None:
            mask, sizes = within(mask, inputs, samples), (samples.num_inputs, samples.num_outputs)
        if mask is not None and type(mask) is not Graph and isinstance(mask, Support):
            mask.check("masked", *sizes)
            _check_batch(mask, inputs)
        return mask

    def _given_by_name(self, inputs: Any) -> tuple[Any, Any]:
        """Return its own one of several structures, and the inputs with it, or with the samples if it has none."""
        structures = inputs.structure
        own = self._own(structures)
        apart = structures.samples is None or getattr(own, "samples", None) is not None
        return own, inputs._replace(structure=own if apart else structures.samples)

    def _may_mask_inputs(self, structure: Any) -> bool:
        """Return True if it may hide an input from all outputs: by its tensors, or by the structure as a mask."""
        given = isinstance(self._mask, CalledWith) and isinstance(structure, Support) and structure.may_mask_inputs
        return bool(self._buffers) or given

    def pairs(self, inputs: Any) -> Tensor | None:
        """The pairs that the mask leaves, (..., M, N or 1): cheap masks only, a graph's isolated inputs are not looked
        for; `None` for all."""
        given = self._own(inputs.structure)
        if isinstance(self._mask, CalledWith) and given is None:
            return None  # of what is still to be prepared, or of a call that is refused
        mask = self._given(given) if isinstance(self._mask, CalledWith) else self._moved()
        if not isinstance(mask, Support):
            return None
        if not self._predicts:  # `prepare` asks before there is any z
            mask.check("masked", inputs.num_inputs, None if inputs.z is None else inputs.num_outputs)
            if inputs.z is not None:
                _check_batch(mask, inputs)
        return _table(mask, self._kept)

    def _given(self, structure: Any) -> Graph | Support | None:
        if isinstance(structure, Graph | Support) and not isinstance(structure, Samples):
            return structure
        junk = structure is not None and not isinstance(structure, FrozenValue)
        if self._mask is STRUCTURE or junk:
            raise StructureError(f"masked(keep={self._mask!r})", "the layer must be called with a Graph or a Support",
                                 type(structure).__name__, "Call it as layer(x, structure=graph).")
        return None

    def _moved(self) -> Any:
        """Return the mask over the current buffers: the same object until a buffer is replaced."""
        held = iter(list(self._buffers.values()))
        self._mask = map_tensors(self._mask, lambda t: next(held))
        return self._mask

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as any module does. Masks that a file lacks stay, and those that it has beside them are left out."""
        own = {prefix + name: buffer for name, buffer in self._buffers.items()}
        given = {key: t for key, t in state_dict.items() if key in own or not re.fullmatch(
            r"mask\d+", key.removeprefix(prefix))}
        super()._load_from_state_dict({**own, **given}, prefix, *args)

    def __repr__(self) -> str:
        return repr(self._mask if self._structure_name is None or self._mask is not STRUCTURE else self._structure_name)


def _check_batch(mask: Support, inputs: Any) -> None:
    """Raise `StructureError` where a mask of a batch would give outputs that x and z do not have."""
    batch = mask.batch_shape
    if not batch:
        return
    x, z = inputs.x.shape[:-2], inputs.z.shape[:-2]
    lead = broadcast(x, z)
    if not goes_into(batch, lead):
        expected = f"leading dimensions of the mask must broadcast to {tuple(lead)}, those of x and z"
        raise StructureError("masked", expected, tuple(batch), "A table of pairs (..., M, N) goes as "
                             "DenseMask(table). All heads share a mask: one of shape (B, heads, M, N) as mask[:, 0].")


def _positions(mask: Any) -> list[nn.Module]:
    """The modules in the fields of a support."""
    if not isinstance(mask, Support):
        return []
    held = [getattr(mask, field.name) for field in dataclasses.fields(mask)]  # type: ignore[arg-type]
    return [found for field in held for found in ([field] if isinstance(field, nn.Module) else _positions(field))]


def _at_positions(mask: Any, modules: Any, inputs: Any) -> Any:
    """The support with what its modules predict in their places."""
    if not isinstance(mask, Support):
        return mask
    held = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}  # type: ignore[arg-type]
    changed = {name: positions(next(modules), inputs) if isinstance(field, nn.Module) else new
               for name, field in held.items() if
               isinstance(field, nn.Module) or (new := _at_positions(field, modules, inputs)) is not field}
    return dataclasses.replace(cast(Any, mask), **changed) if changed else mask


def _on(mask: Any, grid: Grid) -> Any:
    """The mask with its windows over the entries of a grid, the same window for the same two; one around predicted
    positions stays on the line."""
    if isinstance(mask, Window):
        fixed = mask.grid is not None or mask.center is not None
        return mask if fixed else derived(mask, ("on", grid), lambda: mask.on(grid))
    if not isinstance(mask, And | Or | Not):
        return mask
    held = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    changed = {name: new for name, field in held.items() if (new := _on(field, grid)) is not field}
    return altered(mask, **changed) if changed else mask


def _table(mask: Support, kept: bool) -> Tensor | None:
    """The pairs in the mask (`kept`), or out of it, (..., M, N or 1); perhaps more, `None` for all."""
    if isinstance(mask, Not):
        return _table(mask.kept, not kept)
    if isinstance(mask, And if kept else Or):
        first, second = _table(mask.first, kept), _table(mask.second, kept)
        return second if first is None else first if second is None else first & second
    if isinstance(mask, And | Or):
        first, second = _table(mask.first, kept), _table(mask.second, kept)
        return None if first is None or second is None else first | second
    if isinstance(mask, DenseMask):
        return mask.keep if kept else ~mask.keep
    inputs = mask.visible_inputs() if kept else ~mask.keep if isinstance(mask, Padding) else None
    return None if inputs is None else inputs.unsqueeze(-1)
