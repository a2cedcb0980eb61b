"""Loaders of sampled neighborhoods: what is drawn, from what, by whom, and how often."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from structconv import Adjacency, ConfigError, Conv, Graph, Identity, StructureError, data
from structconv.data import LinkNeighborLoader, NeighborLoader, blocks
from structconv.data.subgraphs import Sampler
from structconv.errors import StructconvError
from structconv.primitives import sampling
from tests.support.threads import on_threads

NODES, EDGES = 60, 500


def graph(seed: int = 0, nodes: int = NODES, edges: int = EDGES) -> Graph:
    """A graph with hubs, parallel edges, loops, and nodes without edges."""
    generator = torch.Generator().manual_seed(seed)
    ends = (torch.rand(2, edges, generator=generator) ** 2 * nodes).long()
    ends[1] = ends[1].clamp(max=nodes - 5)
    return Graph(ends, num_nodes=nodes, edge_weight=torch.randint(3, (edges,), generator=generator).float())


OPTIONS = {
    "few": {},
    "none": {"num_neighbors": [3, 0, 2]},
    "all": {"num_neighbors": [-1, -1]},
    "many": {"num_neighbors": [40, 2]},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "disjoint replace": {"disjoint": True, "replace": True},
    "weighted": {"weight_attr": "edge_weight"},
    "weighted replace": {"weight_attr": "edge_weight", "replace": True},
    "sorted": {"is_sorted": True},
    "uniform": {"time_attr": "time"},
    "last": {"time_attr": "time", "temporal_strategy": "last"},
    "last weighted": {"time_attr": "time", "temporal_strategy": "last", "weight_attr": "edge_weight"},
    "last weighted replace": {"time_attr": "time", "temporal_strategy": "last", "weight_attr": "edge_weight",
                              "replace": True},
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
}


def batches_of(options: dict, **more) -> tuple[Graph, list]:
    """The whole graph, and the batches of a loader."""
    whole, options = graph(), {"num_neighbors": [4, 3, 2], **options}
    if options.get("is_sorted"):
        order = whole.edge_index[1].argsort(stable=True)
        whole = Graph(whole.edge_index[:, order], num_nodes=NODES, edge_weight=whole.edge_weight[order])
    features = {"x": torch.arange(NODES) * 10, "time": torch.arange(NODES) % 7}
    return whole, list(NeighborLoader(whole, batch_size=16, features=features, seed=3, **options, **more))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_batch_holds_what_a_search_by_hand_allows(name):
    options = {"num_neighbors": [4, 3, 2], **OPTIONS[name]}
    whole, batches = batches_of(OPTIONS[name])
    assert torch.cat([batch.n_id[:batch.batch_size] for batch in batches]).tolist() == list(range(NODES))
    for batch in batches:
        groups = torch.zeros_like(batch.n_id) if batch.batch is None else batch.batch
        keys = list(zip(batch.n_id.tolist(), groups.tolist(), strict=True))
        assert len({*keys}) == len(keys)
        assert torch.equal(batch.features["x"], batch.n_id * 10)
        assert torch.equal(batch.graph.edge_weight, whole.edge_weight[batch.e_id])
        ends = batch.n_id[batch.graph.edge_index]
        real = whole.edge_index[:, batch.e_id]
        if name == "bidirectional":
            assert torch.equal(ends.sort(0).values, real.sort(0).values)
            pairs = [*zip(*batch.graph.edge_index.tolist(), strict=True)]
            assert {*pairs} == {(b, a) for a, b in pairs} and len({*pairs}) == len(pairs)
            continue
        assert torch.equal(ends, real)
        source, target = batch.graph.edge_index
        assert torch.equal(groups[source], groups[target])
        if name == "induced":
            inside = torch.isin(whole.edge_index, batch.n_id).all(0).nonzero().flatten()
            assert torch.equal(batch.e_id.sort().values, inside)
            continue
        _check_hops(whole, batch, options, groups, keys)


def _check_hops(whole, batch, options, groups, keys):
    source, target = batch.graph.edge_index
    first = edge = 0
    assert sum(batch.num_sampled_nodes) == len(batch.n_id) and sum(batch.num_sampled_edges) == len(batch.e_id)
    for hop, fanout in enumerate(options["num_neighbors"]):
        frontier = range(first, first + batch.num_sampled_nodes[hop])
        drawn = range(edge, edge := edge + batch.num_sampled_edges[hop])
        counts = Counter(target[drawn].tolist())
        assert {*counts} <= {*frontier}
        for n in frontier:
            into = _allowed(whole, batch, options, int(batch.n_id[n]), int(groups[n]), fanout)
            chosen = batch.e_id[drawn][target[drawn] == n].tolist()
            if fanout < 0:
                assert sorted(chosen) == sorted(into)
                continue
            assert {*chosen} <= {*into}
            replace = options.get("replace", False)
            assert len(chosen) == ((fanout if into else 0) if replace else min(fanout, len(into)))
            assert replace or len({*chosen}) == len(chosen)
        first = frontier.stop
        met = dict.fromkeys(keys[:first])
        for m in source[drawn].tolist():
            met.setdefault(keys[m])
        assert list(met) == keys[:first + batch.num_sampled_nodes[hop + 1]]


def _allowed(whole, batch, options, node, group, fanout):
    """The edges that may be drawn into a node."""
    into = (whole.edge_index[1] == node).nonzero().flatten().tolist()
    if "weight_attr" in options and fanout >= 0:
        into = [e for e in into if whole.edge_weight[e] > 0]
    if "time_attr" in options:
        limit = int(batch.n_id[group]) % 7
        into = sorted((e for e in into if int(whole.edge_index[0, e]) % 7 <= limit),
                      key=lambda e: int(whole.edge_index[0, e]) % 7)
        if "temporal_strategy" in options and fanout >= 0:
            into = into[max(len(into) - fanout, 0):]
    return into


def _same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for name, value in {**vars(a), **a.features, "edges": a.graph.edge_index}.items():
            again = {**vars(b), **b.features, "edges": b.graph.edge_index}[name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, again), name
            elif isinstance(value, list):
                assert value == again, name


BLOCKS = [name for name in OPTIONS if "subgraph_type" not in OPTIONS[name]]


@pytest.mark.parametrize("name", BLOCKS)
def test_layers_over_blocks_give_the_seeds_what_layers_over_the_whole_sample_give(name):
    mechanism = Adjacency("row").of("neighbors") | Identity().of("own")
    for batch in batches_of(OPTIONS[name])[1]:
        hops = len(batch.num_sampled_edges)
        layers = [Conv(mechanism, {"neighbors": 3, "own": 3}, 3).double() for _ in range(hops)]
        x = y = torch.randn(len(batch.n_id), 3, dtype=torch.float64)
        for layer, block in zip(layers, blocks(batch), strict=True):
            x = layer({"neighbors": x, "own": x}, batch.graph).tanh()
            y = layer({"neighbors": y, "own": y[:block.num_outputs]}, block).tanh()
        seeds = batch.num_sampled_nodes[0]
        assert y.shape == (seeds, 3)
        torch.testing.assert_close(y, x[:seeds])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("normalize", [None, "row", "sym"])
def test_blocks_have_the_degrees_of_the_whole_sample(normalize, self_loops, weighted):
    torch.manual_seed(0)
    whole = graph()
    if not weighted:
        whole = Graph(whole.edge_index, num_nodes=NODES, edge_attr=torch.randn(EDGES, 2))
    for batch in NeighborLoader(whole, [4, 3, 2], batch_size=16, seed=0):
        layers = [Conv(Adjacency(normalize, self_loops=self_loops), 3, 3) for _ in range(3)]
        x = y = torch.randn(len(batch.n_id), 3)
        for layer, block in zip(layers, blocks(batch, normalize=normalize, self_loops=self_loops), strict=True):
            over_block = Conv(Adjacency(None), 3, 3)
            over_block.load_state_dict(layer.state_dict())
            x, y = layer(x, batch.graph).tanh(), over_block(y, block).tanh()
            assert weighted or block.edge_attr.shape == (block.num_edges, 2)
        assert bool((y != 0).any(1).all()) or not self_loops
        torch.testing.assert_close(y, x[:batch.batch_size])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_first_layer_reads_features_of_the_whole_graph_where_they_are(name):
    mechanism = Adjacency(None).of("neighbors") | Identity().of("own")
    features = torch.randn(NODES, 3, requires_grad=True)
    for batch in batches_of(OPTIONS[name])[1]:
        layer, options = Conv(mechanism, {"neighbors": 3, "own": 3}, 3), {"normalize": "sym", "self_loops": True}
        copied, whole = blocks(batch, **options)[0], blocks(batch, **options, num_nodes=NODES)
        assert whole[0].num_inputs == NODES and [block.num_inputs for block in whole[1:]] == [
            block.num_outputs for block in whole[:-1]]
        x = features[batch.n_id]
        results = [layer({"neighbors": inputs, "own": x[:block.num_outputs]}, block)
                   for inputs, block in ((x, copied), (features, whole[0]))]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), features, retain_graph=True)[0]
                                     for y in results))


def test_blocks_of_pygs_data_have_the_attributes_of_its_edges():
    pyg = pytest.importorskip("torch_geometric")
    data = pyg.data.Data(edge_index=graph().edge_index, num_nodes=NODES,
                         edge_attr=torch.arange(2.0 * EDGES).view(-1, 2), edge_weight=torch.arange(1.0 * EDGES))
    batch = next(iter(NeighborLoader(data, [3, 2], batch_size=4)))
    first, last = blocks(batch)
    assert torch.equal(first.edge_index, batch.edge_index) and torch.equal(first.edge_attr, batch.edge_attr)
    assert (last.num_inputs, last.num_outputs) == (first.num_outputs, 4)
    assert torch.equal(last.edge_weight, batch.e_id[:batch.num_sampled_edges[0]].float())


def test_a_batch_is_printed_by_its_shapes():
    batch = batches_of({})[1][0]
    assert f"x=[{len(batch.n_id)}], time=[{len(batch.n_id)}]" in repr(batch)
    assert "tensor(" not in repr(batch) and "batch=None" not in repr(batch)


@pytest.mark.parametrize("name", OPTIONS)
def test_torchs_operators_draw_what_the_kernels_draw(name, monkeypatch):
    _, native = batches_of(OPTIONS[name])
    monkeypatch.setattr(sampling, "kernels", lambda: None)
    _same(native, batches_of(OPTIONS[name])[1])


@pytest.mark.parametrize("limit, words, dtype", [(1000, 1, torch.int32), (2**20, 1, torch.int64),
                                                 (2**40, 2, torch.int64)])
def test_every_table_numbers_keys_in_the_order_in_which_they_come(limit, words, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    seeds, *added, unknown = (torch.randint(limit, (300,), generator=generator) for _ in range(5))
    results = []
    for core in (sampling.kernels, lambda: None):
        monkeypatch.setattr(sampling, "kernels", core)
        numbers = sampling.Numbers(limit)
        numbers.enter(seeds)
        results.append([part for keys in added for part in numbers.add(torch.cat([keys, seeds[:9], keys[:9]]))]
                       + [numbers.find(torch.cat([unknown, seeds, added[0]]))])
        if numbers._core is not None:  # a number for each key that there may be, where this is not larger
            assert numbers._table.dtype is dtype and numbers._table.shape[1] == words
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(sampling.kernels() is None, reason="there are no native kernels")
@pytest.mark.parametrize("source", [-1, 5, 2**40])
def test_edges_from_outside_that_nobody_has_checked_are_refused(source):
    edges = sampling.InEdges(torch.tensor([0, 1, 2]), torch.tensor([source, 0]))
    with pytest.raises(StructureError, match=r"edges must begin at nodes in \[0, 2\); got"):
        Sampler({(None, None, None): edges}, {None: 2}, [2]).sample({None: torch.tensor([0, 1])}, 0)


@pytest.mark.parametrize("name", ["few", "disjoint"])
def test_many_draws_of_a_node_and_threads_change_nothing(name, monkeypatch):
    def drawn():
        loader = NeighborLoader(graph(1, 300, 60_000), [90, 60], batch_size=100, seed=5, **OPTIONS[name])
        return [next(iter(loader))]

    one, four = on_threads(drawn, (1, 4))
    monkeypatch.setattr(sampling, "kernels", lambda: None)
    assert len(one[0].e_id) > 2**14
    _same(one, four)
    _same(one, drawn())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "filter_per_worker": False},
                                     {"num_workers": 1, "persistent_workers": True},
                                     {"num_workers": 1, "persistent_workers": True,
                                      "multiprocessing_context": "spawn"}])
def test_batches_are_the_seeds_and_not_the_workers(options):
    loaders = [NeighborLoader(graph(), [3, 2], batch_size=16, shuffle=True, seed=7, features={"x": torch.arange(NODES)},
                              **more) for more in ({}, options)]
    epochs = [[list(loader) for _ in range(2)] for loader in loaders]
    for one, other in zip(*epochs, strict=True):
        _same(one, other)
    first, second = ([batch.e_id.tolist() for batch in epoch] for epoch in epochs[0])
    assert first != second
    assert sorted(torch.cat([batch.n_id[:batch.batch_size] for batch in epochs[0][1]]).tolist()) == list(range(NODES))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_epoch_after_one_that_stopped_early_is_the_seed_and_not_the_workers(workers):
    epochs = []
    for options in ({}, {"num_workers": workers, "prefetch_factor": 9}):
        loader = NeighborLoader(graph(), [3], batch_size=16, shuffle=True, seed=7, **options)
        next(iter(loader))
        epochs.append([batch.n_id.tolist() for batch in loader])
    assert epochs[0] == epochs[1]


@pytest.mark.parametrize("options", [{"batch_size": 1, "sampler": [0] * 200}, {"batch_sampler": [[0]] * 200},
                                     {"batch_size": None, "sampler": [[0]] * 200}])
def test_positions_that_a_sampler_repeats_get_other_neighbors(options):
    """Each of six edges is drawn about 33 times; the bound is that of p = 10^-5 with five degrees of freedom."""
    loader = NeighborLoader(_star(6), [1], seed=2, **options)
    batches = [batch.e_id.item() for batch in loader]
    counts = torch.tensor(batches).bincount(minlength=6)
    assert _chi_square(counts, 200 / 6, 200 / 6) < 31
    assert batches[0] == loader([0]).e_id.item()
    assert batches != [batch.e_id.item() for batch in loader]


def _chi_square(counts, expected, variance):
    return float(((counts - expected) ** 2 / variance).sum())


def _star(degree: int, **more) -> Graph:
    return Graph(torch.stack([torch.arange(degree) + 1, torch.zeros(degree, dtype=torch.long)]), num_nodes=degree + 1,
                 **more)


def _drawn(star: Graph, rounds: int, fanout: int, **options) -> torch.Tensor:
    """(rounds, fanout): the edges drawn in independent subgraphs of one batch."""
    (batch,) = NeighborLoader(star, [fanout], input_nodes=torch.zeros(rounds, dtype=torch.long), batch_size=rounds,
                              disjoint=True, seed=0, **options)
    return batch.e_id.view(rounds, fanout)


@pytest.mark.parametrize("degree, fanout, replace", [(20, 1, False), (20, 1, True), (6, 3, False), (5, 2, True)])
def test_every_choice_is_equally_likely(degree, fanout, replace):
    """The bounds are those of p = 10^-5 of chi-square with 19 and 24 degrees of freedom."""
    rounds, choices = 4000, {(20, 1): 20, (6, 3): 20, (5, 2): 25}[degree, fanout]
    drawn = _drawn(_star(degree), rounds, fanout, replace=replace)
    drawn = drawn if replace else drawn.sort(1).values
    counts = (drawn * degree ** torch.arange(fanout)).sum(1).unique(return_counts=True)[1]
    assert len(counts) == choices
    assert _chi_square(counts, rounds / choices, rounds / choices) < {20: 57, 25: 66}[choices]


def test_batches_nodes_and_groups_are_independent():
    """Draws of one edge out of four agree with the next ones by chance: 15 degrees of freedom, p = 10^-5."""
    count, degree = 3000, 4
    hubs = torch.arange(count).repeat_interleave(degree)
    shared = Graph(torch.stack([torch.arange(degree).repeat(count) + count, hubs]), num_nodes=count + degree)
    (nodes,) = NeighborLoader(shared, [1], input_nodes=torch.arange(count), batch_size=count, seed=1)
    batches = NeighborLoader(_star(degree), [1], input_nodes=torch.zeros(640, dtype=torch.long), seed=1)
    for drawn in (nodes.e_id % degree, _drawn(_star(degree), count, 1)[:, 0],
                  torch.cat([batch.e_id for batch in batches])):
        pairs = torch.bincount(drawn[:-1] * degree + drawn[1:], minlength=degree**2)
        expected = (len(drawn) - 1) / degree**2
        assert _chi_square(pairs, expected, expected) < 50


@pytest.mark.parametrize("replace", [False, True])
def test_weights_are_probabilities(replace):
    """p = 10^-5 at two degrees of freedom; the second draw without replacement is of what is left."""
    weights, rounds = torch.tensor([1.0, 2.0, 0.0, 5.0]), 4000
    drawn = _drawn(_star(4, edge_weight=weights), rounds, 2, replace=replace, weight_attr="edge_weight")
    first = weights / 8
    second = first if replace else sum(first[i] * weights.index_fill(0, torch.tensor(i), 0) / (8 - weights[i])
                                       for i in range(4))
    for column, p in zip(drawn.t(), (first, second), strict=True):
        counts, expected = torch.bincount(column, minlength=4), rounds * p
        assert counts[2] == 0
        assert _chi_square(counts[p > 0], expected[p > 0], expected[p > 0]) < 23


def typed() -> SimpleNamespace:
    """PyTorch Geometric's `HeteroData`."""
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    generator = torch.Generator().manual_seed(4)
    data["paper"].x, data["author"].x = torch.arange(40.0)[:, None], torch.arange(25.0)[:, None]
    data["paper"].time = torch.arange(40) % 9
    data["author"].time = torch.arange(25) % 4
    for kind, sizes in {("author", "writes", "paper"): (25, 40), ("paper", "cites", "paper"): (40, 40),
                        ("paper", "rev", "author"): (40, 25)}.items():
        data[kind].edge_index = torch.stack([torch.randint(size, (150,), generator=generator) for size in sizes])
        data[kind].edge_attr = torch.arange(150)
    return data


