"""`Mask`: a mask of an expression as a module; its tensors move, save, load and copy with the layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from structconv.derived import cached, derived, values_known
from structconv.errors import StructureError, text_of
from structconv.mechanisms.naming import Named, reads_of
from structconv.mechanisms.samples import positions, within
from structconv.mechanisms.visibility import BY_INPUTS, BY_PAIRS
from structconv.shapes import broadcast, goes_into
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.masks import And, Not, Or, inverted
from structconv.structures.named import NamedStructures
from structconv.structures.output_positions import at_positions
from structconv.structures.samples import Samples
from structconv.structures.supports import Blocks, Causal, DenseMask, EdgeSupport, Global, Padding, Support, Window
from structconv.structures.values import FrozenValue, altered, map_tensors, tensors_in
from structconv.torch_compat import is_wrapped

__all__ = ["STRUCTURE", "STRUCTURE_IF_GIVEN"]

#: Outputs that a pass over all pairs takes at a time, and the pairs of which a table may be held.
COLUMNS, TABLE = 256, 1 << 22


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
    """The pairs that exist, or with kept=False that do not: a `Support`, a `Graph`, booleans (..., M) of the inputs,
    `STRUCTURE`, `STRUCTURE_IF_GIVEN`, or the name of a structure of the call. Its tensors are buffers: they move with
    `.to()`, are part of `state_dict`, and are copied. A file without them loads, and so does a file with the buffers of
    a mask that was removed. Positions that it predicts are submodules."""

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
        for i, position in enumerate(_modules_of(mask)):
            self.add_module(f"position{i}", position)
        self._predicts = bool(self._modules)
        #: True if an entry that it does not list as hidden is a pair with itself, `None` if the structure says so.
        self._reflexive = None if isinstance(mask, CalledWith) and kept else _is_reflexive(mask, kept)
        self.reads: Collection[str] = {fact for position in _modules_of(mask) for fact in reads_of(position)} | {
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
        called = inputs.structure
        if type(called) is NamedStructures:
            called, inputs = self._called_by_name(inputs)
        if isinstance(mask, CalledWith):
            if not (type(called) is Graph or (called is None and mask is not STRUCTURE)):
                called = self._mask_of(called)
            mask = called
        elif self._buffers:
            mask = self._over_buffers()
        if self._predicts:
            modules = [getattr(self, f"position{i}") for i in range(len(_modules_of(mask)))]
            mask = _with_predicted(mask, iter(modules), inputs)
        if isinstance(inputs.structure, Grid):
            mask = _on_grid(mask, inputs.structure)
        sizes = inputs.x.shape[-2], inputs.z.shape[-2]
        if inputs.output_positions is not None:
            mask = at_positions(mask, inputs.output_positions, *sizes, or_none=self._kept)
        if samples is not None:
            mask, sizes = within(mask, inputs, samples), (samples.num_inputs, samples.num_outputs)
        if mask is not None and type(mask) is not Graph and isinstance(mask, Support):
            mask.check("masked", *sizes)
            _check_batch(mask, inputs)
        return mask

    def _called_by_name(self, inputs: Any) -> tuple[Any, Any]:
        """Return the structure that the mask names, and the inputs with it, or with the samples if it has none."""
        structures = inputs.structure
        own = self._own(structures)
        keeps_own = structures.samples is None or getattr(own, "samples", None) is not None
        return own, inputs._replace(structure=own if keeps_own else structures.samples)

    def _may_mask_inputs(self, structure: Any, others: bool = False) -> int:
        """How it may hide an input from all outputs: by its tensors or those of the structure, and, for a gradient, by
        its pairs, of entries with themselves or with `others`."""
        called = isinstance(self._mask, CalledWith)
        masks_inputs = called and isinstance(structure, Support) and structure.may_mask_inputs
        by_inputs = BY_INPUTS if self._buffers or masks_inputs else 0
        mask = self._mask_of(structure) if called else self._mask
        if mask is None or self._predicts or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return by_inputs
        if isinstance(mask, Graph) and self._kept:
            return by_inputs | hidden_by(mask)
        may_exclude = others or not (_is_reflexive(mask, self._kept) if called else self._reflexive)
        return by_inputs | BY_PAIRS if may_exclude and not isinstance(mask, Padding | DenseMask) else by_inputs

    def reached(self, inputs: Any) -> Tensor | None:
        """The pairs that the mask leaves, (..., M, N), or of many their inputs (..., M, 1); `None` for all. A pass
        over all pairs."""
        samples = inputs.samples
        if self._predicts or (samples is not None and not samples.square):
            return self.pairs(inputs)
        mask = self(inputs, samples)
        if mask is None:
            return None
        support = EdgeSupport(mask) if isinstance(mask, Graph) else mask
        support, sizes = support if self._kept else inverted(support), (inputs.num_inputs, inputs.num_outputs)
        if sizes[0] * sizes[1] <= TABLE:  # an input may be in a pair of each of two masks, and in none of both
            m, n = (torch.arange(size, device=inputs.x.device) for size in sizes)
            return support.contains(m.unsqueeze(-1), n)
        return reached_by(support, *sizes, inputs.x.device).unsqueeze(-1)

    def pairs(self, inputs: Any) -> Tensor | None:
        """The pairs that the mask leaves, (..., M, N or 1): cheap masks only, a graph's isolated inputs are not looked
        for; `None` for all."""
        called = self._own(inputs.structure)
        if isinstance(self._mask, CalledWith) and called is None:
            return None  # while x is prepared, or in a call that is refused
        mask = self._mask_of(called) if isinstance(self._mask, CalledWith) else self._over_buffers()
        if not isinstance(mask, Support):
            return None
        if not self._predicts:  # `prepare` asks before there is any z
            mask.check("masked", inputs.num_inputs, None if inputs.z is None else inputs.num_outputs)
            if inputs.z is not None:
                _check_batch(mask, inputs)
        return _table(mask, self._kept)

    def _mask_of(self, structure: Any) -> Graph | Support | None:
        if isinstance(structure, Graph | Support) and not isinstance(structure, Samples):
            return structure
        if self._mask is STRUCTURE or not (structure is None or isinstance(structure, FrozenValue)):
            raise StructureError(f"masked(keep={self._mask!r})", "the layer must be called with a Graph or a Support",
                                 type(structure).__name__, "Call it as layer(x, structure=graph).")
        return None

    def _over_buffers(self) -> Any:
        """Return the mask over the current buffers: the same object until a buffer is replaced."""
        buffers = iter(list(self._buffers.values()))
        mask = map_tensors(self._mask, lambda t: next(buffers))
        if mask is not self._mask and not is_borrowed(self):
            self._mask = mask
        return mask

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as any module does. Masks that a file lacks stay, and those that it has beside them are left out."""
        own = {prefix + name: buffer for name, buffer in self._buffers.items()}
        loaded = {key: t for key, t in state_dict.items()
                  if key in own or not re.fullmatch(r"mask\d+", key.removeprefix(prefix))}
        super()._load_from_state_dict({**own, **loaded}, prefix, *args)

    def __repr__(self) -> str:
        return repr(self._mask if self._structure_name is None or self._mask is not STRUCTURE else self._structure_name)


