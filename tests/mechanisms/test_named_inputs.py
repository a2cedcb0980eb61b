"""Several x in one call: each part of `|` reads the one whose name it has, against loops in plain torch."""

import pytest
import torch

from structconv import STRUCTURE, Additive, Adjacency, DotProduct, Identity, Incidence, Mechanism, Shifts
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms import Mixture
from structconv.nn import Conv, RelativeValue, compose
from structconv.structures import Graph, Grid, Padding, Samples, batch
from structconv.testing.checks import same
from structconv.weights import Depthwise, Eye, Full, HeadBlocks
from tests.support.errors import check_refused

F64, P, A, Q = torch.float64, 4, 3, 5
COUNTS = {"nodes": P, "edges": A}
ENDS = (Incidence("sender") | Incidence("receiver")).of("nodes")
EDGE_UPDATE = ENDS | Identity().of("edges")
TO_NODES = Incidence("receiver").transpose().of("edges")
DOT = DotProduct(heads=2, dim=3).scaled()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape) + seed))


def graph(nodes: int, edges: int) -> Graph:
    ends = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(nodes))
    return Graph(ends, num_nodes=nodes)


def inputs(structure: Graph, *lead: int) -> dict[str, torch.Tensor]:
    return {"nodes": numbers(*lead, structure.num_nodes, P), "edges": numbers(*lead, structure.num_edges, A)}


def conv(mechanism: Mechanism, channels=COUNTS, outputs: int = Q, **options) -> Conv:
    torch.manual_seed(0)
    return Conv(mechanism, channels, outputs, **options).to(F64)


def thetas(layer: Conv) -> list[torch.Tensor]:
    """Theta of each part, (K, P, Q)."""
    return [part().dense() for part in layer.weight.weights]


def looped(layer: Conv, x: dict[str, torch.Tensor], structure: Graph) -> torch.Tensor:
    """The edge update, edge by edge."""
    (sender,), (receiver,), (own,) = thetas(layer)
    rows = [x["nodes"][..., m, :] @ sender + x["nodes"][..., n, :] @ receiver + x["edges"][..., e, :] @ own
            for e, (m, n) in enumerate(structure.edge_index.T.tolist())]
    return torch.stack(rows, -2) + layer.bias


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_the_update_of_edges_reads_both_ends_and_the_edge(lead):
    layer, structure = conv(EDGE_UPDATE), graph(6, 11)
    x = inputs(structure, *lead)
    for t in x.values():
        t.requires_grad_()
    y, expected = layer(x, structure=structure), looped(layer, x, structure)
    same(y, expected, "edge by edge")
    variables = [*x.values(), *layer.parameters()]
    for own, other in zip(*(torch.autograd.grad(t.sin().sum(), variables) for t in (y, expected)), strict=True):
        same(own, other, "gradients")


PARTS = {
    "edges": (EDGE_UPDATE, ENDS, Identity()),
    "nodes": (DOT.masked(keep=STRUCTURE).softmax().of("nodes") | TO_NODES, DOT.masked(keep=STRUCTURE).softmax(),
              Incidence("receiver").transpose()),
}


def test_few_channels_of_all_parts_are_joined_for_one_product():
    layer, structure = conv(EDGE_UPDATE), graph(6, 11)
    x = inputs(structure)
    shared = {"nodes": torch.randn(3, 6, 4, dtype=F64, requires_grad=True), "edges": x["edges"]}
    for given in (x, shared):
        actual = []
        for layer.path in ("structure_first", "per_part"):
            plan, y = layer.plan(given, structure=structure), layer(given, structure=structure)
            leaves = (*given.values(), *layer.parameters())
            actual.append((y, *torch.autograd.grad(y.square().sum(), [t for t in leaves if t.requires_grad])))
            assert plan.path == layer.path
        for joined, apart in zip(*actual, strict=True):
            same(joined, apart, "joined")
    layer.path = None
    assert layer.plan(x, structure=structure).path == "structure_first"


