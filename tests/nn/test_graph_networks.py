"""The graph network block against loops over nodes and edges, each constructor; pooling; bad reads and attributes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.export import Dim

from structconv import STRUCTURE, Additive, ConfigError, DotProduct, Graph, ShapeError, StructureError, batch
from structconv.nn import Attributes, EdgeConditionedConv, GraphNetwork, GraphPool, GroupPool
from structconv.nn.pooling import POOLINGS
from tests.support.drawn import drawn, slow

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
GRAPHS = (Graph(torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 2, 1]]), num_nodes=4),
          Graph(torch.tensor([[1], [0]]), num_nodes=2), Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=1))
WHOLE = batch(GRAPHS)
SIZES = (4, 3, 2)
UPDATES = {"edge": (8, 7), "node": (9, 6), "globals": (5,)}
BLOCKS = {
    **{f"{to_nodes}-{to_graphs}": partial(GraphNetwork, *SIZES, **UPDATES, aggregate=to_nodes, readout=to_graphs)
       for to_nodes, to_graphs in (("sum", "mean"), ("mean", "max"), ("max", "softmax"), ("softmax", "sum"))},
    "independent": lambda: GraphNetwork.independent(*SIZES, **UPDATES),
    "message-passing": lambda: GraphNetwork.message_passing(4, 3, edge=(8, 7), node=6, globals=5, aggregate="mean"),
    "interaction": lambda: GraphNetwork.interaction(*SIZES, edge=(8, 7), node=(9, 6)),
    "interaction of nodes": lambda: GraphNetwork.interaction(4, edge=7, node=6),
    "relation": lambda: GraphNetwork.relation(4, edge=(8, 7), globals=(9, 5)),
    "non-local": lambda: GraphNetwork.non_local(4, node=(9, 6), heads=2),
    "deep sets": lambda: GraphNetwork.deep_sets(4, 2, node=(9, 6), globals=5),
    "no node update": lambda: GraphNetwork(*SIZES, edge=7, globals=5),
    "no edge update": lambda: GraphNetwork(*SIZES, node=6, globals=5),
    "tanh": lambda: GraphNetwork(*SIZES, **UPDATES, activation=nn.Tanh)}
EACH = pytest.mark.parametrize("name", BLOCKS)


def make(name):
    torch.manual_seed(0)
    block = BLOCKS[name]().to(F64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.uniform_(-0.5, 0.5)
    return block


def given(block, graph=WHOLE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    count = 1 if graph.samples is None else graph.samples.num_samples
    rows = {"nodes": graph.num_inputs, "edges": graph.num_edges, "globals": count}
    channels = {"nodes": block.node_channels, "edges": block.edge_channels, "globals": block.global_channels}
    return {name: torch.randn(rows[name], channels[name], generator=generator, dtype=F64) if channels[name] else None
            for name in rows}


def told(block, graph, attributes):
    return block(attributes["nodes"], graph, attributes["edges"], attributes["globals"])


def mlp(update, parts):
    """The network of an update on what it reads, concatenated."""
    return update.rest(sum(x @ theta for x, theta in zip(parts, matrices(update), strict=True)) + update.first.bias)


def matrices(update):
    """Theta of each part, by its role."""
    held = dict(update.first.named_parameters())
    actual = [value for name, value in held.items() if name.startswith("weight.")]
    return [theta for value in actual for theta in value.unbind(0)]


def pooled(rows, kind, pool, channels):
    """Of a list of rows."""
    if not rows:
        return torch.zeros(channels, dtype=F64)
    stack = torch.stack(rows)
    if kind == "softmax":
        vector = next(p for name, p in pool.named_parameters() if "vector_source" in name)[0]
        return (stack @ vector).softmax(0) @ stack
    return {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0)}[kind]


def loop(block, graph, nodes, edges, globals):
    """Algorithm 1 of Battaglia et al., an edge and a node at a time, for one graph; without `neighbors`."""
    pairs = graph.edge_index.T.tolist()
    own = {"nodes": list(nodes), "edges": None if edges is None else list(edges),
           "globals": None if globals is None else globals[0]}

    def reads(update, available):
        return [value() for name, value in available.items() if name in update._parts]

    if block.edge is not None:
        own["edges"] = [mlp(block.edge, reads(block.edge, {
            "edges": lambda e=e: edges[e], "senders": lambda s=s: nodes[s], "receivers": lambda r=r: nodes[r],
            "globals": lambda: own["globals"]})) for e, (s, r) in enumerate(pairs)]
    if block.node is not None:
        pool = dict(block.node.pools).get("edges")
        width = block.edge.out_channels if block.edge is not None else block.edge_channels
        own["nodes"] = [mlp(block.node, reads(block.node, {
            "edges": lambda n=n: pooled([own["edges"][e] for e, (_, r) in enumerate(pairs) if r == n], block.aggregate,
                                        pool, width),
            "nodes": lambda n=n: nodes[n], "globals": lambda: own["globals"]})) for n in range(graph.num_inputs)]
    if block.globals is not None:
        pools = dict(block.globals.pools)
        width = block.edge.out_channels if block.edge is not None else block.edge_channels
        own["globals"] = mlp(block.globals, reads(block.globals, {
            "edges": lambda: pooled(own["edges"], block.readout, pools.get("edges"), width),
            "nodes": lambda: pooled(own["nodes"], block.readout, pools.get("nodes"), 0),
            "globals": lambda: own["globals"]}))
    return own


def alike(ours, expected):
    """Each attribute, or its absence."""
    for own, other in zip(ours, expected, strict=True):
        assert (own is None) is (other is None)
        if own is not None:
            close(own, other)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "non-local"])
@pytest.mark.parametrize("graph", GRAPHS[:2], ids=["five edges", "one edge"])
def test_a_block_is_the_loop(name, graph):
    block = make(name)
    x = given(block, graph)
    ours, expected = told(block, graph, x), loop(block, graph, **x)
    for own, name in zip(ours, Attributes._fields, strict=True):
        if own is not None:
            other = expected[name]
            close(own, other.unsqueeze(0) if name == "globals" else torch.stack(other))


def test_the_non_local_block_is_attention_along_the_graph():
    block, graph = make("non-local"), GRAPHS[0]
    x = given(block, graph)["nodes"]
    scores = next(part for part in block.modules() if type(part).__name__ == "DotProduct")
    query, key = (part(x).unflatten(-1, (2, -1)).transpose(0, 1) for part in (scores.query, scores.key))
    keep = torch.zeros(4, 4, dtype=torch.bool)
    keep[graph.target, graph.source] = True
    weights = (query @ key.mT / 2 ** 0.5).masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
    first = sum(weights[k] @ x @ theta for k, theta in enumerate(matrices(block.node))) + block.node.first.bias
    close(block(x, graph).nodes, block.node.rest(first))


@EACH
def test_a_batch_is_each_graph_alone(name):
    block = make(name)
    x = given(block)
    whole, at = told(block, WHOLE, x), {"nodes": 0, "edges": 0, "globals": 0}
    for graph in GRAPHS:
        counts = {"nodes": graph.num_inputs, "edges": graph.num_edges, "globals": 1}
        own = {key: None if t is None else t[at[key]:at[key] + counts[key]] for key, t in x.items()}
        for field, single, together in zip(Attributes._fields, told(block, graph, own), whole, strict=True):
            if single is not None:
                close(together[at[field]:at[field] + counts[field]], single)
        at = {key: at[key] + counts[key] for key in at}


@EACH
def test_samples_may_share_the_graph(name):
    block = make(name)
    x, other = given(block), given(block, seed=2)
    both = {key: None if t is None else torch.stack([t, other[key]]) for key, t in x.items()}
    for together, *single in zip(*(told(block, WHOLE, some) for some in (both, x, other)), strict=True):
        if together is not None:
            close(together, torch.stack(single))


def test_edges_to_other_nodes():
    graph = Graph(torch.tensor([[0, 4, 1], [1, 0, 1]]), num_inputs=5, num_outputs=2)
    block = GraphNetwork(4, 3, 2, edge=(8, 7), node=6, globals=5, bipartite=True).to(F64)
    x, z, e, u = (torch.randn(*shape, dtype=F64) for shape in ((5, 4), (2, 4), (3, 3), (1, 2)))
    actual = block(x, graph, e, u, receivers=z)
    sent = mlp(block.edge, (e, x[graph.source], z[graph.target], u.expand(3, 2)))
    close(actual.edges, sent)
    reached = torch.stack([sent[1], sent[0] + sent[2]])
    close(actual.nodes, mlp(block.node, (reached, z)))
    close(actual.globals, mlp(block.globals, (sent.sum(0, keepdim=True), u)))
    with pytest.raises(ConfigError, match="receivers= must be given"):
        block(x, graph, e, u)


@pytest.mark.parametrize("scores", [DotProduct(2, 3), DotProduct(2, 3).masked(keep=STRUCTURE), Additive(3)], ids=repr)
def test_neighbors_are_those_of_the_same_graph(scores):
    block, x = GraphNetwork(4, node=(9, 6), neighbors=scores.softmax()).to(F64), torch.randn(7, 4, dtype=F64)
    single = [block(part, graph).nodes for part, graph in zip(x.split([4, 2, 1]), GRAPHS, strict=True)]
    close(block(x, WHOLE).nodes, torch.cat(single))


def test_receivers_attend_to_senders():
    graph = Graph(torch.tensor([[0, 1, 2, 0], [0, 1, 1, 1]]), num_inputs=3, num_outputs=2)
    attention = DotProduct(1, 3).masked(keep=STRUCTURE).softmax()
    block = GraphNetwork(4, node=6, node_reads=("neighbors",), neighbors=attention, bipartite=True).to(F64)
    senders, receivers = torch.randn(3, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    first = block.node.first
    actual = first.basis({"nodes": senders}, graph, z=receivers).dense()[0]
    scores = next(part for part in block.modules() if isinstance(part, DotProduct))
    expected = scores.key(senders) @ scores.query(receivers).mT
    expected[[1, 2], 0] = -torch.inf
    close(actual, expected.softmax(0))
    close(block(senders, graph, receivers=receivers).nodes,
          actual.mT @ senders @ first.weight().dense()[0] + first.bias)


def test_activations_are_drawn_anew_too():
    block = GraphNetwork(4, node=(9, 6), activation=nn.PReLU)
    torch.nn.init.zeros_(block.node.rest[0].weight)
    block.reset_parameters()
    assert block.node.rest[0].weight == 0.25


@pytest.mark.parametrize(("make", "said"), [
    (lambda: GraphNetwork(4, edge=5, edge_reads=("edges",)), "edge_reads must be of senders, receivers"),
    (lambda: GraphNetwork(4, node=5, node_reads=("nodes", "senders")), "node_reads must be of nodes; got senders"),
    (lambda: GraphNetwork(4, node=5, node_reads=()), "node_reads must be of nodes; got none"),
    (lambda: GraphNetwork(4), "at least one of edge, node and globals"),
    (lambda: GraphNetwork(4, edge=5, node_reads=("nodes",)), "node must be given where node_reads is"),
    (lambda: GraphNetwork(4, edge=5, neighbors=DotProduct()), "an update of nodes must be there"),
    (lambda: GraphNetwork(4, node=()), "an update must have one width or more"),
    (lambda: GraphNetwork(4, node=5, aggregate="median"), "aggregate must be"),
    (lambda: GraphNetwork(4, 0, 2, edge=3, node=5, node_reads=("globals",), bipartite=True), "node_reads must be of")])
def test_blocks_that_cannot_be(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(("change", "kind", "said"), [
    ({"nodes": torch.zeros(6, 4)}, ShapeError, r"nodes must have shape \(..., M=7, P=4\)"),
    ({"edges": torch.zeros(6, 2)}, ShapeError, r"edges must have shape \(..., M=6, P=3\)"),
    ({"globals": torch.zeros(1, 2)}, ShapeError, r"globals must have shape \(..., M=3, P=2\)"),
    ({"edges": None}, ConfigError, "edges must be given, with 3 channels")])
def test_attributes_that_do_not_fit(change, kind, said):
    block = GraphNetwork(*SIZES, **UPDATES)
    x = {name: t.float() for name, t in given(block).items()}
    with pytest.raises(kind, match=said):
        told(block, WHOLE, {**x, **change})
    with pytest.raises(StructureError, match="the second argument must be a Graph"):
        told(block, "graph", x)


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_is_of_each_graph_in_any_order(kind):
    pool, x = GraphPool(4, kind).to(F64), torch.randn(7, 4, dtype=F64)
    whole = pool(x, WHOLE)
    assert whole.shape == (3, pool.out_channels)
    parts = zip(x.split([4, 2, 1]), GRAPHS, strict=True)
    single = [pool(part[torch.randperm(len(part))], graph) for part, graph in parts]
    close(whole, torch.cat(single))
    close(pool(torch.stack([x, 2 * x]), WHOLE)[0], whole)
    if kind in ("sum", "mean", "max"):
        assert torch.equal(single[2], x[6:])


@pytest.mark.parametrize("kind", POOLINGS)
def test_rows_come_in_any_order_of_edges_and_weigh_alike(kind):
    edges, x = torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.randn(3, 4, dtype=F64)
    pool = GroupPool(4, kind).to(F64)
    turned = Graph(edges.flip(1), num_inputs=3, num_outputs=2, edge_weight=torch.rand(3, dtype=F64))
    close(pool(x, turned), pool(x, Graph(edges, num_inputs=3, num_outputs=2)))


@pytest.mark.parametrize("targets", [[2, 0, 1, 0, 2, 2, 1], [0, 0, 0, 0, 0, 0, 1], [0, 0, 2, 2, 0, 2, 0]])
def test_maxima_of_groups_that_are_even_uneven_and_empty(targets):
    """By a table of members or by spreading rows: values, shared gradients of equal ones, derivatives twice, export."""
    groups = Graph(torch.tensor([range(7), targets]), num_inputs=7, num_outputs=max(targets) + 1)
    pool, x = GroupPool(2, "max"), torch.randn(3, 7, 2, dtype=F64).round().requires_grad_()
    rows = [[m for m in range(7) if targets[m] == g] for g in range(groups.num_outputs)]
    expected = torch.stack([x[:, own].amax(-2) if own else 0 * x[:, 0] for own in rows], 1)
    y, seed = pool(x, groups), torch.randn_like(expected)
    close(y, expected)
    close(*(torch.autograd.grad(actual, x, seed)[0] for actual in (y, expected)))
    assert torch.autograd.gradgradcheck(lambda x: pool(x, groups), torch.randn(2, 7, 2, dtype=F64, requires_grad=True),
                                        fast_mode=True)
    close(torch.export.export(pool, (x.detach(), groups)).module()(x, groups), expected)


def test_set2set_is_its_recurrence():
    pool, x = GraphPool(4, "set2set", steps=2).to(F64), torch.randn(4, 4, dtype=F64)
    gates, both = nn.LSTMCell(8, 4).to(F64), torch.zeros(1, 8, dtype=F64)
    state = torch.zeros(1, 4, dtype=F64), torch.zeros(1, 4, dtype=F64)
    theta, bias = pool.state_dict()["cell.gates.weight.theta"][0], pool.state_dict()["cell.gates.bias"]
    with torch.no_grad():
        gates.weight_ih.copy_(theta[:8].mT)
        gates.weight_hh.copy_(theta[8:].mT)
        gates.bias_ih.copy_(bias)
        gates.bias_hh.zero_()
    for _ in range(2):
        state = gates(both, state)
        both = torch.cat([state[0], (state[0] @ x.mT).softmax(-1) @ x], -1)
    close(pool(x, GRAPHS[0]), both)


@EACH
def test_every_parameter_is_learned(name):
    block = make(name)
    sum(t.square().sum() for t in told(block, WHOLE, given(block)) if t is not None and t.requires_grad).backward()
    assert all(parameter.grad is not None for parameter in block.parameters())


OTHERS = batch([Graph(torch.tensor([[4, 0, 3, 3], [0, 0, 1, 2]]), num_nodes=5), *GRAPHS[:2],
                Graph(torch.tensor([[0, 1], [0, 1]]), num_nodes=3)])


@slow
@pytest.mark.parametrize("name", ["deep sets", "message-passing", "relation"])
def test_a_batch_is_compiled_whole(name):
    torch.compiler.reset()
    block = make(name)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    for graph in (WHOLE, OTHERS):
        x = given(block, graph)
        alike(told(compiled, graph, x), told(block, graph, x))


@pytest.mark.parametrize("name", drawn(["non-local", "max-softmax"], 2))
def test_a_batch_is_exported_with_any_numbers_of_graphs_nodes_and_edges(name):
    block, free = make(name).eval(), Dim.DYNAMIC
    samples = [{0: free}, {0: free}, free, free, free, free, None, None]
    x = given(block)
    rows = {key: None if t is None else {0: free} for key, t in x.items()}
    program = torch.export.export(block, (x["nodes"], WHOLE, x["edges"], x["globals"]), dynamic_shapes={
        "nodes": rows["nodes"], "graph": [{1: free}, free, free, samples], "edges": rows["edges"],
        "globals": rows["globals"]}).module()
    for graph in (WHOLE, OTHERS):
        x = given(block, graph)
        alike(told(program, graph, x), told(block, graph, x))


class OneGraph(nn.Module):
    """A row of a graph that is made of its edges."""

    def __init__(self, kind):
        super().__init__()
        self.messages = GraphNetwork.message_passing(4, 3, edge=5, node=4, globals=3, aggregate="max")
        self.pool = GraphPool(4, kind)

    def forward(self, x, edge_index, edges):
        graph = Graph(edge_index, num_nodes=x.shape[0])
        passed = self.messages(x, graph, edges)
        return torch.cat([passed.globals, self.pool(passed.nodes, graph)], -1)


@pytest.mark.parametrize("kind", drawn(["max", "set2set"], 2))
def test_one_graph_is_exported_with_any_numbers_of_nodes_and_edges(kind):
    model, free = OneGraph(kind), Dim.DYNAMIC
    sizes = ((6, 11), (9, 4), (2, 20))
    first, *others = [(torch.randn(n, 4), torch.randint(n, (2, e)), torch.randn(e, 3)) for n, e in sizes]
    program = torch.export.export(model, first, dynamic_shapes=({0: free}, {1: free}, {0: free})).module()
    for x in (first, *others):
        torch.testing.assert_close(program(*x), model(*x), rtol=1e-5, atol=1e-5)


def test_filters_of_edges_on_a_graph_without_nodes():
    graph = Graph(torch.empty(2, 0, dtype=torch.int64), num_nodes=0, edge_attr=torch.empty(0, 3))
    x = torch.randn(0, 5, requires_grad=True)
    y = EdgeConditionedConv(5, 4, 3, 8)(x, graph)
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad.shape == (0, 5)
