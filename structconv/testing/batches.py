"""The law of batches: a layer returns for each sample of a batch what it returns for that sample by itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from structconv.mechanisms.given import Given
from structconv.nn.attention import MultiheadAttention
from structconv.structures import Graph, Grid, KnowledgeGraph, Samples, Support, batch
from structconv.structures.batching import is_batchable
from structconv.testing.checks import same
from structconv.testing.laws import with_entries_reversed
from structconv.testing.use import Use

__all__ = ["check_samples", "larger", "side_by_side", "takes_samples"]

_SIZES = ("num_inputs", "num_outputs", "num_entities", "num_entries", "num_edges")


def takes_samples(use: Use) -> bool:
    """Return True if the layer takes a structure, also by keyword only, and no mask replaces it; an image layer takes
    samples of one size."""
    filters = any(isinstance(value, Support) and not isinstance(value, Samples)
                  for name, value in _named(use) if name == "structure")
    return not filters and bool(use.structures or "structure" in inspect.signature(use.layer.forward).parameters)


def check_samples(use: Use) -> None:
    """Two samples of different sizes side by side give what each gives by itself, gradients included; or the layer
    refuses such a batch by a `StructureError`."""
    use = dataclasses.replace(use, layer=use.layer.eval())
    single = use, larger(use)
    together = side_by_side(*single)
    results = [_results(each) for each in single]
    result = _results(together)
    for own, (first, second) in zip(result, zip(*results, strict=True), strict=True):
        same(own, torch.cat([first, second], -2), "a batch of two samples")
    parameters = [p for p in use.layer.parameters() if p.requires_grad]
    if not parameters or not result[0].requires_grad:
        return
    expected_gradients, gradients = (
        torch.autograd.grad([y.cos().sum() for y in outcome], parameters, allow_unused=True)
        for outcome in ([y for each in results for y in each], result))
    for own, expected in zip(gradients, expected_gradients, strict=True):
        same(torch.zeros(()) if own is None else own, torch.zeros(()) if expected is None else expected,
             "the gradient of a batch of two samples")


def larger(use: Use) -> Use:
    """Return the layer with another sample: other numbers, and two more entries unless the layer fixes their number."""
    grown = [(structure, _grown(structure)) for structure in use.structures]
    counts = {getattr(old, name): getattr(new, name) for old, new in grown for name in _SIZES if hasattr(old, name)}
    if not grown:
        counts = {t.shape[-2]: t.shape[-2] + 2 for t in use.arguments}
    fixed = any(isinstance(module, Given) for module in use.layer.modules())
    if fixed or any(t.shape[-2] not in counts for t in use.arguments):
        grown, counts = [], {}

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            more = counts.get(value.shape[-2], value.shape[-2]) - value.shape[-2]
            new = torch.cat([value.flip(-1) * 0.5, 0.3 + value.new_zeros(*value.shape[:-2], more, value.shape[-1])], -2)
            return new.detach().requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            return {name: of(structure) for name, structure in value.items()}
        return next((new for old, new in grown if old is value), value)

    return dataclasses.replace(use, args=tuple(map(of, use.args)),
                               kwargs={name: of(value) for name, value in use.kwargs.items()})


def side_by_side(first: Use, second: Use) -> Use:
    """Both samples in one call: entries one after the other, structures in a batch; without any, `Samples`."""
    def of(one: Any, other: Any) -> Any:
        if isinstance(one, Tensor) and one.is_floating_point():
            return torch.cat([one, other], -2).detach().requires_grad_(one.requires_grad)
        if isinstance(one, dict):
            return {name: of(structure, other[name]) for name, structure in one.items()}
        pair: list[Any] = [one, other]
        return batch(pair) if is_batchable(one) else one

    args = tuple(of(*pair) for pair in zip(first.args, second.args, strict=True))
    kwargs = {name: of(value, second.kwargs[name]) for name, value in first.kwargs.items()}
    if not any(is_batchable(value) for value in first.structures):
        index = list(inspect.signature(first.layer.forward).parameters).index("structure")
        sizes = [[t.shape[-2] for t in each.arguments] for each in (first, second)]
        last = len(sizes[0]) - 1
        order = (last, 0) if isinstance(first.layer, MultiheadAttention) else (0, min(1, last))
        inputs, outputs = ([each[i] for each in sizes] for i in order)
        samples = Samples(inputs, None if inputs == outputs else outputs)
        args = (*args[:index], *((samples,) if len(args) > index else ()), *args[index + 1:])
        kwargs = kwargs if len(args) > index else {**kwargs, "structure": samples}
    return dataclasses.replace(first, args=args, kwargs=kwargs)


def _grown(structure: Any) -> Any:
    """Return the structure with two more entries; a user's, of which no enlargement is known, in another order."""
    if isinstance(structure, Graph):
        return dataclasses.replace(structure, num_inputs=structure.num_inputs + 2,
                                   num_outputs=structure.num_outputs + 2)
    if isinstance(structure, KnowledgeGraph):
        return KnowledgeGraph(structure.triples, structure.num_entities + 2, structure.relations)
    if isinstance(structure, Samples):
        inputs, outputs = structure.sizes()
        return Samples([inputs[0] + 2, *inputs[1:]], [outputs[0] + 2, *outputs[1:]])
    if isinstance(structure, Grid):
        return Grid(tuple(size + 2 for size in structure.shape), structure.periodic)
    return with_entries_reversed(structure)


def _named(use: Use) -> Iterator[tuple[str, Any]]:
    """The arguments of the call by their names."""
    names = inspect.signature(use.layer.forward).parameters
    yield from zip(names, use.args, strict=False)
    yield from use.kwargs.items()


def _results(use: Use) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(use.layer(*use.args, **use.kwargs)) if isinstance(t, Tensor)]