def test_times_of_a_type_that_has_another_number_of_edges_are_refused():
    whole = pytest.importorskip("torch_geometric.data").HeteroData(node={"num_nodes": 3})
    for name, length in (("near", 2), ("far", 1)):
        whole["node", name, "node"].edge_index = torch.tensor([[0, 1], [1, 2]])
        whole["node", name, "node"].time = torch.arange(length)
    with pytest.raises(StructconvError, match=r"'time' of .*'far'.* must have the length 2; got"):
        NeighborLoader(whole, [1], "node", input_time=torch.arange(3), time_attr="time")


@pytest.mark.parametrize("timed", [False, True])
def test_types_of_nodes_and_edges(timed):
    data = typed()
    fanouts = {("author", "writes", "paper"): [3, 2], ("paper", "cites", "paper"): [-1, 1],
               ("paper", "rev", "author"): [0, 4]}
    loader = NeighborLoader(data, fanouts, input_nodes=("paper", torch.arange(10, 30)), batch_size=7, seed=0,
                            time_attr="time" if timed else None)
    for batch in loader:
        size = batch["paper"].batch_size
        assert torch.equal(batch["paper"].n_id[:size], batch["paper"].input_id + 10)
        for kind, numbers in fanouts.items():
            part, (source, target) = batch[kind], batch[kind].edge_index
            assert torch.equal(part.edge_attr, part.e_id)
            nodes = [batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]]
            assert torch.equal(torch.stack(nodes), data[kind].edge_index[:, part.e_id])
            limits = None
            if timed:
                groups = batch[kind[0]].batch[source]
                assert torch.equal(groups, batch[kind[2]].batch[target])
                limits = data["paper"].time[batch["paper"].n_id[:size]]
                assert bool((data[kind[0]].time[nodes[0]] <= limits[groups]).all())
            first = edge = 0
            for hop, fanout in enumerate(numbers):
                frontier = range(first, first := first + batch[kind[2]].num_sampled_nodes[hop])
                drawn = range(edge, edge := edge + part.num_sampled_edges[hop])
                counts = Counter(target[drawn].tolist())
                for n in frontier:
                    into = data[kind].edge_index[:, data[kind].edge_index[1] == batch[kind[2]].n_id[n]][0]
                    if limits is not None:
                        into = into[data[kind[0]].time[into] <= limits[batch[kind[2]].batch[n]]]
                    assert counts.pop(n, 0) == (len(into) if fanout < 0 else min(fanout, len(into)))
                assert not counts
        assert torch.equal(batch["author"].x.flatten().long(), batch["author"].n_id)


