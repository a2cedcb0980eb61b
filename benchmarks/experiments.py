"""Experiments of `benchmarks.fit`: for each constant of `planning.fitted`, the operations that it is a ratio of.

Everything is forward, in float32, on the CPU. An experiment times its works in turns, and one round of them gives each
of its constants a value for every case that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.graphs import power_law
from structconv.bases import (
    Additive,
    Affine,
    Bilinear,
    Dense,
    LeakyReLU,
    Lookup,
    Masked,
    Normalized,
    Sparse,
    Sum,
    Typed,
)
from structconv.bases.base import Basis
from structconv.bases.linear import Scaled
from structconv.kernels import relational
from structconv.kernels.additive_attention import AdditiveAttention
from structconv.kernels.blocked_attention import BlockedAttention
from structconv.kernels.dense_attention import ScaledDotProduct
from structconv.kernels.orders import Applied, DenseOperator, Primitives
from structconv.kernels.reassociation import Reassociation
from structconv.kernels.relational import PerRelation
from structconv.kernels.samples import SampleBySample
from structconv.kernels.sparse_attention import EdgeAttention
from structconv.kernels.sparse_product import SparseProduct
from structconv.planning import Call, Problem, Sizes
from structconv.planning.fitted import FULL_COLUMNS
from structconv.primitives.grouped import group_products
from structconv.primitives.window import window_attention
from structconv.structures import Causal, Graph, Samples
from structconv.structures.supports import EdgeSupport
from structconv.weights import Eye, Full, LowRank, Weight
from structconv_systems.timing import Work

__all__ = ["EXPERIMENTS", "Experiment"]

Works = dict[str, Work]
Seconds = Mapping[str, float]
Values = dict[str, list[float]]


class Experiment(NamedTuple):
    """Works, and what follows from their times.

    Args:
        name: in words.
        units: of the constants that are fitted, by name.
        works: (quick) -> what is timed, small if quick.
        values: (seconds of one round) -> the values of each constant, one a case.
        threads: of torch; all where absent.
    """

    name: str
    units: dict[str, str]
    works: Callable[[bool], Works]
    values: Callable[[Seconds], Values]
    threads: int | None = None


def posed(basis: Basis, theta: Weight) -> tuple[Call, Problem]:
    """A call of this basis on random x, the same at every call of one size, and the problem that it poses."""
    x = torch.randn(basis.num_inputs, theta.in_channels, generator=torch.Generator().manual_seed(0))
    call = Call(x, basis, theta)
    return call, Problem(call.spec(), theta, x, Sizes(1, x.itemsize))


def application(kernel: Applied, basis: Basis, channels: int = 3, mode: str = "apply") -> Callable[[], Tensor]:
    """Run "apply", "analysis" or "synthesis" of a basis with this number of channels."""
    call, problem = posed(basis, Eye.of(basis.size, channels))
    match = kernel.match(problem)
    assert match is not None, f"{kernel.name} does not take {basis!r}"
    result = kernel.application(match, problem)
    take = {"apply": result.apply, "analysis": result.analyze(), "synthesis": result.synthesize()}[mode]
    argument = call.x if mode == "analysis" else torch.stack([call.x] * basis.size)
    return lambda: take(argument, call)


def dot_products(entries: int, depth: int, heads: int = 2) -> Bilinear:
    """Scores of random queries and keys."""
    query, key = torch.randn(2, heads, entries, depth)
    return Bilinear(query, key)


# -- calls: tiny inputs, on one thread, since waiting for others is no call ---------------------------------------

def _call_works(quick: bool) -> Works:
    a, x, r, heads = torch.ones(4, 4), torch.randn(5, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    graph = Graph(torch.randint(0, 5, (2, 9)), num_nodes=5)
    dense, scores = Dense(torch.randn(2, 5, 5)), dot_products(5, 3)
    full, factors = Full.of(torch.randn(2, 3, 4)), LowRank.of(torch.randn(2, 3, 2), torch.randn(2, 2, 4))
    call, problem = posed(dense, full)
    operator = DenseOperator().compile(True, problem, "operator_first")
    softmax = Normalized(scores, "softmax", "inputs")
    along = Normalized(Masked(scores, EdgeSupport(graph)), "softmax", "inputs")
    repeated = (("all pairs", Primitives(), scores), ("edges", EdgeAttention(), along))
    linear = {kind: Normalized(scores, kind, "inputs") for kind in ("sum", "count")}
    reassociated = partial(application, Reassociation())
    return {
        "call": lambda: torch.mm(a, a.t()),  # the call of `Machine.call_us`
        "dense": application(Primitives(), dense), "edges": application(SparseProduct(), Sparse(graph, torch.randn(9))),
        "edges, two matrices": application(SparseProduct(), Sparse(graph, torch.randn(2, 9))),
        **{f"{mode}, {name}": application(kernel, basis, mode=mode) for mode in ("apply", "analysis", "synthesis")
           for name, kernel, basis in repeated},
        "expand": lambda: full.expand(x), "contract": lambda: full.contract(r),
        "expand, two factors": lambda: factors.expand(x), "contract, two factors": lambda: factors.contract(r),
        "join": lambda: factors.join(heads),
        "operator": lambda: operator(call),
        "nodes": application(Primitives(), Normalized(Scaled(scores, 0.5), "softmax", "inputs")),
        "alike": application(ScaledDotProduct(), softmax),
        "unlike": application(ScaledDotProduct(), softmax, 4),
        "samples": application(SampleBySample(), Normalized(Masked(scores, Samples([2, 3])), "softmax", "inputs")),
        "undivided": reassociated(scores), "causal": reassociated(Masked(scores, Causal())),
        **{kind: reassociated(basis) for kind, basis in linear.items()}}


def _call_values(seconds: Seconds) -> Values:
    def calls(work: str, beside: str | None = None) -> float:
        return (seconds[work] - (0.0 if beside is None else seconds[beside])) / seconds["call"]

    return {"DENSE_CALLS": [calls("dense")], "SPARSE_CALLS": [calls("edges"), calls("edges, two matrices")],
            "REPEAT_CALLS": [calls(f"{mode}, {name}", f"apply, {name}") for mode in ("analysis", "synthesis")
                             for name in ("all pairs", "edges")],
            "NODE_CALLS": [calls("nodes", "apply, all pairs") / 2],
            "CHANNEL_CALLS": [calls("expand"), calls("contract")],
            "FACTOR_CALLS": [calls("expand, two factors", "expand"), calls("contract, two factors", "contract"),
                             calls("join")],
            "OPERATOR_CALLS": [calls("operator", "contract")], "PADDED": [calls("unlike", "alike")],
            "SAMPLE_CALLS": [calls("samples") / 2 - calls("alike")],
            "DIVIDED_CALLS": [calls("sum", "undivided"), calls("count", "undivided")],
            "CAUSAL_CALLS": [calls("causal", "undivided")]}


# -- products of few columns --------------------------------------------------------------------------------------

#: Columns that are fewer than full, from which on multiples show, and those that run at the full rate.
SKINNY = range(2, FULL_COLUMNS)
WIDE = tuple(FULL_COLUMNS * quarters // 4 for quarters in (4, 5, 6, 7, 8, 10, 12, 14, 16))
FULL = WIDE[-1]
MULTIPLES = (1, 2, 4, 8, 16, 32)


def _column_works(quick: bool) -> Works:
    basis = Dense(torch.randn(2 if quick else 4, 256, 256))
    return {str(columns): application(Primitives(), basis, columns) for columns in (*SKINNY, *WIDE)}


def _column_values(seconds: Seconds) -> Values:
    """A product of c columns takes as long as `effective` columns at the full rate; logarithms make errors relative."""
    effective = {columns: math.log(FULL * seconds[str(columns)] / seconds[str(FULL)]) for columns in (*SKINNY, *WIDE)}
    multiple = min(MULTIPLES, key=lambda step: _scatter([
        effective[columns] - math.log(math.ceil(columns / step) * step) for columns in WIDE]))
    split = min(SKINNY[:-1], key=lambda last: sum(_scatter(part) for part in _parts(effective, last)))
    few, narrow = (math.exp(sum(part) / len(part)) for part in _parts(effective, split))
    return {"FULL_COLUMNS": [multiple], "FEW_COLUMNS": [split], "FEW_TAKEN": [few], "NARROW_TAKEN": [narrow]}


def _parts(taken: Mapping[int, float], last: int) -> tuple[list[float], list[float]]:
    return [taken[c] for c in SKINNY if c <= last], [taken[c] for c in SKINNY if c > last]


def _scatter(numbers: Sequence[float]) -> float:
    """The sum of squares about their mean."""
    mean = sum(numbers) / len(numbers)
    return sum((number - mean)**2 for number in numbers)


# -- fused attention ----------------------------------------------------------------------------------------------

def _fused_cases(quick: bool) -> dict[str, tuple[Applied, Basis]]:
    entries, heads, depth = 128 if quick else 1024, 4, 32
    graph = power_law(4_000 if quick else 200_000)
    edges, nodes = EdgeSupport(graph), graph.num_nodes
    table, vector = torch.randn(heads, 1, 65), torch.randn(heads, depth)
    source, target = torch.randn(2, heads, entries, depth)
    ahead, behind = torch.randn(2, heads, nodes, depth)
    near = Lookup(table, "clip", 32, entries, entries)
    along = {"dot products": (EdgeAttention(), dot_products(nodes, depth, heads)),
             "sums": (EdgeAttention(), LeakyReLU(Affine(ahead[..., 0], behind[..., 0]), 0.2)),
             "additive": (AdditiveAttention(), Additive(ahead, behind, vector))}
    pairs = {"dot products": (ScaledDotProduct(), dot_products(entries, depth, heads)),
             "offsets": (BlockedAttention(), Sum(dot_products(entries, depth, heads), near)),
             "additive": (AdditiveAttention(), Additive(source, target, vector))}
    return ({f"{name}, edges": (kernel, Masked(scores, edges)) for name, (kernel, scores) in along.items()}
            | {f"{name}, all pairs": case for name, case in pairs.items()})


def _fused_works(quick: bool) -> Works:
    works: Works = {}
    for name, (kernel, scores) in _fused_cases(quick).items():
        basis = Normalized(scores, "softmax", "inputs")
        works[f"{name}: fused"] = application(kernel, basis, 32)
        works[f"{name}: separate"] = application(Primitives(), basis, 32)
    return works


def _fused_values(seconds: Seconds) -> Values:
    names = [name.removesuffix(": fused") for name in seconds if name.endswith(": fused")]
    return {"FUSED_SHARE": [seconds[f"{name}: fused"] / seconds[f"{name}: separate"] for name in names]}


# -- windows ------------------------------------------------------------------------------------------------------

RADII = (0, 4, 8, 16, 32, 64, 128)


def _window_works(quick: bool) -> Works:
    entries = 512 if quick else 4096
    q, k, v = torch.randn(3, entries, 8, 32)
    works: Works = {}
    for radius in RADII:
        works[f"window {radius}"] = partial(window_attention, q, k, v, shape=(entries,), below=(radius,),
                                            above=(radius,), dilation=(1,))
    return works


def _window_values(seconds: Seconds) -> Values:
    """A straight line over the pairs of an output: the window kernel computes 15 beyond those of the window."""
    pair, entry = _line([2 * radius + 16 for radius in RADII], [seconds[f"window {radius}"] for radius in RADII])
    return {"WINDOW_ENTRY": [entry / pair]}


def _line(at: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(slope, height at 0) of the line with the least squares of relative errors."""
    points, heights = torch.tensor(at, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    design = torch.stack([points, torch.ones_like(points)], 1) / heights[:, None]
    slope, height = torch.linalg.lstsq(design, torch.ones_like(points)[:, None]).solution.flatten().tolist()
    return slope, height


# -- relations ----------------------------------------------------------------------------------------------------

def _relation_works(quick: bool) -> Works:
    """Each edge comes with its reverse, so that there are as many pairs of outputs as of inputs; several blocks."""
    edges, nodes, relations = (150_000, 50_000, 16) if quick else (1_000_000, 100_000, 16)
    half, kind = torch.randint(0, nodes, (2, edges // 2)), torch.randint(0, relations, (edges // 2,))
    graph = Graph(torch.cat([half, half.flip(0)], 1), num_nodes=nodes)
    call, problem = posed(Typed(graph, kind.repeat(2), relations), Full.of(torch.randn(relations, 64, 64)))
    match = PerRelation().match(problem)
    assert match is not None
    run = PerRelation().compile(match, problem, "per_relation")

    def work(favor: float) -> object:  # blocks of outputs are computed up to this ratio of the pairs
        with mock.patch.object(relational, "IN_FAVOR", favor):
            return run(call)

    return {"by outputs": partial(work, math.inf), "by inputs": partial(work, 0.0)}


def _relation_values(seconds: Seconds) -> Values:
    return {"IN_FAVOR": [seconds["by inputs"] / seconds["by outputs"]]}


#: Channels of x, of which a diagonal block has a part.
CHANNELS, BLOCKS = 128, (8, 16, 32, 64)


def _block_works(quick: bool) -> Works:
    relations, rows = 4, 2048 if quick else 16_384
    x, bounds = torch.randn(relations * rows, CHANNELS), [rows * k for k in range(relations + 1)]
    return {str(width): partial(group_products, x, torch.randn(relations, CHANNELS // width, width, width), bounds)
            for width in (*BLOCKS, CHANNELS)}


def _block_values(seconds: Seconds) -> Values:
    """Where products with blocks take as long as with the whole, between two widths by logarithms."""
    lost = {width: math.log(seconds[str(width)] / seconds[str(CHANNELS)]) for width in BLOCKS}
    if lost[BLOCKS[0]] <= 0:
        return {"NARROW": [BLOCKS[0]]}
    for below, above in pairwise(BLOCKS):
        if lost[above] <= 0:
            return {"NARROW": [below * (above / below)**(lost[below] / (lost[below] - lost[above]))]}
    return {"NARROW": [CHANNELS]}


EXPERIMENTS = (
    Experiment("calls of operators", dict.fromkeys(
        ("DENSE_CALLS", "SPARSE_CALLS", "REPEAT_CALLS", "NODE_CALLS", "CHANNEL_CALLS", "FACTOR_CALLS", "OPERATOR_CALLS",
         "PADDED", "DIVIDED_CALLS", "CAUSAL_CALLS", "SAMPLE_CALLS"), "calls"), _call_works, _call_values, threads=1),
    Experiment("products of few columns", dict.fromkeys(
        ("FULL_COLUMNS", "FEW_COLUMNS", "FEW_TAKEN", "NARROW_TAKEN"), "columns"), _column_works, _column_values),
    Experiment("fused attention", {"FUSED_SHARE": "of the time"}, _fused_works, _fused_values),
    Experiment("windows", {"WINDOW_ENTRY": "pairs"}, _window_works, _window_values),
    Experiment("relations by outputs and by inputs", {"IN_FAVOR": "of the time"}, _relation_works, _relation_values),
    Experiment("diagonal blocks of Theta", {"NARROW": "channels"}, _block_works, _block_values),
)
