"""Dtypes, memory layouts, copies, compiled and exported programs."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from structconv.mechanisms.expression import Mechanism
from structconv.structures import Graph, Grid, KnowledgeGraph
from structconv.structures.values import FrozenValue, field_names, fields
from structconv.testing.checks import F64, arguments, same
from structconv.testing.laws import twice, with_entries_reversed
from structconv.testing.specimens import Setup, Specimen, Subject, as_basis, mapped, with_dtype

__all__ = ["Analysis", "check_compile", "check_copies", "check_dtypes", "check_export", "check_noncontiguous", "larger"]


def check_dtypes(specimen: Specimen) -> None:
    """float32 and bfloat16 keep their dtype and differ from float64 by what rounding explains. A sum of n terms is off
    by at most n eps times the sum of their absolute values (Higham 2002, equation 3.5); the basis itself is off by what
    relative errors of n eps in its tensors make of it, measured by perturbing them."""
    for dtype in (torch.float32, torch.bfloat16):
        low = with_dtype(specimen.subject(), dtype)
        basis, exact = as_basis(low), as_basis(with_dtype(low, F64))
        x = arguments(basis, heads=False).detach().to(dtype)
        y = basis.analysis(x)
        assert y.dtype == dtype, f"analysis of {dtype} gives {y.dtype}"
        if not y.numel() or not basis.num_inputs:
            assert not y.any(), "what reads nothing is not zero"
            continue
        a = exact.dense(F64)
        terms = basis.num_inputs + 2 * _width(low) + 8
        unit = torch.finfo(dtype).eps * terms
        allowed = unit * torch.einsum("...kmn,...mc->...knc", a.abs() + a.abs().max() / 8, x.to(F64).abs())
        allowed = allowed + unit * _sensitivity(low, x.to(F64), torch.finfo(dtype).eps) + torch.finfo(dtype).tiny
        same(y, exact.analysis(x.to(F64)), f"analysis in {dtype}", allowed)


def _width(subject: Subject) -> int:
    """The most terms that one score sums: channels of x or of z, or the largest last axis of a tensor held."""
    widths = [1]

    def look(t: Tensor) -> Tensor:
        widths.extend(t.shape[-1:])
        return t

    mapped(subject, look)
    return max(widths)


def _sensitivity(subject: Subject, x: Tensor, eps: float) -> Tensor:
    """Return the largest change of each output under random relative changes by eps of all tensors, divided by eps."""
    generator = torch.Generator().manual_seed(11)

    def perturbed(t: Tensor) -> Tensor:
        sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return t.detach().to(F64) * (1 + eps * sign)

    base = as_basis(with_dtype(subject, F64)).analysis(x)
    changes = [(as_basis(mapped(subject, perturbed)).analysis(x) - base).abs() for _ in range(4)]
    return torch.stack(changes).amax(0).max() / eps


def check_noncontiguous(specimen: Specimen) -> None:
    """Inputs of any memory layout give what contiguous ones give."""
    subject = specimen.subject()
    basis = as_basis(subject)
    x, r = arguments(basis, heads=False).detach(), arguments(basis, heads=True).detach()
    strided = as_basis(mapped(subject, _scattered)) if isinstance(subject, Setup) else basis
    for layout in (_scattered, _turned):
        same(strided.analysis(layout(x)), basis.analysis(x), "analysis of a non-contiguous x")
        same(strided.apply(layout(r)), basis.apply(r), "apply to a non-contiguous r")
        same(strided.synthesis(layout(r)), basis.synthesis(r), "synthesis of a non-contiguous r")
    one = x[..., :1].expand_as(x)
    same(basis.analysis(one), basis.analysis(one.contiguous()), "analysis of an expanded x")


def _scattered(t: Tensor) -> Tensor:
    """Return a tensor of equal numbers with stride 2 in memory."""
    wide = t.new_zeros(*t.shape, 2)
    wide[..., 0] = t.detach()
    return wide[..., 0]


def _turned(t: Tensor) -> Tensor:
    """Return a tensor of equal numbers with the last two axes exchanged in memory."""
    return t.mT.contiguous().mT


def check_copies(specimen: Specimen) -> None:
    """Deep copies, pickles and state dicts make the same basis again."""
    subject = specimen.subject()
    a = as_basis(subject).dense(F64)
    same(as_basis(copy.deepcopy(subject)).dense(F64), a, "a deep copy")
    same(as_basis(pickle.loads(pickle.dumps(subject))).dense(F64), a, "unpickled")
    if not isinstance(subject, Setup):
        return
    other = specimen.subject(seed=1)
    assert isinstance(other, Setup)
    stream = io.BytesIO()
    torch.save(subject.mechanism.state_dict(), stream)
    stream.seek(0)
    other.mechanism.load_state_dict(torch.load(stream, weights_only=True))
    same(dataclasses.replace(subject, mechanism=other.mechanism).basis().dense(F64), a, "state_dict of another")


class Analysis(nn.Module):
    """A mechanism's basis applied to the x from which it is made, as a module to compile or export."""

    mechanism: Mechanism

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.mechanism = mechanism

    def forward(self, x: Tensor, z: Tensor | None = None, structure: Any = None) -> Tensor:
        """(..., K, N, P)."""
        return self.mechanism.basis(x, structure, z=z).analysis(x)