@pytest.mark.parametrize("negatives", [None, "binary", {"mode": "binary", "amount": 1.5},
                                       {"mode": "triplet", "amount": 2}])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("kind", [None, ("author", "writes", "paper"), ("paper", "cites", "paper")])
def test_pairs(negatives, timed, kind):
    times = torch.randint(2, 9, (20,), generator=torch.Generator().manual_seed(1)) if timed else None
    more = {"edge_label_time": times, "time_attr": "time"} if timed else {}
    if kind is None:
        whole, pairs = graph(), torch.stack([torch.arange(20), torch.arange(40, 60)])
        loader = LinkNeighborLoader(whole, [3, 2], pairs, batch_size=8, neg_sampling=negatives, seed=0,
                                    features={"time": torch.arange(NODES) % 9}, **more)
    else:
        data = typed()
        pairs = torch.stack([torch.arange(20), torch.arange(20, 40)])
        loader = LinkNeighborLoader(data, [3, 2], (kind, pairs), batch_size=8, neg_sampling=negatives, seed=0, **more)
    for batch in loader:
        ends = [batch, batch] if kind is None else [batch[kind[0]], batch[kind[2]]]
        link = batch if kind is None else batch[kind]
        expected, mode = pairs[:, link.input_id], negatives if isinstance(negatives, str | None) else negatives["mode"]
        count = expected.shape[1]
        if mode == "triplet":
            index = torch.stack([ends[0].src_index, ends[1].dst_pos_index])
            drawn = ends[1].n_id[ends[1].dst_neg_index]
            assert drawn.shape == (count, 2)
            limit = None if times is None else times[link.input_id][:, None]
        else:
            index = link.edge_label_index
            ones = 0 if mode is None else count if negatives == "binary" else int(count * 1.5)
            assert index.shape[1] == count + ones
            assert mode is None or link.edge_label.tolist() == [1.0] * count + [0.0] * ones
            drawn = ends[1].n_id[index[1, count:]]
            limit = None if times is None else link.edge_label_time[count:]
        assert torch.equal(torch.stack([ends[0].n_id[index[0, :count]], ends[1].n_id[index[1, :count]]]), expected)
        assert limit is None or bool((drawn % 9 <= limit).all())
        if timed and kind is None:
            source = batch.graph.edge_index[0]
            assert bool((batch.features["time"][source] <= times[batch.input_id][batch.batch[source]]).all())


