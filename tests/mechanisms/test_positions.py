"""Terms of positions and edges against their formulas."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from structconv import ALiBi, ConfigError, Conv, GATConv, Graph, Grid, RelativeBias, ShapeError, StructureError, Window
from structconv.bases.positions import bucket, bucket_count
from structconv.mechanisms import EdgeNetwork, LearnedEncoding, SinusoidalEncoding, sinusoidal
from structconv.mechanisms.positions import ClippedShifts, EdgeBias, GaussianWindow, PredictedPosition, RelativeKey
from structconv.mechanisms.scores import DotProduct, General, heads_of

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
M, P = 7, 4
X = torch.randn(2, M, P, dtype=F64, generator=torch.Generator().manual_seed(1))
I = torch.arange(M)  # noqa: E741 - the index of an entry
OFFSET = I[:, None] - I


@pytest.mark.parametrize("dot", [DotProduct(), DotProduct(heads=2)])
def test_relative_key_takes_its_dimension_from_the_product_beside_it(dot):
    m = (RelativeKey(2) + dot).bound(P).to(F64)
    assert m.operands[0].table.shape == (5, P if not dot.projects else 2)
    assert m.basis(X).dense().shape == (2, dot.size, M, M)


def test_relative_key_alone_has_queries_of_its_own():
    m = RelativeKey(2, heads=2, dim=4, sinusoidal=True).bound(P).to(F64)
    assert not m.table.requires_grad
    query = heads_of(m.query, X, 2)
    close(m.basis(X).dense(F64), torch.einsum("bknd,mnd->bkmn", query, m.table[OFFSET.clamp(-2, 2) + 2]))
    with pytest.raises(ConfigError, match="dim must be given"):
        RelativeKey(2).bound(P)


@pytest.mark.parametrize("term", [ALiBi(), RelativeBias(2)])
def test_terms_take_the_heads_of_what_is_beside_them(term):
    m = (term + DotProduct(heads=4, dim=2)).bound(P).to(F64)
    assert m.operands[0].size == 4 and m.size == 4
    assert term.size == 1, "the term itself is a recipe that stays as it was"


def t5_bucket(offset, buckets, bidirectional, furthest=128):
    """The rule of Raffel et al. 2020 as their text states it, for one pair; offset = key position - query position."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if offset > 0 else 0
        offset = abs(offset)
    else:
        offset = max(-offset, 0)
    exact = buckets // 2
    if offset < exact:
        return start + offset
    growth = math.log(offset / exact) / math.log(furthest / exact) * (buckets - exact)
    return start + min(exact + int(growth), buckets - 1)


@pytest.mark.parametrize(("kind", "clip", "buckets", "both"), [("log", 16, 32, True), ("log_causal", 32, 32, False)])
def test_logarithmic_buckets_are_t5s(kind, clip, buckets, both):
    positions = torch.arange(300)
    actual = bucket(kind, clip, positions[:, None], positions)
    expected = torch.tensor([[t5_bucket(i - j, buckets, both) for j in range(300)] for i in range(0, 300, 37)])
    wrong = (actual[::37] != expected).sum()
    assert wrong == 0, f"{wrong} buckets differ"
    assert bucket_count(kind, clip) == buckets and actual.max() == buckets - 1 and actual.min() == 0


def test_windows_around_predicted_positions_are_of_the_line_whatever_the_grid():
    m = General().masked(keep=Window(2, center=PredictedPosition())).softmax().bound(P).to(F64)
    close(m.basis(X, Grid((1, M))).dense(F64), m.basis(X).dense(F64))


