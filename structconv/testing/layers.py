"""The laws of layers, for a `Use` and for a `Conv` over a specimen: batches, prepared inputs, positions of outputs.

A layer may refuse a batch, prepared inputs or positions by an error of the package.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms.given import Given
from structconv.nn.attention import MultiheadAttention
from structconv.nn.conv import Conv
from structconv.structures import Graph, Grid, KnowledgeGraph, Samples, Support, batch
from structconv.structures.batching import is_batchable
from structconv.testing.checks import F64, same, same_gradients, with_batch
from structconv.testing.laws import with_entries_reversed
from structconv.testing.specimens import Setup, Specimen, mapped, random_numbers
from structconv.testing.use import Use, use

__all__ = ["check_positions", "check_prepared", "check_samples", "larger", "layer_over", "of_specimen", "side_by_side",
           "takes_positions", "takes_prepared", "takes_samples"]

_SIZES = ("num_inputs", "num_outputs", "num_entities", "num_entries", "num_edges")
#: Channels of the layer over a specimen.
P, Q = 4, 3


def of_specimen(applies: Callable[[Use], bool], check: Callable[[Use], None]) -> Callable[[Specimen], None]:
    """Return the check of a law for the layer over a specimen, if the law applies to it."""
    def check_layer(specimen: Specimen) -> None:
        with random_numbers(0):
            layer = layer_over(specimen)
        if not applies(layer):
            return
        try:
            check(layer)
        except (ConfigError, ShapeError, StructureError):
            return  # refused, and so no wrong number

    return check_layer


def layer_over(specimen: Specimen) -> Use:
    """A `Conv` over a specimen's mechanism, or over its basis as a user's mechanism."""
    subject = specimen.subject()
    if isinstance(subject, Setup):
        other = None if subject.z is None else subject.z.shape[-1]
        conv = Conv(subject.mechanism, subject.x.shape[-1], Q, other_channels=other)
        return use(conv, subject.x, subject.structure, **({} if subject.z is None else {"z": subject.z}))
    lead = with_batch(subject)
    return use(Conv(Given(mapped(subject, nn.Parameter)), P, Q), torch.randn(*lead, subject.num_inputs, P, dtype=F64))


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
    """Return the structure with two more entries; a structure of a user's class in another order instead."""
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
    """Yield the arguments of the call with their names."""
    names = inspect.signature(use.layer.forward).parameters
    yield from zip(names, use.args, strict=False)
    yield from use.kwargs.items()


def _results(use: Use) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(use.layer(*use.args, **use.kwargs)) if isinstance(t, Tensor)]


def takes_prepared(use: Use) -> bool:
    """Return True if the layer reads one x that is not an image."""
    return isinstance(use.layer, Conv) and isinstance(use.args[0], Tensor) and "axes" not in use.kwargs


def takes_positions(use: Use) -> bool:
    """Return True if the layer also takes positions of its outputs."""
    return takes_prepared(use) and "positions" in inspect.signature(use.layer.forward).parameters


def check_positions(use: Use) -> None:
    """Only the last outputs, and all outputs in another order, at given positions, equal those of the whole call; or
    the layer refuses positions by an error."""
    layer: Any = use.layer.eval()
    x, z, others = _parted(use)
    others.pop("return_weights", None)
    z = x if z is None else z

    def of(outputs: Tensor, **options: Any) -> Any:
        args, by_name = layer._arguments(x, outputs)
        return layer(*args, **by_name, **others, **options)

    whole, count = of(z), z.shape[-2]
    for first in range(1, count, max(count - 2, 1)):
        own = of(z[..., first:, :], positions=first)
        same(own, whole[..., first:, :], f"the outputs from {first} on")
    turned = torch.arange(count - 1, -1, -1)
    same(of(z.flip(-2), positions=turned), whole.flip(-2), "the outputs in turned order")


def check_prepared(use: Use) -> None:
    """A call of prepared inputs gives what the call gives, the second one too, gradients included."""
    layer: Any = use.layer
    x, z, others = _parted(use)
    expected = use()

    def of(cache: Any) -> Use:
        args, by_name = layer._arguments(cache, z)
        return dataclasses.replace(use, args=args, kwargs={**by_name, **others})

    def run() -> Tensor:
        return use.run(lambda *args, **kwargs: of(layer.prepare(x))())

    for turn in ("", ", again"):
        same_gradients(run(), expected, use.variables, f"prepared{turn}")
    cache = layer.prepare(x)
    for turn in ("first", "second"):
        same(of(cache)(), expected, f"the {turn} call of one prepared")
    try:
        cache = layer.prepare(x[..., :2, :])
        for entry in x[..., 2:, :].split(1, -2):
            cache.append(entry)
        appended = of(cache)()
    except (ConfigError, ShapeError, StructureError):
        return  # for example, the structure is of all entries
    same(appended, expected, "entries that were appended one by one")


def _parted(use: Use) -> tuple[Any, Any, dict[str, Any]]:
    """x and z of a call of a `Conv`, by whichever names its layer has for them, and the other arguments."""
    others: dict[str, Any] = dict(inspect.signature(use.layer.forward).bind(*use.args, **use.kwargs).arguments)
    if isinstance(use.layer, MultiheadAttention):
        x, z = use.layer._inputs(others.pop("query"), others.pop("key_value", None))
        return x, z, others
    return others.pop("x"), others.pop("z", None), others