@pytest.mark.parametrize("given, kind", [(("author", "paper"), ("author", "writes", "paper")),
                                         (("author", "author"), ("author", "to", "author"))])
def test_two_node_types_name_the_type_of_pairs(given, kind):
    pairs = torch.stack([torch.arange(8), torch.arange(8, 16)])
    batch = next(iter(LinkNeighborLoader(typed(), [3], (given, pairs), batch_size=8, neg_sampling="binary", seed=0)))
    ends = [batch[kind[0]].n_id, batch[kind[2]].n_id]
    index = batch[kind].edge_label_index[:, :8]
    assert torch.equal(torch.stack([n_id[row] for n_id, row in zip(ends, index, strict=True)]), pairs)


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_pygs_own_loaders_draw_by_ours_while_they_are_patched(kind):
    loader = pytest.importorskip("torch_geometric.loader")
    from structconv.compat.pyg import patch

    if kind == "plain":
        whole = graph()
        data = pytest.importorskip("torch_geometric.data").Data(
            x=torch.arange(NODES), edge_index=whole.edge_index, edge_weight=whole.edge_weight,
            time=torch.arange(NODES) % 7)
        where = {"input_nodes": torch.tensor([3, 50, 9])}
    else:
        data, where = typed(), {"input_nodes": ("paper", torch.tensor([3, 30, 9]))}
    with patch() as report:
        for options in ({}, {"disjoint": True}, {"time_attr": "time"}, {"subgraph_type": "induced"}):
            theirs, ours = (next(iter(cls(data, [-1, -1], batch_size=3, **where, **options)))
                            for cls in (loader.NeighborLoader, NeighborLoader))
            assert theirs.keys() == ours.keys()
            assert report.replaced["NeighborSampler"] > 0
            for a, b in zip(theirs.stores, ours.stores, strict=True):
                assert {*a.keys()} == {*b.keys()}
                for name in {*a.keys()} & {"n_id", "e_id", "x", "edge_attr", "batch"}:
                    assert a[name] is b[name] is None or torch.equal(a[name].sort(0)[0], b[name].sort(0)[0])
                for name in {*a.keys()} & {"num_sampled_nodes", "num_sampled_edges", "batch_size"}:
                    assert a[name] == b[name]
                if "batch_size" in a:
                    assert torch.equal(a.n_id[:3], b.n_id[:3]) and torch.equal(a.input_id, b.input_id)
        few = next(iter(loader.NeighborLoader(data, [2, 2], batch_size=3, num_workers=1, replace=True, **where)))
        for store in few.edge_stores:
            source, target = [few] * 2 if kind == "plain" else [few[store._key[0]], few[store._key[2]]]
            ends = torch.stack([source.n_id[store.edge_index[0]], target.n_id[store.edge_index[1]]])
            assert torch.equal(ends, (data if kind == "plain" else data[store._key]).edge_index[:, store.e_id])
        link = None if kind == "plain" else ("paper", "cites", "paper")
        batch = next(iter(loader.LinkNeighborLoader(data, [2], batch_size=4, edge_label_index=link,
                                                    neg_sampling_ratio=1.0)))
        assert (batch if link is None else batch[link]).edge_label_index.shape == (2, 8)
    if kind == "plain":
        with pytest.raises(ImportError, match="pyg-lib"), pytest.warns(UserWarning, match="pyg-lib"):
            next(iter(loader.NeighborLoader(data, [2], **where)))


