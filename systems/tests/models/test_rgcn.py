"""R-GCN: the table without features is the layer with x = I; what it overfits; permutations, saving, exporting."""

import pytest
import torch
from torch.nn import functional as F

from structconv import ConfigError, KnowledgeGraph, RelationalConv, StructureError
from structconv_systems.models.rgcn import EntityClassifier, EntityTable, LinkPredictor
from systems.tests.models.sequences import check_learns, check_saved
from tests.support.drawn import drawn

N, K = 12, 3


def graph(seed=0, entities=N, triples=30):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(most, (triples,), generator=generator) for most in (entities, K, entities)]
    return KnowledgeGraph(torch.stack(drawn, 1), entities, tuple("abc")).with_inverses()


def predictor(seed=0, **options):
    torch.manual_seed(seed)
    return LinkPredictor(N, 2 * K, 16, **{"layers": 1, "num_bases": 2, **options})


def permuted(known, order):
    """The same graph whose entity n is called order[n]."""
    triples = torch.stack([order[known.triples[:, 0]], known.triples[:, 1], order[known.triples[:, 2]]], 1)
    return KnowledgeGraph(triples, known.num_entities, known.relations)


def test_the_table_is_an_rgcn_layer_of_the_identity():
    known = graph()
    table = EntityTable(known, 4).double()
    layer = RelationalConv(N, 4, 2 * K).double()
    relations, own = layer.weight.weights
    with torch.no_grad():
        relations.theta.zero_()
        for place, number in enumerate(table.pairs.tolist()):
            relations.theta[number % (2 * K), number // (2 * K)] = table.rows[place]
        own.theta.copy_(table.own.unsqueeze(0))
        layer.bias.copy_(table.conv.bias.normal_())
    torch.testing.assert_close(table(known), layer(torch.eye(N, dtype=torch.float64), known), rtol=1e-10, atol=1e-10)
    assert len(table.rows) == len(torch.unique(known.triples[:, :2], dim=0))


def test_the_table_takes_a_part_of_its_graph_and_no_other():
    known = graph()
    table = EntityTable(known, 4)
    part = KnowledgeGraph(known.triples[:5], N, known.relations)
    assert table(part).shape == (N, 4)
    with pytest.raises(StructureError, match="must be one that it was made with"):
        table(graph(1))
    with pytest.raises(StructureError, match=r"\(entities, relations\) = \(12, 6\); got \(13, 6\)"):
        table(graph(entities=13))


def test_two_tables_share_a_graph_but_not_its_rows():
    known = graph()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    tables = [EntityTable(one, 4) for one in (known, permuted(known, order))]
    tables[0](known)
    with pytest.raises(StructureError, match="must be one that it was made with"):
        tables[1](known)


@pytest.mark.parametrize("kind", drawn(["exported", "compiled"], 2))
def test_a_classifier_is_a_program_for_any_number_of_triples(kind):
    known = graph()
    model = EntityClassifier(known, 8, 3).eval()
    if kind == "compiled":
        program = torch.compile(model, backend="eager", fullgraph=True)
    else:
        shapes = {"graph": [{0: torch.export.Dim.DYNAMIC}, None]}  # names are no part of the pytree
        program = torch.export.export(model, (known,), dynamic_shapes=shapes).module()
    for one in (known, KnowledgeGraph(known.triples[3:20], N, known.relations)):
        torch.testing.assert_close(program(one), model(one))
    with pytest.raises(Exception, match="edge_index"):
        program(KnowledgeGraph(graph(1).triples[:20], N, known.relations))


def test_a_classifier_overfits_and_is_saved():
    known, labels = graph(), torch.arange(N) % 3
    model, fresh = EntityClassifier(known, 8, 3), EntityClassifier(known, 8, 3)
    check_learns(model, lambda: F.cross_entropy(model(known), labels), 80, 0.02)
    check_saved(model, fresh, known)


def test_a_classifier_of_renamed_entities_says_the_same_of_them():
    known, order = graph(), torch.randperm(N)
    other = permuted(known, order)
    torch.manual_seed(0)
    model, renamed = EntityClassifier(known, 8, 3).double(), EntityClassifier(other, 8, 3).double()
    renamed.second.load_state_dict(model.second.state_dict())
    with torch.no_grad():
        renamed.first.own[order] = model.first.own
        numbers = order[model.first.pairs // (2 * K)] * 2 * K + model.first.pairs % (2 * K)
        renamed.first.rows[torch.searchsorted(renamed.first.pairs, numbers)] = model.first.rows
    torch.testing.assert_close(renamed(other)[order], model(known), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"layers": 0}, {}, {"layers": 2, "num_bases": None, "num_blocks": 4}])
def test_a_predictor_overfits_and_is_saved(options):
    known = graph()
    _, number = torch.unique(known.triples[:, :2], dim=0, return_inverse=True)
    questions = known.triples[[int((number == k).nonzero()[0]) for k in range(int(number.max()) + 1)]][:8]
    model = predictor(**options)
    check_learns(model, lambda: F.cross_entropy(model(known, questions[:, :2]), questions[:, 2]), 100, 0.02)
    check_saved(model, predictor(1, **options), known, questions[:, :2])


def test_a_predictor_is_equivariant():
    known, order, queries = graph(), torch.randperm(N), torch.tensor([[0, 1], [5, 4], [11, 0]])
    model, renamed = predictor().double(), predictor().double()
    renamed.load_state_dict(model.state_dict())
    with torch.no_grad():
        renamed.entities.weight[order] = model.entities.weight
    asked = torch.stack([order[queries[:, 0]], queries[:, 1]], 1)
    torch.testing.assert_close(renamed(permuted(known, order), asked)[:, order], model(known, queries), rtol=1e-10,
                               atol=1e-10)


def test_distmult_is_symmetric_and_by_hand():
    model = predictor(layers=0)
    queries = torch.cartesian_prod(torch.arange(N), torch.tensor([2]))
    y = model(graph(), queries)
    torch.testing.assert_close(y, y.mT)
    e = model.entities.weight
    torch.testing.assert_close(y[3, 7], (e[3] * model.relations.weight[2] * e[7]).sum())
    with pytest.raises(ConfigError, match="layers must be at least 0"):
        predictor(layers=-1)


def test_export_with_any_number_of_queries():
    known, queries = graph(), torch.tensor([[0, 1], [5, 4], [11, 0]])
    model = predictor().eval()
    count = torch.export.Dim("queries")

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, queries):
            return self.model(known, queries)

    program = torch.export.export(Fixed(), (queries,), dynamic_shapes=({0: count},)).module()
    torch.testing.assert_close(program(queries[:2]), model(known, queries[:2]), rtol=1e-5, atol=1e-5)
