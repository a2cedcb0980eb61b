"""Message passing: its equations atom by atom, molecules in any order and alone, and a program for any molecules."""

import pytest
import torch
from torch.export import Dim
from torch.nn import functional as F

from structconv.structures import Graph, batch
from structconv_systems.models.molecules import MessagePassing
from systems.tests.models.sequences import check_learns, check_saved
from tests.support.drawn import slow

ATOMS, BONDS = 5, 3
READOUTS = pytest.mark.parametrize("readout", ["sum", "mean", "max", "softmax", "set2set"])


def make(seed=0, **options):
    torch.manual_seed(seed)
    return MessagePassing(ATOMS, BONDS, **{"channels": 8, "edge_hidden": 6, "mean": 2.0, "deviation": 3.0, **options})


def molecule(atoms, seed):
    """Random atoms, and bonds of two kinds in both directions: a chain and one more."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([[place, place + 1] for place in range(atoms - 1)] + ([[0, 2]] if atoms > 3 else [])).long()
    kinds = F.one_hot(torch.randint(2, (len(ends),), generator=generator), BONDS).float()
    index = ends.view(-1, 2).T
    graph = Graph(torch.cat([index, index.flip(0)], 1), num_nodes=atoms, edge_attr=torch.cat([kinds, kinds]))
    return torch.randn(atoms, ATOMS, generator=generator), graph


def several():
    """Molecules of five sizes, one of them an atom without bonds, and all of them as one."""
    single = [molecule(atoms, seed) for seed, atoms in enumerate((5, 1, 9, 2, 6))]
    return single, (torch.cat([x for x, _ in single]), batch([graph for _, graph in single]))


def test_it_is_the_equations_of_the_paper():
    """Message by message, bond by bond, in float64."""
    model = make(readout="sum", message_steps=2).double()
    x, graph = molecule(6, 0)
    x, bonds = x.double(), graph.edge_attr.double()
    network, theta = model.messages.mechanism.network, model.messages.weight().dense()
    h = F.relu(model.embed(x))
    for _ in range(2):
        message = model.messages.bias.expand(6, -1).clone()
        for (m, n), bond in zip(graph.edge_index.T.tolist(), bonds, strict=True):
            message[n] += h[m] @ (theta[0] + (network(bond)[:, None, None] * theta[1:]).sum(0))
        h = torch.stack([model.update(message[n:n + 1], h[n:n + 1])[0] for n in range(6)])
    expected = 2 + 3 * model.predict(model.join(torch.cat([h, x], -1)).sum(0))
    torch.testing.assert_close(model(x, Graph(graph.edge_index, num_nodes=6, edge_attr=bonds)), expected,
                               rtol=1e-10, atol=1e-10)


def test_it_overfits():
    model, (_, (x, graph)) = make(), several()
    expected = torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0])
    check_learns(model, lambda: F.mse_loss(model(x, graph), expected), 60, 2e-2)


@READOUTS
def test_a_molecule_alone_and_in_a_batch_are_the_same(readout):
    model, (single, together) = make(readout=readout), several()
    actual = torch.cat([model(*one) for one in single])
    torch.testing.assert_close(model(*together), actual, rtol=1e-5, atol=1e-5)


@READOUTS
def test_the_order_of_atoms_and_of_bonds_says_nothing(readout):
    model, (x, graph) = make(readout=readout), molecule(9, 3)
    atoms, bonds = torch.randperm(9), torch.randperm(graph.num_edges)
    places = atoms.argsort()
    other = Graph(places[graph.edge_index][:, bonds], num_nodes=9, edge_attr=graph.edge_attr[bonds])
    torch.testing.assert_close(model(x[atoms], other), model(x, graph), rtol=1e-5, atol=1e-5)


def test_bonds_and_their_kinds_matter():
    model, (x, graph) = make(), molecule(6, 1)
    without = Graph(graph.edge_index[:, 2:], num_nodes=6, edge_attr=graph.edge_attr[2:])
    others = Graph(graph.edge_index, num_nodes=6, edge_attr=graph.edge_attr.roll(1, -1))
    for changed in (without, others):
        assert not torch.allclose(model(x, changed), model(x, graph))


def test_atoms_without_bonds_alone():
    """A batch of methane and water has no edge at all."""
    single = [molecule(1, seed) for seed in range(3)]
    y = make()(torch.cat([x for x, _ in single]), batch([graph for _, graph in single]))
    assert y.shape == (3,) and y.isfinite().all()


def test_every_parameter_has_a_gradient():
    model, (_, (x, graph)) = make(), several()
    model(x, graph).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_filters_are_made_once_a_kind_of_bond():
    model, (x, graph) = make(channels=32, edge_hidden=32), molecule(200, 0)
    assert "mixed filters" in str(model.messages.plan(model.embed(x), graph))


def test_a_saved_model():
    check_saved(make(), make(seed=1), *several()[1])


@slow
def test_export_with_any_numbers_of_molecules_atoms_and_bonds():
    model, (_, (x, graph)), free = make().eval(), several(), Dim.DYNAMIC
    samples = [{0: free}, {0: free}, free, free, free, free, None, None]
    shapes = {"x": {0: free}, "graph": [{1: free}, free, free, {0: free}, samples]}
    program = torch.export.export(model, (x, graph), dynamic_shapes=shapes).module()
    others = [molecule(atoms, atoms) for atoms in (3, 8, 4, 7, 9, 1, 2)]
    for y, bonds in ((x, graph), (torch.cat([y for y, _ in others]), batch([bonds for _, bonds in others]))):
        torch.testing.assert_close(program(y, bonds), model(y, bonds), rtol=1e-5, atol=1e-5)
