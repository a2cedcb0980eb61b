"""Supports: `contains` against loops, `edges` against `contains`, masks that combine and transpose."""


import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structconv import STRUCTURE, Conv, DotProduct, RelativeBias, Uniform, batch
from structconv.errors import StructureError
from structconv.structures import Blocks, Causal, DenseMask, EdgeSupport, Global, Graph, Grid, Padding, Support, Window
from structconv.structures.masks import And, Not, Or, Transposed
from structconv.structures.values import structure
from tests.support.errors import check_refused


def table(support, num_inputs, num_outputs):
    return support.contains(torch.arange(num_inputs)[:, None], torch.arange(num_outputs)[None, :])


def expected(rule, num_inputs, num_outputs):
    rows = [[rule(m, n) for n in range(num_outputs)] for m in range(num_inputs)]
    return torch.tensor(rows, dtype=torch.bool).reshape(num_inputs, num_outputs)


def assert_lists_agree(support, num_inputs, num_outputs):
    """`edges` lists what `contains` says, `candidates` at least that, `edge_bound` bounds both."""
    dense = table(support, num_inputs, num_outputs)
    edges = support.edges(num_inputs, num_outputs)
    candidates = support.candidates(num_inputs, num_outputs)
    bound = support.edge_bound(num_inputs, num_outputs)
    for graph in (edges, candidates):
        if graph is None:
            continue
        assert (graph.num_inputs, graph.num_outputs) == (num_inputs, num_outputs) and graph.num_edges <= bound
        assert torch.unique(graph.edge_index, dim=1).shape == graph.edge_index.shape
        assert torch.equal(support.contains(graph.source, graph.target), dense[..., graph.source, graph.target])
        listed = torch.zeros(num_inputs, num_outputs, dtype=torch.bool)
        listed[graph.source, graph.target] = True
        assert torch.equal(listed & dense, dense)
        if graph is edges:
            assert torch.equal(listed, dense)
    assert torch.equal(table(support.transpose(), num_outputs, num_inputs), dense.mT)
    transposed = support.transpose().edges(num_outputs, num_inputs)
    assert (transposed is None) == (edges is None)
    assert transposed is None or transposed.num_edges == edges.num_edges


