"""The choice of paths: by cost, by request and within bytes; plans as values that print, are remembered, and run."""

import dataclasses

import pytest
import torch
from torch import nn

from examples.literature import ROWS
from structconv import Causal, ConfigError, GCNConv, Graph, Grid, Mechanism, Powers, Window, conv, plan
from structconv.bases import Bilinear, Dense, Identity, Polynomial, Shift, Sparse
from structconv.nn import Conv, GATConv, Layer
from structconv.planning import Cost, Machine, Sizes, autotune
from structconv.planning import machine as machines
from structconv.planning import plan as plans
from structconv.planning.cost import lost_flops
from structconv.planning.counts import application, nonzeros
from structconv.weights import Eye, Full, HeadBlocks, LowRank, Shared
from tests.support.drawn import EVERY, drawn
from tests.support.layers import planned
from tests.support.plans import (
    check_plan_is_what_runs,
    check_plans_hold_no_tensor,
    plans_that_run,
)


def full(k, p, q, grad=False):
    return Full.of(torch.zeros(k, p, q, requires_grad=grad))


def chosen(x, basis, theta, **options):
    return plan(x, basis, theta, **options).path


def sparse(entries=500, edges=3000, size=1, dtype=torch.float32):
    index = torch.randint(0, entries, (2, edges))
    return Sparse(Graph(index, num_nodes=entries), torch.ones(size, edges, dtype=dtype))


def test_where_x_needs_no_gradient_the_structure_may_come_first():
    """Then nothing of the backward passes through the structure, and the cost says so."""
    basis, theta = sparse(), full(1, 32, 24, grad=True)
    x = torch.zeros(500, 32)
    costs = {c.path: c.cost.gathered for c in plan(x, basis, theta).candidates}
    with_x = {c.path: c.cost.gathered for c in plan(x.clone().requires_grad_(), basis, theta).candidates}
    assert with_x["structure_first"] == 2 * costs["structure_first"]
    assert with_x["channels_first"] == costs["channels_first"]


def test_costs_of_dense_paths_are_their_flops():
    basis, theta = Dense(torch.zeros(3, 50, 40)), full(3, 7, 5)
    costs = {c.path: c.cost.flops for c in plan(torch.zeros(2, 50, 7), basis, theta).candidates}
    assert costs["channels_first"] == 2 * 2 * 3 * 50 * 7 * 5 + 2 * 2 * 3 * 50 * 40 * 5
    assert costs["structure_first"] == 2 * 2 * 3 * 50 * 40 * 7 + 2 * 2 * 3 * 40 * 7 * 5
    assert costs["operator_first"] == 2 * 3 * 50 * 40 * 7 * 5 + 2 * 2 * 50 * 40 * 7 * 5


def test_the_operator_is_built_for_many_small_products_only():
    small = Dense(torch.zeros(16, 4, 4))
    assert chosen(torch.zeros(10_000, 4, 2), small, full(16, 2, 2)) == "operator_first"
    large = Dense(torch.zeros(4, 600, 600))
    made = plan(torch.zeros(100_000, 1, 1).expand(100_000, 600, 64), large, full(4, 64, 64))
    assert made.path != "operator_first"
    assert next(c for c in made.candidates if c.path == "operator_first").rejected == "only on request"


def test_the_side_with_fewer_channels_comes_first_and_low_rank_goes_between():
    assert chosen(torch.zeros(500, 128), sparse(), full(1, 128, 8)) == "channels_first"
    assert chosen(torch.zeros(500, 8), sparse(), full(1, 8, 128)) == "structure_first"
    scores = Bilinear(torch.zeros(8, 256, 16), torch.zeros(8, 256, 16)).softmax()
    assert chosen(torch.zeros(256, 128), scores, LowRank.of(
        torch.zeros(8, 128, 16), torch.zeros(8, 16, 128))) == "between"