def test_typed_edges_in_both_directions_are_those_of_pyg():
    """PyTorch Geometric's own loader adds the reversed edges, to the edges that our sampler draws."""
    loader, data = pytest.importorskip("torch_geometric.loader"), typed()
    from structconv.compat.pyg import patch

    data["venue"].x = torch.arange(3)
    data["venue", "of", "paper"].edge_index = torch.stack([torch.arange(40) % 3, torch.arange(40)])
    with patch(), pytest.warns(UserWarning, match=r"\('venue', 'of', 'paper'\) stay .* \('paper', 'rev_of', 'venue'\)"):
        theirs, ours = (next(iter(cls(data, [-1], ("paper", torch.tensor([3, 30, 9])), batch_size=3,
                                      subgraph_type="bidirectional")))
                        for cls in (loader.NeighborLoader, NeighborLoader))
    for kind in data.edge_types:
        pairs = [sorted(zip(*(batch[end].n_id[index].tolist() for end, index in zip(kind[::2], batch[kind].edge_index,
                                                                                  strict=True)), strict=True))
                 for batch in (theirs, ours)]
        assert pairs[0] == pairs[1] and pairs[0]
        if kind[1] in ("cites", "of"):  # reversed edges of another type have no number in this one
            assert len(ours[kind].e_id) == len(pairs[1])
        else:
            assert "e_id" not in ours[kind] and "edge_attr" not in ours[kind]


def test_numbers_of_neighbors_are_also_pygs_object():
    numbers = pytest.importorskip("torch_geometric.sampler").NumNeighbors
    kind, data = ("paper", "cites", "paper"), typed()
    cases = [(graph(), None, numbers([3, 2]), [3, 2]),
             (data, "paper", numbers([3, 2]), [3, 2]),
             (data, "paper", numbers({kind: [1, 0]}, default=[2, 2]),
              {key: [2, 2] for key in data.edge_types} | {kind: [1, 0]})]
    for whole, seeds, given, meant in cases:
        one, other = (next(iter(NeighborLoader(whole, fanouts, seeds, batch_size=9, seed=0)))
                      for fanouts in (given, meant))
        for a, b in [(one, other)] if seeds is None else [(one[k], other[k]) for k in data.edge_types]:
            assert torch.equal(a.e_id, b.e_id)
    with pytest.raises(ConfigError, match="num_neighbors must name types"):
        NeighborLoader(data, numbers({("paper", "likes", "paper"): [1]}), "paper")


