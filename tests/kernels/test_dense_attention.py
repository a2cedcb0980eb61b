"""Dense attention in blocks, and by re-association, equals the expression evaluated pair by pair."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from structconv import ALiBi, BiAffine, Causal, Dense, DotProduct, Eye, Padding, RelativeBias, Window, ops, plan
from structconv.bases import Bilinear, Distance, Dropped, Lookup
from structconv.kernels import dense_attention, reassociation
from structconv.kernels.reassociation import causal_product
from structconv.mechanisms import ClippedShifts, RelativeKey
from structconv.planning import decide
from structconv.primitives import blocked_attention as blocks
from structconv.primitives.blocked_attention import Maps, Options, _composed, blocked_attention
from structconv.primitives.native import core
from tests.kernels.applied import (
    PRIMITIVES,
    application_of,
    applied,
    call_of,
    check_computes_the_same,
    expression,
    match_of,
    offered,
    problem_of,
)
from tests.support.derivatives import same
from tests.support.drawn import drawn, slow

BLOCKED_KERNEL, REASSOCIATED = "structconv.blocked_attention", "structconv.reassociated"
FUSED = "structconv.dense_attention"
N, P = 19, 8
DOT = DotProduct(heads=4).scaled()
KEEP = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) > 0.4
BLOCKED = {
    "learned bias": (DOT + RelativeBias(3)).softmax(),
    "buckets": (DOT + RelativeBias(6, buckets="log")).softmax(),
    "causal buckets": (DOT + RelativeBias(4, buckets="log_causal")).masked(keep=Causal()).softmax(),
    "alibi, padded": (ALiBi() + DOT).masked(keep=Padding(KEEP)).softmax(),
    "relative keys": (DOT + RelativeKey(2)).softmax(),
    "keys and bias": (DOT + RelativeKey(2) + 0.5 * RelativeBias(3, heads=4)).masked(keep=Causal()).softmax(),
    "two masks": (DOT + RelativeKey(2)).masked(keep=Causal()).masked(keep=Padding(KEEP)).softmax(),
    "a table of pairs": (DOT + RelativeBias(2)).masked(drop=Window(1)).softmax(),
    "dropout": DOT.softmax().dropout(0.4),
    "dropout under a mask": (DOT + RelativeBias(2)).masked(keep=Causal()).softmax().dropout(0.4),
    "sigmoid": DOT.masked(keep=Padding(KEEP)).normalize("sigmoid"),
    "relu, sum": DOT.relu().masked(keep=Causal()).normalize("sum"),
    "relu, count": DOT.relu().masked(keep=Causal()).normalize("count"),
    "softcap": DOT.softcap(2.0).softmax(),
    "bi-affine": BiAffine(heads=3).softmax(),
    "two products": (DOT + DotProduct(heads=4, dim=5)).softmax(),
}
LOW_RANK = {
    "as it is": DotProduct(heads=4), "scaled": DOT, "causal": DOT.masked(keep=Causal()),
    "count": DOT.normalize("count"), "count, causal": DOT.masked(keep=Causal()).normalize("count"),
    "count, padded": DOT.masked(keep=Padding(KEEP)).normalize("count"),
    "count over outputs": DOT.normalize("count", over="outputs"),
    "sum": DotProduct(heads=2, feature=torch.nn.functional.softplus).normalize("sum"),
    "sum, both masks": DotProduct(heads=2, feature=torch.exp).masked(keep=Causal()).masked(
        keep=Padding(KEEP)).normalize("sum"),
    "sum over outputs": DotProduct(heads=2, feature=torch.exp).masked(keep=Padding(KEEP)).normalize("sum", "outputs"),
    "two products": (DOT + DotProduct(heads=4, dim=3)).normalize("count"),
}
OTHERS = {
    "fused by torch": DOT.softmax(),
    "listed": (DOT + RelativeBias(2)).masked(keep=Window(2)).softmax(),
    "over outputs": (DOT + RelativeBias(2)).softmax(over="outputs"),
    "unknown map": DOT.map(torch.sin).softmax(),
    "map below a sum": (DOT.tanh() + RelativeBias(2)).softmax(),
    "positions alone": RelativeBias(2, heads=2).softmax(),
    "rows of two kinds": (DOT + RelativeKey(2) + RelativeKey(3)).softmax(),
}


@pytest.fixture(params=[(1 << 20, 256), (64, 4), (700, 5)], ids=["one block", "rows", "blocks"])
def sizes(request, monkeypatch):
    monkeypatch.setattr(blocks, "BUFFER", request.param[0])
    monkeypatch.setattr(blocks, "ROWS", request.param[1])
    monkeypatch.setattr(reassociation, "CHUNK", request.param[1])
    monkeypatch.setattr(dense_attention, "HELD_RELATIVE", 0)


def built(mechanism, dtype=torch.float64):
    x = torch.randn(2, N, P, dtype=dtype, requires_grad=True)
    return expression(mechanism.bound(P).to(dtype), x, channels=6)


@pytest.mark.parametrize("name", drawn(BLOCKED, 2))
def test_blocks_compute_the_same(name, sizes):
    """In each dtype, of which every second expression has the other; in float32 another kernel has the dropout."""
    exact = name == "dropout" or (list(BLOCKED).index(name) + blocks.ROWS) % 2
    dtype, tolerance = (torch.float64, 1e-10) if exact else (torch.float32, 1e-4)
    check_computes_the_same(built(BLOCKED[name], dtype), BLOCKED_KERNEL, tolerance)


@pytest.mark.skipif(core() is None, reason="the native kernels are turned off")
@pytest.mark.parametrize("mechanism", [DOT.softmax().dropout(0.4), DOT.masked(keep=Causal()).softmax().dropout(0.4),
                                       DOT.masked(keep=Causal()).masked(keep=Padding(KEEP)).softmax(),
                                       DOT.masked(keep=Padding(KEEP)).softmax().dropout(0.4)])
def test_dropout_and_padding_under_an_order_are_the_native_kernels(mechanism):
    check_computes_the_same(built(mechanism, torch.float32), FUSED, 1e-4)
    assert FUSED not in offered(built(mechanism)[2])


@pytest.mark.parametrize("name", LOW_RANK)
def test_reassociation_computes_the_same(name, sizes):
    basis, leaves, call = built(LOW_RANK[name])
    r = call.projected
    for each in (call_of(basis, r), call):
        form = application_of(REASSOCIATED, each)
        same(form.apply(r, each), basis.apply(r), leaves, 1e-10, 1e-10)
        torch.testing.assert_close(form.apply(r, each), basis.dense().mT @ r, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(form.synthesize()(r, each), basis.synthesis(r), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(form.analyze()(r[:, 0], each), basis.analysis(r[:, 0]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OTHERS)
def test_what_blocks_cannot_compute_is_left_alone(name):
    assert BLOCKED_KERNEL not in offered(built(OTHERS[name])[2])


@pytest.mark.parametrize("mechanism", [DOT.softmax(), DOT.relu().normalize("sum"), DOT.masked(drop=Window(1)),
                                       DOT.masked(keep=Causal()).normalize("sum", over="outputs")])
def test_what_has_no_low_rank_is_not_reassociated(mechanism):
    assert REASSOCIATED not in offered(built(mechanism)[2])


def test_small_relative_terms_are_held_whole_for_torch():
    for scores in (DOT + RelativeBias(3), ALiBi() + DOT, DOT + RelativeKey(2)):
        check_computes_the_same(built(scores.softmax()), FUSED, 1e-10)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_table_of_numbers_goes_to_torch_with_its_mask(heads):
    query, key, table, r = (torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in (
        (4, N, P), (4, N, P), (heads, N, N), (4, N, P)))
    absent = torch.zeros(N, N, dtype=torch.bool)
    absent[3:, 0] = absent[:, 5] = True  # some inputs of output 0, all of output 5
    scores = Bilinear(query, key).scaled() + Dense(table.masked_fill(absent, -torch.inf))
    basis = scores.masked(keep=Padding(KEEP)).softmax()
    assert plan(r.flatten(0, 1)[0], basis, Eye.of(4, P)).kernel == FUSED
    held = query, key, table, r
    y, expected = ops.apply(basis, r), basis.dense().mT @ r
    grads, reference = (torch.autograd.grad(t.sin().sum(), held, retain_graph=True) for t in (y, expected))
    torch.testing.assert_close((y, *grads), (expected, *reference), rtol=1e-10, atol=1e-10)
    assert y[:, :, 5].eq(0).all()


def test_the_planner_reassociates_where_that_is_cheaper():
    x = torch.randn(4096, 16)
    scores = DotProduct(heads=2, dim=16).bound(16).basis(x)
    for basis in (scores.normalize("count"), scores):
        assert plan(x, basis, Eye.of(2, 16)).kernel == REASSOCIATED
    small = torch.randn(8, 64)
    basis = DotProduct(heads=1, dim=64).bound(64).basis(small).normalize("count")
    assert plan(small, basis, Eye.of(1, 64)).kernel != REASSOCIATED
    assert decide(problem_of(call_of(basis, small.unsqueeze(0)))).kernel != REASSOCIATED


@pytest.mark.parametrize("scores", [DOT, DOT + RelativeBias(2), DOT.relu()], ids=["dot", "bias", "relu"])
@pytest.mark.parametrize("kind", ["softmax", "count"])
@pytest.mark.parametrize("mask", [Causal(), Padding(KEEP)], ids=["causal", "padding"])
def test_strangers_do_not_leak(scores, kind, mask, sizes):
    """What is not finite at an input reaches the outputs that see it, and no other."""
    _, (r, *_), call = built(scores.masked(keep=mask).normalize(kind))
    made = decide(problem_of(call))
    assert made.kernel != PRIMITIVES
    unseen = ~KEEP if isinstance(mask, Padding) else (torch.arange(N) >= N - 3).expand(2, N)
    reached = torch.zeros_like(unseen) if isinstance(mask, Padding) else unseen
    dirty = r.detach().masked_fill(unseen[:, None, :, None], torch.nan)
    y, clean = (made.run(call._replace(projected=t)).movedim(1, -1)[~reached] for t in (dirty, r))
    torch.testing.assert_close(y, clean)


def test_an_output_without_inputs_is_zero_and_gives_no_gradient(sizes):
    q, k = (torch.randn(2, N, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    table = torch.zeros(2, 1, 5, dtype=torch.float64, requires_grad=True)
    nothing = Padding(torch.zeros(N, dtype=torch.bool))
    basis = (Bilinear(q, k) + Lookup(table, "clip", 2, N, N)).masked(keep=nothing).softmax()
    r = torch.randn(2, N, 3, dtype=torch.float64)
    y = applied(basis, r, BLOCKED_KERNEL)
    assert not y.any()
    assert all(not g.any() for g in torch.autograd.grad(y.sum(), [q, k, table]))
    hidden = Bilinear(q, k) + Lookup(table.detach() - torch.inf, "clip", 2, N, N)
    assert not applied(hidden.softmax(), r, BLOCKED_KERNEL).any()


def test_a_batch_of_values_shares_the_dropout_of_the_weights():
    q = torch.randn(2, N, 4, dtype=torch.float64)
    basis = Dropped(Bilinear(q, q).softmax(), 0.4, torch.tensor(3))
    r = torch.randn(3, 2, N, 5, dtype=torch.float64)
    torch.testing.assert_close(applied(basis, r, BLOCKED_KERNEL), basis.dense().mT @ r)


@pytest.mark.parametrize("name", ["learned bias", "relative keys", "dropout under a mask", "relu, sum"])
def test_weights_by_offset_are_those_of_the_outer_product(name, sizes):
    basis, (r, *leaves), call = built(BLOCKED[name])
    call = call._replace(relative=torch.randn(5, 6, dtype=r.dtype))
    y, actual = application_of(BLOCKED_KERNEL, call).shares(r, 2, call)
    shifts = ClippedShifts(2).bound(P).basis(leaves[0])
    expected = basis.outer(shifts).analysis(leaves[0].new_ones(N, 1)).squeeze(-1).unflatten(-2, (basis.size, 5)).mT
    torch.testing.assert_close(y, basis.apply(r), rtol=1e-10, atol=1e-10)
    same(actual, expected, leaves, 1e-10, 1e-10)


def problem(heads=2, dtype=torch.float64, *, weights="softmax", p=0.0):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2 * heads, size, 3, dtype=dtype, requires_grad=True) for size in (5, 7, 7))
    diagonal = torch.randn(2 * heads, 11, dtype=dtype, requires_grad=True)
    rows = torch.randn(2 * heads, 5, 3, dtype=dtype, requires_grad=True)
    bucket = torch.arange(-4, 7).clamp(-1, 1) + 1
    keep = torch.rand(1, heads, 7, 5) > 0.3
    return (q, k, v, Maps(diagonal, rows, bucket, keep, torch.tensor(7)),
            Options(weights, "tanh", 2.0, False, 0.5, p, heads))


@pytest.mark.parametrize("weights", blocks.WEIGHTS)
def test_the_operator_has_its_derivatives_of_first_and_second_order(weights):
    q, k, v, terms, options = problem(weights=weights, p=0.3)
    leaves = (q, k, v, terms.diagonal, terms.rows)

    def value(q, k, v, diagonal, rows):
        return blocked_attention(q, k, v, terms._replace(diagonal=diagonal, rows=rows), options, buckets=3)

    torch.testing.assert_close(value(*leaves), _composed(q, k, v, *terms, *options, 3))
    torch.autograd.gradcheck(value, leaves, fast_mode=True)
    torch.autograd.gradgradcheck(value, leaves, fast_mode=True)


def test_bfloat16_is_summed_in_float32():
    q, k, v, terms, options = problem(dtype=torch.bfloat16)
    terms = terms._replace(rows=None)
    y, _ = blocked_attention(q, k, v, terms, options)
    wide = [t.float() for t in (q, k, v, terms.diagonal)]
    exact, _ = blocked_attention(*wide[:3], terms._replace(diagonal=wide[3]), options)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact.bfloat16().float())


@slow
def test_compiled_and_exported_attention_is_the_same():
    q, k, v = (torch.randn(1, 2, N, 4) for _ in range(3))
    table, slope = torch.randn(2, 1, 5), torch.tensor([0.5, 0.25])

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, table, slope):
            scores = Bilinear(q, k) * 0.5 + Lookup(table, "clip", 2, N, N) + Distance(slope, N, N)
            nonlocal_block = Bilinear(q, k).normalize("count")
            return ops.apply(scores.masked(keep=Causal()).softmax(), v) + ops.apply(nonlocal_block, v)

    arguments, layer = (q, k, v, table, slope), Layer()
    expected = layer(*arguments)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments), expected)
    torch.testing.assert_close(torch.export.export(layer, arguments).module()(*arguments), expected)


def test_the_causal_product_takes_more_inputs_than_outputs_and_fewer():
    for outputs, inputs in ((300, 140), (140, 300)):
        q, k, v = (torch.randn(2, size, 3, dtype=torch.float64) for size in (outputs, inputs, inputs))
        expected = (q @ k.mT).tril() @ v
        torch.testing.assert_close(causal_product(q, k, v), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sizes", [(40, 40), (50, 40), (40, 50)], ids=["square", "more inputs", "more outputs"])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_what_comes_later_does_not_leak(backend, sizes, bad):
    inputs, outputs = sizes
    for which in range(3):
        leaves = [torch.randn(2, size, 4) for size in (outputs, inputs, inputs)]
        clean = ops.apply(Bilinear(*leaves[:2]).masked(keep=Causal()).softmax(), leaves[2])
        leaves[which][:, 30:] = bad
        q, k, v = leaves
        basis = Bilinear(q, k).masked(keep=Causal()).softmax()
        with sdpa_kernel(backend):
            y = applied(basis, v, FUSED)
        torch.testing.assert_close(y[:, :30], clean[:, :30])


def test_torch_fuses_causal_attention_without_a_table():
    actual = built(DOT.masked(keep=Causal()).softmax())
    match = match_of(FUSED, actual[2])
    assert match.existing.causal
    assert not match.existing.masked
    check_computes_the_same(actual, FUSED, 1e-10)