def test_parts_have_their_own_plans():
    basis = sparse() | Shift(Grid(500), ((-1,), (0,), (1,)), "zeros")
    made = plan(torch.zeros(500, 128), basis, full(4, 128, 64))
    assert made.path == "per_part"
    assert [part.kernel for part in made.parts] == ["structconv.spmm", "torch.conv"]
    assert "torch.conv" in str(made)
    assert made.cost.flops > sum(part.cost.flops for part in made.parts) * 0.999


def test_max_bytes():
    basis, theta = sparse(size=4), full(4, 64, 8)
    x = torch.zeros(500, 64)
    held = {c.path: c.cost.peak_bytes for c in plan(x, basis, theta).candidates}
    assert held["channels_first"] == 4 * 512 * 8 * 4  # 512 is the greatest of the class of 500
    made = plan(x, basis, theta, max_bytes=int(held["channels_first"]))
    assert made.path == "channels_first"
    assert "over max_bytes" in str(made)
    tight = plan(x, basis, theta, max_bytes=1)
    assert tight.path == "channels_first"
    assert "all hold more than max_bytes" in tight.reason


def test_a_plan_prints_what_it_rejected():
    made = plan(torch.zeros(500, 128), sparse(), full(1, 128, 8))
    text = str(made)
    assert text.startswith("Sparse (K=1, M=500, N=500), Full(K=1, P=128, Q=8), x (500, 128) float32")
    for words in ("* channels_first", "structure_first", "operator_first", "GFLOP", "MB held", "cheapest",
                  "only on request"):
        assert words in " ".join(text.split())
    assert made.candidates[0].rejected == ""
    assert all(c.rejected for c in made.candidates[1:])


@pytest.fixture
def remembered(monkeypatch):
    """The plans that there are, none at first."""
    monkeypatch.setattr(plans, "_PLANS", {})
    return plans._PLANS


def test_plans_are_remembered_by_what_is_static(remembered):
    x, theta = torch.zeros(500, 16), full(1, 16, 8)
    first, wide = plan(x, sparse(), theta), Full.of(theta.theta.double())
    assert plan(torch.ones(500, 16), sparse(), full(1, 16, 8)) is first
    for other in (plan(torch.zeros(2, 500, 16), sparse(), theta), plan(x, sparse(edges=2000), theta),
                  plan(torch.zeros(600, 16), sparse(600), theta),
                  plan(x, sparse(), full(1, 16, 9)), plan(x.double(), sparse(dtype=torch.float64), wide),
                  plan(x, sparse(), theta, path="structure_first"), plan(x, sparse(), theta, max_bytes=10**9),
                  plan(x, sparse(), LowRank.of(torch.zeros(1, 16, 8), torch.zeros(1, 8, 8)))):
        assert other is not first
    assert len(remembered) == 9


@pytest.mark.parametrize("sizes", [(500, 510), (64 * 5, 300), (70, 72), (1 << 20, (1 << 20) - 1)])
def test_sizes_of_a_quarter_octave_share_a_plan(sizes, remembered):
    """A new graph in every step compiles nothing anew."""
    theta = full(1, 16, 8)
    one, other = (plan(torch.zeros(size, 16), sparse(size, 4 * size), theta) for size in sizes)
    assert one is other
    y = conv(torch.ones(sizes[1], 16), sparse(sizes[1], 4 * sizes[1]), theta, plan=one)
    assert y.shape == (sizes[1], 8)


def test_small_sizes_have_their_own_plans(remembered):
    for size in range(2, 65):
        plan(torch.zeros(size, 16), Identity(size), full(1, 16, 8))
    assert len(remembered) == 63


def test_plans_are_bounded(remembered, monkeypatch):
    monkeypatch.setattr(plans, "CAPACITY", 4)
    for entries in range(1, 9):
        latest = plan(torch.zeros(entries, 2), Identity(entries), full(1, 2, 2))
        assert plan(torch.zeros(entries, 2), Identity(entries), full(1, 2, 2)) is latest
        assert len(remembered) <= 4