def test_two_types_of_nodes_name_the_only_edges_between_them():
    data = typed()
    batches = [next(iter(LinkNeighborLoader(data, [2], link, batch_size=5, seed=0)))["author", "writes", "paper"]
               for link in (("author", "writes", "paper"), ("author", "paper"), (("author", "paper"), None))]
    assert all(torch.equal(batches[0].edge_label_index, batch.edge_label_index) for batch in batches)
    with pytest.raises(ConfigError, match="edge_label_index must be a type out of"):
        LinkNeighborLoader(data, [2], ("author", "author"))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "filter_per_worker": False},
                                     {"disjoint": True}])
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_a_function_of_pygs_output_changes_what_is_read(kind, options):
    pyg, whole = pytest.importorskip("torch_geometric"), graph()
    data = typed() if kind == "typed" else pyg.data.Data(edge_index=whole.edge_index, num_nodes=NODES,
                                                         edge_attr=torch.arange(EDGES))
    edges = None if kind == "plain" else ("paper", "cites", "paper")

    def even(output):
        """Keep edges with even numbers."""
        assert type(output).__name__ == ("SamplerOutput" if edges is None else "HeteroSamplerOutput")
        assert output.metadata[0].tolist() == [0, 1, 2, 3]
        keep = (output.edge if edges is None else output.edge[edges]) % 2 == 0
        for name in ("row", "col", "edge"):
            part = getattr(output, name)
            setattr(output, name, part[keep] if edges is None else part | {edges: part[edges][keep]})
        output.num_sampled_edges = None
        return output

    where = {"input_nodes": None if kind == "plain" else "paper", "batch_size": 4, "seed": 0}
    every, some = (next(iter(NeighborLoader(data, [5, 4], **where, **options, transform_sampler_output=function)))
                   for function in (None, even))
    if edges is not None:
        every, some = every[edges], some[edges]
    keep = every.e_id % 2 == 0
    assert 0 < int(keep.sum()) < len(keep)
    for name in ("edge_index", "edge_attr", "e_id"):
        assert torch.equal(some[name], every[name][..., keep])
    assert "num_sampled_edges" not in some or some.num_sampled_edges is None


def test_loaders_share_the_sampler_of_one():
    first = NeighborLoader(graph(), [3, 2], batch_size=16, seed=1)
    shared = NeighborLoader(graph(), [3, 2], batch_size=16, seed=1, neighbor_sampler=first.neighbor_sampler)
    _same(list(first), list(shared))
    links = LinkNeighborLoader(graph(), [3, 2], batch_size=16, neighbor_sampler=first.neighbor_sampler)
    assert links.neighbor_sampler is shared.neighbor_sampler is first.neighbor_sampler
    with pytest.raises(ConfigError, match="neighbor_sampler must be that of another loader of the same data"):
        NeighborLoader(WHOLE, [3], neighbor_sampler=first.neighbor_sampler)


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_whole_neighborhoods_are_those_of_pygs_search(kind, hops):
    """Against `k_hop_subgraph`, whose edges are those among the nodes."""
    search, whole = pytest.importorskip("torch_geometric.utils").k_hop_subgraph, graph()
    for batch in NeighborLoader(whole, [-1] * hops, torch.tensor([3, 50, 9, 57]), batch_size=2, subgraph_type=kind):
        seeds = batch.n_id[:batch.batch_size]
        nodes, _, _, inside = search(seeds, hops, whole.edge_index, num_nodes=NODES)
        assert batch.n_id.sort().values.tolist() == nodes.tolist()
        if kind == "induced":
            assert batch.e_id.sort().values.tolist() == inside.nonzero().flatten().tolist()
        else:  # those into nodes that are one hop nearer
            nearer = search(seeds, hops - 1, whole.edge_index, num_nodes=NODES)[0]
            into = torch.isin(whole.edge_index[1], nearer).nonzero().flatten()
            assert batch.e_id.sort().values.tolist() == into.tolist()


@pytest.mark.parametrize("mode", [None, "binary", "triplet"])
@pytest.mark.parametrize("kind", [None, ("author", "writes", "paper"), ("paper", "cites", "paper")])
@pytest.mark.parametrize("timed", [False, True])
def test_batches_of_pairs_have_pygs_attributes(kind, mode, timed):
    """PyTorch Geometric's own loader fills its batch, from the nodes and edges that our sampler draws."""
    loader, pairs = pytest.importorskip("torch_geometric.loader"), torch.stack([torch.arange(8), torch.arange(8) + 9])
    from structconv.compat.pyg import patch

    options = {"batch_size": 4, "neg_sampling": mode}
    options |= {"edge_label": torch.arange(8)} if mode is None else {}
    options |= {"time_attr": "time", "edge_label_time": torch.full((8,), 20)} if timed else {}
    if kind is None:
        whole = graph()
        data = pytest.importorskip("torch_geometric.data").Data(
            x=torch.arange(NODES), edge_index=whole.edge_index, time=torch.arange(NODES) % 7)
    else:
        data = typed()
    with patch():
        theirs, ours = (next(iter(cls(data, [-1, -1], edge_label_index=pairs if kind is None else (kind, pairs),
                                      **options))) for cls in (loader.LinkNeighborLoader, LinkNeighborLoader))
    for a, b in zip(theirs.stores, ours.stores, strict=True):
        assert {*a.keys()} == {*b.keys()}
        for name in {*a.keys()} & {"edge_label", "edge_label_time", "input_id", "edge_label_index", "src_index",
                                   "dst_pos_index", "dst_neg_index"}:
            assert (a[name] is None) is (b[name] is None) and (a[name] is None or a[name].shape == b[name].shape), name
            if name in ("edge_label", "edge_label_time", "input_id") and a[name] is not None:
                assert torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype, name