def test_attention_among_edges_names_their_samples():
    graphs = [graph(6, 11), graph(4, 5)]
    xs = [inputs(each) for each in graphs]
    both = {name: torch.cat([x[name] for x in xs]) for name in COUNTS}
    unnamed = conv(ENDS | DOT.softmax().of("edges"))
    with pytest.raises(StructureError, match="the same samples of their outputs"):
        unnamed(both, structure=batch(graphs))
    layer = conv(ENDS.on("graph") | DOT.softmax().of("edges").on("rows") | Identity().of("edges"))
    single = torch.cat([layer(x, structure={"graph": each, "rows": Samples([each.num_edges])})
                       for x, each in zip(xs, graphs, strict=True)])
    given = {"graph": batch(graphs), "rows": Samples([11, 5])}
    same(layer(both, structure=given), single, "batched")
    with pytest.raises(StructureError, match="the same samples of their outputs"):
        layer(both, structure={**given, "rows": Samples([10, 6])})
    with pytest.raises(StructureError, match="some part names must tell"):
        conv(ENDS.on("graph") | DOT.softmax().of("edges") | DOT.softmax().on("rows").of("edges"))(
            both, structure=given)


def test_keys_of_a_named_x_and_queries_that_are_given():
    attention = DotProduct(heads=2, dim=3).softmax()
    layer = conv(attention.of("nodes") | Additive(dim=3).softmax().of("edges"), other_channels=2)
    structure, z = graph(6, 11), numbers(7, 2)
    x = inputs(structure)
    one, two = layer.mechanism.operands
    expected = layer.bias
    for part, name, theta in zip((one, two), COUNTS, thetas(layer), strict=True):
        a = part.basis({name: x[name]}, z=z).dense(F64)
        expected = expected + torch.einsum("kmn,mp,kpq->nq", a, x[name], theta)
    same(layer(x, z=z), expected, "queries given")
    with pytest.raises(ShapeError, match="z must be given"):
        layer(x)
    with pytest.raises(ConfigError, match=r"other_channels must be given .*P'=2 for \[3, 4\]"):
        conv(attention.of("nodes") | attention.of("edges"))(x, z=z)
    single = conv(attention.of("nodes") | TO_NODES)
    same(single(x, structure, z=x["nodes"]), single(x, structure=structure), "z is the x that is read")
    with pytest.raises(ShapeError, match=r"same outputs N; got N=5 of .* and N=6 of Incidence"):
        single(x, structure, z=x["nodes"][:5])


def test_padding_of_one_input_leaves_the_others():
    layer = conv(DOT.masked(keep="padding").softmax().of("nodes") | TO_NODES.on("graph"))
    small = graph(4, 5)
    large = Graph(small.edge_index, num_nodes=6)
    x, keep = inputs(large), torch.arange(6) < 4
    single = layer({"nodes": x["nodes"][:4], "edges": x["edges"]},
                  structure={"padding": Padding(keep[:4]), "graph": small})
    x["nodes"][4:] = torch.nan
    same(layer(x, structure={"padding": Padding(keep), "graph": large})[:4], single, "nothing leaks")


def test_structures_by_name_too():
    expression = Incidence("sender", structure="bonds").of("nodes") | Shifts([0, 1], structure="line").of("edges")
    layer, structure = conv(expression), graph(6, 11)
    x = inputs(structure)
    given = {"bonds": structure, "line": Grid(11)}
    (sender,), (own, before) = thetas(layer)
    moved = torch.cat([torch.zeros(1, A, dtype=F64), x["edges"][:-1]])
    expected = x["nodes"][structure.source] @ sender + x["edges"] @ own + moved @ before + layer.bias
    same(layer(x, structure=given), expected, "both by name")
    with pytest.raises(StructureError, match="Missing: 'line'"):
        layer(x, structure={"bonds": structure})


def test_weights_of_each_part():
    structure = graph(6, 11)
    x = inputs(structure)
    layer = conv(EDGE_UPDATE, outputs=P, weight=[Eye(), Depthwise(), Full()])
    assert set(layer.state_dict()) == {"bias", "weight.1.depthwise", "weight.2.theta"}
    expected = x["nodes"][structure.source] + x["nodes"][structure.target] * layer.weight.weights[1].depthwise.flatten()
    same(layer(x, structure=structure), expected + x["edges"] @ thetas(layer)[2][0] + layer.bias, "three kinds")
    assert [tuple(theta.shape) for theta in thetas(conv(EDGE_UPDATE, weight=HeadBlocks()))] == [
        (1, P, Q), (1, P, Q), (1, A, Q)]
    with pytest.raises(ConfigError, match="weights must be 3"):
        conv(EDGE_UPDATE, weight=[Full(), Full()])