def larger(setup: Setup) -> list[Setup]:
    """The setup, and others of the same mechanism with more entries and edges."""
    other = dataclasses.replace(setup, x=setup.x.flip(-1), structure=with_entries_reversed(setup.structure))
    pair = _whole(twice(setup, other))
    return [setup, pair, _whole(twice(pair, setup))]


def _whole(setup: Setup) -> Setup:
    """The setup on a structure that is one sample."""
    if isinstance(setup.structure, Graph | KnowledgeGraph):
        return dataclasses.replace(setup, structure=dataclasses.replace(setup.structure, samples=None))
    return setup


def check_compile(specimen: Specimen) -> None:
    """One graph without breaks gives the eager numbers; other sizes cost one more graph, and no third."""
    setup = specimen.setup("compiles")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    module = Analysis(setup.mechanism)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for each in larger(setup) if "resizes" in specimen.traits else [setup]:
        same(compiled(each.x, each.z, each.structure).detach(), module(each.x, each.z, each.structure).detach(),
             f"compiled, with {each.x.shape[-2]} entries")
    assert len(graphs) <= 2, f"{len(graphs)} graphs were compiled for three sizes; one that is dynamic should do"


def check_export(specimen: Specimen) -> None:
    """An exported program gives the eager numbers at the sizes it was traced for and at larger ones. With a graph the
    number of edges is free and the number of entries, an integer of the graph, is not; nor are they with a grid."""
    setup = specimen.setup("exports")
    module, graph = Analysis(setup.mechanism), setup.structure
    free = None if isinstance(graph, Graph | Grid) else {-2 % setup.x.dim(): Dim.DYNAMIC}
    shapes = {"x": free, "z": None if setup.z is None else free, "structure": _edges_free(graph)}
    program = torch.export.export(module, (setup.x, setup.z, graph), dynamic_shapes=shapes).module()
    for each in _others(setup):
        same(program(each.x, each.z, each.structure).detach(), module(each.x, each.z, each.structure).detach(),
             f"exported, with {each.x.shape[-2]} entries")


def _edges_free(structure: Any, axis: int = -1) -> Any:
    """Return the dynamic axes of each part of a structure: an axis of each tensor, the edges of a graph."""
    if isinstance(structure, Tensor):
        return {axis % structure.dim(): Dim.DYNAMIC}
    if isinstance(structure, Graph):
        parts = {name: getattr(structure, name) for name in field_names(structure)}
        return [_edges_free(part, -2 if name == "edge_attr" and part.dim() > 1 else -1)
                for name, part in parts.items() if part is not None]  # exporters leave out fields that are None
    of_value = isinstance(structure, FrozenValue)
    values = [part for part in fields(structure) if part is not None] if of_value else structure
    if not isinstance(values, tuple | list):
        return None
    return type(values)(_edges_free(part, -1 if i == 0 else 0) for i, part in enumerate(values))


def _others(setup: Setup) -> list[Setup]:
    if isinstance(setup.structure, Grid):
        return [setup, dataclasses.replace(setup, x=setup.x.flip(-1))]
    if not isinstance(setup.structure, Graph):
        return larger(setup)
    graph = setup.structure
    weight, attributes = graph.edge_weight, graph.edge_attr
    fewer = Graph(graph.edge_index[:, 1:], num_inputs=graph.num_inputs, num_outputs=graph.num_outputs,
                  edge_weight=None if weight is None else weight[..., 1:],
                  edge_attr=None if attributes is None else attributes[1:] if attributes.dim() == 1
                  else attributes[..., 1:, :])
    return [setup, dataclasses.replace(setup, structure=fewer)]