def is_borrowed(module: nn.Module) -> bool:
    """Return True if tensors in it belong to a transform of `torch.func` or to an autograd graph."""
    return any(is_wrapped(t) or not t.is_leaf for t in (*module._parameters.values(), *module._buffers.values())
               if t is not None)


def _check_batch(mask: Support, inputs: Any) -> None:
    """Raise `StructureError` where a mask of a batch would give outputs that x and z do not have."""
    batch = mask.batch_shape
    if not batch:
        return
    x, z = inputs.x.shape[:-2], inputs.z.shape[:-2]
    lead = broadcast(x, z)
    if not goes_into(batch, lead):
        expected = f"leading dimensions of the mask must broadcast to {text_of(lead)}, those of x and z"
        raise StructureError("masked", expected, tuple(batch), "A table of pairs (..., M, N) goes as "
                             "DenseMask(table). All heads share a mask: one of shape (B, heads, M, N) as mask[:, 0].")


def _is_reflexive(mask: Any, kept: bool) -> bool:
    """Return True if each entry is in a pair, as an input, where inputs and outputs are the same entries; a mask of
    inputs, or of any pairs, lists those that are not."""
    if isinstance(mask, Padding | DenseMask):
        return True
    if isinstance(mask, Not):
        return _is_reflexive(mask.kept, not kept)
    if isinstance(mask, And):
        return kept and all(_is_reflexive(part, True) and not isinstance(part, DenseMask | Global)
                            for part in (mask.first, mask.second))
    return kept and (isinstance(mask, Causal | Blocks | Global) or (isinstance(mask, Window) and mask.center is None))


