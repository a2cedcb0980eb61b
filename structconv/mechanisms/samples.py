"""Mechanisms over a batch: mask out pairs of different samples, and call a mechanism for each sample by itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.derived import derived
from structconv.errors import StructureError
from structconv.structures.batching import GridBatch, parts_of
from structconv.structures.graph import Graph
from structconv.structures.masks import And, Not, Or, Support
from structconv.structures.named import NamedStructures
from structconv.structures.samples import Samples, Within, same_samples
from structconv.structures.supports import Causal, EdgeSupport, Global, Window
from structconv.structures.values import altered

__all__ = ["LEAVING_ZEROS", "NORMALIZING", "closings", "each_sample", "left_out", "positions", "within"]


def each_sample(inputs: Any) -> list[Any]:
    """Return the inputs of each sample."""
    all_x, all_z, batch, of_entries, sibling, exists, *_ = inputs
    samples: Samples = batch.samples
    sources, targets = samples.sizes()
    x = _split("x", "M", all_x, sources)
    z = x if all_z is all_x else _split("z", "N", all_z, targets)
    projected: list[Any] = [None] * len(x)
    if of_entries is not None:
        of_x, of_z = of_entries
        projected = list(zip(of_x.split(sources, -2), of_z.split(targets, -2), strict=True))
    existing = [None] * len(x) if exists is None else exists.split(sources, -1)
    structures = batch.parts() if isinstance(batch, NamedStructures) else parts_of(batch)
    return [type(inputs)(own, other, structure, after, sibling, exist)
            for own, other, structure, after, exist in zip(x, z, structures, projected, existing, strict=True)]


def positions(center: Any, inputs: Any) -> Tensor:
    """Return the position that a `Position` predicts for each output, (..., N), counted over the whole batch."""
    samples: Samples | None = inputs.samples
    if samples is None:
        return cast(Tensor, center(inputs))
    apart = getattr(center, "batching", "apart") == "apart"
    result = torch.cat([center(part) for part in each_sample(inputs)], -1) if apart else center(inputs)
    starts = samples.input_starts.to(result.device)[samples.members(result.device)[1]]
    return result.double() + starts  # as numbers of entries may be large, and autocast leaves these as they are


def _split(name: str, letter: str, entries: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    if entries.shape[-2] != sum(sizes):
        raise StructureError("Samples", f"{name} must have the entries of all samples, {letter}={sum(sizes)}",
                             tuple(entries.shape))
    return entries.split(sizes, -2)


#: Steps that leave a zero zero and no other pair there; all that read one pair at a time and leave a zero zero; those
#: that make weights of scores.
LEAVING_ZEROS = frozenset(("multiply", "mix", "leaky_relu", "scaled", "softcap", "dropout"))
_ENTRYWISE = LEAVING_ZEROS | {"masked"}
NORMALIZING = frozenset(("normalize", "softmax_with_sink"))


def closings(steps: tuple[Any, ...], opened: bool) -> tuple[frozenset[int], bool]:
    """Before which steps pairs of different samples are left out, and whether there may be some in the end: where
    something reads more than one pair of what is `opened`, or would take them for pairs of weight zero."""
    before, left = set(), False
    for i, step in enumerate(steps):
        whole = step.name not in _ENTRYWISE and step.name != "map"
        sums = step.name == "normalize" and dict(step.options)["kind"] == "sum"
        if (whole and opened) or not (opened or left or sums or step.name in _ENTRYWISE or step.name == "transpose"):
            before.add(i)
            opened, left = False, True
        left = left and step.name not in NORMALIZING
    return frozenset(before), opened


def left_out(basis: Basis, samples: Samples) -> Basis:
    """The basis without the pairs of different samples."""
    return basis if _leaves_out(basis.support()) else basis.masked(keep=samples)


def _leaves_out(support: Support | None) -> bool:
    """Return True if no pair in the support joins two samples, judged by its type."""
    if isinstance(support, Or):
        return _leaves_out(support.first) and _leaves_out(support.second)
    return support is not None and support.samples is not None


def within(mask: Any, inputs: Any, samples: Samples) -> Any:
    """The mask with positions counted in each sample; one made for the whole batch stays, one for another batch is an
    error."""
    own = getattr(mask, "samples", None)
    if own is not None and not same_samples(own, samples):
        raise StructureError("masked", f"the mask must be for the samples of the call, {samples!r}", repr(own))
    if type(mask) is Graph:
        return mask
    if isinstance(mask, And | Or):
        return altered(mask, first=within(mask.first, inputs, samples), second=within(mask.second, inputs, samples))
    if isinstance(mask, Not):
        return altered(mask, kept=within(mask.kept, inputs, samples))
    if isinstance(mask, Window) and isinstance(inputs.structure, GridBatch) and mask.center is None:
        return _on_each(mask, inputs.structure)
    if isinstance(mask, Global) and not torch.compiler.is_compiling():
        return derived(samples, ("global", mask.entries), lambda: _global_in_each(mask, samples))
    fixed = not isinstance(mask, Support) or mask.num_inputs is not None or mask.num_outputs is not None
    shifts = samples.square and isinstance(mask, Causal | Window)
    return mask if fixed or shifts else Within(mask, samples)


def _global_in_each(mask: Global, samples: Samples) -> Support:
    """List the pairs of the global entries of each sample."""
    sizes, starts = samples.sizes(), (samples.input_starts.tolist(), samples.output_starts.tolist())
    pairs = [mask.edges(m, n).edge_index + torch.tensor([[first], [onto]])
             for m, n, first, onto in zip(*sizes, *(start[:-1] for start in starts), strict=True)]
    return EdgeSupport(Graph(torch.cat(pairs, 1), num_inputs=samples.num_inputs, num_outputs=samples.num_outputs))


def _on_each(window: Window, grids: GridBatch) -> Support:
    """The windows on each grid, listed."""
    if all(grid.ndim == 1 and not grid.periodic for grid in grids.grids):
        return window
    listed = [window.on(grid).edges(grid.num_entries, grid.num_entries) for grid in grids.grids]
    moved = [graph.edge_index + start for graph, start in zip(listed, grids.offsets, strict=False) if graph is not None]
    return EdgeSupport(Graph(torch.cat(moved, 1), num_nodes=grids.num_entries, samples=grids.samples))