def test_graphs_in_files(tmp_path):
    whole = graph()
    order = whole.edge_index[1].argsort(stable=True)
    files = {}
    for name, tensor in {"index": whole.edge_index[:, order].contiguous(), "x": torch.randn(NODES, 8)}.items():
        tensor.numpy().tofile(tmp_path / name)
        files[name] = torch.from_file(str(tmp_path / name), size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    loader = NeighborLoader(Graph(files["index"], num_nodes=NODES), [3], batch_size=20, is_sorted=True, num_workers=1,
                            features={"x": files["x"]}, seed=0)
    held = loader.neighbor_sampler.relations[None, None, None].sources
    assert held.data_ptr() == files["index"].data_ptr()
    for batch in loader:
        assert torch.equal(batch.features["x"], files["x"][batch.n_id])


INDEX = torch.tensor([[0, 1], [1, 2]])
WRONG = {
    "sorting": (lambda: NeighborLoader(Graph(INDEX.flip(1)), [1], is_sorted=True), StructureError, "must not fall"),
    "weights": (lambda: NeighborLoader(Graph(INDEX, edge_weight=torch.tensor([1.0, -1.0])), [1],
                                       weight_attr="edge_weight"), StructureError, "not negative"),
    "time": (lambda: NeighborLoader(Graph(INDEX), [1], input_time=torch.ones(3)), ConfigError, "needs time_attr"),
    "hops": (lambda: blocks(next(iter(NeighborLoader(Graph(INDEX), [1], subgraph_type="induced")))), ConfigError,
             "directional"),
    "whole": (lambda: blocks(next(iter(NeighborLoader(WHOLE, [1]))), num_nodes=0), StructureError,
              "num_nodes=0"),
    "no list": (lambda: NeighborLoader(WHOLE, 5), ConfigError, "num_neighbors must be a list"),
    "few nodes": (lambda: NeighborLoader(
        SimpleNamespace(edge_index=WHOLE.edge_index, num_nodes=2, is_edge_attr=bool), [1]),
              StructureError, "^NeighborLoader: edge_index must be"),
    "no output": (lambda: next(iter(NeighborLoader(typed(), [1], "paper", transform_sampler_output=str))), ConfigError,
               "must return a SamplerOutput"),
    "numbers": (lambda: blocks(replace(next(iter(NeighborLoader(WHOLE, [1]))), n_id=None), num_nodes=4), ConfigError,
                "needs batch.n_id"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


# -- wrong arguments ----------------------------------------------------------------------------------------------

WHOLE = Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
CLUSTERS = data.ClusterData(WHOLE, 2)
#: In the place of any argument; and the names of arguments that take it.
BAD = {
    "None": None, "0": 0, "-1": -1, "1.5": 1.5, "nan": float("nan"), "inf": float("inf"), "a text": "abc", "True": True,
    "2^70": 2 ** 70, "a list of fractions": [1.5], "a negative list": [-3], "a list of texts": ["a"],
    "a list of None": [None], "a list of 2^70": [2 ** 70], "a dictionary": {"zzz": [1]}, "an object": object(),
    "a class": Graph, "a function": len, "fractions": torch.tensor([0.5, 1.5]), "outside": torch.tensor([0, 99]),
    "below": torch.tensor([-1, 0]), "a matrix": torch.zeros(2, 3), "a scalar": torch.tensor(1.5),
    "booleans": torch.tensor([True, False]), "an array": np.array([0.5])}
RIGHT = {
    "cluster": {"None"}, "cluster_data": set(), "directed": {"True"}, "disjoint": {"True"}, "drop_last": {"True"},
    "edge_label": {"None"}, "edge_label_index": {"None"}, "edge_label_time": {"None"}, "features": {"None"},
    "filter_per_worker": {"None", "True"}, "generator": {"None"}, "index": {"0", "-1", "a negative list", "below"},
    "input_id": {"None"}, "input_nodes": {"None"}, "input_time": {"None"}, "is_sorted": {"True"}, "length": {"0"},
    "normalize": {"None"}, "num_nodes of blocks": {"None"}, "self_loops": {"True"},
    "neg_sampling": {"None"}, "neg_sampling_ratio": {"None", "0", "1.5"}, "replace": {"True"}, "num_workers": {"0"},
    "batch_sampler": {"None"}, "sampler": {"None", "a negative list", "below", "booleans"},
    "sample_coverage": {"0"}, "seed": {"None", "0", "-1"}, "shuffle": {"None", "True"},
    "slack": {"0", "1.5", "a scalar", "2^70"}, "start": set(), "time_attr": {"None"},
    "transform": {"None", "a class", "a function"}, "transform_sampler_output": {"None"}, "neighbor_sampler": {"None"},
    "walk_length": {"0"}, "weight_attr": {"None"}, "src_weight": {"None"}, "amount": {"1.5"}}
LOADING = {"batch_size": 1, "shuffle": False, "generator": None, "num_workers": 0, "drop_last": False, "sampler": None,
           "batch_sampler": None}
SHARED = {"features": {"x": torch.ones(4)}, "seed": None, "transform": None}
SAINT = {"data": WHOLE, "batch_size": 2, "num_steps": 1, "sample_coverage": 1, **SHARED}
SAMPLING = {"data": WHOLE, "num_neighbors": [2], "replace": False, "subgraph_type": "induced", "disjoint": False,
            "temporal_strategy": "last", "time_attr": None, "weight_attr": None, "directed": True, "input_id": None,
            "is_sorted": False, "filter_per_worker": None, "transform_sampler_output": None, "neighbor_sampler": None,
            **SHARED}
#: Public functions and loaders, with right arguments.
USES = {
    "partition": {"edge_index": WHOLE.edge_index, "num_nodes": 4, "num_parts": 2, "slack": 0.1, "seed": 0},
    "random_walk": {"edge_index": WHOLE.edge_index, "start": torch.tensor([0, 1]), "length": 2, "num_nodes": 4,
                    "seed": 0},
    "ClusterData": {"data": WHOLE, "num_parts": 2, "cluster": None, "features": {"x": torch.ones(4)}, "seed": 0},
    "ClusterLoader": {"cluster_data": CLUSTERS, "transform": None, "filter_per_worker": None, "seed": None, **LOADING},
    "GraphSAINTNodeSampler": SAINT, "GraphSAINTEdgeSampler": SAINT,
    "GraphSAINTRandomWalkSampler": {**SAINT, "walk_length": 2},
    "HGTLoader": {"data": None, "num_samples": [2, 2], "input_nodes": "paper", "is_sorted": False, "seed": None,
                  "filter_per_worker": None, "transform": None, **LOADING},
    "NeighborLoader": {**SAMPLING, "input_nodes": None, "input_time": None, **LOADING},
    "LinkNeighborLoader": {**SAMPLING, "edge_label_index": None, "edge_label": None, "edge_label_time": None,
                           "neg_sampling": "binary", "neg_sampling_ratio": None, "batch_size": 1},
    "blocks": {"batch": ..., "normalize": None, "self_loops": False, "num_nodes": 4},  # a batch is what a loader yields
    "NeighborBatch": {}}
INNER = {  # what stands within an argument
    "index of ClusterData": (lambda index: CLUSTERS[index], "index", {"0", "-1"}),
    "index of a call": (lambda index: NeighborLoader(WHOLE, [2])(index), "index", RIGHT["index"] - {"0", "-1"}),
    "counts": (lambda counts: data.HGTLoader(typed(), {"author": counts}, "paper"), "num_samples", {"outside"}),
    "hops": (lambda hops: NeighborLoader(typed(), {("author", "writes", "paper"): hops}, "paper"), "num_neighbors",
             {"outside", "below"}),
    "nodes": (lambda nodes: NeighborLoader(typed(), [1], ("paper", nodes)), "input_nodes", {"None"}),
    "pairs": (lambda pairs: LinkNeighborLoader(typed(), [1], (("author", "writes", "paper"), pairs)),
              "edge_label_index", {"None"}),
    "amount": (lambda n: LinkNeighborLoader(WHOLE, [1], neg_sampling={"mode": "binary", "amount": n}), "neg_sampling",
               {"1.5", "a scalar"}),
    "weights": (lambda w: LinkNeighborLoader(WHOLE, [1], neg_sampling={"mode": "binary", "src_weight": w}),
                "src_weight", {"None"}),
    "a feature": (lambda t: NeighborLoader(WHOLE, [1], features={"x": t}), "features", set()),
    "times": (lambda t: NeighborLoader(WHOLE, [1], features={"t": torch.arange(4)}, time_attr="t", input_time=t),
              "input_time", {"None"})}


def complaint(call, name):
    """What is wrong with the answer to a bad argument; nothing, if it is an error that names the argument."""
    try:
        call()
    except StructconvError as error:
        return "" if name in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_the_table_of_wrong_arguments_has_every_public_name():
    assert {*USES} == {*data.__all__}


@pytest.mark.parametrize("name", [name for name in USES if USES[name]])
def test_every_loader_names_the_wrong_argument(name):
    given, use = dict(USES[name]), getattr(data, name)
    if name == "HGTLoader":
        given["data"] = typed()
    if name == "blocks":
        given["batch"] = next(iter(NeighborLoader(WHOLE, [2])))

    def run(**arguments):
        result = use(**arguments)
        return list(result) if isinstance(result, torch.utils.data.DataLoader) else result

    assert run(**given) is not None
    wrong = {(place, bad): said for place in given for bad, value in BAD.items()
             if bad not in RIGHT.get(f"{place} of {name}", RIGHT.get(place, ()))
             and (said := complaint(partial(run, **{**given, place: value}), place))}
    assert not wrong


@pytest.mark.parametrize("name", INNER)
def test_what_stands_within_an_argument_is_named(name):
    call, place, right = INNER[name]
    wrong = {bad: said for bad, value in BAD.items() if bad not in right
             and (said := complaint(partial(call, value), place))}
    if name == "index of ClusterData":
        assert wrong.pop("2^70").startswith("IndexError")  # which ends a loop over clusters
    assert not wrong


@pytest.mark.parametrize("end", ["src_weight", "dst_weight"])
@pytest.mark.parametrize("weights", [[0.0, 0, 0, 0], [1.0, -1, 1, 0], [float("nan"), 1, 1, 1], [float("inf"), 1, 1, 1]])
def test_weights_of_negative_samples_have_a_sum(end, weights):
    with pytest.raises(ConfigError, match=f"{end}.* must be finite and not negative, and some positive; got"):
        LinkNeighborLoader(WHOLE, [1], neg_sampling={"mode": "binary", end: torch.tensor(weights)})


@pytest.mark.parametrize("weights", [[0.0, 0, 1, 0], [0.0, 1, 0, 3], [1.0, 0, 0, 0], [0.0, 0, 5e-324, 0],
                                     [0.0, 1e308, 1e308, 0]])
@pytest.mark.parametrize("timed", [False, True])
def test_negative_samples_have_a_positive_weight(weights, timed):
    weights, times = torch.tensor(weights, dtype=torch.float64), torch.arange(50) % 5
    more = {"time_attr": "time", "edge_label_time": times, "features": {"time": torch.arange(4)}} if timed else {}
    loader = LinkNeighborLoader(WHOLE, [1], torch.zeros(2, 50, dtype=torch.long), batch_size=50, seed=0, neg_sampling={
        "mode": "triplet", "amount": 20, "dst_weight": weights}, **more)
    for batch in loader:
        drawn = batch.n_id[batch.dst_neg_index]
        assert set(drawn.flatten().tolist()) == set(weights.nonzero().flatten().tolist())
        if timed:  # not later than the limit, or the earliest
            assert bool((drawn <= times[batch.input_id, None].clamp(min=int(weights.nonzero()[0]))).all())


def test_an_empty_set_of_seeds_has_no_batches():
    for seeds in ([], torch.zeros(4, dtype=torch.bool)):
        assert not list(NeighborLoader(WHOLE, [2], seeds, shuffle=True))


def test_errors_of_torchs_loader_are_errors_of_ours():
    with pytest.raises(ConfigError, match=r"^HGTLoader: options must be those of .*DataLoader; got prefetch_factor"):
        data.HGTLoader(typed(), [1], "paper", prefetch_factor=3)
    _same(*(list(NeighborLoader(WHOLE, [2], seed=0, **options)) for options in (
        {"sampler": [[0, 3], [1]], "batch_size": None}, {"batch_sampler": [[0, 3], [1]]})))
    with pytest.raises(ConfigError, match=r"^NeighborLoader: batch_sampler excludes sampler and shuffle; got both\.$"):
        NeighborLoader(WHOLE, [2], batch_sampler=[[0]], shuffle=True)