@pytest.mark.parametrize("by", [2, torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))])
def test_edge_bias(by):
    graph = Graph(torch.tensor([[0, 1, 2], [1, 0, 0]]), num_nodes=M, edge_attr=torch.randn(3, 2, dtype=F64))
    m = EdgeBias(by, heads=3, **({"bias": True} if by == 2 else {})).bound(P).to(F64)
    expected, module = torch.zeros(3, M, M, dtype=F64), m.linear if by == 2 else m.module
    expected[:, graph.source, graph.target] = module(graph.edge_attr).mT
    close(m.basis(X, graph).dense(F64), expected)
    m.basis(X, graph).dense(F64).sum().backward()
    assert module is not by and all(parameter.grad.abs().sum() > 0 for parameter in m.parameters())
    with pytest.raises(StructureError, match="must be called with a Graph; got NoneType"):
        m.basis(X)
    if by == 2:
        with pytest.raises(StructureError, match=r"A=2 channels; got \(3,\)"):
            m.basis(X, Graph(graph.edge_index, num_nodes=M, edge_attr=torch.zeros(3)))
    else:
        with pytest.raises(ShapeError, match=r"of shape \(3, 2\); got \(3, 3\)"):
            EdgeBias(by, heads=2).bound(P).to(F64).basis(X, graph)


@pytest.mark.parametrize("layer", [GATConv(2, 3, edge_dim=1), Conv((DotProduct(dim=2) + EdgeBias(1)).softmax(), 2, 3),
                                   Conv(EdgeNetwork(1, 4), 2, 3)], ids=["GATConv", "EdgeBias", "EdgeNetwork"])
@pytest.mark.parametrize("kinds", [1, 200])
def test_complex_attributes_of_edges_are_refused(layer, kinds):
    edges, numbers = torch.randint(3, (2, 200)), torch.randn(kinds, 1, dtype=torch.complex64)
    graph = Graph(edges, num_nodes=3, edge_attr=numbers[torch.arange(200) % kinds])
    with pytest.raises(ShapeError, match=r"edge_attr must be real; got torch\.complex64\. Pass both parts as channels"):
        layer(torch.randn(3, 2), structure=graph)


def test_attributes_of_a_batch_on_one_graph_give_what_each_sample_gives_alone():
    index = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 2]])
    graph = Graph(index, num_nodes=M, edge_attr=torch.randn(3, 4, 2, dtype=F64))
    x = torch.randn(3, M, P, dtype=F64)
    for layer in (GATConv(P, 5, heads=2, edge_dim=2).to(F64),
                  Conv((DotProduct(heads=2, dim=3) + EdgeBias(2)).softmax(), P, 5).to(F64)):
        single = [layer(x[i], structure=dataclasses.replace(graph, edge_attr=graph.edge_attr[i])) for i in range(3)]
        close(layer(x, structure=graph), torch.stack(single))
        with pytest.raises(StructureError, match=r"of edge_attr must broadcast to \(\), those of x and z; got \(3, "):
            layer(x[0], structure=graph)
        with pytest.raises(StructureError, match="leading dimensions of edge_attr"):
            layer(x[:2], structure=graph)


def test_clipped_shifts_are_one_hot():
    a = ClippedShifts(2).bound(P).basis(X).dense(F64)
    close(a, torch.nn.functional.one_hot(OFFSET.clamp(-2, 2) + 2, 5).to(F64).movedim(-1, 0))


def test_sinusoids_are_vaswanis():
    p = sinusoidal(torch.arange(9).to(F64), 6)
    for i in range(9):
        for j in range(3):
            angle = i / 10000 ** (2 * j / 6)
            assert abs(p[i, 2 * j] - math.sin(angle)) < 1e-12 and abs(p[i, 2 * j + 1] - math.cos(angle)) < 1e-12


def test_sinusoids_on_a_grid_split_the_channels_among_the_axes():
    x = torch.zeros(12, 8, dtype=F64)
    p = SinusoidalEncoding(8, shape=(3, 4))(x)
    rows, columns = sinusoidal(torch.arange(3).float(), 4), sinusoidal(torch.arange(4).float(), 4)
    expected = torch.cat([rows[:, None].expand(3, 4, 4), columns[None].expand(3, 4, 4)], -1).reshape(12, 8)
    torch.testing.assert_close(p, expected.to(F64))
    line = sinusoidal(torch.arange(5.0), 8).expand(2, 5, 8)
    torch.testing.assert_close(SinusoidalEncoding(8)(torch.zeros(2, 5, 8)), line)
    with pytest.raises(ConfigError, match="multiple of 2 x 2 axes; got 6"):
        SinusoidalEncoding(6, shape=(3, 4))(torch.zeros(12, 6))