def test_nonzeros():
    sizes = Sizes(batch=1, itemsize=4)
    assert nonzeros(sparse(), sizes) == 3072  # the greatest of the class of 3000
    assert nonzeros(sparse().transpose(), sizes) == 3072
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
        return plan(torch.zeros(500, 32), sparse(size=6), theta, path="channels_first").cost

    shared, own = cost(Shared.of(torch.zeros(32, 32), 6)), cost(full(6, 32, 32))
    assert own.flops - shared.flops == 5 * 2 * 512 * 32 * 32
    assert cost(Eye.of(6, 32)).peak_bytes == 0


def test_unknown_paths_are_errors():
    for path in ("sideways", "between"):
        with pytest.raises(ConfigError, match="path must be one of 'channels_first', 'operator_first', "
                                              f"'structure_first' for Identity; got '{path}'"):
            plan(torch.zeros(3, 2), Identity(3), full(1, 2, 2), path=path)


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
    """Three steps take longer than two where there is nothing to compute; of large inputs fewer channels are moved."""
    theta = HeadBlocks.of(torch.zeros(2, 64, 4))
    actual = [plan(torch.zeros(size, 64), sparse(size, 5 * size, size=2), theta) for size in (20, 20_000)]
    assert [made.path for made in actual] == ["channels_first", "between"]
    for made in actual:
        calls = {c.path: c.cost.calls for c in made.candidates}
        assert calls["between"] > calls["channels_first"] > 0


def test_one_identity_is_its_theta():
    x, theta = torch.randn(5, 3), Full.of(torch.randn(1, 3, 2))
    made = plan(x, Identity(5), theta)
    assert made.kernel == "one product"
    torch.testing.assert_close(conv(x, Identity(5), theta, plan=made), x @ theta.theta[0])
    assert plan(x, Identity(5, 2), full(2, 3, 2)).kernel != "one product"


def test_a_lookup_sees_what_a_plan_depends_on():
    basis, theta, x = sparse(), full(1, 32, 24), torch.zeros(500, 32)
    first = plan(x, basis, theta)
    assert plan(x, basis, theta) is first
    theta.theta.requires_grad_()
    learned = plan(x, basis, theta)
    assert "backward to theta" in learned.problem and "backward" not in first.problem
    with torch.no_grad():
        assert "backward" not in plan(x, basis, theta).problem
    assert "backward to x and theta" in plan(x.clone().requires_grad_(), basis, theta).problem
    assert plan(x, basis, theta, max_bytes=1) is not learned
    factors = LowRank.of(torch.zeros(1, 32, 4), torch.zeros(1, 4, 24))
    assert plan(x, basis, factors).problem != learned.problem


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


class Factor(Mechanism):
    """The identity, times a trained number."""

    def bind(self, channels):
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return torch.eye(inputs.num_inputs) * self.factor


def test_a_plan_says_to_what_gradients_go():
    layer, x = Conv(Factor(), 4, 4, weight=Eye()), torch.randn(5, 4)
    assert layer.plan(x).problem.endswith("forward and backward to the basis")
    assert layer.plan(x.clone().requires_grad_()).problem.endswith("forward and backward to x and the basis")
    with torch.no_grad():
        assert layer.plan(x).problem.endswith(", forward")


def test_measuring_again_makes_new_plans(tmp_path, monkeypatch):
    """What is decided by the rates of a machine is decided anew when they are."""
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(machines, "_KNOWN", {})
    layer, x = GATConv(16, 8, heads=4), torch.randn(500, 16)
    graph = Graph(torch.randint(0, 500, (2, 3000)), num_nodes=500)
    before = layer.plan(x, graph)
    assert layer.plan(x, graph) is before
    actual = machines.measure("cpu", seconds=0.001)
    after = layer.plan(x, graph)
    assert after is not before and layer.plan(x, graph) is after
    assert after.seconds == after.cost.seconds(actual)
    assert before.seconds == before.cost.seconds(machines.TYPICAL["cpu"])


