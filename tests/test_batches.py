"""Batches do not leak: over every specimen and named layer, samples side by side give what each gives alone."""

import dataclasses

import pytest
import torch

from structconv import Conv, Graph, Grid, KnowledgeGraph, Samples, StructureError, batch
from structconv.mechanisms import Chebyshev, DotProduct, Incidence
from structconv.structures.batching import parts_of
from structconv.testing.layers import check_samples, takes_samples
from tests.support.layers import drawn, uses

#: Masks that are made for one number of entries say nothing of a batch of other sizes.
REFUSED = {"mha_padded", "masked_by_graph", "over_table_with_infinities", "over_sparsemax_of_nothing", "over_padded",
           "over_padded_batch", "over_padded_window", "over_padded_pairs", "over_masked_columns",
           "over_everything_masked", "over_masked_then_capped", "over_masked_sum"}
USES = {name: make for name, make in uses().items() if takes_samples(make())}


@pytest.mark.parametrize("name", drawn(sorted(USES.keys() - REFUSED), 3))
def test_a_batch_gives_what_each_sample_gives_alone(name):
    check_samples(USES[name]())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_mask_of_one_size_is_refused_for_a_batch_of_others(name):
    with pytest.raises(StructureError, match="must have"):
        check_samples(USES[name]())


def test_only_layers_of_images_and_of_a_mask_and_without_structure_take_no_samples():
    left = {name for name in uses() if name not in USES}
    images = {"conv1d", "conv2d", "conv2d_grouped", "conv3d", "separable", "pool1d", "pool2d", "pool3d", "pool_padded",
              "transposed", "transposed_grouped"}
    others = {"mha_window", "linear", "linear_relu"}
    assert {name for name in left if not name.startswith("non_local_")} == images | others


def test_each_graph_of_a_batch_has_its_own_largest_eigenvalue():
    ring = torch.arange(5)
    graphs = [Graph(torch.stack([ring, (ring + 1) % 5]), num_nodes=5),
              Graph(torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 2, 0]]), num_nodes=4)]
    layer = Conv(Chebyshev(2, None, "computed"), 3, 2).double()
    xs = [torch.randn(graph.num_nodes, 3, dtype=torch.float64) for graph in graphs]
    torch.testing.assert_close(layer(torch.cat(xs), structure=batch(graphs)),
                               torch.cat([layer(x, structure=graph) for x, graph in zip(xs, graphs, strict=True)]))


def test_a_readout_sums_over_each_sample_and_hands_back_to_its_entries():
    graphs = [Graph.complete(3), Graph.complete(2)]
    both, x = batch(graphs), torch.randn(5, 4)
    for structure in (both, Samples([3, 2]), batch([Grid(3), Grid(2)])):
        total = Incidence("sample").basis(x, structure=structure)
        torch.testing.assert_close(total.analysis(x)[0], torch.stack([x[:3].sum(0), x[3:].sum(0)]))
        mean = Incidence("sample").normalize("sum").basis(x, structure=structure)
        torch.testing.assert_close(mean.analysis(x)[0], torch.stack([x[:3].mean(0), x[3:].mean(0)]))
        back = Incidence("sample").transpose().basis(x[:2], structure=structure)
        torch.testing.assert_close(back.analysis(x[:2])[0], x[[0, 0, 0, 1, 1]])
    assert Conv(Incidence("sample"), 4, 2)(x, structure=both).shape == (2, 2)


def test_edges_between_samples_and_sizes_that_do_not_fit_are_refused():
    both = batch([Graph.complete(3), Graph.complete(2)])
    with pytest.raises(StructureError, match="of one sample"):
        dataclasses.replace(both, edge_index=torch.tensor([[0], [4]]), edge_weight=None)
    attention = Conv(DotProduct(heads=2).softmax(), 4, 4)
    with pytest.raises(ValueError, match="M=5"):
        attention(torch.randn(6, 4), structure=Samples([3, 2]))
    for sizes in ([], [-1], [2.0], "ab", 3):
        with pytest.raises(StructureError, match="Samples"):
            Samples(sizes)


def test_triples_between_samples_are_refused_as_edges_are():
    knowledge = batch([KnowledgeGraph(torch.tensor([[0, 0, 1]]), 3, ("a",)),
                       KnowledgeGraph(torch.tensor([[1, 0, 0]]), 2, ("a",))])
    both = batch([Graph.complete(3), Graph.complete(2)])
    for whole, others in ((knowledge, {"triples": torch.tensor([[0, 0, 4], [1, 0, 1]])}),
                          (both, {"edge_index": torch.tensor([[0], [4]])})):
        with pytest.raises(StructureError, match="must join entries of one sample"):
            dataclasses.replace(whole, **others)
        for samples in (Samples([3, 3]), [3, 2]):
            with pytest.raises(StructureError, match="samples must be Samples of M=5 inputs and N=5 outputs"):
                dataclasses.replace(whole, samples=samples)
    for whole, index in ((knowledge, knowledge.triples), (both, both.edge_index.T)):
        index[0, -1] = 4
        with pytest.raises(StructureError, match="must join entries of one sample"):
            parts_of(whole)
