"""Relations by their distinct pairs, or by mixed matrices: values, gradients and memory against one `Sparse` each."""

import pytest
import torch

from structconv import Eye, Full, Graph, Grouped, KnowledgeGraph, LowRank, Relations, Separable, Shared, conv, plan
from structconv.bases import Sparse, Typed
from structconv.kernels import relational
from structconv.testing import by_definition
from structconv.testing.specimens import with_leaves
from tests.kernels.applied import LargestTensor
from tests.support.derivatives import same

F64 = torch.float64
P = 4
THETAS = {
    "full": lambda k: Full.of(torch.randn(k, P, 6, dtype=F64)),
    "separable": lambda k: Separable.of(torch.randn(k, 2, dtype=F64), torch.randn(2, P, 6, dtype=F64)),
    "grouped": lambda k: Grouped.of(torch.randn(k, 2, 2, 3, dtype=F64)),
    "low rank": lambda k: LowRank.of(torch.randn(1, P, 2, dtype=F64), torch.randn(k, 2, 3, dtype=F64)),
    "shared": lambda k: Shared.of(torch.randn(P, 3, dtype=F64), k),
    "eye": lambda k: Eye.of(k, P),
}


def typed(m=9, n=7, edges=40, count=5, weighted=True):
    """Repeated edges; the last input, output and type have none."""
    index = torch.stack([torch.randint(0, m - 1, (edges,)), torch.randint(0, n - 1, (edges,))])
    values = torch.randn(edges, dtype=F64) if weighted else None
    return Typed(Graph(index, num_inputs=m, num_outputs=n), torch.randint(0, count - 1, (edges,)), count, values)


CASES = {
    "bipartite": typed,
    "few inputs": lambda: typed(m=3, n=20),
    "few outputs": lambda: typed(m=20, n=3),
    "ones": lambda: typed(weighted=False),
    "one type": lambda: Typed(Graph(torch.tensor([[0, 1, 1], [2, 2, 2]]), num_nodes=4),
                              torch.zeros(3, dtype=torch.int64), 1, torch.randn(3, dtype=F64)),
    "no edges": lambda: Typed(Graph(torch.zeros(2, 0, dtype=torch.int64), num_inputs=3, num_outputs=2),
                              torch.zeros(0, dtype=torch.int64), 2, torch.zeros(0, dtype=F64)),
    "int32": lambda: Typed(Graph(torch.tensor([[0, 2, 1], [1, 1, 0]], dtype=torch.int32), num_nodes=3),
                           torch.tensor([1, 0, 1]), 3),
}


def parts(basis, values):
    """The same matrices, each as a `Sparse`."""
    kept = [basis.kind == k for k in range(basis.count)]
    values = torch.ones(basis.graph.num_edges, dtype=F64) if values is None else values
    return Sparse.stack([Sparse(basis.graph.select(keep), values[keep]) for keep in kept])


def paths(theta):
    actual = ["per_relation"] if not isinstance(theta, Shared | Eye) else []
    return [*actual, "mixed_first"] if isinstance(theta, Separable | Shared | Eye) else actual


@pytest.mark.parametrize(("name", "theta_name", "blocks"), [
    (name, theta, (1 << 24, 256)[(at + number) % 2]) for at, name in enumerate(CASES)
    for number, theta in enumerate(THETAS)])
