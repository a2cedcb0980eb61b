"""What every kernel along edges must hold on: each of them through each of the graphs, in both storage types.

A kernel is one line of `KERNELS`: which tensors it takes, and its call. Values and gradients are compared with the
same operator in float64, which runs by torch's operators; other tests compare those with sums over the edges.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from structconv.bases.typed import Typed
from structconv.ops import conv
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.layout import compress
from structconv.primitives.native import build, core
from structconv.primitives.native.additive import additive_attention
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.joint import joint_attention
from structconv.primitives.native.product import spmm_add
from structconv.primitives.native.projected import projected_attention
from structconv.primitives.native.recurrence import polynomial_analysis, polynomial_synthesis
from structconv.structures import Graph
from structconv.weights import Full

#: Errors of an entry, or an edge, relative to its own largest number, beside which there may be one that is relative to
#: the largest of all: what is left of sums that cancel.
TOLERANCE, CANCELLED = {torch.float32: 5e-5, torch.bfloat16: 0.04}, {torch.float32: 1e-6, torch.bfloat16: 0.03}


class Edges:
    """A list of edges with its two layouts."""

    def __init__(self, source: Tensor, target: Tensor, inputs: int, outputs: int) -> None:
        self.source, self.target, self.m, self.n, self.e = source, target, inputs, outputs, len(source)
        self.layouts = (compress(target, source, outputs), compress(source, target, inputs))
        self.graph = Graph(torch.stack([source, target]), num_inputs=inputs, num_outputs=outputs)

    def values(self) -> Tensor:
        """A weight an edge, small at entries of many edges, so that repeated products stay in range."""
        out, into = (torch.bincount(t, minlength=1).clamp(min=1).float() for t in (self.source, self.target))
        scale = (out[self.source.long()] * into[self.target.long()]).rsqrt() if self.e else torch.zeros(0)
        return torch.randn(self.e) * scale


class Kernel(NamedTuple):
    """The shapes of the tensors a kernel takes beside the edges, and its call with (edges, *tensors)."""

    shapes: Callable[[Edges], list[tuple[int, ...]]]
    call: Callable[..., Tensor]
    square: bool = False
    weighted: bool = False  # the first tensor is a weight for each edge
    constant: bool = False  # and gets no gradient
    vectors: tuple[int, ...] = ()  # tensors whose products with rows are scores, of unit size like all others


def _relational(edges: Edges, values: Tensor, x: Tensor, theta: Tensor) -> Tensor:
    kind = torch.arange(edges.e) % 3
    return conv(x, Typed(edges.graph, kind, 3, values), Full.of(theta))


KERNELS = {
    "spmm": Kernel(lambda g: [(g.e,), (3, g.m, 20)], lambda g, a, x: spmm(*g.layouts, a, x), weighted=True),
    "spmm_add": Kernel(lambda g: [(g.e,), (3, g.m, 20), (3, g.n, 20)],
                       lambda g, a, x, z: spmm_add(*g.layouts, a, x, z, alpha=2.0, beta=-0.5), weighted=True),
    "sddmm": Kernel(lambda g: [(3, g.n, 20), (3, g.m, 20)], lambda g, q, k: sddmm(*g.layouts, q, k)),
    "recurrence, analysis": Kernel(lambda g: [(g.e,), (g.m, 20)], lambda g, a, x: polynomial_analysis(
        *g.layouts, a, x, order=3), square=True, weighted=True, constant=True),
    "recurrence, synthesis": Kernel(lambda g: [(g.e,), (4, g.m, 20)], lambda g, a, r: polynomial_synthesis(
        *g.layouts, a, r), square=True, weighted=True, constant=True),
    "affine": Kernel(lambda g: [(g.m, 3), (g.n, 3), (g.m, 3, 20)],
                     lambda g, s, t, x: affine_attention(*g.layouts, s, t, x)),
    "projected": Kernel(lambda g: [(g.m, 3, 20), (3, 20), (3, 20), (g.n, 3, 20)],
                        lambda g, x, a, b, z: projected_attention(*g.layouts, x, a, b, z), vectors=(1, 2)),
    "additive": Kernel(lambda g: [(g.n, 3, 12), (g.m, 3, 12), (g.m, 3, 20), (3, 12)], lambda g, q, k, x, v:
                       additive_attention(*g.layouts, q, k, x, v, activation="tanh"), vectors=(3,)),
    "bilinear": Kernel(lambda g: [(g.n, 3, 12), (g.m, 3, 12), (g.m, 3, 20), (3, g.e)],
                       lambda g, q, k, v, b: bilinear_attention(*g.layouts, q, k, v, b, scale=12**-0.5)),
    "joint": Kernel(lambda g: [(g.m, 3 * (12 + 20)), (g.n, 3, 12), (3, g.e)], lambda g, table, q, b:
                    joint_attention(*g.layouts, table, q, b, heads=3, depth=12, scale=12**-0.5)),
    "joint, one table": Kernel(lambda g: [(g.m, 3 * (12 + 12 + 20))], lambda g, table:
                               joint_attention(*g.layouts, table, heads=3, depth=12, scale=12**-0.5), square=True),
    "relational": Kernel(lambda g: [(g.e,), (g.m, 12), (3, 12, 8)], _relational, weighted=True),
}


def hub() -> Edges:
    """A power law: output 7 has 10^5 edges, input 11 has 3 10^4, and the others follow 1 / rank."""
    rank = torch.arange(1, 3001)
    drawn = torch.multinomial(1.0 / rank, 30_000, replacement=True)
    source = torch.cat([torch.randint(3000, (100_000,)), drawn, torch.full((30_000,), 11)])
    target = torch.cat([torch.full((100_000,), 7), torch.randint(3000, (30_000,)), torch.randint(3000, (30_000,))])
    mixed = torch.randperm(len(source))
    return Edges(source[mixed], target[mixed], 3000, 3000)


def drawn(inputs: int, outputs: int, edges: int, dtype: torch.dtype = torch.int64, used: float = 1.0) -> Edges:
    """Random edges among the first `used` of the entries."""
    return Edges(torch.randint(int(used * inputs), (edges,)).to(dtype),
                 torch.randint(int(used * outputs), (edges,)).to(dtype), inputs, outputs)


def looped() -> Edges:
    """Every entry joined to itself, some of them only so."""
    edges, loops = drawn(40, 40, 90, used=0.7), torch.arange(40)
    return Edges(torch.cat([edges.source, loops]), torch.cat([edges.target, loops]), 40, 40)


def repeated() -> Edges:
    """Every edge three times, one of them forty times."""
    edges = drawn(30, 30, 60)
    times = torch.full((60,), 3)
    times[5] = 40
    return Edges(edges.source.repeat_interleave(times), edges.target.repeat_interleave(times), 30, 30)


GRAPHS: dict[str, Callable[[], Edges]] = {
    "hub": hub,
    "isolated": lambda: drawn(90, 90, 300, used=0.5),
    "duplicates": repeated,
    "self-loops": looped,
    "no edges": lambda: drawn(9, 9, 0),
    "nothing": lambda: Edges(*torch.zeros(2, 0, dtype=torch.int64), 0, 0),
    "bipartite, more inputs": lambda: drawn(200, 13, 700),
    "bipartite, more outputs": lambda: drawn(13, 200, 700),
    "int32": lambda: drawn(60, 60, 400, torch.int32),
    "int64": lambda: drawn(60, 60, 400, torch.int64),
}


def tensors_of(kernel: Kernel, edges: Edges, dtype: torch.dtype) -> list[Tensor]:
    found = [torch.randn(shape) for shape in kernel.shapes(edges)]
    if kernel.weighted:
        found[0] = edges.values()
    for i in kernel.vectors:
        found[i] = found[i] * found[i].shape[-1]**-0.5
    return [t.to(dtype).requires_grad_(not (kernel.constant and i == 0)) for i, t in enumerate(found)]


def results(kernel: Kernel, edges: Edges, tensors: list[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """y and the gradients of all that get one."""
    y = kernel.call(edges, *tensors)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)) if grad is None else grad
    wanted = [t for t in tensors if t.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, grad.to(y.dtype))]


def by_row(t: Tensor, edges: Edges) -> Tensor:
    """The largest number of each entry, or each edge; of all where the tensor has neither."""
    others = [axis for axis, length in enumerate(t.shape) if length not in (edges.m, edges.n, edges.e)]
    return t.abs().amax(others) if others else t.abs()


def test_rows_are_entries_and_edges() -> None:
    edges = drawn(40, 40, 90)
    y = torch.ones(40, 3)
    y[7] = 1e4
    assert by_row(y, edges).tolist() == [1.0] * 7 + [1e4] + [1.0] * 32
    assert by_row(torch.ones(3, 90), edges).shape == (90,)


def pairs() -> list[tuple[str, str]]:
    return [(kernel, graph) for kernel in KERNELS for graph in GRAPHS
            if not (KERNELS[kernel].square and graph.startswith("bipartite"))]


@pytest.fixture(autouse=True)
def native() -> None:
    if core() is None:
        pytest.skip("the native core cannot be built here")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("kernel_name", "graph"), pairs())
def test_values_and_gradients(kernel_name, graph, dtype):
    kernel, edges = KERNELS[kernel_name], GRAPHS[graph]()
    tensors = tensors_of(kernel, edges, dtype)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    for found, expected in zip(results(kernel, edges, tensors), results(kernel, edges, wide), strict=True):
        assert found.dtype == dtype and found.shape == expected.shape
        if expected.numel():
            error, size = (by_row(t, edges) for t in (found.double() - expected, expected))
            allowed = torch.minimum(TOLERANCE[dtype] * size + CANCELLED[dtype] * size.max(),
                                    TOLERANCE[dtype] * size.max().clamp(min=1.0))
            worst = (error / allowed.clamp(min=1e-300)).argmax()
            assert (error <= allowed).all(), f"{error.flatten()[worst]:.2g} of {size.flatten()[worst]:.3g}"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel_name", KERNELS)
def test_what_is_not_finite_stays_with_its_neighbors(kernel_name, dtype, bad):
    """Two components, and entries without edges: bad rows in the second component and in these leave the first."""
    kernel = KERNELS[kernel_name]
    first, second = torch.randint(30, (2, 200)), torch.randint(30, 60, (2, 200))
    edges = Edges(*torch.cat([first, second], 1), 70, 70)
    clean = tensors_of(kernel, edges, dtype)
    dirty = [t.detach().clone() for t in clean]
    for t in dirty:
        for axis, length in enumerate(t.shape):
            if length == edges.m:
                t.index_fill_(axis, torch.arange(45, 70), bad)
    dirty = [t.requires_grad_(c.requires_grad) for t, c in zip(dirty, clean, strict=True)]
    y = kernel.call(edges, *clean)
    grad = torch.randn(y.shape)
    spoilt = grad.clone()
    for axis, length in enumerate(y.shape):
        if length == edges.n:
            grad = grad.index_fill(axis, torch.arange(30, 70), 0.0)
            spoilt = grad.index_fill(axis, torch.arange(30, 70), bad)
    spoilt = grad if "relational" in kernel_name or kernel_name == "sddmm" else spoilt
    for found, expected in zip(results(kernel, edges, dirty, spoilt), results(kernel, edges, clean, grad), strict=True):
        for axis, length in enumerate(expected.shape):
            part = 30 if length == edges.m else 200 if length == edges.e else None
            if part is not None:
                found, expected = (t.narrow(axis, 0, part) for t in (found, expected))
                torch.testing.assert_close(found, expected)


def test_no_native_kernel_is_left_out():
    """Each function of the core is one of those that the kernels above run, or has its own such tests."""
    covered = {"spmm", "sddmm", "affine_forward", "affine_backward", "bilinear_forward", "bilinear_backward",
               "additive_forward", "additive_backward"}
    elsewhere = {"window_forward", "window_backward",  # no edges: test_window_attention.py
                 "project", "outer",  # nor here: test_products.py
                 "drop_block",  # nor here: test_dropout.py
                 "attention_step",  # nor here: test_attention_step.py
                 "additive_step", "additive_step_backward",  # nor here: test_step_gradients.py
                 "edge_weights",  # test_edge_weights.py
                 "conditioned_sums", "conditioned_adjoint",  # test_graphs.py
                 "layouts", "outside", "verify",  # test_layout.py
                 "sample_bounds", "sample_draw", "number",  # test_loaders.py
                 "adjacency", "transpose", "edges", "groups", "maxima", "maxima_backward"}  # test_new_graphs.py
    sources = "".join(path.read_text() for path in build.SOURCES.glob("*.cpp"))
    assert set(re.findall(r"SC_EXPORT\((\w+)\)", sources)) == covered | elsewhere
