"""Structures where people put them: in a `DataLoader`, a module, a file."""

import copy
import io
import pickle
from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from structconv import Causal, ConfigError, Graph, Grid, Incidence, Padding, StructureError, Window, batch, collate
from structconv.nn import Conv, GCNConv, StructureBuffer
from structconv.structures import Blocks, DenseMask, EdgeSupport, KnowledgeGraph
from structconv.structures.values import tensors_in

P = 3
Sample = namedtuple("Sample", ["x", "graph", "label"])


def graph(nodes, edges=5, **options):
    return Graph(torch.randint(nodes, (2, edges)), num_nodes=nodes, **options)


def sample(nodes, edges=5):
    return Sample(torch.randn(nodes, P), graph(nodes, edges, edge_attr=torch.randn(edges, 2)), torch.tensor(nodes % 2))


SAMPLES = [sample(4), sample(6, 7), sample(5, 0)]
KNOWN = KnowledgeGraph.from_labels([("a", "r", "b"), ("b", "s", "c")])
STRUCTURES = {
    "graph": graph(4, edge_weight=torch.rand(5), edge_attr=torch.rand(5, 2)), "grid": Grid((3, 4)), "knowledge": KNOWN,
    "grids": batch([Grid(3), Grid(5)]), "padding": Padding(torch.arange(4) < 3), "table": DenseMask(torch.eye(4) > 0),
    "window": Window((3, 3), grid=Grid((2, 3))), "edges": EdgeSupport(graph(4)),
    "combined": (Causal() & Window(2)) | ~Padding(torch.arange(4) < 3), "blocks": Blocks(2).transpose(),
}


def same(one, other):
    assert type(one) is type(other) and repr(one) == repr(other)
    for a, b in zip(tensors_in(one), tensors_in(other), strict=True):
        assert torch.equal(a, b) and a.device == b.device


@pytest.mark.parametrize("form", ["namedtuple", "tuple", "list", "dict", "nested"])
def test_samples_of_graphs(form):
    made = {"namedtuple": lambda s: s, "tuple": tuple, "list": list, "dict": lambda s: s._asdict(),
            "nested": lambda s: (s.x, {"graph": s.graph, "label": [s.label]})}[form]
    actual = next(iter(DataLoader([made(s) for s in SAMPLES], batch_size=3, collate_fn=collate)))
    x, whole, label = ((actual[0], actual[1]["graph"], actual[1]["label"][0]) if form == "nested" else
                       actual.values() if form == "dict" else actual)
    assert type(actual) is type(made(SAMPLES[0]))
    same(whole, batch([s.graph for s in SAMPLES]))
    assert torch.equal(x, torch.cat([s.x for s in SAMPLES])) and label.shape == (3,)
    layer = GCNConv(P, 2)
    torch.testing.assert_close(layer(x, whole), torch.cat([layer(s.x, s.graph) for s in SAMPLES]))


def test_what_has_no_row_for_an_entry_or_is_named_is_stacked():
    samples = [(torch.randn(n, P), graph(n, n), torch.randn(7), torch.arange(n), n, str(n)) for n in (4, 6)]
    x, _, label, numbers, count, name = collate(samples)
    assert x.shape == (10, P) and label.shape == (2, 7) and numbers.shape == (10,)
    assert count.tolist() == [4, 6] and list(name) == ["4", "6"]
    samples = [{"x": torch.randn(4, P), "graph": graph(4), "y": torch.randn(4)} for _ in range(2)]
    assert collate(samples)["y"].shape == (8,)
    loader = DataLoader(samples, batch_size=2, collate_fn=partial(collate, stacked=("y",)))
    assert next(iter(loader))["y"].shape == (2, 4)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shared", [graph(4, edge_weight=torch.rand(5)), Grid(4), KNOWN])
def test_one_structure_for_all_is_named(shared, size):
    n = 3 if shared is KNOWN else 4
    samples = [{"x": torch.randn(n, P), "on": copy.deepcopy(shared)} for _ in range(size)]
    actual = collate(samples, shared=("on",))
    assert actual["x"].shape == (size, n, P)
    same(actual["on"], shared)
    other = {Graph: graph(4), Grid: Grid(5), KnowledgeGraph: KnowledgeGraph.from_labels([("a", "r", "b")])}
    with pytest.raises(StructureError, match="shared structures must be the same in all samples, at 'on'"):
        collate([*samples, {"x": torch.randn(n, P), "on": other[type(shared)]}], shared=("on",))