def test_values_and_gradients(name, theta_name, blocks, monkeypatch):
    monkeypatch.setattr(relational, "BLOCK_BYTES", blocks)
    given = CASES[name]()
    theta, leaves = with_leaves(THETAS[theta_name](given.count))
    values = None if given.values is None else given.values.clone().requires_grad_()
    leaves += [] if values is None else [values]
    basis = Typed(given.graph, given.kind, given.count, values)
    for lead in ((), (2,)):
        x = torch.randn(*lead, basis.num_inputs, P, dtype=F64, requires_grad=True)
        other = parts(given, values)
        reference = by_definition(x, other, theta)
        torch.testing.assert_close(conv(x, other, theta), reference, rtol=0, atol=1e-10)
        for path in (*paths(theta), None):
            same(conv(x, basis, theta, path=path), reference, [x, *leaves], 0, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bipartite", "few inputs", "few outputs", "ones"])
def test_native_products_in_blocks_agree_with_float64(name, dtype, monkeypatch):
    monkeypatch.setattr(relational, "BLOCK_BYTES", 256)
    given, leaf = CASES[name](), {"dtype": F64, "requires_grad": True}
    exact = [torch.randn(2, given.num_inputs, P, **leaf), torch.randn(given.count, P, 3, **leaf)]
    exact += [] if given.values is None else [given.values.clone().requires_grad_()]

    def run(x, theta, values=None):
        y = conv(x, Typed(given.graph, given.kind, given.count, values), theta, path="per_relation")
        return y, *torch.autograd.grad(y.sin().sum(), [x, theta] + ([] if values is None else [values]))

    coarse = [t.detach().to(dtype).requires_grad_() for t in exact]
    wide = [t.detach().to(F64).requires_grad_() for t in coarse]
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for ours, expected in zip(run(*coarse), run(*wide), strict=True):
        torch.testing.assert_close(ours.to(F64), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("name", ["few inputs", "few outputs"])
def test_an_empty_batch(name):
    given = CASES[name]()
    x = torch.randn(0, given.num_inputs, P, dtype=F64, requires_grad=True)
    theta = torch.randn(given.count, P, 3, dtype=F64, requires_grad=True)
    y = conv(x, given, theta, path="per_relation")
    assert y.shape == (0, given.num_outputs, 3)
    y.sum().backward()
    assert x.grad.shape == x.shape and not theta.grad.any()


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("name", ["few inputs", "few outputs"])
def test_one_gradient_at_a_time(name, needed, monkeypatch):
    monkeypatch.setattr(relational, "BLOCK_BYTES", 256)
    given = CASES[name]()
    tensors = [torch.randn(given.num_inputs, P, dtype=F64), torch.randn(given.count, P, 3, dtype=F64), given.values]
    for tensor, need in zip(tensors, needed, strict=True):
        tensor.requires_grad_(need)
    x, theta, values = tensors
    y = conv(x, Typed(given.graph, given.kind, given.count, values), theta, path="per_relation")
    expected = by_definition(x, parts(given, values), theta)
    same(y, expected, [t for t in tensors if t.requires_grad], 0, 1e-10)


@pytest.mark.parametrize("name", ["few inputs", "few outputs"])
def test_second_derivatives(name, monkeypatch):
    monkeypatch.setattr(relational, "BLOCK_BYTES", 256)
    given = CASES[name]()
    x = torch.randn(given.num_inputs, 2, dtype=F64, requires_grad=True)
    theta = torch.randn(given.count, 2, 2, dtype=F64, requires_grad=True)
    values = given.values.clone().requires_grad_()

    def run(x, theta, values):
        return conv(x, Typed(given.graph, given.kind, given.count, values), theta, path="per_relation")

    assert torch.autograd.gradcheck(run, (x, theta, values), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, theta, values), fast_mode=True)


def test_blocks_on_the_diagonal_stay_blocks(monkeypatch):
    basis, theta, x = typed(), THETAS["grouped"](5), torch.randn(9, P, dtype=F64)
    padded = conv(x, basis, theta, path="per_relation")
    monkeypatch.setattr(relational, "NARROW", 1)
    torch.testing.assert_close(conv(x, basis, theta, path="per_relation"), padded, rtol=0, atol=1e-12)


def test_a_stranger_does_not_leak():
    basis = typed()
    x = torch.randn(9, P, dtype=F64)
    x[2] = torch.nan
    reached = (basis.dense()[:, 2] != 0).any(0)
    assert reached.any() and not reached.all()
    for path in ("per_relation", None):
        y = conv(x, basis, THETAS["full"](5), path=path)
        assert y.isnan().any(-1).equal(reached)
        assert not conv(torch.ones(9, P, dtype=F64), basis, THETAS["full"](5), path=path)[-1].any()


def test_the_planner_takes_it_for_many_relations():
    knowledge = large()
    made = plan(*problem(knowledge, Full.of(torch.randn(50, 32, 32, requires_grad=True))))
    assert made.path == "per_relation"
    mixed = Separable.of(torch.randn(50, 2, requires_grad=True), torch.randn(2, 32, 32, requires_grad=True))
    assert plan(*problem(knowledge, mixed)).path == "mixed_first"
    assert plan(*problem(knowledge, Eye.of(50, 32))).path == "mixed_first"


def large(entities=2000, triples=20000, relations=50):
    index = [torch.randint(0, high, (triples,)) for high in (entities, relations, entities)]
    return KnowledgeGraph(torch.stack(index, 1), entities, [f"r{k}" for k in range(relations)])


def problem(knowledge, theta):
    x = torch.randn(knowledge.num_entities, 32, requires_grad=True)
    return x, Relations(theta.size).basis(x, structure=knowledge), theta


@pytest.mark.parametrize("limit", [1 << 24, 1 << 18])
def test_never_all_heads_of_all_entries_nor_channels_of_edges(limit, monkeypatch):
    monkeypatch.setattr(relational, "BLOCK_BYTES", limit)
    knowledge = large(entities=400, triples=20000, relations=10)
    x, basis, theta = problem(knowledge, Full.of(torch.randn(10, 32, 32, requires_grad=True)))
    pairs = min(relational.counts(basis))
    assert pairs < 400 * 10 < 20000
    with LargestTensor() as largest:
        conv(x, basis, theta, path="per_relation").sum().backward()
    assert 400 * 32 <= largest.elements <= max(min(pairs * 32, limit // 4), 400 * 32, 20000)
    assert x.grad.isfinite().all() and theta.theta.grad.isfinite().all()


@pytest.mark.parametrize("path", [None, "structure_first", "channels_first"])
def test_values_of_one_basis_reach_no_other(path):
    """Several bases over the same edges and types, also after a change in place."""
    graph, kind = Graph(torch.randint(0, 20, (2, 90)), num_nodes=20), torch.randint(0, 3, (90,))
    x, theta = torch.randn(20, 6), torch.randn(3, 6, 16, requires_grad=True)
    values = [torch.rand(90), torch.rand(90), None]
    for own in (*values, *reversed(values), values[0].mul_(2)):
        basis = Typed(graph, kind, 3, own)
        expected = torch.einsum("kmn,mp,kpq->nq", basis.dense(), x, theta)
        torch.testing.assert_close(conv(x, basis, theta, path=path), expected, rtol=1e-4, atol=1e-4)