def test_weights_come_back_part_by_part():
    layer, structure = conv(PARTS["nodes"][0]), graph(6, 11)
    x = inputs(structure)
    y, (attention, incidence) = layer(x, structure=structure, return_weights=True)
    same(y, layer(x, structure=structure), "the result")
    part = layer.mechanism.operands[0].basis({"nodes": x["nodes"]}, structure=structure).dense(F64)
    assert attention.shape == (2, 11) and incidence.shape[0] == 1
    for e, (m, n) in enumerate(structure.edge_index.T.tolist()):
        copies = structure.edge_index.T.tolist().count([m, n])
        same(attention[:, e] * copies, part[:, m, n], "along the edges")


def test_numbers_are_drawn_for_each_x():
    structure = graph(60, 4000)
    layer = Conv(EDGE_UPDATE, {"nodes": 64, "edges": 8}, 64, bias=False)
    x = {"nodes": torch.randn(60, 64), "edges": torch.randn(4000, 8)}
    assert 0.7 < layer(x, structure=structure).var() < 1.4
    before = layer.state_dict()["weight.0.theta"].clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.state_dict()["weight.0.theta"])
    layer.calibrate({name: 3 * t for name, t in x.items()}, structure=structure)
    y = layer({name: 3 * t for name, t in x.items()}, structure=structure)
    spread = torch.cat([3 * t.flatten() for t in x.values()]).var()
    same(y.detach().var(), spread, "calibrated", torch.tensor(1e-3))


def test_names_that_do_not_fit_are_told():
    layer, structure = conv(EDGE_UPDATE), graph(6, 11)
    x = inputs(structure)
    for given, text in {
        "nodes": r"'nodes', 'edges'; got 'nodes'\. Missing: 'edges'; left over: none",
        "nodes edges more": "Missing: none; left over: 'more'",
        "node edges": "Missing: 'nodes'; left over: 'node'",
        "": "Missing: 'nodes', 'edges'; left over: none",
    }.items():
        with pytest.raises(ConfigError, match=text):
            layer({name: x.get(name, x["nodes"]) for name in given.split()}, structure=structure)
    check_refused(
        (ConfigError, r"got Tensor\. Missing", lambda: layer(x["nodes"], structure=structure)),
        (ConfigError, r"in_channels must be .*Missing: 'edges'; left over: 'edge'",
         lambda: conv(EDGE_UPDATE, {"nodes": P, "edge": A})),
        (ConfigError, r"in_channels\['edges'\] must be a positive integer",
         lambda: conv(EDGE_UPDATE, {"nodes": P, "edges": 0})),
        (ConfigError, "no part of the mechanism names an x", lambda: conv(Adjacency(), {"nodes": P})),
        (ConfigError, r"must name the x that it reads.*got Incidence\('receiver'\)",
         lambda: conv(Incidence("sender").of("nodes") | Incidence("receiver") | Identity().of("edges"))))
    for name in ("", 3, x["nodes"]):
        with pytest.raises(ConfigError, match="the name of an x"):
            Identity().of(name)


def test_wrong_shapes_are_told_with_the_name():
    layer, structure = conv(EDGE_UPDATE), graph(6, 11)
    x = inputs(structure)
    for wrong, error, text in [
        ({"edges": numbers(11, A + 1)}, ShapeError, r"x\['edges'\] must have shape \(..., M, P=3\); got \(11, 4\)"),
        ({"nodes": numbers(5, P)}, ShapeError, r"x\['nodes'\] must have shape \(..., M=6, P\); got \(5, 4\)"),
        ({"edges": numbers(10, A)}, ShapeError, "same outputs N; got N=11 and N=11 and N=10"),
        ({"edges": numbers(1, A)}, ShapeError, "same outputs N"),
        ({"edges": x["edges"].float()}, ShapeError, r"x\['edges'\] and x\['nodes'\] must share one dtype"),
        ({"edges": [1.0]}, ConfigError, r"x\['edges'\] must be a tensor; got list"),
        ({"edges": None}, ConfigError, r"x\['edges'\] must be a tensor; got NoneType"),
    ]:
        with pytest.raises(error, match=text):
            layer({**x, **wrong}, structure=structure)
    check_refused(
        (ShapeError, "x and theta must share one dtype",
         lambda: layer({name: t.float() for name, t in x.items()}, structure=structure)),
        (StructureError, "must be a Graph", lambda: layer(x)),
        (ConfigError, "an image must be the only x", lambda: layer(x, structure=structure, axes=1)))


