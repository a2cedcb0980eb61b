"""Functional transforms pass through every operator of the library and give what `.backward()` gives."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, jacrev, vjp, vmap

from structconv.nn import ChebConv, GATConv, GATv2Conv, RelationalConv
from structconv.primitives import products  # noqa: F401  (defines its operators)
from structconv.primitives.blocked_attention import blocked_attention
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.dense_blocks import Maps, Options
from structconv.primitives.grouped import group_outer, group_products
from structconv.primitives.layout import compress
from structconv.primitives.native.additive import additive_attention
from structconv.primitives.native.additive_dense import dense_additive_attention
from structconv.primitives.native.affine import affine_attention
from structconv.primitives.native.bilinear import bilinear_attention
from structconv.primitives.native.conditioned import conditioned_product
from structconv.primitives.native.joint import joint_attention
from structconv.primitives.native.operator import OPERATORS
from structconv.primitives.native.product import spmm_add
from structconv.primitives.native.projected import projected_attention
from structconv.primitives.native.recurrence import polynomial_analysis, polynomial_synthesis
from structconv.primitives.native.weights import additive_weights, affine_weights, bilinear_weights
from structconv.primitives.native.window import window_attention
from structconv.primitives.segments import masked_softmax, segment_softmax
from structconv.primitives.shifted import shift_products
from structconv.structures import Graph, KnowledgeGraph

M, N, E, K = 7, 6, 20, 2
OPTIONS = Options("softmax", "identity", 1.0, True, 0.5, 0.0, K)
DROP = {"dropout": 0.3, "seed": torch.tensor(3)}


def layouts(m, n):
    g = torch.Generator().manual_seed(1)
    source, target = torch.randint(m - 1, (E,), generator=g), torch.randint(n - 1, (E,), generator=g)
    return compress(target, source, n), compress(source, target, m)


JOINED, SQUARE, INDEX = layouts(M, N), layouts(M, M), torch.tensor([0, 0, 2, 2, 2, 1])

#: What each operator computes, and the shapes that its gradients are taken of.
CASES = {
    "affine_attention": (lambda s, t, x: affine_attention(*JOINED, s, t, x, **DROP), [(M, K), (N, K), (M, K, 3)]),
    "projected_attention": (lambda x, u, v, z, b: projected_attention(*JOINED, x, u, v, z, b, **DROP),
                            [(M, K, 3), (K, 3), (K, 3), (N, K, 3), (K, 3)]),
    "bilinear_attention": (lambda q, k, v, b: bilinear_attention(*JOINED, q, k, v, b, scale=0.5, **DROP),
                           [(N, K, 4), (M, K, 4), (M, K, 3), (K, E)]),
    "joint_attention": (lambda t, q, b: joint_attention(*JOINED, t, q, b, heads=K, depth=4, scale=0.5, **DROP),
                        [(M, K * (4 + 3)), (N, K, 4), (K, E)]),
    "additive_attention": (lambda q, k, x, v: additive_attention(*JOINED, q, k, x, v, activation="tanh", **DROP),
                           [(N, K, 4), (M, K, 4), (M, K, 3), (K, 4)]),
    "dense_additive_attention": (lambda q, k, x, v: dense_additive_attention(q, k, x, v, **DROP),
                                 [(N, K, 4), (M, K, 4), (M, K, 3), (K, 4)]),
    "window_attention": (lambda q, k, v, t: window_attention(q, k, v, t, shape=(M,), below=(1,), above=(1,),
                                                             dilation=(1,), **DROP),
                         [(M, K, 4), (M, K, 4), (M, K, 3), (K, 3)]),
    "conditioned_product": (lambda v, x, t: conditioned_product(*JOINED, v, x, t), [(E, K), (M, 3), (K, 3, 2)]),
    "affine_weights": (lambda s, t: affine_weights(*JOINED, s, t, **DROP), [(M, K), (N, K)]),
    "bilinear_weights": (lambda q, k, b: bilinear_weights(*JOINED, q, k, b, **DROP), [(N, K, 4), (M, K, 4), (K, E)]),
    "additive_weights": (lambda q, k, v: additive_weights(*JOINED, q, k, v, activation="tanh", **DROP),
                         [(N, K, 4), (M, K, 4), (K, 4)]),
    "blocked_attention": (lambda q, k, v, d, r: torch.cat(blocked_attention(
        q, k, v, Maps(d, r, torch.arange(M + M - 1) % 3, None, None), OPTIONS, buckets=3), -1),
        [(K, M, 4), (K, M, 4), (K, M, 3), (K, M + M - 1), (K, M, 3)]),
    "spmm": (lambda values, x: spmm(*JOINED, values, x), [(E,), (M, 3)]),
    "sddmm": (lambda q, k: sddmm(*JOINED, q, k), [(N, 4), (M, 4)]),
    "spmm_add": (lambda values, x, z: spmm_add(*JOINED, values, x, z, alpha=2.0), [(E,), (M, 3), (N, 3)]),
    "polynomial_analysis": (lambda x: polynomial_analysis(*SQUARE, None, x, order=2), [(M, 3)]),
    "polynomial_synthesis": (lambda r: polynomial_synthesis(*SQUARE, None, r), [(3, M, 2)]),
    "shift_products": (lambda x, w: shift_products(x, w, [-1, 0, 2]), [(1, M, 3), (3, 3, 2)]),
    "shift_correlation": (lambda x, g: torch.ops.structconv.shift_correlation(x, g, [-1, 0, 2]),
                          [(1, M, 3), (1, M, 2)]),
    "group_products": (lambda x, w: group_products(x, w, [0, 3, 3, M]), [(M, 3), (3, 3, 2)]),
    "group_outer": (lambda x, y: group_outer(x, y, [0, 3, 3, M]), [(M, 3), (M, 2)]),
    "project": (lambda x, w, b: torch.ops.structconv.project(x, w, b), [(M, 3), (3, 2), (2,)]),
    "project_relu": (lambda x, w, b: torch.ops.structconv.project_relu(x, w, b), [(M, 3), (3, 2), (2,)]),
    "outer": (lambda x, y: torch.ops.structconv.outer(x, y), [(M, 3), (M, 2)]),
}
#: What has derivatives of its own without being an operator.
FUNCTIONS = {
    "segment_softmax": (lambda s: segment_softmax(s, INDEX, 4), [(2, 6)]),
    "masked_softmax": (lambda s: masked_softmax(s, torch.ones(N, M).tril() > 0, -1), [(N, M)]),
    "recompute_blocks": (lambda x, w: recompute_blocks(lambda rows, x, w: (x[rows] @ w).tanh(), [x, w],
                                                       [slice(0, 4), slice(4, M)], reduce="cat"), [(M, 3), (3, 2)]),
}
ALL = CASES | FUNCTIONS


def case(name, dtype=torch.float64):
    """A number that depends on an operator's arguments, the arguments, and the places of all of them."""
    fn, shapes = ALL[name]
    torch.manual_seed(len(name))
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return (lambda *t: fn(*t).tanh().square().sum()), tensors, tuple(range(len(tensors)))


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def close(found, wanted, tol=1e-9):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=tol, atol=tol)


