from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from structconv.errors import ConfigError, StructureError
from structconv.mechanisms import (
    Adjacency,
    Chebyshev,
    Cuboid,
    Identity,
    Incidence,
    Pool,
    Powers,
    Relation,
    Relations,
    Shifts,
    Walks,
)
from structconv.nn import Conv
from structconv.structures import Graph, Grid, KnowledgeGraph

F64 = torch.float64


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-12)


def directed(weighted=True):
    """Six nodes, the last one isolated; node 4 only sends, node 3 only receives."""
    index = torch.tensor([[0, 1, 2, 0, 4, 1, 2], [1, 0, 0, 3, 2, 2, 3]])
    weight = torch.tensor([0.5, 2.0, 1.5, 3.0, 0.25, 1.0, 4.0], dtype=F64) if weighted else None
    return Graph(index, num_nodes=6, edge_weight=weight)


def matrix(graph):
    a = torch.zeros(graph.num_inputs, graph.num_outputs, dtype=F64)
    weight = torch.ones(graph.num_edges, dtype=F64) if graph.edge_weight is None else graph.edge_weight
    for m, n, w in zip(*graph.edge_index.tolist(), weight.tolist(), strict=True):
        a[m, n] += w
    return a


def inverse(degree, power=1.0):
    return torch.diag(torch.tensor([0.0 if d == 0 else d**-power for d in degree.tolist()], dtype=F64))


def sym(w):
    return inverse(w.sum(0), 0.5) @ w @ inverse(w.sum(0), 0.5)


def row(w):
    return w @ inverse(w.sum(0))


def built(mechanism, structure, entries, channels=2):
    """The dense basis, after checking that its size is the mechanism's and its products follow it."""
    x = torch.randn(3, entries, channels, dtype=F64)
    basis = mechanism.basis(x, structure=structure)
    a = basis.dense(F64)
    assert a.shape[0] == mechanism.size == basis.size
    close(basis.analysis(x), a.mT @ x.unsqueeze(-3))
    return a


# -- graphs -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("weighted", [False, True])
def test_adjacencies(weighted):
    g = directed(weighted)
    w, eye = matrix(g), torch.eye(6, dtype=F64)
    close(built(Adjacency("sym", self_loops=True), g, 6)[0], sym(w + eye))
    close(built(Adjacency(), g, 6)[0], sym(w))
    close(built(Adjacency("row"), g, 6)[0], row(w))
    close(built(Adjacency("row", self_loops=True), g, 6)[0], row(w + eye))
    close(built(Adjacency(None), g, 6)[0], w)
    close(built(Adjacency(None, self_loops=True), g, 6)[0], w + eye)


def test_a_bipartite_graph_normalizes_both_sides():
    g = Graph(torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]), num_inputs=4, num_outputs=2)
    w = matrix(g)
    close(built(Adjacency(), g, 4)[0], inverse(w.sum(1), 0.5) @ w @ inverse(w.sum(0), 0.5))
    close(built(Adjacency("row"), g, 4)[0], row(w))
    with pytest.raises(StructureError, match="self_loops"):
        built(Adjacency(self_loops=True), g, 4)
    for mechanism in (Chebyshev(2), Powers(2)):
        with pytest.raises(StructureError, match="M=4, N=2"):
            built(mechanism, g, 4)


@pytest.mark.parametrize("lambda_max", [2.0, 1.7])
@pytest.mark.parametrize("normalize", ["sym", "row", None])
def test_chebyshev(normalize, lambda_max):
    g, eye = directed(), torch.eye(6, dtype=F64)
    w = matrix(g)
    laplacian = torch.diag(w.sum(0)) - w if normalize is None else eye - {"sym": sym, "row": row}[normalize](w)
    scaled = 2 * laplacian / lambda_max - eye
    expected = [eye, scaled, 2 * scaled @ scaled - eye]
    expected.append(2 * scaled @ expected[2] - scaled)
    close(built(Chebyshev(3, normalize, lambda_max), g, 6), torch.stack(expected))


