"""Mechanisms over a batch: call a mechanism for each sample, or separate the samples of one basis by a mask.

A pair crosses samples if its input and its output are of different samples. Such pairs do not exist; a basis may have
them only while each step reads one pair at a time.
"""

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
from structconv.structures.supports import Causal, DistinctEdges, Global, Window
from structconv.structures.values import altered

__all__ = ["NORMALIZING", "ZERO_PRESERVING", "each_sample", "positions", "separated", "separations", "within"]


def each_sample(inputs: Any) -> list[Any]:
    """Return the inputs of each sample."""
    x, z, batch, projected, sibling, visible, *_ = inputs
    samples: Samples = batch.samples
    sources, targets = samples.sizes()
    xs = _split("x", "M", x, sources)
    zs = xs if z is x else _split("z", "N", z, targets)
    structures = batch.parts() if isinstance(batch, NamedStructures) else parts_of(batch)
    projections: list[Any] = [None] * len(xs)
    if projected is not None:
        projections = list(zip(projected[0].split(sources, -2), projected[1].split(targets, -2), strict=True))
    visibles = [None] * len(xs) if visible is None else visible.split(sources, -1)
    return [type(inputs)(*parts, sibling, visible)
            for *parts, visible in zip(xs, zs, structures, projections, visibles, strict=True)]


def positions(center: Any, inputs: Any) -> Tensor:
    """Return the position that a `Position` predicts for each output, (..., N), counted over the whole batch."""
    samples: Samples | None = inputs.samples
    if samples is None:
        return cast(Tensor, center(inputs))
    by_sample = getattr(center, "batching", "apart") == "apart"
    result = torch.cat([center(part) for part in each_sample(inputs)], -1) if by_sample else center(inputs)
    starts = samples.input_starts.to(result.device)[samples.members(result.device)[1]]
    return result.double() + starts  # as numbers of entries may be large, and autocast leaves these as they are


def _split(name: str, letter: str, entries: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    if entries.shape[-2] != sum(sizes):
        raise StructureError("Samples", f"{name} must have the entries of all samples, {letter}={sum(sizes)}",
                             tuple(entries.shape))
    return entries.split(sizes, -2)


#: Steps that read one pair at a time, and map a zero to a zero.
ZERO_PRESERVING = frozenset(("multiply", "mix", "leaky_relu", "scaled", "softcap", "dropout"))
#: Steps that turn scores into weights.
NORMALIZING = frozenset(("normalize", "softmax_with_sink"))


def separations(steps: tuple[Any, ...], crosses: bool) -> tuple[frozenset[int], bool]:
    """Return the steps before which samples are separated, and True if some pairs still cross samples at the end.

    `crosses`: True if the first step is applied to a basis with pairs of different samples. Samples are separated
    before a step that reads more than one pair, or that would take pairs which do not exist for weights of zero.
    """
    before, masked = set(), False
    for i, step in enumerate(steps):
        entrywise = step.name in ZERO_PRESERVING or step.name == "masked"
        sums = step.name == "normalize" and dict(step.options)["kind"] == "sum"
        reads_others = not entrywise and step.name != "map"
        keeps_zeros = entrywise or sums or step.name == "transpose"
        if (crosses and reads_others) or not (crosses or masked or keeps_zeros):
            before.add(i)
            crosses, masked = False, True
        masked = masked and step.name not in NORMALIZING
    return frozenset(before), crosses


def separated(basis: Basis, samples: Samples) -> Basis:
    """The basis without pairs that cross samples."""
    return basis if _is_separated(basis.support()) else basis.masked(keep=samples)


def _is_separated(support: Support | None) -> bool:
    """Return True if the type of the support shows that none of its pairs crosses samples."""
    if isinstance(support, Or):
        return _is_separated(support.first) and _is_separated(support.second)
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
    return DistinctEdges(Graph(torch.cat(pairs, 1), num_inputs=samples.num_inputs, num_outputs=samples.num_outputs))


def _on_each(window: Window, grids: GridBatch) -> Support:
    """The windows on each grid, listed."""
    if all(grid.ndim == 1 and not grid.periodic for grid in grids.grids):
        return window
    listed = [window.on(grid).edges(grid.num_entries, grid.num_entries) for grid in grids.grids]
    edges = [graph.edge_index + start for graph, start in zip(listed, grids.offsets, strict=False) if graph is not None]
    return DistinctEdges(Graph(torch.cat(edges, 1), num_nodes=grids.num_entries, samples=grids.samples))
