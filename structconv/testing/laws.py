"""Laws that a specimen promises by a trait: batching, relabeling, translation, masking."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.structures import Graph, Grid, KnowledgeGraph, batch
from structconv.testing.checks import F64, absent_pairs, arguments, same
from structconv.testing.specimens import Setup, Specimen, as_basis, with_leaves

__all__ = ["check_batching", "check_blockwise", "check_masking", "check_permutation", "check_translation", "relabeled",
           "rolled", "twice", "with_entries_reversed"]


def check_batching(specimen: Specimen) -> None:
    """Check that each element of a batch gets the result of a call of its own."""
    subject = specimen.subject()
    basis = as_basis(subject)
    x, r = arguments(basis, heads=False).detach(), arguments(basis, heads=True).detach()
    if not basis.batch_shape:
        for i in range(x.shape[0]):
            same(basis.analysis(x)[i], basis.analysis(x[i]), "analysis of a batch")
            same(basis.apply(r)[i], basis.apply(r[i]), "apply to a batch")
            same(basis.synthesis(r)[i], basis.synthesis(r[i]), "synthesis of a batch")
    if isinstance(subject, Setup):
        _check_batched_content(subject)


def _check_batched_content(setup: Setup) -> None:
    """Each sample gets the result of a call of its own, unless the structure is of a batch and refuses that call, and
    gets the same result beside other samples."""
    together, lead = _with_samples(setup)
    a, y = _of_samples(together, lead)
    for index in {(0,) * len(lead), tuple(size - 1 for size in lead)}:
        others = torch.ones(*lead, 1, 1, dtype=torch.bool)
        others[index] = False
        results = [("beside other samples", _of_samples(_mapped(together, partial(_changed, where=others)), lead))]
        with suppress(ShapeError, StructureError):
            results.append(("alone", _of_samples(_mapped(together, itemgetter(index)), lead)))
        for where, (dense, analysis) in results:
            same(dense[index], a[index], f"the basis of sample {index} {where}")
            same(analysis[index], y[index], f"analysis of sample {index} {where}")


def _with_samples(setup: Setup) -> tuple[Setup, tuple[int, ...]]:
    """The setup on content of several samples, and their leading dimensions."""
    lead = torch.broadcast_shapes(setup.x.shape[:-2], setup.basis().batch_shape)
    if math.prod(lead) == 1:
        setup, lead = _mapped(setup, lambda t: torch.stack([t, t.flip(-1) * 0.5])), (2, *lead)
    return _mapped(setup, lambda t: t.expand(*lead, *t.shape[-2:])), tuple(lead)


def _of_samples(setup: Setup, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The entries, and the analysis of x, for each sample."""
    basis = setup.basis()
    a, y = basis.dense(F64), basis.analysis(setup.x)
    return a.expand(*lead, *a.shape[-3:]), y.expand(*lead, *y.shape[-3:])


def _changed(t: Tensor, where: Tensor) -> Tensor:
    """Other numbers in some samples."""
    return torch.where(where, 0.5 * t.flip(-1), t)


def _mapped(setup: Setup, fn: Callable[[Tensor], Tensor]) -> Setup:
    """The setup with fn of its content."""
    return dataclasses.replace(setup, x=fn(setup.x), z=None if setup.z is None else fn(setup.z))


def check_blockwise(specimen: Specimen) -> None:
    """Two structures side by side in one block-diagonal structure give what they give by themselves."""
    setup = specimen.setup("blockwise")
    if setup.structure is None:
        raise ConfigError(specimen.name, "the trait 'blockwise' needs a mechanism on a structure", "no structure",
                          "Leave the trait out, or let make return Setup(mechanism, x, structure=structure).")
    second = dataclasses.replace(setup, x=setup.x.flip(-1) * 0.5, z=None if setup.z is None else setup.z.neg(),
                                 structure=with_entries_reversed(setup.structure))
    together = twice(setup, second)
    setups = [each.basis().analysis(each.x) for each in (setup, second)]
    same(together.basis().analysis(together.x), torch.cat(setups, -2), "a block-diagonal batch")


def twice(first: Setup, second: Setup) -> Setup:
    """Two setups of one mechanism side by side: entries concatenated, structures batched."""
    z = None if first.z is None or second.z is None else torch.cat([first.z, second.z], -2)
    structure = None if first.structure is None else batch([first.structure, second.structure])
    return Setup(first.mechanism, torch.cat([first.x, second.x], -2), z, structure)


def check_permutation(specimen: Specimen) -> None:
    """Entries and a structure in another order give the basis A in that order."""
    setup = specimen.setup("permutes")
    a = setup.basis().dense(F64)
    generator = torch.Generator().manual_seed(3)
    source = torch.randperm(a.shape[-2], generator=generator)
    target = source if setup.z is None else torch.randperm(a.shape[-1], generator=generator)
    moved = Setup(setup.mechanism, setup.x[..., source, :], None if setup.z is None else setup.z[..., target, :],
                  relabeled(setup.structure, source, target))
    same(moved.basis().dense(F64), a[..., source, :][..., target], "relabeled entries")
    y = setup.basis().analysis(setup.x)
    same(moved.basis().analysis(moved.x), y[..., target, :], "analysis of relabeled entries")