def test_diffusion():
    g = directed()
    w = matrix(g)
    forward, backward = inverse(w.sum(1)) @ w, inverse(w.sum(0)) @ w.T
    expected = [torch.linalg.matrix_power(p, k) for p in (forward, backward) for k in range(3)]
    close(built(Powers(2, walk="forward") | Powers(2, walk="backward"), g, 6), torch.stack(expected))
    close(built(Powers(2, walk="forward", first=1), g, 6), torch.stack(expected[1:3]))


def test_powers_of_adjacencies():
    w, eye = matrix(directed()), torch.eye(6, dtype=F64)
    close(built(Powers(3), directed(), 6), torch.stack([eye, w, w @ w, w @ w @ w]))
    a = sym(w + eye)
    close(built(Powers(2, normalize="sym", self_loops=True), directed(), 6), torch.stack([eye, a, a @ a]))


def test_incidence():
    g = directed()
    senders, receivers = (functional.one_hot(g.edge_index[i], 6).T.to(F64) for i in (0, 1))
    close(built(Incidence("sender") | Incidence("receiver"), g, 6), torch.stack([senders, receivers]))
    close(built(Incidence("receiver").transpose(), g, 7)[0], receivers.T)
    x = torch.randn(6, 3, dtype=F64)
    assert torch.equal(Incidence("sender").basis(x, structure=g).analysis(x)[0], x[g.source])
    two_sided = Graph(torch.tensor([[0, 3], [1, 0]]), num_inputs=4, num_outputs=2)
    assert built(Incidence("sender"), two_sided, 4).shape == (1, 4, 2)
    assert built(Incidence("receiver"), two_sided, 2).shape == (1, 2, 2)


def test_graphs_without_edges():
    g = Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3)
    eye, zero = torch.eye(3, dtype=F64), torch.zeros(3, 3, dtype=F64)
    for mechanism in (Adjacency(), Adjacency("row"), Adjacency(None)):
        close(built(mechanism, g, 3)[0], zero)
    close(built(Adjacency(self_loops=True), g, 3)[0], eye)
    close(built(Chebyshev(2), g, 3), torch.stack([eye, zero, -eye]))
    close(built(Powers(1, walk="forward"), g, 3), torch.stack([eye, zero]))
    assert built(Incidence("sender"), g, 3).shape == (1, 3, 0)


def test_edge_weights_have_gradients_isolated_nodes_included():
    weight = directed().edge_weight.clone().requires_grad_()
    x = torch.randn(6, 2, dtype=F64)
    zero = torch.zeros(7, dtype=F64, requires_grad=True)
    for mechanism in (Adjacency(self_loops=True), Adjacency("row"), Chebyshev(2, lambda_max=1.5),
                      Powers(2, walk="backward")):
        def apply(w, mechanism=mechanism):
            return mechanism.basis(x, structure=Graph(directed().edge_index, num_nodes=6, edge_weight=w)).analysis(x)

        assert torch.autograd.gradcheck(apply, (weight,))
        gradient, = torch.autograd.grad(apply(zero).sum(), zero)
        assert gradient.isfinite().all()


# -- knowledge graphs ---------------------------------------------------------------------------------------------

def films():
    return KnowledgeGraph.from_labels([
        ("Nimoy", "played", "Spock"), ("Nimoy", "played", "Paris"), ("Shatner", "played", "Kirk"),
        ("Spock", "characterIn", "Star Trek"), ("Kirk", "characterIn", "Star Trek"),
        ("Paris", "characterIn", "Mission"), ("Star Trek", "genre", "SF"), ("Mission", "genre", "Spy")])


def relation(kg, name):
    a = torch.zeros(kg.num_entities, kg.num_entities, dtype=F64)
    for head, r, tail in kg.triples.tolist():
        a[head, tail] += kg.relations[r] == name
    return a


