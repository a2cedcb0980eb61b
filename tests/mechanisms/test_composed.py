"""What the second of two composed mechanisms sees: the entries to which the first leads, with their own content."""

import pytest
import torch

from structconv import Conv, Graph, Grid, Samples, StructureError, batch
from structconv.mechanisms import Adjacency, Context, Cuboid, DotProduct, Identity, Incidence, Pool, RelativeBias

F64 = torch.float64


def drawn(expression):
    mechanism = expression.bound(4).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.normal_()
    return mechanism


def entries(count, seed=0):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)


def scores():
    return drawn(DotProduct(dim=3).softmax())


@pytest.mark.parametrize("outputs", [5, 6, 7])
def test_behind_scores_are_the_entries_of_z_however_many_there_are(outputs):
    a, b, x, z = scores(), scores(), entries(6), entries(outputs, 1)
    expected = a.basis(x, z=z).dense() @ b.basis(z, z=z).dense()
    torch.testing.assert_close((a @ b).basis(x, z=z).dense(), expected, rtol=0, atol=1e-12)
    layer = Conv(DotProduct(dim=3).softmax() @ DotProduct(dim=3).softmax(), 4, 4).double()
    torch.testing.assert_close(layer(x, z=z), torch.einsum(
        "kmn,mp,kpq->nq", layer.basis(x, z=z).dense(), x, layer.weight().dense()) + layer.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first, structure", [
    (Identity(), None), (Cuboid(3), None), (Cuboid((3,)), Grid(6)), (Adjacency(), Graph.complete(6)),
    (Cuboid(3, dilation=2) @ Cuboid(3), None), (Adjacency().transpose(), Graph.complete(6))])
@pytest.mark.parametrize("outputs", [5, 6])
def test_what_keeps_entries_leads_to_those_of_x(first, structure, outputs):
    first, b, x, z = drawn(first), scores(), entries(6), entries(outputs, 1)
    expected = (first.basis(x, structure=structure).dense(F64).unsqueeze(1) @ b.basis(x, z=z).dense()).flatten(0, 1)
    torch.testing.assert_close((first @ b).basis(x, structure, z=z).dense(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first, structure", [
    (Pool(1, stride=2), None), (Pool(2), Grid(6)), (Cuboid(3, padding="none"), None), (Context(queries=6), None),
    (Incidence("sender"), Graph(torch.randint(6, (2, 6)), num_nodes=6)),
    (Incidence("receiver").transpose(), Graph(torch.randint(6, (2, 6)), num_nodes=6)),
    (Adjacency(), Graph(torch.randint(5, (2, 9)), num_inputs=6, num_outputs=5))])
def test_entries_of_which_nothing_is_known_have_no_content_to_read(first, structure):
    with pytest.raises(StructureError, match=r"of which b reads the content.*@ DotProduct.*Make two layers"):
        drawn(first @ DotProduct(dim=3).softmax()).basis(entries(6), structure=structure)
    counted = drawn(first @ RelativeBias(2)).basis(entries(6), structure=structure)
    assert counted.dense().shape == (first.size, 6, drawn(first).basis(entries(6), structure=structure).num_outputs)


def test_behind_incidence_are_the_edges():
    graph, x = Graph.complete(4), entries(4)
    edges = Incidence("sender")
    torch.testing.assert_close((edges @ Identity()).basis(x, structure=graph).dense(),
                               edges.basis(x, structure=graph).dense())
    assert (edges @ Identity() @ edges.transpose()).basis(x, structure=graph).dense().shape == (1, 4, 4)


def test_a_batch_leads_to_the_entries_of_z_of_each_sample():
    composed, x, z = drawn(DotProduct(dim=3).softmax() @ DotProduct(dim=3).softmax()), entries(9), entries(8, 1)
    parts = zip(x.split([4, 5]), z.split([6, 2]), strict=True)
    single = torch.block_diag(*(composed.basis(own, z=other).dense()[0] for own, other in parts))
    both = batch([Graph(torch.zeros(2, 1, dtype=torch.long), num_inputs=m, num_outputs=n) for m, n in ((4, 6), (5, 2))])
    for structure in (Samples([4, 5], outputs=[6, 2]), both):
        torch.testing.assert_close(composed.basis(x, structure, z=z).dense()[0], single, rtol=0, atol=1e-12)
