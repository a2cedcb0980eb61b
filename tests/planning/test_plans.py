"""The choice of paths: by cost, by request and within bytes; plans as values that print and are remembered."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from structconv.bases.dense import Dense, Identity
from structconv.bases.polynomial import Polynomial
from structconv.bases.scores import Bilinear
from structconv.bases.shift import Shift
from structconv.bases.sparse import Sparse
from structconv.errors import ConfigError
from structconv.mechanisms import Powers
from structconv.nn import Conv
from structconv.planning import Cost, Machine, Rule, Sizes, autotune, plan_for, rule
from structconv.planning import plan as plans
from structconv.planning import rules as registry
from structconv.planning.cost import lost_flops
from structconv.planning.counts import application, nonzeros
from structconv.planning.signature import token
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.supports import Causal, Window
from structconv.theta import EyeTheta, FullTheta, LowRankTheta, SharedTheta


def full(k, p, q, grad=False):
    return FullTheta(torch.zeros(k, p, q, requires_grad=grad))


def chosen(x, basis, theta, **options):
    return plan_for(x, basis, theta, **options).path


def sparse(entries=500, edges=3000, size=1):
    index = torch.randint(0, entries, (2, edges))
    return Sparse(Graph(index, num_nodes=entries), torch.ones(size, edges))


def test_the_side_with_fewer_channels_is_gathered():
    basis = sparse()
    assert chosen(torch.zeros(500, 128), basis, full(1, 128, 8)) == "channels_first"
    assert chosen(torch.zeros(500, 8), basis, full(1, 8, 128)) == "structure_first"


def test_where_x_needs_no_gradient_the_structure_may_come_first():
    """Then nothing of the backward passes through the structure, and the cost says so."""
    basis, theta = sparse(), full(1, 32, 24, grad=True)
    x = torch.zeros(500, 32)
    costs = {c.path: c.cost.gathered for c in plan_for(x, basis, theta).candidates}
    with_x = {c.path: c.cost.gathered for c in plan_for(x.clone().requires_grad_(), basis, theta).candidates}
    assert with_x["structure_first"] == 2 * costs["structure_first"]
    assert with_x["channels_first"] == costs["channels_first"]


def test_costs_of_dense_paths_are_their_flops():
    basis, theta = Dense(torch.zeros(3, 50, 40)), full(3, 7, 5)
    costs = {c.path: c.cost.flops for c in plan_for(torch.zeros(2, 50, 7), basis, theta).candidates}
    assert costs["channels_first"] == 2 * 2 * 3 * 50 * 7 * 5 + 2 * 2 * 3 * 50 * 40 * 5
    assert costs["structure_first"] == 2 * 2 * 3 * 50 * 40 * 7 + 2 * 2 * 3 * 40 * 7 * 5
    assert costs["operator_first"] == 2 * 3 * 50 * 40 * 7 * 5 + 2 * 2 * 50 * 40 * 7 * 5


def test_the_operator_is_built_for_many_small_products_only():
    small = Dense(torch.zeros(16, 4, 4))
    assert chosen(torch.zeros(10_000, 4, 2), small, full(16, 2, 2)) == "operator_first"
    large = Dense(torch.zeros(4, 600, 600))
    made = plan_for(torch.zeros(100_000, 1, 1).expand(100_000, 600, 64), large, full(4, 64, 64))
    assert made.path != "operator_first"
    assert next(c for c in made.candidates if c.path == "operator_first").rejected == "only on request"


def test_low_rank_goes_between():
    scores = Bilinear(torch.zeros(8, 256, 16), torch.zeros(8, 256, 16)).softmax()
    theta = LowRankTheta(torch.zeros(8, 128, 16), torch.zeros(8, 16, 128))
    assert chosen(torch.zeros(256, 128), scores, theta) == "between"


def test_parts_have_their_own_plans():
    basis = sparse() | Shift(Grid(500), ((-1,), (0,), (1,)), "zeros")
    made = plan_for(torch.zeros(500, 128), basis, full(4, 128, 64))
    assert made.path == "per_part"
    assert [part.kernel for part in made.parts] == ["expand, synthesis", "torch.conv"]
    assert "torch.conv" in str(made)
    assert made.cost.flops > sum(part.cost.flops for part in made.parts) * 0.999


def test_max_bytes():
    basis, theta = sparse(size=4), full(4, 64, 8)
    x = torch.zeros(500, 64)
    held = {c.path: c.cost.peak_bytes for c in plan_for(x, basis, theta).candidates}
    assert held["channels_first"] == 4 * 500 * 8 * 4
    made = plan_for(x, basis, theta, max_bytes=int(held["channels_first"]))
    assert made.path == "channels_first"
    assert "over max_bytes" in str(made)
    tight = plan_for(x, basis, theta, max_bytes=1)
    assert tight.path == "channels_first"
    assert "all hold more than max_bytes" in tight.reason


def test_a_plan_prints_what_it_rejected():
    made = plan_for(torch.zeros(500, 128), sparse(), full(1, 128, 8))
    text = str(made)
    assert text.startswith("Sparse (K=1, M=500, N=500), FullTheta(K=1, P=128, Q=8), x (500, 128) float32")
    for words in ("* channels_first", "structure_first", "operator_first", "GFLOP", "MB held", "cheapest",
                  "only on request"):
        assert words in " ".join(text.split())
    assert made.candidates[0].rejected == ""
    assert all(c.rejected for c in made.candidates[1:])
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.reason = "another"


def test_plans_are_remembered_by_shape(monkeypatch):
    monkeypatch.setattr(plans, "_MEMO", {})
    x, theta = torch.zeros(500, 16), full(1, 16, 8)
    first = plan_for(x, sparse(), theta)
    assert plan_for(torch.ones(500, 16), sparse(), theta) is first
    for other in (plan_for(torch.zeros(2, 500, 16), sparse(), theta), plan_for(x, sparse(edges=2999), theta),
                  plan_for(x, sparse(), full(1, 16, 9)), plan_for(x.double(), sparse(), theta),
                  plan_for(x, sparse(), theta, path="structure_first"), plan_for(x, sparse(), theta, max_bytes=10**9),
                  plan_for(x, sparse(), LowRankTheta(torch.zeros(1, 16, 8), torch.zeros(1, 8, 8)))):
        assert other is not first
    assert len(plans._MEMO) == 8


def test_the_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(plans, "_MEMO", {})
    monkeypatch.setattr(plans, "MEMO_SIZE", 3)
    for entries in range(1, 9):
        plan_for(torch.zeros(entries, 2), Identity(entries), full(1, 2, 2))
    assert len(plans._MEMO) <= 3


def test_signatures_tell_options_apart():
    queries = Bilinear(torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))
    bases = [queries.softmax(), queries.softmax(over="outputs"), queries.normalize("count"),
             queries.masked(keep=Causal()).softmax(), queries.masked(keep=Window(1)).softmax(),
             queries.map(torch.tanh), queries.map(torch.relu), queries.scaled().softmax(),
             Shift(Grid(8), ((0,),), "zeros"), Shift(Grid(8), ((1,),), "zeros"), Shift(Grid(8), ((0,),), "circular")]
    assert len({plans.signature(basis) for basis in bases}) == len(bases)
    assert plans.signature(2.0 * queries) == plans.signature(3.0 * queries)


def test_nonzeros():
    sizes = Sizes(batch=1, itemsize=4)
    assert nonzeros(sparse(), sizes) == 3000
    assert nonzeros(sparse().transpose(), sizes) == 3000
    assert nonzeros(Identity(7, 3), sizes) == 7
    assert nonzeros(Shift(Grid((4, 5)), ((0, 0), (0, 1)), "zeros"), sizes) == 20
    scores = Bilinear(torch.zeros(1, 8, 4), torch.zeros(1, 8, 4))
    assert nonzeros(scores.softmax(), sizes) is None
    assert nonzeros(scores.masked(keep=Causal()).softmax(), sizes) is None
    assert nonzeros(scores.masked(keep=Window(1)).softmax(), sizes) == 24
    assert nonzeros(sparse(8, 5) * scores.softmax(), sizes) == 5


def test_recurrences_cost_their_order_not_their_size():
    sizes, step = Sizes(batch=1, itemsize=4), sparse()
    once = application(step, sizes, 10, "analysis").flops
    polynomial = Polynomial(step, order=5)
    assert application(polynomial, sizes, 10, "analysis").flops == 5 * once
    assert application(polynomial, sizes, 10, "synthesis").flops == 5 * once
    assert application(polynomial, sizes, 10, "apply").flops > 10 * once


def test_composition_costs_both_products():
    sizes, a, b = Sizes(batch=1, itemsize=4), Dense(torch.zeros(2, 10, 20)), Dense(torch.zeros(3, 20, 30))
    assert application(a @ b, sizes, 5, "analysis").flops == 2 * 5 * (2 * 10 * 20 + 2 * 3 * 20 * 30)
    assert application(a @ b, sizes, 5, "synthesis").flops == 2 * 5 * (3 * 2 * 10 * 20 + 3 * 20 * 30)


def test_heads_that_are_alike_are_projected_once():
    def cost(theta):
        return plan_for(torch.zeros(500, 32), sparse(size=6), theta, path="channels_first").cost

    shared, own = cost(SharedTheta(torch.zeros(32, 32), 6)), cost(full(6, 32, 32))
    assert own.flops - shared.flops == 5 * 2 * 500 * 32 * 32
    assert cost(EyeTheta(6, 32)).peak_bytes == 0


def test_unknown_paths_are_errors():
    with pytest.raises(ConfigError, match="path must be one of 'channels_first', 'operator_first', 'structure_first' "
                                          "for Identity; got 'sideways'"):
        plan_for(torch.zeros(3, 2), Identity(3), full(1, 2, 2), path="sideways")
    with pytest.raises(ConfigError, match="got 'between'"):
        plan_for(torch.zeros(3, 2), Identity(3), full(1, 2, 2), path="between")


def test_a_new_kernel_is_one_decorator(monkeypatch):
    """A more specific rule replaces the one of equal path and kernel, and competes with the others."""
    monkeypatch.setattr(registry, "RULES", {kind: list(found) for kind, found in registry.RULES.items()})
    monkeypatch.setattr(plans, "_MEMO", {})

    @rule(Identity, "channels_first", kernel="as it is")
    class AsItIs(Rule):
        def applies(self, basis, theta, x):
            return isinstance(theta, EyeTheta)

        def cost(self, problem):
            return Cost()

        def run(self, x, basis, theta):
            return x

    x = torch.randn(3, 2)
    made = plan_for(x, Identity(3), EyeTheta(1, 2))
    assert made.kernel == "as it is"
    assert made.run(x, Identity(3), EyeTheta(1, 2)) is x
    assert plan_for(x, Identity(3), full(1, 2, 2)).kernel != "as it is"


def test_costs_add_and_repeat():
    cost = Cost(1, 2, 3, 4) + Cost(10, 20, 30, 40)
    assert cost == Cost(11, 22, 33, 44)
    assert cost.repeated(2) == Cost(22, 44, 66, 44)
    rates = Machine(gflops=1.0, copy_gbs=2.0, gather_gbs=4.0)
    assert Cost(1e9, 2e9, 4e9).seconds(rates) == pytest.approx(3.0)
    assert Cost(1e9).seconds(rates, itemsize=8) == pytest.approx(2.0)


def test_narrow_products_cost_what_they_take():
    assert lost_flops(100.0, 16) == lost_flops(100.0, 64) == lost_flops(100.0, 1) == 0
    assert lost_flops(100.0, 8) == pytest.approx(400.0) and lost_flops(100.0, 8, filled=True) == pytest.approx(100.0)
    assert lost_flops(100.0, 24) == pytest.approx(100 / 3)
    basis, theta = Dense(torch.zeros(1, 400, 400)), full(1, 8, 16)
    assert chosen(torch.zeros(400, 8), basis, theta) == "channels_first"
    assert chosen(torch.zeros(400, 32), basis, full(1, 32, 64)) == "structure_first"


def test_calls_count_on_small_inputs():
    """Three steps take longer than two where there is nothing to compute."""
    basis, theta = sparse(20, 30, size=2), LowRankTheta(torch.zeros(2, 4, 1), torch.zeros(2, 1, 4))
    costs = {c.path: c.cost.calls for c in plan_for(torch.zeros(20, 4), basis, theta).candidates}
    assert costs["between"] > costs["channels_first"] > 0
    assert chosen(torch.zeros(20, 4), basis, theta) != "between"


def test_one_identity_is_its_theta():
    x, theta = torch.randn(5, 3), FullTheta(torch.randn(1, 3, 2))
    made = plan_for(x, Identity(5), theta)
    assert made.kernel == "one product"
    torch.testing.assert_close(made.run(x, Identity(5), theta), x @ theta.theta[0])
    assert plan_for(x, Identity(5, 2), full(2, 3, 2)).kernel != "one product"


def test_a_basis_keeps_its_token():
    basis, theta = sparse(), full(1, 16, 8)
    assert token(basis) is token(basis) is token(sparse())
    assert token(basis) is not token(sparse(edges=2999))
    assert token(theta) is token(full(1, 16, 8)) is not token(full(1, 16, 9))


def test_a_lookup_sees_what_a_plan_depends_on():
    basis, theta, x = sparse(), full(1, 32, 24), torch.zeros(500, 32)
    first = plan_for(x, basis, theta)
    assert plan_for(x, basis, theta) is first
    theta.theta.requires_grad_()
    learnt = plan_for(x, basis, theta)
    assert "backward to theta" in learnt.problem and "backward" not in first.problem
    with torch.no_grad():
        assert plan_for(x, basis, theta) is first
    assert "backward to x and theta" in plan_for(x.clone().requires_grad_(), basis, theta).problem
    assert plan_for(x, basis, theta, max_bytes=1) is not learnt
    factors = LowRankTheta(torch.zeros(1, 32, 4), torch.zeros(1, 4, 24))
    assert plan_for(x, basis, factors).problem != learnt.problem


def test_a_layer_shows_its_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path))
    layer = Conv(Powers(3), 64, 8, max_bytes=10**9)
    index = torch.randint(0, 200, (2, 1000))
    graph, x = Graph(index, num_nodes=200), torch.randn(200, 64)
    with autotune():
        made = layer.plan(x, structure=graph)
    timed = [candidate for candidate in made.candidates if candidate.measured is not None]
    assert len(timed) >= 2 and made.measured == min(candidate.measured for candidate in timed)
    assert all(candidate.seconds > 0 and candidate.cost.peak_bytes >= 0 for candidate in made.candidates)
    assert "measured ms" in str(made) and "MB held" in str(made)
    layer.max_bytes = min(candidate.cost.peak_bytes for candidate in made.candidates)
    assert layer.plan(x, structure=graph).cost.peak_bytes == layer.max_bytes