def test_typed_walks():
    kg = films()
    played, appears, genre = (relation(kg, name) for name in ("played", "characterIn", "genre"))
    walk = played @ appears @ genre
    entries = kg.num_entities
    close(built(Walks(["played.characterIn.genre"]), kg, entries)[0], walk)
    close(built(Relation("played") @ Relation("characterIn") @ Relation("genre"), kg, entries)[0], walk)
    together = Walks(["played", ("played", "characterIn"), "characterIn.characterIn^-1"])
    close(built(together, kg, entries), torch.stack([played, played @ appears, appears @ appears.T]))
    assert walk[kg.entity("Nimoy"), kg.entity("SF")] == 1
    assert walk[kg.entity("Shatner"), kg.entity("Spy")] == 0


def test_relations():
    kg = films()
    matrices = [relation(kg, name) for name in kg.relations]
    close(built(Relations(3), kg, kg.num_entities), torch.stack([row(a) for a in matrices]))
    close(built(Relations(3, normalize=None), kg, kg.num_entities), torch.stack(matrices))
    close(built(Relation("played^-1"), kg, kg.num_entities)[0], matrices[0].T)
    close(built(Relation("played^-1"), kg.with_inverses(), kg.num_entities)[0], matrices[0].T)
    mixed = Relations(3) | Identity()
    close(built(mixed, kg, kg.num_entities)[3], torch.eye(kg.num_entities, dtype=F64))


def test_errors_of_knowledge_graphs():
    kg = films()
    x = torch.zeros(kg.num_entities, 1)
    with pytest.raises(StructureError, match="'played'"):
        Relation("plaid").basis(x, structure=kg)
    with pytest.raises(StructureError, match=r"2 relations; got 3.*Relations\(3\)"):
        Relations(2).basis(x, structure=kg)
    with pytest.raises(StructureError, match="KnowledgeGraph; got Graph"):
        Walks(["played"]).basis(x, structure=directed())
    for walks in ([], "played", ["played..genre"], [()]):
        with pytest.raises(ConfigError, match="walk"):
            Walks(walks)


# -- grids --------------------------------------------------------------------------------------------------------

def convolve(mechanism, structure, x, weight):
    """x (B, P, *S) through the basis with a kernel (Q, P, *k), to (B, Q, N)."""
    rows = x.flatten(2).mT
    basis = mechanism.basis(rows, structure=structure)
    return torch.einsum("bknp,qpk->bqn", basis.analysis(rows), weight.flatten(2))


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("kernel", [(3,), (4,)])
def test_same_and_valid_are_torch_words(kernel, mode):
    x = torch.randn(2, 2, 9, dtype=F64)
    for word in ("same", "valid"):
        layer = torch.nn.Conv1d(2, 3, kernel, padding=word, dilation=2, bias=False, padding_mode=mode, dtype=F64)
        close(convolve(Cuboid(kernel, padding=word, dilation=2, padding_mode=mode), None, x, layer.weight), layer(x))
    named = torch.nn.Conv1d(2, 3, 3, stride=2, padding=1, bias=False, padding_mode=mode, dtype=F64)
    close(convolve(Cuboid(3, stride=2, padding=mode), None, x, named.weight), named(x))


def test_asymmetric_padding_and_offset():
    x, weight = torch.randn(1, 1, 6, dtype=F64), torch.randn(1, 1, 3, dtype=F64)
    causal = functional.conv1d(functional.pad(x, (2, 0)), weight)
    close(convolve(Cuboid(3, padding=((2, 0),)), None, x, weight), causal)
    close(convolve(Cuboid(3, offset=1), None, x, weight), causal)


def test_shifts():
    x = torch.randn(2, 8 * 10, 3, dtype=F64)
    image = x.unflatten(-2, (8, 10))
    basis = Shifts([(0, 0), (5, -3)], padding="circular").basis(x, structure=Grid((8, 10)))
    close(basis.analysis(x)[:, 1].unflatten(-2, (8, 10)), image.roll((5, -3), (1, 2)))
    periodic = Shifts([(0, 0), (5, -3)]).basis(x, structure=Grid((8, 10), periodic=True))
    assert torch.equal(periodic.dense(), basis.dense())
    line = Shifts([-1, 1]).basis(x)
    close(line.analysis(x)[:, 0, :-1], x[:, 1:])
    assert Shifts([-1, 2], "none").output_structure(Grid(9)) == Grid(6)