def covers_inputs(graph: Graph) -> bool:
    """Return True if each input is known to have an edge: by its self-loops, or because `hidden_by` found it so."""
    attrs = graph.__dict__
    return "_base" in attrs or (
        not torch.compiler.is_compiling() and "_covered" in attrs and attrs["_covered"] == graph.edge_index._version)


def hidden_by(graph: Graph) -> int:
    """`BY_PAIRS` if an input has no edge and a gradient is wanted, else 0; noted on the graph if each has one."""
    edges, count = graph.edge_index if "_base" not in graph.__dict__ else None, graph.num_inputs
    if edges is None or not count or not torch.is_grad_enabled() or not values_known(edges):
        return 0
    # an edge that was moved out of range is refused where the edges are sorted
    inside = cached(edges, ("reaches", count), lambda: bool(_ends(edges[0].clamp(0, count - 1), count).all()))
    if inside and not edges.is_inference():  # whose changes are not counted
        graph.__dict__["_covered"] = edges._version
    return 0 if inside else BY_PAIRS


def _ends(index: Tensor, count: int, keep: Tensor | None = None) -> Tensor:
    """Booleans (..., count): True at the numbers in `index` (E,), of the edges in `keep` (..., E)."""
    if keep is None:
        return torch.zeros(count, dtype=torch.bool, device=index.device).index_fill_(0, index.long(), True)
    counted = torch.zeros((*keep.shape[:-1], count), dtype=torch.uint8, device=index.device)
    return counted.index_reduce_(-1, index.long(), keep.to(torch.uint8), "amax") > 0


def reached_by(mask: Any, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
    """Booleans (..., M), True for inputs in a pair of the mask."""
    if isinstance(mask, Graph):
        return _ends(mask.source, num_inputs)
    graph, exact = mask.listing(num_inputs, num_outputs, device)
    if graph is not None:
        return _ends(graph.source, num_inputs, None if exact else mask.contains(graph.source, graph.target))
    m, reached = torch.arange(num_inputs, device=device).unsqueeze(-1), None
    for start in range(0, num_outputs, COLUMNS):
        n = torch.arange(start, min(start + COLUMNS, num_outputs), device=device)
        some = mask.contains(m, n).any(-1)
        reached = some if reached is None else reached | some
    return torch.zeros(num_inputs, dtype=torch.bool, device=device) if reached is None else reached


def _modules_of(mask: Any) -> list[nn.Module]:
    """The modules in the fields of a support."""
    if not isinstance(mask, Support):
        return []
    values = [getattr(mask, field.name) for field in dataclasses.fields(mask)]  # type: ignore[arg-type]
    return [module for field in values for module in ([field] if isinstance(field, nn.Module) else _modules_of(field))]


def _with_predicted(mask: Any, modules: Any, inputs: Any) -> Any:
    """The support with the positions that its modules predict."""
    if not isinstance(mask, Support):
        return mask
    values = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}  # type: ignore[arg-type]
    changed = {name: positions(next(modules), inputs) if isinstance(field, nn.Module) else new
               for name, field in values.items() if
               isinstance(field, nn.Module) or (new := _with_predicted(field, modules, inputs)) is not field}
    return dataclasses.replace(cast(Any, mask), **changed) if changed else mask


def _on_grid(mask: Any, grid: Grid) -> Any:
    """The mask with its windows over the entries of a grid, the same window for the same two; one around predicted
    positions stays on the line."""
    if isinstance(mask, Window):
        fixed = mask.grid is not None or mask.center is not None
        return mask if fixed else derived(mask, ("on", grid), lambda: mask.on(grid))
    if not isinstance(mask, And | Or | Not):
        return mask
    values = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    changed = {name: new for name, field in values.items() if (new := _on_grid(field, grid)) is not field}
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
