"""Samples of a batch, each computed by its own best kernel; samples of equal sizes run together.

A basis without pairs of different samples is block diagonal: sample b needs its own M_b N_b pairs, or none if its
kernel lists none (a fused softmax, reassociated products). With many small samples the list of all pairs costs less,
and so may the native kernel of windows; the planner compares them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.linear import BlockDiagonal
from structconv.bases.pairwise import BLOCK_ELEMENTS, complete, nodes, reach
from structconv.bases.tree import Leaf, itself, tree_spec
from structconv.kernels.composite import Nested
from structconv.kernels.orders import Application, Applied, Primitives, shares_of
from structconv.planning import machine
from structconv.planning.cost import Cost
from structconv.planning.fitted import SAMPLE_CALLS
from structconv.planning.kernel import matching, register
from structconv.planning.plan import Plan, decide, plan_for
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.blocks import recompute_blocks
from structconv.shapes import broadcast
from structconv.structures.masks import Transposed, joined_by_and
from structconv.structures.samples import Pieces, Restriction, Samples
from structconv.structures.values import Structure, altered, map_tensors, size_class, tensors_in
from structconv.weights.whole import ByHead

__all__ = ["SampleBySample", "Samplewise"]

#: Numbers of samples that are computed in one call.
_Group = tuple[int, ...]


class Samplewise(NamedTuple):
    """The computation of the samples of a call. Fields: whether samples of equal sizes may be stacked along a leading
    dimension; whether the backward would store their pairs (`keeps`), so that many are evaluated again instead; the
    plans of the size classes so far."""

    stacks: bool
    keeps: bool
    plans: dict[Hashable, Plan]

    def with_relative(self, call: Call) -> Tensor:
        """y with vectors of relative positions added to the values of each head."""
        r = call.theta.heads(call.x) if call.projected is None else call.projected
        return call.theta.join(self.apply(r, call, call.relative), call.bias)

    def apply(self, r: Tensor, call: Call, relative: Tensor | None = None) -> Tensor:
        """(..., K or 1, M, C) -> (..., K, N, C)."""
        basis = call.materialized()
        samples, lead = _samples_of(basis), broadcast(r.shape[:-3], basis.batch_shape)
        assert samples is not None
        width = max(getattr(node, "_width", 1) for node in nodes(basis))
        groups = _groups(samples, math.prod(lead) * basis.size * width, self.stacks)
        if not groups or basis.restricted(Restriction(samples, groups[0][1], len(lead), Pieces())) is None:
            y = basis.apply(r)
            return y if relative is None else y + shares_of(call, relative.shape[0] // 2) @ relative
        tensors_of_basis, rank = tensors_in(basis, whole=(Structure,)), len(lead)

        def run(block: list[_Group], rows: Tensor, *tensors: Tensor) -> Tensor:
            supply, pieces = iter(tensors), Pieces()
            tree = map_tensors(basis, lambda _: next(supply), whole=(Structure,))
            table = next(supply, None)
            return torch.cat([self._of_group(tree, Restriction(samples, group, rank, pieces), rows, table)
                              for group in block], -2)

        # Pairs of more than a block are evaluated again by the sample's own plan already.
        tensors = [r, *tensors_of_basis, *(() if relative is None else (relative,))]
        again = [self.keeps and (numbers <= BLOCK_ELEMENTS or len(complete(basis)) == 2) for numbers, _ in groups]
        plain = [group for (_, group), repeats in zip(groups, again, strict=True) if not repeats]
        blocks = _blocks([group for group, repeats in zip(groups, again, strict=True) if repeats])
        parts = [run(plain, *tensors)] if plain else []
        parts += [recompute_blocks(run, tensors, blocks, reduce="cat")] if blocks else []
        order = [number for block in (plain, *blocks) for group in block for number in group]
        return _in_order(torch.cat(parts, -2) if len(parts) > 1 else parts[0], order, samples.sizes()[1])

    def _of_group(self, basis: Basis, to: Restriction, r: Tensor, relative: Tensor | None) -> Tensor:
        own, rows = basis.restricted(to), to.of_inputs(r, -2, 3)
        assert own is not None
        if to.inputs * to.outputs == 0:
            lead = broadcast(rows.shape[:-3], own.batch_shape)
            y = rows.new_zeros(*lead, basis.size, to.outputs, rows.shape[-1])
        else:
            call = Call(rows.select(-3, 0), own, ByHead.of(basis.size, rows.shape[-1]), None, rows, relative)
            y = self._plan(call, to).run(call)
        return y if to.lead is None else y.movedim(0, -3).flatten(-3, -2)

    def _plan(self, call: Call, to: Restriction) -> Plan:
        if not self.stacks:  # samples may be unlike in more than their sizes
            return plan_for(call)
        rows = call.projected
        assert rows is not None
        key = (*map(size_class, (*rows.shape[:-3], to.inputs, to.outputs)), rows.shape[-3], rows.shape[-1], rows.dtype,
               rows.requires_grad, torch.is_grad_enabled())
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = plan_for(call)
        return plan


class _Match(NamedTuple):
    """A sample of the mean size as a problem, and the kernels that may compute it."""

    problem: Problem
    kernels: tuple[tuple[Applied, Any], ...]
    samples: Samples
    stacks: bool

    def least(self, channels: int) -> tuple[Applied, Cost]:
        """The kernel that costs least for this number of channels."""
        rates, itemsize = machine.rates(self.problem.x.device), self.problem.sizes.itemsize
        costs = [(kernel, kernel.application_cost(match, self.problem, channels, "apply"))
                 for kernel, match in self.kernels]
        return min(costs, key=lambda match: match[1].seconds(rates, itemsize))

    def calls(self) -> int:
        """The number of calls: one for each sample, or one for each size if samples stack, estimated from the sums of
        sizes."""
        samples, count = self.samples, _count(self.samples)
        if not self.stacks:
            return count
        return 1 if samples.uniform else min(count, size_class(samples.longest))


class SampleBySample(Applied):
    """The samples of a batch by plans of their own."""

    name = "samples by plans of their own"

    def match(self, problem: Problem) -> _Match | None:
        samples = None if problem.sizes.nominal else _samples_of(problem.basis)
        if samples is None or samples.num_samples < 2:  # a program for any number of entries cannot be split by sample
            return None
        single, several = (problem.basis.restricted(_OfSpec(samples, problem.basis, lead)) for lead in (None, 0))
        if single is None:
            return None
        spec, theta = tree_spec(single, itself), ByHead.of(problem.basis.size, problem.theta.head_channels)
        lead = problem.x.shape[:-2] if problem.image is None else (problem.sizes.batch,)
        x = problem.x.new_empty(()).expand(*lead, spec.num_inputs, theta.channels)
        inner = dataclasses.replace(problem.part(spec, theta), x=x, projected=True, theta_grad=False,
                                    x_grad=problem.x_grad or problem.theta_grad)
        kernels = tuple((kernel, match) for kernel, match, path in matching(inner)
                        if isinstance(kernel, Applied) and path == "between")
        return _Match(inner, kernels, samples, several is not None)

    def application_cost(self, match: _Match, problem: Problem, channels: int, mode: str) -> Cost:
        """Return the cost of a sample of the mean size times their number, and of splitting and joining the rows."""
        one = match.least(channels)[1]
        work = dataclasses.replace(one, calls=0).repeated(match.samples.num_samples)
        moved = problem.bytes(2 * problem.basis.size * (problem.inputs + problem.outputs) * channels)
        return work + Cost(bytes=moved, calls=match.calls() * (one.calls + SAMPLE_CALLS))

    def application(self, match: _Match, problem: Problem) -> Application:
        return Application(self._samplewise(match, problem).apply)

    def compile(self, match: _Match, problem: Problem, path: str) -> Run:
        if problem.relative is None:
            return super().compile(match, problem, path)
        return self._samplewise(match, problem).with_relative

    def parts(self, match: _Match, problem: Problem) -> tuple[Plan, ...]:
        return (decide(match.problem),)

    def label(self, path: str) -> str:
        return "samples, each alone"

    def _samplewise(self, match: _Match, problem: Problem) -> Samplewise:
        kernel = match.least(problem.theta.head_channels)[0]
        return Samplewise(match.stacks, isinstance(kernel, Primitives | Nested), {})


def _samples_of(basis: Basis) -> Samples | None:
    """The samples outside which a basis is zero; those of a spec with inputs and outputs exchanged by their counts."""
    for term in joined_by_and(reach(basis)):
        if isinstance(term, Samples):
            return term
        if isinstance(term, Transposed) and isinstance(term.of, Samples):
            turned: Samples = altered(term.of, input_count=term.of.output_count, output_count=term.of.input_count)
            return turned
    return None


class _OfSpec(Restriction):
    """A sample of the mean size, cut from a spec, with one more leading dimension or without."""

    def __init__(self, samples: Samples, spec: Basis, lead: int | None) -> None:
        self.samples, self.lead, self._turned, self.numbers = samples, lead, False, (0,)
        pairs = size_class(samples.pair_count) / _count(samples)
        sides = size_class(samples.num_inputs) / max(size_class(samples.num_outputs), 1)
        self.inputs = max(1, round(math.sqrt(pairs * sides)))
        self.outputs = max(1, round(pairs / self.inputs))
        for node in nodes(spec):
            if isinstance(node, BlockDiagonal):
                counts = [size_class(part.num_inputs) * size_class(part.num_outputs) for part in node.parts]
                self.numbers = (min(range(len(counts)), key=lambda number: abs(counts[number] - pairs)),)
                part = node.parts[self.numbers[0]]
                self.inputs, self.outputs = part.num_inputs, part.num_outputs

    def same(self, samples: Any) -> bool:
        return True

    def first(self) -> tuple[Any, Any]:
        none = torch.zeros((1,) * (self.lead is not None), dtype=torch.int64)
        return none, none

    def from_first_input(self, t: Any) -> Any:
        return t

    def _select(self, t: Any, axis: int, own: int, side: bool) -> Any:
        shape = list(t.shape)
        shape[axis] = self.outputs if side != self._turned else self.inputs
        return Leaf(_nowhere, t, tuple(shape))


def _count(samples: Samples) -> int:
    """The largest number of samples in the class, which is the class of their `num_samples + 1` borders."""
    return size_class(samples.num_samples + 1) - 1


def _nowhere(basis: Sequence[Any]) -> Any:
    raise AssertionError("a sample of a spec has a spec of its own, by which it is read")


# -- a call -------------------------------------------------------------------------------------------------------

def _groups(samples: Samples, numbers: int, stacks: bool) -> list[tuple[int, _Group]]:
    """Groups of samples of equal sizes that are computed together, each with its count of numbers, `numbers` at each
    pair; one block holds a group. Empty if no sample has a pair."""
    if samples.pair_count == 0:
        return []
    alike: dict[Any, list[int]] = {}
    for number, sizes in enumerate(zip(*samples.sizes(), strict=True)):
        alike.setdefault(sizes if stacks else number, []).append(number)
    groups = []
    for members in alike.values():
        inputs, outputs = (side[members[0]] for side in samples.sizes())
        one = max(1, inputs * outputs * numbers)
        step = max(1, BLOCK_ELEMENTS // one)
        groups += [(one * len(part), part) for part in
                   (tuple(members[start:start + step]) for start in range(0, len(members), step))]
    return groups


def _blocks(groups: list[tuple[int, _Group]]) -> list[list[_Group]]:
    """Groups whose pairs one block holds."""
    blocks: list[list[_Group]] = []
    elements = BLOCK_ELEMENTS + 1
    for numbers, group in groups:
        if elements + numbers > BLOCK_ELEMENTS:
            blocks.append([])
            elements = 0
        blocks[-1].append(group)
        elements += numbers
    return blocks


def _in_order(y: Tensor, numbers: list[int], sizes: list[int]) -> Tensor:
    """The outputs of samples in the order of their numbers."""
    if numbers == sorted(numbers):
        return y
    pieces = dict(zip(numbers, y.split([sizes[number] for number in numbers], -2), strict=True))
    return torch.cat([pieces[number] for number in sorted(numbers)], -2)


register(SampleBySample())
