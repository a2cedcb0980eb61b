"""Structures and masks that change in place, or are others."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from structconv import ConfigError, Conv, Graph, KnowledgeGraph, Padding, StructureError, batch
from structconv.mechanisms.masks import Mask
from structconv.structures import Support
from structconv.structures.values import map_tensors, tensors_in
from structconv.testing.checks import same
from structconv.testing.use import Use, joined
from tests.support.calls import as_written, check_now
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import (
    has_graph,
    has_masks,
    masks,
    of_the_package,
    other,
    own_structures,
    refusal,
)


def elsewhere(t: Tensor, structure: Any) -> Tensor:
    """Edges or triples with other targets, or other weights."""
    if t.is_floating_point():
        return other(t)
    turned = t.clone()
    if isinstance(structure, KnowledgeGraph):
        turned[:, 2] = (t[:, 2] + 1) % structure.num_entities
    elif isinstance(structure, Graph):
        turned[1] = (t[1] + 1) % max(structure.num_outputs, 1)
    return turned


@mutation(has_graph)
def a_structure_in_place(use: Use) -> None:
    use = own_structures(use)
    use()
    for structure in use.structures:
        for t in tensors_in(structure):
            t.copy_(elsewhere(t, structure))
            check_now(use, f"a tensor of {structure!r} was changed in place")


ROUTES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    ".data": lambda t, new: t.data.copy_(new),
    "numpy": lambda t, new: t.detach().numpy().__setitem__(Ellipsis, new.numpy()),
}


@mutation(has_graph)
def a_structure_behind_torch(use: Use) -> None:
    """What torch cannot notice counts once `changed` was called; of inference tensors nothing is remembered."""
    for name, write in ROUTES.items():
        own = own_structures(use)
        own()
        for structure in own.structures:
            for t in tensors_in(structure):
                write(t, elsewhere(t, structure))
            structure.changed()
        check_now(own, f"a structure was changed through {name}")
    with torch.inference_mode():
        own = own_structures(use)
        own()
        for structure in own.structures:
            for t in tensors_in(structure):
                t.copy_(elsewhere(t, structure))
        with as_written():
            expected = own()
        same(own(), expected, "an inference structure was changed in place")


@mutation(has_graph)
def new_structures(use: Use) -> None:
    """Of the same size, of another size, and the first one again."""
    one = own_structures(use)
    one()
    moved = use.on(lambda s: map_tensors(copy.deepcopy(s), lambda t: elsewhere(t, s)))
    check_now(moved, "a new structure of the same size")
    check_now(one, "the first structure again")
    if not has_masks(use):  # two graphs side by side fit: each entry of x is one of the structure's
        twice = use.on(lambda s: batch([s, s])).mapped(doubled)
        check_now(twice, "a structure of twice the size")
    check_now(one, "the first structure once more")


def doubled(t: Tensor) -> Tensor:
    return torch.cat([t, t], -2).detach().requires_grad_() if t.is_floating_point() else t


@mutation(has_masks)
def masks_in_place(use: Use) -> None:
    use()
    for t in masks(use.layer):
        changed = t.clone()
        if t.dtype == torch.bool:
            changed[..., 0] = ~changed[..., 0]
        else:
            changed[1] = t[1].roll(1)
        t.copy_(changed)
        check_now(use, "a mask was changed in place")
    for module in use.layer.modules():
        if isinstance(module, Mask):
            for name, t in list(module.named_buffers(recurse=False)):
                setattr(module, name, t.flip(-1))
                check_now(use, "a mask was replaced")


@mutation(has_graph)
def an_index_out_of_range(use: Use) -> None:
    """Written into a structure in place it is an error, and no other call suffers."""
    for value in (10**9, -1, None):  # and one beyond the last
        own = own_structures(use)
        own()
        for structure in own.structures:
            if not isinstance(structure, Graph | KnowledgeGraph):
                continue
            index = tensors_in(structure)[0]
            if not index.numel():
                return
            size = structure.num_outputs if isinstance(structure, Graph) else structure.num_entities
            index[(1, 0) if isinstance(structure, Graph) else (0, 2)] = size if value is None else value
        error = refusal(own)
        assert isinstance(error, StructureError), f"an index of {size if value is None else value}: {error!r}"
    check_now(use, "after a structure was refused")


@mutation(lambda use: type(use.layer) is Conv and of_the_package(use.layer))
def structures_that_nothing_reads(use: Use) -> None:
    """A support counts or is refused, whatever the expression; what is no structure is refused."""
    x, z = use.args[0], use.kwargs.get("z")
    nothing = Padding(torch.zeros(use.arguments[0].shape[-2], dtype=torch.bool))
    for structure in (nothing, torch.ones(3), "a graph"):
        try:
            y = joined(use.layer(x, structure, z=z))
        except StructureError:
            continue
        assert structure is nothing, f"{structure!r} was taken for a structure"
        everything = joined(use.layer(x, Padding(~nothing.keep), z=z))
        assert not torch.equal(y, everything), "a support was not read"


def by_name(use: Use) -> dict[str, Any]:
    """The structures of a call with several."""
    given = use.kwargs.get("structure")
    return given if isinstance(given, dict) else {}


@mutation(lambda use: bool(by_name(use)))
def names_that_do_not_fit(use: Use) -> None:
    """A name that is missing, or one that nothing reads, is told beside those that fit."""
    given = by_name(use)
    first, *others = given
    wrong = [{name: given[name] for name in others}, {**given, "more": given[first]}, {"more": given[first]}, None,
             given[first]]
    for structures in wrong:
        error = refusal(replace(use, kwargs={**use.kwargs, "structure": structures}))
        assert isinstance(error, StructureError), f"{structures!r} for {list(given)} gave {error!r}"
        names = (*given, *(structures if isinstance(structures, dict) else ()))
        assert all(repr(name) in str(error) for name in names), f"{error} does not list {names}"
    check_now(use, "after names that do not fit")


@mutation(lambda use: isinstance(use.args[0], dict))
def names_of_x_that_do_not_fit(use: Use) -> None:
    """The same of the names of x."""
    given, others = use.args[0], use.args[1:]
    first, *left = given
    for x in ({name: given[name] for name in left}, {**given, "more": given[first]}, {}, given[first]):
        error = refusal(replace(use, args=(x, *others)))
        assert isinstance(error, ConfigError), f"{x!r} for {list(given)} gave {error!r}"
        names = (*given, *(x if isinstance(x, dict) else ()))
        assert all(repr(name) in str(error) for name in names), f"{error} does not list {names}"
    check_now(use, "after names of x that do not fit")


def _tables(use: Use) -> list[tuple[Tensor, Callable[[Tensor], Use]]]:
    """The boolean masks of a layer and of its arguments, and the same use with another one in a mask's place."""
    def held(module: Mask, name: str) -> Callable[[Tensor], Use]:
        def put(new: Tensor) -> Use:
            module._buffers[name] = new
            return use

        return put

    def given(old: Tensor) -> Callable[[Tensor], Use]:
        return lambda new: use.on(lambda s: map_tensors(s, lambda t: new if t is old else t))

    own = [(t, held(module, name)) for module in use.layer.modules() if isinstance(module, Mask)
           for name, t in module._buffers.items() if t is not None]
    actual = own + [(t, given(t)) for s in use.structures if isinstance(s, Support) for t in tensors_in(s)]
    return [(t, put) for t, put in actual if t.dtype == torch.bool]


@mutation(lambda use: bool(_tables(use)))
def masks_of_another_batch(use: Use) -> None:
    """A mask with more leading dimensions than x is refused: outputs keep the shape of x."""
    for old, put in _tables(use):
        error = refusal(put(old.expand(2, 1, 1, *old.shape)))
        assert isinstance(error, StructureError), f"a mask with more leading dimensions than x gave {error!r}"
        put(old)
    check_now(use, "with its own masks")