SIZES = [(5, 5), (7, 4), (4, 9), (0, 3), (3, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize("support, rule", [
    (Causal(), lambda m, n: m <= n),
    (~Causal(), lambda m, n: m > n),
    (Causal().transpose(), lambda m, n: m >= n),
    (Window(2), lambda m, n: abs(m - n) <= 2),
    (Window(0), lambda m, n: m == n),
    (Window(100), lambda m, n: True),
    (Window((5,)), lambda m, n: abs(m - n) <= 2),
    (Window(2, dilation=3), lambda m, n: abs(m - n) <= 6 and (m - n) % 3 == 0),
    (Blocks(3), lambda m, n: m // 3 == n // 3),
    (Window(1) & Causal(), lambda m, n: n - 1 <= m <= n),
    (Causal() & Blocks(2), lambda m, n: m <= n and m // 2 == n // 2),
    (Window(1) | Blocks(3), lambda m, n: abs(m - n) <= 1 or m // 3 == n // 3),
    (Window(1) | Causal(), lambda m, n: m - n <= 1),
    (Global(2), lambda m, n: m < 2 or n < 2),
    (Global((6, 0, 3)), lambda m, n: m in (0, 3, 6) or n in (0, 3, 6)),
    (Global(0), lambda m, n: False),
    (Global(100), lambda m, n: True),
    (Window(1) | Global([3]), lambda m, n: abs(m - n) <= 1 or m == 3 or n == 3),
    (Global(1) & Causal(), lambda m, n: m <= n and (m < 1 or n < 1)),
    (Window(3) & ~Window(1), lambda m, n: 1 < abs(m - n) <= 3),
])
def test_supports_of_sequences(support, rule):
    for sizes in SIZES:
        assert torch.equal(table(support, *sizes), expected(rule, *sizes))
        assert_lists_agree(support, *sizes)


def test_which_are_listed():
    sparse = [Window(1), Global(1), Window(1) | Global((0, 2)),
              Blocks(2), Window(1) & Causal(), Causal() & Window(1), Window(1) | Blocks(2)]
    dense = [Causal(), ~Window(1), Window(1) | Causal(), Padding(torch.ones(4).bool()),
             DenseMask(torch.ones(4, 4).bool()), Causal() & Padding(torch.ones(4).bool())]
    assert all(support.edges(4, 4) is not None for support in sparse)
    assert all(support.edges(4, 4) is None and support.edge_bound(4, 4) is None for support in dense)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), periodic=st.booleans())
def test_windows_on_grids(data, shape, periodic):
    grid = Grid(shape, periodic=periodic)
    radii = [data.draw(st.integers(0, 3)) for _ in shape]
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    window = Window(tuple(2 * r + 1 for r in radii), dilation=tuple(steps)).on(grid)
    points = grid.coordinates().tolist()

    def rule(m, n):
        reached = [[b + step * i for i in range(-r, r + 1)] for b, r, step in zip(points[n], radii, steps, strict=True)]
        return all(a in ([p % s for p in line] if periodic else line)
                   for a, line, s in zip(points[m], reached, shape, strict=True))

    entries = grid.num_entries
    assert torch.equal(table(window, entries, entries), expected(rule, entries, entries))
    assert_lists_agree(window, entries, entries)


@pytest.mark.parametrize("grid", [Grid((0, 3)), Grid((2, 0), periodic=True), Grid(0)])
def test_windows_on_nothing(grid):
    window = Window(1, grid=grid)
    assert window.edges(0, 0).num_edges == 0 and table(window, 0, 0).shape == (0, 0)


@settings(max_examples=25, deadline=None)
@given(center=st.lists(st.floats(-4, 12, width=32), min_size=1, max_size=6), radius=st.integers(0, 3))
def test_centered_windows(center, radius):
    center = torch.tensor(center)
    window = Window(radius, center=center)
    near = [[bool(abs(torch.tensor(float(m)) - c) <= radius) for c in center] for m in range(8)]
    assert table(window, 8, len(center)).tolist() == near
    assert_lists_agree(window, 8, len(center))


def test_centers_out_of_reach_keep_nothing():
    window = Window(1, center=torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9, 2.0]))
    assert window.edges(6, 5).edge_index.tolist() == [[1, 2, 3], [4, 4, 4]]


def random_supports(num_inputs, num_outputs):
    """A strategy for expressions over every kind of support of this size."""
    def graph(pairs):
        index = torch.tensor(sorted(pairs), dtype=torch.int64).reshape(-1, 2).T
        return EdgeSupport(Graph(index, num_inputs=num_inputs, num_outputs=num_outputs))

    pair = st.tuples(st.integers(0, num_inputs - 1), st.integers(0, num_outputs - 1))
    booleans = st.lists(st.booleans(), min_size=num_inputs, max_size=num_inputs).map(torch.tensor)
    batched = st.lists(booleans, min_size=2, max_size=2).map(torch.stack)
    leaves = st.one_of(
        st.builds(Causal), st.builds(Window, st.integers(0, 3), st.integers(1, 2)),
        st.builds(Blocks, st.integers(1, 4)), st.builds(Global, st.integers(0, 3)),
        st.sets(st.integers(0, 8), max_size=3).map(tuple).map(Global),
        st.sets(pair, max_size=8).map(graph), booleans.map(Padding), batched.map(Padding),
        booleans.map(lambda keep: DenseMask(keep[:, None].expand(num_inputs, num_outputs))))
    return st.recursive(leaves, lambda inner: st.one_of(
        st.builds(And, inner, inner), st.builds(Or, inner, inner), st.builds(Not, inner),
        st.builds(Transposed, inner) if num_inputs == num_outputs else inner), max_leaves=5)


@settings(max_examples=140, deadline=None)
@given(data=st.data(), sizes=st.sampled_from([(6, 6), (6, 6), (5, 7)]))
def test_expressions(data, sizes):
    assert_lists_agree(data.draw(random_supports(*sizes)), *sizes)


def test_edge_support_is_the_graph_itself_with_its_duplicates():
    graph = Graph(torch.tensor([[2, 0, 2], [1, 0, 1]]), num_inputs=3, num_outputs=4, edge_weight=torch.rand(3))
    support = EdgeSupport(graph)
    assert support.edges(3, 4) is graph and support.edges(3, 4, torch.device("cpu")) is graph
    assert table(support, 3, 4).nonzero().tolist() == [[0, 0], [2, 1]]
    assert support.transpose().graph is graph.reversed()
    empty = EdgeSupport(Graph(torch.zeros(2, 0, dtype=torch.int32), num_nodes=3))
    assert not table(empty, 3, 3).any() and empty.edges(3, 3).num_edges == 0


@pytest.mark.parametrize("mask", [Window(2), Blocks(2), Global(1), Window(1) & Causal(), Causal()])
@pytest.mark.parametrize("graph_first", [True, False])
def test_duplicate_edges_count_whatever_other_lists_are_shorter(mask, graph_first):
    """The shorter list was filtered, a window's pairs once each: a batch gave other numbers than its samples."""
    graphs = [Graph(torch.randint(n, (2, 4 * n)), num_nodes=n) for n in (5, 3, 4)]
    scores, keep = DotProduct(heads=2, dim=4), (STRUCTURE, mask) if graph_first else (mask, STRUCTURE)
    layer = Conv(scores.masked(keep=keep[0]).masked(keep=keep[1]).softmax(), 3, 4).double()
    xs = [torch.randn(graph.num_inputs, 3).double() for graph in graphs]
    apart = torch.cat([layer(x, structure=graph) for x, graph in zip(xs, graphs, strict=True)])
    torch.testing.assert_close(layer(torch.cat(xs), structure=batch(graphs)), apart)
    kept = (EdgeSupport(graphs[1]) & mask).edges(3, 3)
    assert kept.num_edges == mask.contains(graphs[1].source, graphs[1].target).sum()


@pytest.mark.parametrize("support", [
    Padding(torch.rand(2, 1, 4) > 0.5), DenseMask(torch.rand(2, 3, 4, 5) > 0.5), Window(1, center=torch.rand(2, 5) * 4),
    Window(1) & Padding(torch.rand(2, 4) > 0.5), ~Padding(torch.rand(2, 4) > 0.5)])
def test_batched_supports(support):
    """The whole table, a block of it and its pairs one by one say the same."""
    dense = table(support, 4, 5)
    assert dense.shape[-2:] == (4, 5) and dense.dim() > 2 and support.edges(4, 5) is None
    m, n = torch.cartesian_prod(torch.arange(4), torch.arange(5)).T
    assert torch.equal(support.contains(m, n), dense.flatten(-2))
    assert torch.equal(support.contains(torch.arange(1, 4)[:, None], torch.arange(2, 5)), dense[..., 1:4, 2:5])
    assert torch.equal(table(support.transpose(), 5, 4), dense.mT)


def test_a_window_keeps_its_candidates_under_batched_padding():
    support = Padding(torch.rand(3, 50) > 0.5) & Window(1)
    assert support.edges(50, 50) is None and support.candidates(50, 50).num_edges == 148


def test_long_sequences_are_listed_without_a_table():
    length = 200_000
    edges = (Window(3) & Causal()).edges(length, length)
    assert edges.num_edges == 4 * length - 6
    assert (Window(1) | Global((5, length - 1))).edges(length, length).num_edges == 7 * length - 14
    graph = EdgeSupport(Window(1).edges(length, length))
    assert graph.contains(edges.source, edges.target).sum() == 2 * length - 1


def test_on_the_meta_device_a_list_is_as_long_as_it_may_be():
    support = Window(1) | Global(2)
    assert support.edges(9, 9).num_edges < support.edges(9, 9, "meta").num_edges <= support.edge_bound(9, 9)


BAD = {
    "radius": (lambda: Window(-1), "radius must be an integer >= 0; got -1"),
    "even": (lambda: Window((4, 3)), r"sizes, each odd; got \(4, 3\)"),
    "dilation": (lambda: Window(2, dilation=0), "dilation must be a positive integer; got 0"),
    "axes": (lambda: Window((3, 3), grid=Grid(9)), r"each axis of Grid\(\(9,\)\); got \(3, 3\)"),
    "no grid": (lambda: Window((7, 7), dilation=2).edges(9, 9), r"window.on\(grid\)"),
    "no grid to test": (lambda: table(Window((7, 7)), 9, 9), r"each axis of a sequence; got \(7, 7\)"),
    "center on grid": (lambda: Window(2, grid=Grid(3), center=torch.rand(3)), "center goes with an integer radius"),
    "center dilated": (lambda: Window(2, dilation=2, center=torch.rand(3)), "center goes with an integer radius"),
    "center dtype": (lambda: Window(2, center=torch.arange(3)), "center must be floating; got torch.int64"),
    "blocks": (lambda: Blocks(0), "size must be a positive integer; got 0"),
    "global": (lambda: Global(-1), "entries must be an integer >= 0; got -1"),
    "global twice": (lambda: Global((2, 0, 2)), r"entries must be distinct numbers; got \(2, 0, 2\)"),
    "global text": (lambda: Global("abc"), "entries must be an integer"),
    "padding dtype": (lambda: Padding(torch.ones(3)), r"boolean tensor \(..., M\); got torch.float32"),
    "padding list": (lambda: Padding([True]), "boolean tensor.*got list"),
    "table rank": (lambda: DenseMask(torch.ones(3).bool()), r"\(..., M, N\); got torch.bool \(3,\)"),
    "padding length": (lambda: Padding(torch.ones(4).bool()).check("Conv", 5, 5), r"Conv: .*M=5\); got \(4,\)"),
    "table length": (lambda: DenseMask(torch.ones(5, 4).bool()).check("Conv", 5, 5), r"Conv: .*N=5\); got \(5, 4\)"),
    "inside": (lambda: (Causal() & ~Padding(torch.ones(4).bool())).check("Conv", 5, 5), r"M=5\); got \(4,\)"),
    "transposed": (lambda: Padding(torch.ones(4).bool()).transpose().check("Conv", 4, 5), "length N=5; got 4"),
    "graph size": (lambda: EdgeSupport(Graph(torch.tensor([[0], [1]]))).edges(3, 3), "length M=3; got 2"),
    "grid size": (lambda: Window(1, grid=Grid((2, 2))).edges(5, 5), "length M=5; got 4"),
    "centers": (lambda: Window(1, center=torch.rand(4)).check("Conv", 5, 5), "length N=5; got 4"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    build, message = BAD[case]
    check_refused((StructureError, message, build))


def test_masks_combine_with_masks_only():
    with pytest.raises(TypeError):
        Causal() & torch.ones(2, 2).bool()


@pytest.mark.parametrize(("support", "text"), [
    (Causal() & ~Padding(torch.ones(2, 4).bool()), "(Causal() & ~Padding(keep=bool(2, 4)))"),
    (Window(2, dilation=3), "Window(radius=2, dilation=3)"), (Window(2), "Window(radius=2)"),
    (Causal().transpose(), "Causal().transpose()"), (Blocks(2) | Causal(), "(Blocks(size=2) | Causal())"),
    (Window(2) | Global((0, 5)), "(Window(radius=2) | Global(entries=(0, 5)))")])
def test_repr(support, text):
    assert repr(support) == text


def test_inverses_of_themselves():
    causal = Causal()
    assert ~~causal is causal and causal.transpose().transpose() is causal
    assert Window(2).transpose().radius == 2 and Blocks(2).transpose().size == 2
    assert Global(2).transpose().entries == 2


def test_devices():
    support = Window(1) & Padding(torch.rand(6) > 0.5) | EdgeSupport(Graph(torch.tensor([[0], [5]]), num_nodes=6))
    moved = support.to("meta")
    assert moved.first.second.keep.is_meta and moved.second.graph.edge_index.is_meta


@structure()
class Diagonal(Support):
    """m = n + step, by the methods that a user's support defines."""

    step: int

    def _contains(self, m, n):
        return m == n + self.step

    def edges(self, num_inputs, num_outputs, device=None):
        n = torch.arange(min(num_inputs - self.step, num_outputs), device=device)
        return Graph(torch.stack([n + self.step, n]), num_inputs=num_inputs, num_outputs=num_outputs)

    def edge_bound(self, num_inputs, num_outputs):
        return num_outputs


@pytest.mark.parametrize("combine", [lambda own: own, lambda own: own | Window(0), lambda own: own & Blocks(50),
                                     lambda own: own.transpose()])
def test_only_the_pairs_that_a_support_of_the_user_lists_are_scored(combine):
    support = combine(Diagonal(2))
    assert support.listed and "edge_attention" in plan_of(support, 4096)
    assert_lists_agree(support, 9, 9)


def plan_of(support, entries):
    return Conv(DotProduct(dim=4).masked(keep=support).softmax(), 4, 4).plan(torch.randn(entries, 4)).kernel


@structure()
class Wrong(Support):
    result: object

    def _contains(self, m, n):
        return self.result

    def edges(self, num_inputs, num_outputs, device=None):
        return self.result


@pytest.mark.parametrize(("result", "got"), [(None, "NoneType"), (torch.ones(1, 1), "torch.float32"), (3, "int")])
def test_results_of_a_support_of_the_user_are_checked(result, got):
    with pytest.raises(StructureError, match=rf"^Wrong: _contains must return a tensor of booleans; got {got}"):
        table(Wrong(result), 3, 3)
    if result is not None:
        with pytest.raises(StructureError, match=r"^Wrong: edges must return a Graph, or None; got (Tensor|int)"):
            Wrong(result).listing(3, 3)


def test_lists_of_numbers_are_tuples():
    assert Window([3, 5], dilation=[1, 2]).on(Grid((9, 9))).axes() == [(1, 1), (2, 2)]
    assert Uniform([3, 5]).window == (3, 5) and RelativeBias([2, 1]).clip == (2, 1) and Global([0, 2]).entries == (0, 2)
    with pytest.raises(StructureError, match=r"^Window: a tuple gives neighborhood sizes, each odd; got \(4, 3\)"):
        Window([4, 3])