def relabeled(structure: Any, source: Tensor, target: Tensor) -> Any:
    """Return the structure in which entry source[i] is entry i, and output target[j] is output j. A user's class needs
    a method `relabeled(source, target)`."""
    rows, columns = source.argsort(), target.argsort()
    if isinstance(structure, Graph):
        moved = torch.stack([rows[structure.source.long()], columns[structure.target.long()]])
        sizes = {"num_inputs": structure.num_inputs, "num_outputs": structure.num_outputs}
        return Graph(moved.to(structure.edge_index.dtype), **sizes, edge_weight=structure.edge_weight,
                     edge_attr=structure.edge_attr)
    if isinstance(structure, KnowledgeGraph):
        head, relation, tail = structure.triples.unbind(1)
        return KnowledgeGraph(torch.stack([rows[head], relation, columns[tail]], 1), structure.num_entities,
                              structure.relations)
    own = getattr(structure, "relabeled", None)
    assert structure is None or own is not None, (
        f"no way to relabel a {type(structure).__name__}: give its class a method relabeled(source, target)")
    return None if own is None else own(source, target)


def with_entries_reversed(structure: Any) -> Any:
    """The structure with its entries in reversed order; the same one if there is no way to relabel it."""
    if getattr(structure, "samples", None) is not None:
        return structure
    if isinstance(structure, KnowledgeGraph):
        counts = structure.num_entities, structure.num_entities
    elif isinstance(structure, Graph) or hasattr(structure, "relabeled"):
        sides = ("num_inputs", "num_outputs") if hasattr(structure, "num_inputs") else ("num_entries", "num_entries")
        counts = getattr(structure, sides[0]), getattr(structure, sides[1])
    else:
        return structure
    source, target = (torch.arange(count - 1, -1, -1) for count in counts)
    return relabeled(structure, source, target)


def check_translation(specimen: Specimen) -> None:
    """On a periodic grid, analysis commutes with translations."""
    subject = specimen.subject()
    basis = as_basis(subject)
    grid = subject.structure if isinstance(subject, Setup) else getattr(subject, "grid", None)
    if not isinstance(grid, Grid) or not grid.periodic:
        raise ConfigError(specimen.name, "the trait 'translates' needs a basis or mechanism on a periodic grid",
                          type(grid).__name__, "Leave the trait out, or take a Grid with periodic=True.")
    x = arguments(basis, heads=False).detach()
    for axis in range(grid.ndim):
        same(basis.analysis(rolled(x, grid, axis)), rolled(basis.analysis(x), grid, axis),
             f"translation along axis {axis}")


def rolled(x: Tensor, grid: Grid, axis: int) -> Tensor:
    """Entries of a grid translated by one along an axis."""
    return x.unflatten(-2, grid.shape).roll(1, axis - grid.ndim - 1).flatten(-1 - grid.ndim, -2)


def check_masking(specimen: Specimen) -> None:
    """Outputs that read nothing are exactly zero, with zero gradients; NaN in inputs that no output reads stays there,
    also in the gradients of parameters."""
    absent = absent_pairs(specimen.basis())
    hidden, blind = (absent.all(dim) for dim in (-1, -2))
    assert absent.any(), "masks needs an input that some output does not see"
    _check_blind(specimen, blind)
    if hidden.any():
        clean, dirty = (_results_with(specimen, hidden, value) for value in (0.5, torch.nan))
        names = ["analysis", "synthesis", *(f"gradient {position}" for position in range(len(clean) - 2))]
        for name, one, other in zip(names, dirty, clean, strict=True):
            same(one, other, f"{name} with NaN in masked-out inputs")


def _check_blind(specimen: Specimen, blind: Tensor) -> None:
    subject, leaves = with_leaves(specimen.subject())
    basis = as_basis(subject)
    x = arguments(basis, heads=False)
    y = basis.analysis(x)[..., blind, :]
    assert not y.any(), "an output that reads nothing is not exactly zero"
    if y.requires_grad:
        for gradient in torch.autograd.grad(y.sum(), [x, *leaves], allow_unused=True):
            assert gradient is None or not gradient.any(), "an output that reads nothing has a gradient"


def _results_with(specimen: Specimen, hidden: Tensor, value: float) -> list[Tensor]:
    """Results and gradients with `value` in the hidden inputs of content and values; the outputs' own content stays."""
    subject = specimen.subject()
    tensors: list[Tensor] = []
    parameters: list[Tensor] = []
    basis: Basis
    if isinstance(subject, Setup):
        z = (subject.x if subject.z is None else subject.z).detach().clone().requires_grad_()
        x = subject.x.detach().masked_fill(hidden.unsqueeze(-1), value).requires_grad_()
        basis, tensors = Setup(subject.mechanism, x, z, subject.structure).basis(), [x, z]
        parameters = list(subject.mechanism.parameters())
    else:
        basis = subject
    r = arguments(basis, heads=True).detach().masked_fill(hidden.unsqueeze(-1), value).requires_grad_()
    first, second = basis.analysis(r[..., 0, :, :]), basis.synthesis(r)
    gradients = torch.autograd.grad(first.cos().sum() + second.cos().sum(), [r, *tensors], allow_unused=True,
                                    retain_graph=True)
    of_parameters = torch.autograd.grad(basis.analysis(arguments(basis, heads=False)).cos().sum(), parameters,
                                        allow_unused=True) if parameters else ()
    visible = [gradient if position == 2 or gradient is None else gradient[..., ~hidden, :]
            for position, gradient in enumerate(gradients)]
    return [first.detach(), second.detach(), *(gradient for gradient in (*visible, *of_parameters)
                                               if gradient is not None)]
