"""The law of kernels: each kernel that matches a specimen's calls computes eq. 8, for all calls of one plan.

The planner chooses one kernel for a call. Here each kernel is compiled for a first call, and run on it and on other
calls of the same plan: with other numbers, other sizes, and NaN at masked entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

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
from structconv.testing.specimens import (
    Draw,
    Rounded,
    Setup,
    Specimen,
    Subject,
    draws,
    mapped,
    random_numbers,
    with_dtype,
    with_leaves,
)
from structconv.weights import Full, HeadBlocks, LowRank, Weight

__all__ = ["Compiled", "check_absent", "check_changes", "check_kernels", "check_sizes", "compiled"]

OUTPUTS = 2
#: (K, P, Q) -> Theta.
MakeTheta = Callable[[int, int, int], Weight]

#: Theta whole, and the two kinds that let the structure act between their factors.
THETAS: tuple[MakeTheta, ...] = (
    lambda k, p, q: Full.of(_numbers(k, p, q)),
    lambda k, p, q: HeadBlocks.of(_numbers(k, p, q)),
    lambda k, p, q: LowRank.of(_numbers(k, p, 2), _numbers(k, 2, q)),
)


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
    grad = torch.is_grad_enabled()
    problem = Problem(spec, call.theta, call.x, Sizes(math.prod(lead), call.x.element_size()),
                      grad and call.x.requires_grad, grad and any(t.requires_grad for t in call.theta.tensors))
    for kernel, match, path in matching(problem):
        yield Compiled(f"{kernel.label(path)}, {path}, {type(call.theta).__name__}",
                       kernel.automatic(match, problem, path), kernel.compile(match, problem, path),
                       kernel.weights(match, problem))


def check_kernels(specimen: Specimen) -> None:
    """Each kernel that matches gives eq. 8 with a bias, gradients included, and the entries where they count: on each
    of its paths, for Theta whole and in factors, for the call that it was compiled for and for one of other numbers
    that finds the same plan; and for calls in float32, without gradients, with 0 to 2 leading dimensions and with other
    numbers of channels (`draws`)."""
    rounded = Rounded.of(specimen.subject())
    for turn, theta in enumerate(THETAS):
        calls = [_call(subject, theta, leaves)
                 for subject, leaves in map(with_leaves, (specimen.subject(), _other(specimen)))]
        plans = [plan_for(call) for call, _ in calls]
        assert plans[0] is plans[1], f"calls that differ in their numbers have two plans:\n{plans[0]}\n{plans[1]}"
        for each in compiled(calls[0][0]):
            for which, (call, variables) in zip(("", ", in its second call"), calls, strict=True):
                same_gradients(each.run(call), _expected(call), variables, f"{each.name}{which}")
                same(each.weights(call), weights_at(call.materialized(), F64), f"weights of {each.name}{which}")
        for draw in draws(turn):
            _check_drawn(rounded, theta, draw)


def _check_drawn(rounded: Rounded, theta: MakeTheta, draw: Draw) -> None:
    """Each kernel that matches a drawn call gives eq. 8, as computed in float64 from the same numbers."""
    with torch.set_grad_enabled(draw.gradients):
        exact, of_exact = call, variables = _drawn_call(rounded, theta, draw, F64)
        if draw.dtype != F64:
            call, variables = _drawn_call(rounded, theta, draw, draw.dtype)
        expected = _expected(exact)
        weights = None if draw.gradients else weights_at(exact.materialized(), F64)
        for each in compiled(call):
            y = each.run(call)
            assert y.dtype == draw.dtype, f"{each.name}, {draw}: gives {y.dtype}"
            same_gradients(y, expected, variables, f"{each.name}, {draw}", of_exact)
            if weights is not None:
                same(each.weights(call), weights, f"weights of {each.name}, {draw}")


def _drawn_call(rounded: Rounded, theta: MakeTheta, draw: Draw, dtype: torch.dtype) -> tuple[Call, list[Tensor]]:
    """The call of a draw, computed in `dtype`, and its variables; the numbers are equal for each dtype."""
    drawn = rounded.like(draw, dtype)
    subject, leaves = with_leaves(drawn) if draw.gradients else (drawn, [])

    def weight_for(size: int, channels: int) -> Weight:
        return cast(Weight, _rounded(theta(size, channels, draw.out_channels), dtype))

    with random_numbers(0):
        if isinstance(subject, Setup):
            lead, weight = tuple(subject.x.shape[:-2]), weight_for(subject.mechanism.size, subject.x.shape[-1])
            call, _ = call_of(subject.mechanism, weight, None, subject.x, subject.z, subject.structure)
        else:
            lead, call = draw.lead(tuple(subject.batch_shape)), Call(_numbers(0), subject, weight_for(subject.size, 1))
        if call.projected is not None:  # scores read Theta, whose channels are those of x
            bias = _rounded(_numbers(call.theta.out_channels), dtype).requires_grad_()
            return call._replace(bias=bias), [*leaves, bias]
        spec = call.spec()
        x = _rounded(_numbers(*lead, spec.num_inputs, draw.channels), dtype).requires_grad_(draw.gradients)
        weight, of_weight = with_leaves(weight_for(spec.size, draw.channels))
        bias = _rounded(_numbers(weight.out_channels), dtype).requires_grad_()
    return call._replace(x=x, theta=weight, bias=bias), [*leaves, x, *of_weight, bias]


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """A tensor or Theta in `dtype`, of numbers that float32 represents."""
    return with_dtype(with_dtype(value, torch.float32), dtype)


def check_sizes(specimen: Specimen) -> None:
    """Each kernel gives eq. 8 for numbers of entries that it was not compiled for: another two of the same class."""
    setup = specimen.setup("resizes")
    for theta in THETAS[:2]:
        first, other = _of_one_plan(setup, theta)
        for each in compiled(first):
            same(each.run(other), _expected(other),
                 f"{each.name}, compiled for {first.x.shape[-2]} entries, with {other.x.shape[-2]}")


def check_absent(specimen: Specimen) -> None:
    """NaN in an input stays away from the outputs whose pair with it is masked out, whatever kernel is chosen."""
    subject = specimen.subject()
    for theta in THETAS[:2]:
        clean = _call(subject, theta)[0]
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
    first = _call(setup)[0]
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
    changed = _call(setup)[0]
    fresh = dataclasses.replace(setup, structure=dataclasses.replace(graph, edge_index=other))
    basis = fresh.basis()
    for each in kernels:
        same(each.run(changed), by_definition(changed.x, basis, changed.theta) + cast(Tensor, changed.bias),
             f"{each.name} after a change in place")


def _check_refused(setup: Setup, run: Run, what: str) -> None:
    try:
        run(_call(setup)[0])
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
    last = first = _call(_times(setup, least), theta)[0]
    for copies in range(least + 1, 2 * least + 4):
        before, last = last, _call(_times(setup, copies), theta)[0]
        if plan_for(before) is plan_for(last):
            return before, last
    return first, first


def _times(setup: Setup, copies: int) -> Setup:
    """The mechanism on `copies` times as many entries, and on `copies` of the structure side by side."""
    x, z = (None if t is None else _numbers(*t.shape[:-2], t.shape[-2] * copies, t.shape[-1])
            for t in (setup.x, setup.z))
    assert x is not None
    return Setup(setup.mechanism, x, z, None if setup.structure is None else batch([setup.structure] * copies))


def _other(specimen: Specimen) -> Subject:
    """The specimen with other numbers."""
    other: Subject = mapped(specimen.subject(seed=1), lambda t: 0.75 * t.detach())
    return other


def _call(subject: Subject, theta: MakeTheta = THETAS[0], leaves: Sequence[Tensor] = ()) -> tuple[Call, list[Tensor]]:
    """Return a call with a random Theta and b, and the tensors with gradients, `leaves` of the subject among them."""
    if isinstance(subject, Setup):
        size, channels = subject.mechanism.size, subject.x.shape[-1]
    else:
        size, channels = subject.size, CHANNELS
    weight, of_weight = with_leaves(theta(size, channels, OUTPUTS))
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
