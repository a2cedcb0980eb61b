from functools import partial

import pytest
import torch
from torch.nn import functional

from structconv import Adjacency, Chebyshev, Conv, Cuboid, Identity, Incidence, Pool, Powers, Relations, Shifts
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms import Relation, Walks
from structconv.structures import Graph, Grid, KnowledgeGraph
from tests.support.errors import check_refused
from tests.support.graphs import matrix

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def directed(weighted=True):
    """Six nodes, the last one isolated; node 4 only sends, node 3 only receives."""
    index = torch.tensor([[0, 1, 2, 0, 4, 1, 2], [1, 0, 0, 3, 2, 2, 3]])
    weight = torch.tensor([0.5, 2.0, 1.5, 3.0, 0.25, 1.0, 4.0], dtype=F64) if weighted else None
    return Graph(index, num_nodes=6, edge_weight=weight)


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
    for mechanism, expected in (
            (Adjacency("sym", self_loops=True), sym(w + eye)), (Adjacency(), sym(w)), (Adjacency("row"), row(w)),
            (Adjacency("row", self_loops=True), row(w + eye)), (Adjacency(None), w),
            (Adjacency(None, self_loops=True), w + eye)):
        close(built(mechanism, g, 6)[0], expected)


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


def test_diffusion_and_powers_of_adjacencies():
    w, eye = matrix(directed()), torch.eye(6, dtype=F64)
    forward, backward, a = inverse(w.sum(1)) @ w, inverse(w.sum(0)) @ w.T, sym(w + eye)
    expected = [torch.linalg.matrix_power(p, k) for p in (forward, backward) for k in range(3)]
    for mechanism, powers in (
            (Powers(2, walk="forward") | Powers(2, walk="backward"), expected), (Powers(3), (eye, w, w @ w, w @ w @ w)),
            (Powers(2, walk="forward", first=1), expected[1:3]),
            (Powers(2, normalize="sym", self_loops=True), (eye, a, a @ a))):
        close(built(mechanism, directed(), 6), torch.stack(tuple(powers)))


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
    matrices, entries = [relation(kg, name) for name in kg.relations], kg.num_entities
    close(built(Relations(3), kg, entries), torch.stack([row(a) for a in matrices]))
    close(built(Relations(3, normalize=None), kg, entries), torch.stack(matrices))
    for given in (kg, kg.with_inverses()):
        close(built(Relation("played^-1"), given, entries)[0], matrices[0].T)
    close(built(Relations(3) | Identity(), kg, entries)[3], torch.eye(entries, dtype=F64))


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


# -- all ----------------------------------------------------------------------------------------------------------

def test_structures_that_do_not_fit():
    x, kg = torch.zeros(12, 1), films()
    check_refused(
        (StructureError, r"Adjacency: structure must be a Graph; got Grid.*grid\.graph\(\)",
         lambda: Adjacency().basis(x, structure=Grid(12))),
        (StructureError, "got NoneType", lambda: Chebyshev(2).basis(x)),
        (StructureError, "'played'", lambda: Relation("plaid").basis(x, structure=kg)),
        (StructureError, r"2 relations; got 3.*Relations\(3\)", lambda: Relations(2).basis(x, structure=kg)),
        (StructureError, "KnowledgeGraph; got Graph", lambda: Walks(["played"]).basis(x, structure=directed())),
        (StructureError, r"Cuboid: structure must be a Grid with 2 axes; got NoneType.*\(H, W\)",
         lambda: Cuboid((3, 3)).basis(x)),
        (StructureError, "2 axes", lambda: Cuboid((3, 3)).basis(x, structure=Grid(12))),
        (StructureError, "got Graph", lambda: Shifts([1]).basis(x, structure=directed())),
        (StructureError, "got Graph", lambda: Pool(2).basis(x, structure=directed())))


@pytest.mark.parametrize("wrong", [
    lambda: Adjacency("column"), lambda: Chebyshev(-1), lambda: Chebyshev(2, None), lambda: Chebyshev(2, lambda_max=0),
    lambda: Powers(2, walk="sideways"), lambda: Powers(1, first=2), lambda: Powers(True), lambda: Incidence("edge"),
    lambda: Powers(2, walk="forward", normalize="row"), lambda: Relations(0), lambda: Relation("a", "mean"),
    lambda: Cuboid((3, 0)), lambda: Cuboid(3, stride=0), lambda: Cuboid(3, padding="mirror"),
    lambda: Cuboid(3, padding=-1), lambda: Cuboid((3, 3), padding=(1, 2, 3)), lambda: Cuboid(3.0),
    lambda: Cuboid((3, 3), padding=((1, 2),)), lambda: Cuboid(3, padding="reflect", padding_mode="zeros"),
    lambda: Shifts([]), lambda: Shifts(2), lambda: Shifts([(1, 2), (1,)]), lambda: Shifts([1], "same"), lambda: Pool(0),
    lambda: Pool(2, (1, 2)), lambda: Identity(0), lambda: Walks([]), lambda: Walks("played"),
    lambda: Walks(["played..genre"]), lambda: Walks([()])])
def test_options_that_cannot_be(wrong):
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