def test_one_x_needs_no_name_and_one_name_no_mixture():
    structure = graph(6, 11)
    x = inputs(structure)
    plain = conv(Incidence("sender") | Incidence("receiver"), P)
    same(plain({"any": x["nodes"]}, structure=structure), plain(x["nodes"], structure=structure), "one entry")
    with pytest.raises(ConfigError, match=r"expression names, none; got 'nodes', 'edges'"):
        plain(x, structure=structure)
    named = conv(ENDS, {"nodes": P})
    named.load_state_dict(plain.state_dict())
    same(named({"nodes": x["nodes"]}, structure=structure), plain(x["nodes"], structure=structure), "one name")
    assert named.in_channels == P and conv(ENDS, P).in_channels == P
    with pytest.raises(ConfigError, match="Missing: 'nodes'"):
        named(x["nodes"], structure=structure)
    assert conv(EDGE_UPDATE, P).in_channels == {"nodes": P, "edges": P}


def test_of_names_what_has_no_name():
    explicit = Incidence("sender").of("nodes") | Incidence("receiver").of("nodes") | Identity().of("edges")
    implied = (Incidence("sender") | Incidence("receiver") | Identity().of("edges")).of("nodes")
    assert isinstance(implied, Mixture) and repr(implied) == repr(explicit) == repr(EDGE_UPDATE)
    assert repr(implied.operands[0]) == "Incidence('sender').of('nodes')"
    late = (DOT.of("nodes") + 1.0 * DotProduct(heads=2, dim=2)).softmax() | TO_NODES
    layer, structure = conv(late), graph(6, 11)
    early = conv((DOT + 1.0 * DotProduct(heads=2, dim=2)).softmax().of("nodes") | TO_NODES)
    same(layer(inputs(structure), structure=structure), early(inputs(structure), structure=structure), "of, softmax")


def test_what_reads_two_inputs_or_one_after_theta_is_refused():
    mixed = EDGE_UPDATE
    for make in (mixed.softmax, mixed.transpose, lambda: mixed @ Identity(), lambda: Identity() @ mixed,
                 lambda: mixed + Identity(), lambda: 2.0 * mixed, lambda: mixed.masked(keep=STRUCTURE),
                 lambda: mixed.outer(Identity())):
        with pytest.raises(ConfigError, match="operands must read one x"):
            make()
    with pytest.raises(ConfigError, match=r"each part of \| must read one x; got 'nodes', 'edges'"):
        conv((DOT.of("nodes") + DOT.of("edges")).softmax())
    with pytest.raises(ConfigError, match="in a layer of one x"):
        DotProduct(2, on="projected").softmax().of("nodes") | Identity().of("edges")
    with pytest.raises(ConfigError, match="relative_value must be in a layer of one x"):
        conv(EDGE_UPDATE, relative_value=RelativeValue(1))
    for layer in (conv(EDGE_UPDATE, bias=False), conv(Identity().of("edges"), {"edges": A}, bias=False)):
        with pytest.raises(ConfigError, match="first must read an x without a name"):
            compose(layer, Conv(Identity(), Q, 2, bias=False).to(F64))
    nested = torch.nested.nested_tensor([numbers(3, P), numbers(2, P)], layout=torch.jagged)
    with pytest.raises(ShapeError, match=r"x\['nodes'\] must not be nested"):
        conv(DOT.softmax().of("nodes") | Identity().of("edges"))({"nodes": nested, "edges": numbers(5, A)})
