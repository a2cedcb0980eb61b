"""NaN in an input that is in no pair, by a graph, a window or an order alone, reaches no gradient of a parameter."""

import itertools

import pytest
import torch

from structconv import STRUCTURE, BiAffine, Conv, DotProduct, Full, Given, LowRank, RelativeBias, Rotary, Separable
from structconv.mechanisms import Additive, Concatenation, Context, EdgeBias, General, Pair
from structconv.structures import Causal, DenseMask, Graph, Padding, Samples, Window

M, N, P, HIDDEN = 12, 5, 6, [7, 9]
PAIRS = torch.tensor([(m, n) for m in range(M) for n in range(N) if m not in HIDDEN and (m + n) % 2 == 0]).T
GRAPH = Graph(PAIRS, num_inputs=M, num_outputs=N, edge_attr=torch.randn(PAIRS.shape[1], 1, dtype=torch.float64))
PRESENT = torch.tensor([m != 3 for m in range(M)])
DOT = DotProduct(heads=2, dim=4)
SCORES = {"dot": DOT.scaled(), "bias": DOT + RelativeBias(3), "rotary": DotProduct(heads=2, dim=4, rotary=Rotary()),
          "general": General(2), "biaffine": BiAffine(2), "gat": BiAffine(2, bilinear=False).leaky_relu(),
          "projected": BiAffine(2, bilinear=False, on="projected").leaky_relu(), "additive": Additive(3, heads=2),
          "concatenation": Concatenation(3, heads=2), "pair": Pair(heads=2)}
MASKS = {"graph of the call": (lambda scores: scores.masked(keep=STRUCTURE), GRAPH),
         "graph of the layer": (lambda scores: scores.masked(keep=GRAPH), None),
         "graph by name": (lambda scores: scores.masked(keep="bonds"), {"bonds": GRAPH}),
         "edges": (lambda scores: scores + EdgeBias(1), GRAPH),
         "causal": (lambda scores: scores.masked(keep=Causal()), None),
         "window": (lambda scores: scores.masked(keep=Window(1)), None),
         "dropped": (lambda scores: scores.masked(drop=~(Causal() & Window(2))), None),
         "padding and window": (lambda scores: scores.masked(keep=PRESENT).masked(keep=Window(2)), None)}
WEIGHTS = {"full": Full, "factors": lambda: LowRank(3), "separable": lambda: Separable(2)}
CASES = list(zip(itertools.product(MASKS, SCORES), itertools.cycle(WEIGHTS), strict=False))


def gradients(layer, x, *args, **options):
    layer.zero_grad()
    y = layer(x, *args, **options)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y.detach()} | {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def same_with_nan(layer, x, hidden, *args, **options):
    with_zeros, with_nan = (gradients(layer, x.index_fill(-2, torch.tensor(hidden), value), *args, **options)
                            for value in (0.0, torch.nan))
    torch.testing.assert_close(with_nan, with_zeros)


@pytest.mark.parametrize(("case", "weight"), CASES)
def test_parameters_do_not_read_an_input_that_is_in_no_pair(case, weight):
    mask, structure = MASKS[case[0]]
    layer = Conv(mask(SCORES[case[1]]).softmax(), P, P, weight=WEIGHTS[weight]()).double()
    x, z = torch.randn(2, M, P).double(), torch.randn(2, N, P).double()
    same_with_nan(layer, x, HIDDEN, structure, z=z)


def test_of_an_input_that_loses_its_edges_after_the_first_call():
    graph = Graph(torch.arange(M).repeat(2, 1), num_nodes=M)
    layer = Conv(DOT.masked(keep=STRUCTURE).softmax(), P, P).double()
    gradients(layer, torch.randn(M, P).double(), graph)  # notes that each input has an edge
    graph.edge_index[0, HIDDEN] = 0
    same_with_nan(layer, torch.randn(M, P).double(), HIDDEN, graph, z=torch.randn(M, P).double())


@pytest.mark.parametrize("one", [Window(1), DenseMask(torch.eye(M) > 0)])
def test_a_factor_that_is_nan_where_the_other_has_no_pair(one):
    both = DOT.masked(keep=one).normalize("sigmoid") * General(2).masked(keep=Window(2)).normalize("sigmoid")
    layer, x, z = Conv(both, P, P), torch.randn(M, P), torch.randn(M, P)
    expected = layer(x, z=z)
    x[0] = torch.nan
    torch.testing.assert_close(layer(x, z=z)[2:], expected[2:])


NEAR = DOT.masked(keep=Window(1))
#: Expressions, the hidden inputs, and how many outputs are given as z.
OTHERS = {
    "two masks that no pair passes": ((NEAR + General(2).masked(drop=Window(1))).softmax(), [2], M),
    "two factors that no pair has": (NEAR.softmax(over="outputs") * General(2).masked(drop=Window(1)).softmax(
        over="outputs"), [2], M),
    "two heads": (NEAR.softmax() | DOT.masked(keep=Causal()).softmax(), [8], 3),
    "learned queries, the first": (Context(6, heads=2).masked(drop=Causal()).softmax(), [0], None),
    "learned queries": (Context(3, heads=2).masked(keep=Window(1)).softmax(), [4, 5], None)}


@pytest.mark.parametrize("name", OTHERS)
def test_of_expressions_of_several_terms_and_of_learned_queries(name):
    expression, hidden, outputs = OTHERS[name]
    z = {} if outputs is None else {"z": torch.randn(outputs, P).double()}
    same_with_nan(Conv(expression, P, P).double(), torch.randn(M, P).double(), hidden, **z)


def test_of_a_batch_of_samples():
    layer = Conv(Context(2, heads=2).masked(keep=Causal()).softmax(), P, P, weight=LowRank(3)).double()
    same_with_nan(layer, torch.randn(9, P).double(), [3, 8], structure=Samples([4, 5]))


def test_a_mask_that_another_score_ignores_hides_nothing():
    layer = Conv(DOT.softmax().masked(keep=Window(1)), P, P).double()
    x = torch.randn(M, P).double()
    x[9] = torch.nan
    assert layer(x, z=torch.randn(N, P).double()).isnan().all()


def test_padding_is_read_as_before_beside_a_window():
    x, z = torch.randn(M, P), torch.randn(N, P)
    layer = Conv(DOT.masked(keep=Padding(PRESENT) & Window(2)).softmax(), P, P)
    expected = layer(x, z=z)
    x[[3, 10]] = torch.nan
    torch.testing.assert_close(layer(x, z=z), expected)


@pytest.mark.parametrize("scores", [RelativeBias(2, heads=2), Given(torch.randn(2, M, M).double())])
def test_of_scores_that_are_transposed_before_they_are_masked(scores):
    mask = Graph(torch.arange(M - 1).repeat(2, 1), num_nodes=M)
    layer = Conv(scores.transpose().masked(keep=mask).softmax(), P, P).double()
    same_with_nan(layer, torch.randn(M, P).double().requires_grad_(), [M - 1])