def squares(grads):
    return sum(g.square().sum() for g in grads)


def test_no_operator_is_left_out():
    assert set(CASES) == {name for name in OPERATORS if not name.endswith("_backward")} - {"layouts"}


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", ALL)
def test_gradients(name, dtype, tol):
    fn, tensors, every = case(name, dtype)
    wanted = torch.autograd.grad(fn(*(inputs := leaves(tensors))), inputs)
    close(grad(fn, every)(*tensors), wanted, tol)
    value, pull = vjp(fn, *tensors)
    torch.testing.assert_close(value, fn(*tensors))
    close(pull(torch.tensor(2.0, dtype=dtype)), [2 * w for w in wanted], tol)


@pytest.mark.parametrize("name", ALL)
def test_second_derivatives(name):
    """Of all arguments; of one within a function of another; and with the graph of autograd outside or inside."""
    fn, tensors, every = case(name)
    inputs = leaves(tensors)
    first = torch.autograd.grad(fn(*inputs), inputs, create_graph=True)
    wanted = torch.autograd.grad(squares(first), inputs, retain_graph=True)
    close(grad(lambda *t: squares(grad(fn, every)(*t)), every)(*tensors), wanted)
    close(torch.autograd.grad(squares(grad(fn, every)(*inputs)), inputs), wanted)
    _, pull = vjp(fn, *inputs)
    close(torch.autograd.grad(squares(pull(torch.ones((), dtype=torch.float64))), inputs), wanted)
    for other in every[1:]:
        mixed = torch.autograd.grad(first[other].square().sum(), inputs[0], retain_graph=True)

        def inner(t, other=other):
            return grad(lambda *u: fn(t, *u), other - 1)(*tensors[1:]).square().sum()

        close([grad(inner)(tensors[0])], mixed)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_jacobian_one_at_a_time(name):
    _, tensors, _ = case(name)
    fn = ALL[name][0]
    wanted = torch.autograd.functional.jacobian(lambda t: fn(t, *tensors[1:]).sum(-1), tensors[0])
    close([jacrev(lambda t: fn(t, *tensors[1:]).sum(-1), chunk_size=1)(tensors[0])], [wanted])