@pytest.mark.parametrize("structure", [graph(4), Grid(4), KNOWN])
def test_ranks_depend_neither_on_how_many_samples_there_are_nor_on_which(structure):
    """The last batch of an epoch has one sample; a sampler with replacement draws one twice; some are of equal size."""
    n = 3 if structure is KNOWN else 4
    one, twin = ((torch.randn(n, P), structure, torch.tensor(0)), (torch.randn(n, P), copy.deepcopy(structure),
                                                                  torch.tensor(1)))
    norm, layer = nn.BatchNorm1d(P), Conv(Incidence("sample").normalize("sum"), P, 2)
    for drawn in ([one], [one, one], [one, twin], [twin, one, twin]):
        x, whole, label = collate(drawn)
        same(whole, batch([each[1] for each in drawn]))
        assert x.shape == (n * len(drawn), P) and label.shape == (len(drawn),)
        assert layer(norm(x), structure=whole).shape == (len(drawn), 2)


@pytest.mark.parametrize("samples", [[], [(torch.zeros(2, 1), graph(2)), (torch.zeros(2, 1), torch.zeros(2))],
                                     [graph(2), Grid(2)]])
def test_samples_that_do_not_go_together(samples):
    with pytest.raises(StructureError, match=r"got .*\."):
        collate(samples)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_in_files_and_copies(name):
    stream, structure = io.BytesIO(), STRUCTURES[name]
    torch.save({"structure": structure, "step": 3}, stream)
    stream.seek(0)
    for twin in (torch.load(stream, weights_only=True)["structure"], pickle.loads(pickle.dumps(structure)),
                 copy.deepcopy(structure), structure.to("cpu")):
        same(twin, structure)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_move(name):
    moved = STRUCTURES[name].to("meta")
    assert all(t.is_meta for t in tensors_in(moved)) and type(moved) is type(STRUCTURES[name])
    if torch.cuda.is_available():
        assert all(t.is_pinned() for t in tensors_in(STRUCTURES[name].pin_memory()))


class Model(nn.Module):
    def __init__(self, structure):
        super().__init__()
        self.graph = StructureBuffer(structure)
        self.conv = GCNConv(P, 2)

    def forward(self, x):
        return self.conv(x, self.graph())


def test_a_graph_that_belongs_to_a_module():
    given = graph(4, edge_weight=torch.rand(5))
    model, x = Model(given), torch.randn(4, P)
    expected = model.conv(x, given)
    assert torch.equal(model(x), expected) and model.graph() is model.graph()
    assert {"graph.edge_index", "graph.edge_weight"} < set(model.state_dict())
    other = Model(graph(4, edge_weight=torch.rand(5)))
    assert not torch.allclose(other(x), expected)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), expected)
    for twin in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)):
        assert twin.graph().edge_weight.dtype == next(twin.parameters()).dtype
        torch.testing.assert_close(twin(x.to(twin.graph().edge_weight)).float(), expected)
    assert all(t.is_meta for t in tensors_in(model.to("meta").graph()))
    assert model.graph().edge_index.dtype == torch.int64
    with pytest.raises(ConfigError, match="must be a structure; got Tensor"):
        StructureBuffer(x)


@pytest.mark.parametrize("name", STRUCTURES)
def test_any_structure_can_belong_to_a_module(name):
    held = StructureBuffer(STRUCTURES[name])
    same(held(), STRUCTURES[name])
    assert len(held.state_dict()) == len(tensors_in(STRUCTURES[name]))
    assert not StructureBuffer(STRUCTURES[name], persistent=False).state_dict()


@pytest.mark.parametrize(("samples", "message"), [
    ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], "all samples must have the same keys"),
    ([{"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(2)}], "all samples must have the same keys"),
    ([(torch.zeros(2), 1), (torch.zeros(2),)], "all samples must have the same number of parts; got 1, 2"),
])
def test_samples_of_other_parts_raise_an_error(samples, message):
    with pytest.raises(StructureError, match=message):
        collate(samples)
