"""Loaders of induced subgraphs: random nodes, edges and walks, clusters, and nodes of several types by budget."""

import io
import pickle
from collections import Counter

import pytest
import torch

from structconv import ConfigError, Graph, ShapeError, StructureError
from structconv.data import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    partition,
    random_walk,
)
from tests.test_loaders import NODES, graph, typed

FEATURES = {"x": torch.arange(NODES) * 10}
LOADERS = {
    "nodes": lambda **o: GraphSAINTNodeSampler(graph(), 12, num_steps=4, features=FEATURES, **o),
    "edges": lambda **o: GraphSAINTEdgeSampler(graph(), 12, num_steps=4, features=FEATURES, **o),
    "walks": lambda **o: GraphSAINTRandomWalkSampler(graph(), 6, 3, num_steps=4, features=FEATURES, **o),
    "norms": lambda **o: GraphSAINTNodeSampler(graph(), 12, num_steps=4, sample_coverage=5, features=FEATURES, **o),
    "clusters": lambda **o: ClusterLoader(ClusterData(graph(), 6, features=FEATURES), batch_size=2, shuffle=True, **o),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_batch_has_all_edges_between_its_nodes(name):
    whole = graph()
    batches = list(LOADERS[name](seed=1))
    assert len(batches) == (3 if name == "clusters" else 4)
    for batch in batches:
        inside = torch.isin(whole.edge_index, batch.n_id).all(0)
        assert batch.n_id.unique().shape == batch.n_id.shape
        assert batch.e_id.sort().values.equal(inside.nonzero().flatten())
        assert batch.n_id[batch.graph.edge_index].equal(whole.edge_index[:, batch.e_id])
        assert batch.graph.edge_weight.equal(whole.edge_weight[batch.e_id])
        assert batch.features["x"].equal(batch.n_id * 10)
        if name == "norms":
            assert batch.node_norm.shape == batch.n_id.shape
            assert batch.edge_norm.shape == batch.e_id.shape


@pytest.mark.parametrize("name", ["walks", "clusters"])
def test_equal_seeds_give_equal_batches_with_any_number_of_workers(name):
    first, second, other = ([batch.n_id.tolist() for batch in LOADERS[name](**options)] for options in (
        {"seed": 5}, {"seed": 5, "num_workers": 1}, {"seed": 6}))
    assert first == second != other


SEEDED = LOADERS | {
    "neighbors": lambda **o: NeighborLoader(graph(), [3, 2], batch_size=2, shuffle=True, **o),
    "links": lambda **o: LinkNeighborLoader(graph(), [3], graph().edge_index[:, :9], neg_sampling="binary", **o),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_call_and_the_epochs_of_a_seed_leave_the_global_random_state(name):
    state = torch.get_rng_state()
    make, index = SEEDED[name], [2, 0] if name in ("neighbors", "links", "clusters") else [0]
    loader = make(seed=5)
    first, called = list(loader), loader(index)
    again, other = make(seed=5)(torch.tensor(index)), make(seed=6)(index)
    assert torch.get_rng_state().equal(state)
    assert called.n_id.equal(again.n_id)
    assert called.e_id.equal(again.e_id) and called.e_id.equal(loader(index).e_id)
    assert name == "clusters" or called.e_id.tolist() != other.e_id.tolist()
    assert [batch.n_id.tolist() for batch in first] == [batch.n_id.tolist() for batch in make(seed=5)]
    one, same = (make(generator=torch.Generator().manual_seed(4))(index) for _ in range(2))
    assert one.e_id.equal(same.e_id)
    assert torch.get_rng_state().equal(state)


def test_a_call_gives_what_the_first_epoch_gives():
    loader = NeighborLoader(graph(), [3, 2], batch_size=4, seed=5)
    for at, batch in enumerate(loader):
        assert loader(batch.input_id).e_id.equal(batch.e_id) and batch.input_id.tolist()[0] == 4 * at


class _Storages(pickle.Pickler):
    """Counts the tensors of each storage. Linux passes no storage twice to a spawned process."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.counts, self.kept = Counter(), []

    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        self.kept.append(value)
        self.counts[value.untyped_storage().data_ptr()] += value.numel() > 0
        return str, ("",)


STORED = SEEDED | {
    "walks with norms": lambda **o: GraphSAINTRandomWalkSampler(graph(), 6, 3, sample_coverage=2, **o),
    "timed": lambda **o: NeighborLoader(graph(), [3], features={"time": torch.arange(NODES)}, time_attr="time",
                                        input_time=torch.arange(NODES), **o),
    "sorted": lambda **o: NeighborLoader(Graph(graph().edge_index.sort(1).values, num_nodes=NODES), [3],
                                         is_sorted=True, **o),
    "typed": lambda **o: NeighborLoader(typed(), [3], "paper", time_attr="time", **o),
}


@pytest.mark.parametrize("name", STORED)
def test_spawned_workers_get_no_storage_twice(name):
    make, pickler = STORED[name], _Storages()
    loader, again = make(seed=2), make(seed=2)
    pickler.dump(loader._collate)
    assert pickler.counts and {*pickler.counts.values()} <= {0, 1}
    for one, other in zip(loader, again, strict=True):
        stores = [(one, other)] if name != "typed" else [(one[kind], other[kind]) for kind in one.edge_types]
        assert all(torch.equal(a.e_id, b.e_id) for a, b in stores)


def test_items_of_clusters_leave_the_global_random_state():
    data, state = ClusterData(graph(), 6), torch.get_rng_state()
    assert data[0].n_id.equal(data[-6].n_id)
    assert len(list(data)) == 6
    assert torch.get_rng_state().equal(state)


def likely(counts, chances):
    """A chi-square test that one in 10^5 right samplers fails; the draws are fixed by their seeds."""
    expected = chances / chances.sum() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    free = int(kept.sum()) - 1
    statistic = ((counts - expected).square() / expected)[kept].sum()
    assert statistic < free + 4.3 * (2 * free) ** 0.5 + 12


def counts_of(loader, draws=3000):
    """How often each node is in a batch."""
    actual = torch.zeros(NODES)
    for seed in range(draws):
        actual[loader._draw(seed)] += 1
    return actual


def test_nodes_are_drawn_by_their_edges():
    whole = graph()
    likely(counts_of(GraphSAINTNodeSampler(whole, 1)), whole.edge_index[0].bincount(minlength=NODES).double())


def test_edges_are_drawn_by_the_degrees_of_their_ends():
    whole = Graph(torch.tensor([[0, 0, 0, 1, 4], [1, 2, 3, 3, 4]]), num_nodes=5)
    loader = GraphSAINTEdgeSampler(whole, 1)
    ends = torch.stack([loader._draw(seed) for seed in range(3000)])
    counts = torch.stack([(ends == edge).all(1).sum() for edge in whole.edge_index.t()]).double()
    likely(counts, torch.tensor([1 / 3 + 1, 1 / 3 + 1, 1 / 3 + 1 / 2, 1 + 1 / 2, 2]).double())
    assert GraphSAINTEdgeSampler(whole, 100)._draw(0).view(2, -1).shape[1] == 5  # without replacement


def test_walks_follow_edges_that_are_equally_likely():
    index = torch.tensor([[0, 0, 0, 1, 2], [1, 2, 2, 0, 3]])
    walks = random_walk(index, torch.zeros(4000, dtype=torch.int64), 2, num_nodes=4, seed=1)
    likely(walks[:, 1].bincount(minlength=4).double(), torch.tensor([0, 1.0, 2, 0]).double())
    assert set(map(tuple, walks.tolist())) == {(0, 1, 0), (0, 2, 3)}
    assert random_walk(index, torch.tensor([3]), 2, num_nodes=4).tolist() == [[3, 3, 3]]
    assert random_walk(index, torch.tensor([1]), 0, num_nodes=4).tolist() == [[1]]
    with pytest.raises(StructureError, match=r"\[0, 4\)"):
        random_walk(index, torch.tensor([4]), 2, num_nodes=4)


def test_norms_correct_the_bias():
    """The weighted sum over a batch estimates the mean over all nodes that are ever drawn."""
    whole = graph()
    loader = GraphSAINTNodeSampler(whole, 20, num_steps=300, sample_coverage=200, seed=2)
    value, drawn = torch.linspace(1, 2, NODES), whole.edge_index[0].bincount(minlength=NODES) > 0
    estimates = torch.stack([(batch.node_norm * value[batch.n_id]).sum() for batch in loader])
    torch.testing.assert_close(estimates.mean(), (value * drawn).sum() / NODES, rtol=0.05, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_edge_norms_are_exact_for_sums_at_the_targets(symmetric):
    """P(target) / P(edge), worked out from the chances of the draws, which differ between the ends of an edge."""
    index, draws = torch.tensor([[1, 2, 3, 0, 2, 2, 0], [0, 0, 0, 1, 3, 1, 2]]), 3
    index = torch.cat([index, index.flip(0)], 1).unique(dim=1) if symmetric else index
    chances = index[0].bincount(minlength=4).double() / index.shape[1]
    source, target = chances[index]
    node = 1 - (1 - target) ** draws
    edge = node - (1 - source) ** draws + (1 - source - target) ** draws
    loader = GraphSAINTNodeSampler(Graph(index, num_nodes=4), draws, num_steps=30, sample_coverage=2000, seed=3)
    norms = torch.full(target.shape, torch.nan)
    for batch in loader:
        norms[batch.e_id] = batch.edge_norm
    torch.testing.assert_close(norms.double(), node / edge, rtol=0.08, atol=0)


def communities(parts: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    nodes = parts * size
    source = torch.randint(nodes, (8 * nodes,), generator=generator)
    inside = source // size * size + torch.randint(size, source.shape, generator=generator)
    other = torch.randint(nodes, source.shape, generator=generator)
    return torch.stack([source, torch.where(torch.rand(source.shape, generator=generator) < 0.9, inside, other)])


@pytest.mark.parametrize("slack", [0, 0.1])
def test_parts_are_of_equal_size_with_few_edges_between_them(slack):
    edges = communities(5, 60)
    part = partition(edges, 300, 5, slack=slack)
    assert part.bincount(minlength=5).max() <= 60 * (1 + slack)
    assert (part[edges[0]] != part[edges[1]]).float().mean() < 0.4  # 0.8 at random, 0.08 at best
    assert part.equal(partition(edges, 300, 5, slack=slack))


def test_parts_of_odd_graphs():
    none = torch.empty(2, 0, dtype=torch.int64)
    assert partition(none, 7, 3).bincount(minlength=3).max() <= 3
    assert partition(none, 0, 1).shape == (0,)
    assert partition(torch.tensor([[0], [0]]), 1, 1).tolist() == [0]
    for parts in (0, 8):
        with pytest.raises(ConfigError, match="num_parts must be in"):
            partition(none, 7, parts)


def test_clusters_by_hand():
    whole, cluster = graph(), torch.arange(NODES) % 3
    data = ClusterData(whole, 3, cluster=cluster)
    assert len(data) == 3
    assert data[-1].n_id.equal(torch.arange(2, NODES, 3))
    assert len(list(iter(data))) == 3
    every, = ClusterLoader(data, batch_size=3)
    assert every.e_id.sort().values.equal(torch.arange(whole.edge_index.shape[1]))


def test_types_are_drawn_by_budget():
    hetero = pytest.importorskip("torch_geometric").data.HeteroData
    data = hetero()
    data["paper"].x, data["author"].x = torch.arange(4.0), torch.arange(5.0)
    writes = torch.tensor([[0, 1, 2, 2, 3, 4], [0, 0, 0, 1, 1, 3]])
    data["author", "writes", "paper"].edge_index = writes
    data["paper", "cites", "paper"].edge_index = torch.tensor([[1, 2, 3], [0, 0, 1]])
    counts = torch.zeros(5)
    for seed in range(800):
        loader = HGTLoader(data, {"author": [1]}, ("paper", torch.tensor([0, 1])), batch_size=2, seed=seed)
        batch, = loader
        counts[batch["author"].n_id] += 1
        assert batch["paper"].n_id.tolist() == [0, 1]
    likely(counts.double(), torch.tensor([1 / 3, 1 / 3, 1 / 3 + 1 / 2, 1 / 2, 0]).double().square())
    batch, = HGTLoader(data, [5, 5], ("paper", torch.tensor([True, False, False, False])), batch_size=1, seed=0)
    assert (batch["paper"].batch_size, batch["paper"].input_id.tolist()) == (1, [0])
    assert batch["paper"].n_id[0] == 0
    assert set(batch["paper"].n_id.tolist()) == {0, 1, 2, 3}
    assert set(batch["author"].n_id.tolist()) == {0, 1, 2, 3}  # 4 writes paper 3 alone, which comes last
    edges = batch["author", "writes", "paper"]
    assert edges.e_id.sort().values.tolist() == [0, 1, 2, 3, 4]
    assert torch.stack([batch["author"].n_id[edges.edge_index[0]], batch["paper"].n_id[edges.edge_index[1]]]).equal(
        writes[:, edges.e_id])


def test_data_of_pytorch_geometric():
    of = pytest.importorskip("torch_geometric").data.Data
    whole = graph()
    data = of(x=torch.arange(NODES), edge_index=whole.edge_index, edge_attr=whole.edge_weight)
    for loader in (GraphSAINTRandomWalkSampler(data, 5, 2, sample_coverage=2), ClusterLoader(ClusterData(data, 4))):
        batch = next(iter(loader))
        assert batch.x.equal(batch.n_id)
        assert batch.edge_attr.equal(whole.edge_weight[batch.e_id])
        assert batch.num_nodes == len(batch.n_id)


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda: GraphSAINTNodeSampler(Graph(torch.empty(2, 0, dtype=torch.int64), num_nodes=0), 3), StructureError,
     "must have nodes"),
    (lambda: next(iter(GraphSAINTNodeSampler(Graph(torch.empty(2, 0, dtype=torch.int64), num_nodes=2), 3))),
     StructureError, "must have edges"),
    (lambda: ClusterData(graph(), 3, cluster=torch.zeros(4)), ShapeError, "cluster must have the shape"),
    (lambda: ClusterData(graph(), 3, cluster=torch.full((NODES,), 3)), StructureError, r"cluster must be in \[0, 3\)"),
    (lambda: ClusterData(graph(), 3)[3], IndexError, r"cluster must be in \[0, 3\)"),
    (lambda: HGTLoader(graph(), {"paper": [3]}, "paper"), ConfigError, "num_samples must be counts"),
])
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


# -- under a patch ------------------------------------------------------------------------------------------------

def test_the_loaders_of_pyg_are_these_under_a_patch():
    loaders, pyg = pytest.importorskip("torch_geometric.loader"), pytest.importorskip("torch_geometric.data")
    from structconv.compat.pyg import patch

    data = pyg.Data(x=torch.randn(50, 4), edge_index=torch.randint(50, (2, 300)))
    original = loaders.ClusterData
    with patch() as report:
        clusters = loaders.ClusterData(data, 5, recursive=False, log=False)
        batches = list(loaders.ClusterLoader(clusters, batch_size=2))
        batches += loaders.GraphSAINTNodeSampler(data, 20, 3, save_dir=None, log=False)
        batches += loaders.GraphSAINTEdgeSampler(data, batch_size=20, num_steps=2)
        batches += loaders.GraphSAINTRandomWalkSampler(data, 6, walk_length=2)
        with pytest.raises(ConfigError, match="keep_inter_cluster_edges"):
            loaders.ClusterData(data, 5, keep_inter_cluster_edges=True)
        typed = pyg.HeteroData(author={"x": torch.randn(5, 8)}, paper={"x": torch.randn(3, 8)})
        typed["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 4], [0, 0, 2]])
        typed = next(iter(loaders.HGTLoader(typed, num_samples=[2, 2], input_nodes=("paper", None), batch_size=1)))
        assert torch.equal(typed["paper"].n_id[:1], torch.tensor([0]))
        assert report.replaced == {"ClusterData": 1, "ClusterLoader": 1, "GraphSAINTNodeSampler": 1,
                                "GraphSAINTEdgeSampler": 1, "GraphSAINTRandomWalkSampler": 1, "HGTLoader": 1}
    assert loaders.ClusterData is original
    assert len(batches) == 3 + 3 + 2 + 1
    for batch in batches:
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