@pytest.mark.parametrize("name", CASES)
def test_compiled_gradients(name):
    fn, tensors, every = case(name)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: grad(fn, every)(*t), fullgraph=True, backend="aot_eager")
    close(compiled(*tensors), grad(fn, every)(*tensors))


@pytest.mark.parametrize("name", [name for name in CASES if f"{name}_backward" in OPERATORS])
def test_backward_operators_hold_their_contract(name, monkeypatch):
    """With the arguments that a backward calls them with, and gradients of their own asked for."""
    operator, calls = getattr(torch.ops.structconv, f"{name}_backward").default, []
    fn, tensors, _ = case(name)
    inputs = leaves(tensors)

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operator:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    loss = fn(*inputs)
    with Record():
        torch.autograd.grad(loss, inputs)
    (arguments,) = calls
    arguments = [t.detach().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t
                 for t in arguments]
    torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_autograd_registration",
                                                                  "test_faketensor"))


LAYERS = {
    "GATConv": (lambda: GATConv(4, 3, heads=2), Graph),
    "GATv2Conv": (lambda: GATv2Conv(4, 3, heads=2), Graph),
    "ChebConv": (lambda: ChebConv(4, 3, K=3), Graph),
    "RelationalConv": (lambda: RelationalConv(4, 3, 2), lambda index, num_nodes: KnowledgeGraph(
        torch.stack([index[0], torch.arange(30) % 2, index[1]], 1), num_nodes, ["a", "b"])),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers(name):
    build, structure = LAYERS[name]
    layer, graph, x = build(), structure(torch.randint(0, 9, (2, 30)), num_nodes=9), torch.randn(9, 4)
    weights = dict(layer.named_parameters())
    found = grad(lambda w: functional_call(layer, w, (x, graph)).square().sum())(weights)
    layer(x, graph).square().sum().backward()
    close([found[name] for name in weights], [t.grad for t in weights.values()], 1e-4)
    value, pull = vjp(lambda w: functional_call(layer, w, (x, graph)), weights)
    (found,) = pull(2 * value.detach())
    close([found[name] for name in weights], [t.grad for t in weights.values()], 1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the operators have no batching rule
def test_gradients_one_for_each_sample():
    fn, tensors, _ = case("affine_attention", torch.float32)
    first = torch.stack([tensors[0], 2 * tensors[0]])
    found = vmap(grad(fn), in_dims=(0, None, None))(first, *tensors[1:])
    close(found, [grad(fn)(s, *tensors[1:]) for s in first], 1e-5)