def test_the_choice_changes_with_the_machine(tmp_path, monkeypatch):
    """Where calls are dear the path with the fewest, where memory is slow the one that moves least."""
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(machines, "_KNOWN", {})
    monkeypatch.setattr(machines, "_name", lambda device: "another")
    x, basis, theta = torch.zeros(2000, 64), sparse(2000, 10_000, size=2), HeadBlocks.of(torch.zeros(2, 64, 4))
    for call_us, path in ((1e4, "channels_first"), (1e-3, "between"), (1e4, "channels_first")):
        monkeypatch.setattr(machines, "_call_us", lambda *_, each=call_us: each)
        machines.measure("cpu", seconds=0.001)
        made = plan(x, basis, theta)
        assert made.path == path
        assert made.seconds == min(c.seconds for c in made.candidates if c.rejected != "only on request")


PLANNED = planned()
#: The layers that are made of `Conv`: pools have no options of planning.
USES = {name: make for name, make in PLANNED.items() if not name.startswith("pool")}


def called(use, **options):
    """The result of a layer whose convolutions have these options, and their plans."""
    for module in use.layer.modules():
        if isinstance(module, Layer) and "path" in vars(module):
            vars(module).update(options)
    with plans_that_run(outermost=True) as ran:
        y = use()
    return y, ran


@pytest.mark.parametrize("name", drawn(USES, 8))
def test_new_structures_and_masks_in_every_call_make_no_new_plan(name, remembered):
    first, second = USES[name](), USES[name]()
    first()
    there = dict(remembered)
    dataclasses.replace(second, layer=first.layer)()
    assert there and remembered == there


@pytest.mark.parametrize("name", drawn(USES, 6))
def test_every_layer_is_held_to_a_path(name):
    """Any path that its plan weighed, with the same numbers; another is an error."""
    use = USES[name]()
    expected, actual = called(use)
    paths = set.intersection(*({candidate.path for candidate in made.candidates} for made in actual))
    assert paths
    for path in paths:
        y, asked = called(use, path=path)
        assert {(made.path, made.reason) for made in asked} == {(path, "asked for")} and len(asked) == len(actual)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="path must be one of"):
        called(use, path="sideways")


@pytest.mark.parametrize("name", list(USES) if EVERY else list(USES)[1::6])
def test_every_layer_is_held_to_its_bytes(name):
    """What fits and is fastest is taken, or what holds least; the numbers stay."""
    use = USES[name]()
    expected, actual = called(use)
    for limit in {int(candidate.cost.peak_bytes) for made in actual for candidate in made.candidates} | {0}:
        y, limited = called(use, max_bytes=limit)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        for made in limited:
            weighed = [c for c in made.candidates if c.rejected != "only on request"]
            fitting = [c.seconds for c in weighed if c.cost.peak_bytes <= limit]
            least = min(c.cost.peak_bytes for c in weighed)
            assert made.seconds == min(fitting) if fitting else made.cost.peak_bytes == least


@pytest.mark.parametrize("name", drawn(PLANNED, 4))
def test_the_plan_that_a_layer_shows_is_the_one_that_runs_and_holds_no_tensor(name):
    use = PLANNED[name]()
    check_plan_is_what_runs(use.layer, *use.args, **use.kwargs)
    check_plans_hold_no_tensor(use)


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_of_each_row_of_the_literature_is_the_one_that_runs_and_holds_no_tensor(name):
    layer, inputs = ROWS[name].build(), ROWS[name].inputs()
    layer.max_bytes = 1 << 40  # a limit asks for a plan, also in a small call
    check_plan_is_what_runs(layer, **inputs)
    check_plans_hold_no_tensor(lambda: layer(**inputs))


def test_a_plan_is_frozen():
    plan = GCNConv(4, 4).plan(torch.randn(3, 4), Graph(torch.tensor([[0, 1], [1, 2]]), num_nodes=3))
    for name in ("run", "reason", "candidates", "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)