def test_upsampling_is_the_transpose_of_pooling():
    x = torch.randn(6, 2, dtype=F64)
    y = Pool(2).transpose().basis(x, structure=Grid((4, 6))).analysis(x)[0]
    nearest = functional.interpolate(x.T.reshape(1, 2, 2, 3), scale_factor=2)
    close(4 * y.T, nearest.flatten(2)[0])


def test_errors_of_grids():
    x = torch.zeros(12, 1)
    with pytest.raises(StructureError, match=r"Cuboid: structure must be a Grid with 2 axes; got NoneType.*\(H, W\)"):
        Cuboid((3, 3)).basis(x)
    with pytest.raises(StructureError, match="2 axes"):
        Cuboid((3, 3)).basis(x, structure=Grid(12))
    with pytest.raises(StructureError, match="got Graph"):
        Shifts([1]).basis(x, structure=directed())
    with pytest.raises(StructureError, match="got Graph"):
        Pool(2).basis(x, structure=directed())
    for wrong in (lambda: Cuboid((3, 0)), lambda: Cuboid(3, stride=0), lambda: Cuboid(3, padding="mirror"),
                  lambda: Cuboid(3, padding=-1), lambda: Cuboid((3, 3), padding=(1, 2, 3)),
                  lambda: Cuboid((3, 3), padding=((1, 2),)), lambda: Cuboid(3.0),
                  lambda: Cuboid(3, padding="reflect", padding_mode="zeros"),
                  lambda: Shifts([]), lambda: Shifts(2), lambda: Shifts([(1, 2), (1,)]),
                  lambda: Shifts([1], "same"), lambda: Pool(0), lambda: Pool(2, (1, 2)), lambda: Identity(0)):
        with pytest.raises(ConfigError):
            wrong()


# -- all ----------------------------------------------------------------------------------------------------------

def test_errors_of_graphs():
    x = torch.zeros(6, 1)
    with pytest.raises(StructureError, match=r"Adjacency: structure must be a Graph; got Grid.*grid\.graph\(\)"):
        Adjacency().basis(x, structure=Grid(6))
    with pytest.raises(StructureError, match="got NoneType"):
        Chebyshev(2).basis(x)
    for wrong in (lambda: Adjacency("column"), lambda: Chebyshev(-1), lambda: Chebyshev(2, None),
                  lambda: Chebyshev(2, lambda_max=0), lambda: Powers(2, walk="sideways"), lambda: Powers(1, first=2),
                  lambda: Powers(2, walk="forward", normalize="row"), lambda: Incidence("edge"),
                  lambda: Relations(0), lambda: Relation("a", "mean"), lambda: Powers(True)):
        with pytest.raises(ConfigError):
            wrong()


@pytest.mark.parametrize("mechanism", [
    Adjacency(), Adjacency("row", self_loops=True), Chebyshev(2), Powers(2, walk="forward"), Adjacency() | Identity(),
    Adjacency() @ Adjacency(), Adjacency() * Adjacency(), Adjacency().transpose()])
def test_weights_of_edges_may_be_trained_from_the_second_call_on(mechanism):
    weight = torch.rand(8, dtype=torch.float64)
    edges = torch.stack([torch.arange(8), torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])])
    graph, x = Graph(edges, num_nodes=8, edge_weight=weight), torch.randn(8, 3, dtype=torch.float64)
    layer = Conv(mechanism, 3, 2).double()
    layer(x, structure=graph)
    weight.requires_grad_()
    actual, = torch.autograd.grad(layer(x, structure=graph).square().sum(), weight)
    fresh = weight.detach().clone().requires_grad_()
    new = Graph(edges.clone(), num_nodes=8, edge_weight=fresh)
    expected, = torch.autograd.grad(layer(x, structure=new).square().sum(), fresh)
    torch.testing.assert_close(actual, expected)
