"""The law of kernels: each kernel that matches a specimen's calls computes eq. 8, for all calls of one plan.

The planner chooses one kernel for a call. Here each kernel is compiled for a first call, and run on it and on other
calls of the same plan: with other numbers, other sizes, and NaN at masked entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.pairwise import weights_at
from structconv.errors import StructureError
from structconv.nn.conv import call_of
from structconv.planning.counts import Sizes
from structconv.planning.kernel import matching
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call, Problem, Run
from structconv.structures import Graph, batch
from structconv.structures.values import EXACT
from structconv.testing.checks import CHANNELS, F64, absent_pairs, arguments, by_definition, same, same_gradients
from structconv.testing.specimens import Setup, Specimen, Subject, mapped, with_leaves
from structconv.weights import Full, HeadBlocks, LowRank, Weight

__all__ = ["Compiled", "check_absent", "check_changes", "check_kernels", "check_sizes", "compiled", "values"]

OUTPUTS = 2
#: (K, P) -> Theta.
MakeTheta = Callable[[int, int], Weight]


def _full(k: int, p: int) -> Weight:
    return Full.of(_numbers(k, p, OUTPUTS))


def _head_blocks(k: int, p: int) -> Weight:
    return HeadBlocks.of(_numbers(k, p, OUTPUTS))


def _low_rank(k: int, p: int) -> Weight:
    return LowRank.of(_numbers(k, p, 2), _numbers(k, 2, OUTPUTS))


#: Theta whole, and the two kinds that let the structure act between their factors.
THETAS: tuple[MakeTheta, ...] = (_full, _head_blocks, _low_rank)


class Compiled(NamedTuple):
    """A kernel on one of its paths, compiled for a call."""

    name: str
    automatic: bool
    run: Run
    weights: Run


def compiled(call: Call) -> Iterator[Compiled]:
    """Every kernel that a planner weighs for a call, on each of its paths."""
    spec = call.spec()
    lead = torch.broadcast_shapes(call.x.shape[:-2], spec.batch_shape)
    problem = Problem(spec, call.theta, call.x, Sizes(math.prod(lead), call.x.element_size()), call.x.requires_grad,
                      any(t.requires_grad for t in call.theta.tensors))
    for kernel, match, path in matching(problem):
        yield Compiled(f"{kernel.label(path)}, {path}, {type(call.theta).__name__}",
                       kernel.automatic(match, problem, path), kernel.compile(match, problem, path),
                       kernel.weights(match, problem))


def check_kernels(specimen: Specimen) -> None:
    """Each kernel that matches gives eq. 8 with a bias, gradients included, and the entries where they count.

    On each of its paths, for Theta whole and in factors, for the call that it was compiled for and for another one of
    other numbers that finds the same plan.
    """
    for theta in THETAS:
        calls = [_call(*with_leaves(subject), theta) for subject in (specimen.subject(), _other(specimen))]
        plans = [plan_for(call) for call, _ in calls]
        assert plans[0] is plans[1], f"calls that differ in their numbers have two plans:\n{plans[0]}\n{plans[1]}"
        for each in compiled(calls[0][0]):
            for turn, (call, variables) in zip(("", ", in its second call"), calls, strict=True):
                same_gradients(each.run(call), _expected(call), variables, f"{each.name}{turn}")
                same(each.weights(call), weights_at(call.materialized(), F64), f"weights of {each.name}{turn}")


def check_sizes(specimen: Specimen) -> None:
    """Each kernel gives eq. 8 for numbers of entries that it was not compiled for: another two of the same class."""
    setup = specimen.setup("resizes")
    for theta in THETAS[:2]:
        first, other = _of_one_plan(setup, theta)
        for each in compiled(first):
            same(each.run(other), _expected(other),
                 f"{each.name}, compiled for {first.x.shape[-2]} entries, with {other.x.shape[-2]}")


def values(specimen: Specimen) -> Iterator[str]:
    """The names of the checks of this file that a specimen is put to, also without traits."""
    yield "kernels"
    structure = getattr(specimen.subject(), "structure", None)
    if isinstance(structure, Graph) and structure.num_edges:
        yield "changes"


def check_absent(specimen: Specimen) -> None:
    """NaN in an input stays away from the outputs whose pair with it is masked out, whatever kernel is chosen."""
    subject = specimen.subject()
    for theta in THETAS[:2]:
        clean = _call(subject, [], theta)[0]
        absent = absent_pairs(clean.materialized())
        expected = _expected(clean)
        for entry in _first_and_last(absent.any(-1)):
            dirty = _with_nan(subject, entry, clean)
            for each in compiled(clean):
                if each.automatic:
                    same(each.run(dirty)[..., absent[entry], :], expected[..., absent[entry], :],
                         f"{each.name}: outputs that do not read input {entry}, which is NaN")


def check_changes(specimen: Specimen) -> None:
    """A graph whose edges are changed in place is another one to each kernel, and to the basis; with an index out of
    range it is a `StructureError`."""
    setup = specimen.subject()
    assert isinstance(setup, Setup) and isinstance(setup.structure, Graph), "changes needs a mechanism on a graph"
    before = setup.structure.edge_index
    graph = dataclasses.replace(setup.structure, edge_index=before.clone())
    setup = dataclasses.replace(setup, structure=graph)
    first = _call(setup, [], _full)[0]
    kernels = list(compiled(first))
    for each in kernels:
        each.run(first)
    primitives: list[tuple[str, Run]] = [("analysis", lambda call: call.materialized().analysis(call.x)),
                                         *((each.name, each.run) for each in kernels)]
    for row, size in enumerate((graph.num_inputs, graph.num_outputs)):
        for index in (-1, size):
            graph.edge_index[row, -1] = index
            for name, run in primitives:
                _check_refused(setup, run, f"{name} with {index} written into row {row} of edge_index")
            graph.edge_index.copy_(before)
    other = torch.stack([before[0], before[1].roll(1)])
    graph.edge_index.copy_(other)
    changed = _call(setup, [], _full)[0]
    fresh = dataclasses.replace(setup, structure=dataclasses.replace(graph, edge_index=other))
    basis = fresh.basis()
    for each in kernels:
        same(each.run(changed), by_definition(changed.x, basis, changed.theta) + cast(Tensor, changed.bias),
             f"{each.name} after a change in place")


def _check_refused(setup: Setup, run: Run, what: str) -> None:
    try:
        run(_call(setup, [], _full)[0])
    except StructureError:
        return
    raise AssertionError(f"{what}: no StructureError")


def _expected(call: Call) -> Tensor:
    """Compute eq. 8 with b by its definition."""
    assert call.bias is not None
    return by_definition(call.x, call.materialized(), call.theta) + call.bias


def _of_one_plan(setup: Setup, theta: MakeTheta) -> tuple[Call, Call]:
    """Calls with more entries, of two sizes that no plan tells apart; the same twice where each size has its own."""
    least = EXACT // min(t.shape[-2] for t in (setup.x, setup.z) if t is not None) + 1
    last = first = _call(_times(setup, least), [], theta)[0]
    for copies in range(least + 1, 2 * least + 4):
        before, last = last, _call(_times(setup, copies), [], theta)[0]
        if plan_for(before) is plan_for(last):
            return before, last
    return first, first


def _times(setup: Setup, copies: int) -> Setup:
    """The mechanism on so many times the entries, and on so many copies of the structure side by side."""
    x, z = (None if t is None else _numbers(*t.shape[:-2], t.shape[-2] * copies, t.shape[-1])
            for t in (setup.x, setup.z))
    assert x is not None
    return Setup(setup.mechanism, x, z, None if setup.structure is None else batch([setup.structure] * copies))


def _other(specimen: Specimen) -> Subject:
    """The specimen with other numbers."""
    other: Subject = mapped(specimen.subject(seed=1), lambda t: 0.75 * t.detach())
    return other


def _call(subject: Subject, leaves: list[Tensor], theta: MakeTheta) -> tuple[Call, list[Tensor]]:
    """A call with a random Theta and b, and what gradients are taken of where the subject is over leaves."""
    if isinstance(subject, Setup):
        size, channels = subject.mechanism.size, subject.x.shape[-1]
    else:
        size, channels = subject.size, CHANNELS
    weight, of_weight = with_leaves(theta(size, channels))
    bias = _numbers(weight.out_channels).requires_grad_()
    if isinstance(subject, Setup):
        call, _ = call_of(subject.mechanism, weight, bias, subject.x, subject.z, subject.structure)
        return call, [*leaves, *of_weight, bias]
    x = arguments(subject, heads=False)
    return Call(x, subject, weight, bias), [x, *leaves, *of_weight, bias]


def _with_nan(subject: Subject, entry: int, clean: Call) -> Call:
    """The call with NaN in one of the inputs; the outputs' own content stays."""
    bad = torch.arange(clean.x.shape[-2]).unsqueeze(-1) == entry
    if not isinstance(subject, Setup):
        return clean._replace(x=clean.x.detach().masked_fill(bad, torch.nan))
    z = subject.x if subject.z is None else subject.z
    return call_of(subject.mechanism, clean.theta, clean.bias, subject.x.masked_fill(bad, torch.nan), z,
                   subject.structure)[0]


def _first_and_last(which: Tensor) -> set[int]:
    result = which.nonzero().flatten().tolist()
    return {result[0], result[-1]} if result else set()


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)