def test_learned_encoding():
    encoding = LearnedEncoding(9, P)
    torch.testing.assert_close(encoding(torch.ones(2, M, P)), 1 + encoding.embedding[:M].expand(2, M, P))


@pytest.mark.parametrize(("encoding", "shape", "positions", "message"), [
    (LearnedEncoding(9, 6), (2, 1, 6), 9, r"LearnedEncoding: positions must be in \[0, length=9\); got 9 to 9"),
    (LearnedEncoding(9, 6), (2, 3, 6), 8, r"\[0, length=9\); got 8 to 10"),
    (LearnedEncoding(9, 6), (2, 1, 6), -1, r"\[0, length=9\); got -1 to -1"),
    (LearnedEncoding(9, 6), (2, 2, 6), torch.tensor([-1, 20]), r"\[0, length=9\); got -1 to 20"),
    (LearnedEncoding(1, 6), (9, 6), 0, r"\[0, length=1\); got 0 to 8"),
    (LearnedEncoding(9, 1), (9, 6), 0, r"x must have shape \(..., M, P=1\); got \(9, 6\)"),
    (LearnedEncoding(9, 6), (6,), 0, r"x must have shape \(..., M, P=6\); got \(6,\)"),
    (LearnedEncoding(9, 6), (3, 6), torch.arange(3.0), "positions must be integers"),
    (SinusoidalEncoding(6), (9, 1), 0, r"SinusoidalEncoding: x must have shape \(..., M, P=6\); got \(9, 1\)"),
    (SinusoidalEncoding(6), (9, 6), torch.tensor(2), r"positions must have shape \(..., M=9\).*; got \(\)"),
    (SinusoidalEncoding(6), (2, 9, 6), torch.zeros(3, 9), r"positions must have shape \(..., M=9\).*; got \(3, 9\)"),
    (SinusoidalEncoding(6), (9, 6), 1.5, "positions must be that of the first entry"),
    (SinusoidalEncoding(4, shape=(2, 3)), (9, 4), 0, r"x must have shape \(..., M=6, P=4\); got \(9, 4\)"),
    (SinusoidalEncoding(4, shape=(2, 3)), (6, 4), 2, r"positions must be absent for a grid of shape=\(2, 3\); got 2")])
def test_encodings_refuse_what_has_no_encoding(encoding, shape, positions, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        encoding(torch.zeros(shape), positions)


@pytest.mark.parametrize("encoding", [SinusoidalEncoding(6), LearnedEncoding(9, 6)])
def test_encodings_refuse_integers(encoding):
    with pytest.raises(ShapeError, match="Encoding: x must be floating; got"):
        encoding(torch.zeros(3, 6, dtype=torch.int64))


def test_learned_encodings_are_exported_for_all_lengths_and_recorded_in_torch_fx():
    encoding, x = LearnedEncoding(9, 6), torch.randn(2, 5, 6)
    program = torch.export.export(encoding, (x,), dynamic_shapes={"x": {1: torch.export.Dim("M", max=9)}}).module()
    torch.testing.assert_close(program(x[:, :3]), encoding(x[:, :3]))
    torch.testing.assert_close(torch.fx.symbolic_trace(encoding, {"positions": 0})(x), encoding(x))


@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: RelativeBias(-1), "clip must be an integer >= 0"),
    (lambda: RelativeBias(0, buckets="log"), "clip must be a positive integer"),
    (lambda: RelativeBias(3, buckets="linear"), "buckets must be one of 'clip', 'log', 'log_causal'"),
    (lambda: GaussianWindow(0.0), "deviation must be positive; got 0.0"),
    (lambda: ALiBi(heads=0), "ALiBi: heads must be a positive integer"),
    (lambda: EdgeBias(0), "attributes must be a positive integer"),
    (lambda: RelativeKey(2, heads=1, dim=3, sinusoidal=True).bound(P), "multiple of 2"),
    (lambda: ClippedShifts(-1), "clip must be an integer >= 0")])
def test_mistakes_are_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()
