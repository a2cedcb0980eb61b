"""Derivatives in both modes and of second order, and batches, of every operator and of the layers over them.

Forward derivatives are held against finite differences, everything of second order against a double backward.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from structconv.mechanisms import Additive, DotProduct, RelativeBias
from structconv.nn import ChebConv, Conv, GATConv, GATv2Conv, GCNConv, RelationalConv
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.native.operator import OPERATORS
from structconv.structures import Graph, KnowledgeGraph, Window
from tests.primitives.test_transforms import ALL, case, leaves

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")
F64 = torch.float64
#: Of the second derivatives of a number in its first argument.
ORDERS = {"forward of backward": lambda f: jacfwd(jacrev(f)), "hessian": hessian,
          "backward of backward": lambda f: jacrev(jacrev(f)), "backward of forward": lambda f: jacrev(jacfwd(f)),
          "forward of forward": lambda f: jacfwd(jacfwd(f)),
          "in parts": lambda f: jacrev(jacrev(f), chunk_size=3)}


def close(found, wanted, tol=1e-8):
    torch.testing.assert_close(found, wanted, rtol=tol, atol=tol)


def differences(fn, tensors, tangents, step=1e-6):
    ahead, behind = ([t + s * step * d for t, d in zip(tensors, tangents, strict=True)] for s in (1, -1))
    return (fn(*ahead) - fn(*behind)) / (2 * step)


def directions(tensors):
    return [torch.randn_like(t) for t in tensors]


def double_backward(fn, tensors, tangents):
    """The gradient of <gradient of fn, tangents>."""
    inputs = leaves(tensors)
    first = torch.autograd.grad(fn(*inputs), inputs, create_graph=True)
    found = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, tangents, strict=True)), inputs,
                                allow_unused=True)
    return [torch.zeros_like(t) if h is None else h for h, t in zip(found, inputs, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_forward_derivatives_are_those_of_differences(name):
    fn, (_, tensors, _) = ALL[name][0], case(name)
    tangents = directions(tensors)
    value, tangent = jvp(fn, tuple(tensors), tuple(tangents))
    close(value, fn(*tensors))
    close(tangent, differences(fn, tensors, tangents), 1e-6)
    for i, one in enumerate(tangents):
        alone = [one if i == j else torch.zeros_like(d) for j, d in enumerate(tangents)]
        _, found = jvp(lambda t, i=i: fn(*tensors[:i], t, *tensors[i + 1:]), (tensors[i],), (one,))
        assert found.abs().max() > 0
        close(found, differences(fn, tensors, alone), 1e-6)
    with forward.dual_level():
        dual = fn(*(forward.make_dual(t, d) for t, d in zip(tensors, tangents, strict=True)))
        close(forward.unpack_dual(dual).tangent, tangent)
    cotangent = torch.randn_like(value)
    pulled = vjp(fn, *tensors)[1](cotangent)
    close((cotangent * tangent).sum(), sum((p * d).sum() for p, d in zip(pulled, tangents, strict=True)))


@pytest.mark.parametrize("name", ALL)
def test_gradients_in_a_direction_in_every_order_of_modes(name):
    fn, tensors, every = case(name)
    tangents = directions(tensors)
    wanted = double_backward(fn, tensors, tangents)
    close(list(jvp(lambda *t: grad(fn, every)(*t), tuple(tensors), tuple(tangents))[1]), wanted)
    close(list(grad(lambda *t: jvp(fn, t, tuple(tangents))[1], every)(*tensors)), wanted)
    inputs = leaves(tensors)
    with forward.dual_level():
        number = fn(*(forward.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)))
        found = torch.autograd.grad(forward.unpack_dual(number).tangent, inputs, retain_graph=True, allow_unused=True)
        close([torch.zeros_like(t) if f is None else forward.unpack_dual(f).primal
               for f, t in zip(found, inputs, strict=True)], wanted)
        found = [forward.unpack_dual(g).tangent for g in torch.autograd.grad(number, inputs)]
        close([torch.zeros_like(t) if f is None else f for f, t in zip(found, inputs, strict=True)], wanted)


@pytest.mark.parametrize("name", ALL)
def test_second_derivatives_in_every_order(name):
    fn, tensors, _ = case(name)
    ways = torch.randn(4, tensors[0].numel(), dtype=F64)

    def number(t):
        return fn(tensors[0] + (t @ ways).view_as(tensors[0]), *tensors[1:])

    start = torch.randn(4, dtype=F64) / 8
    wanted = torch.autograd.functional.hessian(number, start)
    for order in ORDERS.values():
        close(order(number)(start), wanted)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_linear_in_those_of_the_result(name):
    """The graph was drawn before forward mode was entered."""
    fn, (_, tensors, _) = ALL[name][0], case(name)
    value, pull = vjp(fn, *tensors)
    cotangent, moved = torch.randn_like(value), torch.randn_like(value)
    close(jvp(pull, (cotangent,), (moved,)), (pull(cotangent), pull(moved)))
    y = fn(*(inputs := leaves(tensors)))
    with forward.dual_level():
        found = torch.autograd.grad(y, inputs, forward.make_dual(cotangent, moved))
        close([forward.unpack_dual(g).tangent for g in found], list(pull(moved)))


@pytest.mark.parametrize("name", ALL)
def test_batches(name):
    fn, tensors, _ = case(name)
    op, many = ALL[name][0], [torch.stack([t, 2 * t, -t]) for t in tensors]
    wanted = torch.stack([op(*(t[i] for t in many)) for i in range(3)])
    close(vmap(op)(*many), wanted)
    close(vmap(op, in_dims=-1)(*(t.movedim(0, -1) for t in many)), wanted)
    first = vmap(grad(fn), in_dims=(0, *(None,) * (len(many) - 1)))(many[0], *tensors[1:])
    close(first, torch.stack([grad(fn)(t, *tensors[1:]) for t in many[0]]))
    second = vmap(grad(lambda t: grad(fn)(t, *tensors[1:]).square().sum()))(many[0])
    close(second, torch.stack([grad(lambda t: grad(fn)(t, *tensors[1:]).square().sum())(t) for t in many[0]]))
    close(jacrev(lambda t: op(t, *tensors[1:]))(tensors[0]),
          torch.autograd.functional.jacobian(lambda t: op(t, *tensors[1:]), tensors[0]))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.endswith("_backward")])
def test_a_backward_operator_says_what_it_cannot(name):
    """Forward derivatives in its inputs: never a zero."""
    found = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is getattr(torch.ops.structconv, name).default:
                found.append((func, args))
            return func(*args, **(kwargs or {}))

    fn, tensors, _ = case(name.removesuffix("_backward"))
    loss = fn(*(inputs := leaves(tensors)))
    with Record():
        torch.autograd.grad(loss, inputs)
    (operator, arguments), = found
    at = next(i for i, t in enumerate(arguments) if isinstance(t, torch.Tensor) and t.is_floating_point())

    def call(t):
        return operator(*arguments[:at], t, *arguments[at + 1:])

    x, direction = arguments[at].detach(), torch.randn_like(arguments[at])
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(call, (x,), (direction,))
    with forward.dual_level():
        moved = [forward.unpack_dual(g).tangent for g in call(forward.make_dual(x, direction))]
    assert any(t is not None and t.abs().max() > 0 for t in moved)


def test_values_of_a_recurrence_have_derivatives_too():
    for name in ("polynomial_analysis", "polynomial_synthesis"):
        layouts = ALL["polynomial_analysis"][0].__globals__["SQUARE"]
        values, x = torch.randn(20, dtype=F64), torch.randn(*((1, 7, 2) if "ana" in name else (1, 7, 3, 2)), dtype=F64)
        operator = getattr(torch.ops.structconv, name)

        def number(values, x, operator=operator, layouts=layouts):
            return operator(*layouts[0], *layouts[1], values, x, 2, 0, True).tanh()

        assert torch.autograd.gradcheck(number, leaves([values, x]), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(number, leaves([values, x]))


# -- layers -------------------------------------------------------------------------------------------------------

N = 5
INDEX = torch.tensor([[0, 1, 1, 2, 3, 3, 0, 2], [1, 0, 2, 1, 2, 0, 3, 2]])
GRAPH, TYPED = Graph(INDEX, num_nodes=N), KnowledgeGraph(
    torch.stack([INDEX[0], torch.arange(8) % 2, INDEX[1]], 1), N, ["a", "b"])
LAYERS = {
    "GCN": lambda: (GCNConv(3, 2), (GRAPH,)),
    "GAT": lambda: (GATConv(3, 2, heads=2), (GRAPH,)),
    "GAT, mean of heads": lambda: (GATConv(3, 2, heads=2, concat=False), (GRAPH,)),
    "GATv2": lambda: (GATv2Conv(3, 2, heads=2), (GRAPH,)),
    "Chebyshev": lambda: (ChebConv(3, 2, K=3), (GRAPH,)),
    "R-GCN": lambda: (RelationalConv(3, 2, 2), (TYPED,)),
    "products along edges": lambda: (Conv(DotProduct(2, 3).scaled().masked(keep=GRAPH).softmax(), 3, 2), ()),
    "window": lambda: (Conv(DotProduct(2, 3).scaled().masked(keep=Window(1)).softmax(), 3, 2), ()),
    "additive": lambda: (Conv(Additive(2, 3).softmax(), 3, 2), ()),
    "additive along edges": lambda: (Conv(Additive(2, 3).masked(keep=GRAPH).softmax(), 3, 2), ()),
    "relative bias": lambda: (Conv((DotProduct(2, 3) + RelativeBias(2, heads=2)).softmax(), 3, 2), ()),
}


def layer_of(name):
    layer, structure = LAYERS[name]()
    torch.nn.init.normal_(next(layer.parameters()))
    layer = layer.to(F64)
    return layer, torch.randn(N, 3, dtype=F64), lambda layer, x: layer(x, *structure)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_every_order(name):
    layer, x, run = layer_of(name)
    direction = torch.randn_like(x)

    def number(x):
        return run(layer, x).tanh().sum()

    close(jvp(lambda x: run(layer, x), (x,), (direction,))[1],
          differences(lambda x: run(layer, x), [x], [direction]).detach(), 1e-6)
    wanted = torch.autograd.functional.hessian(number, x)
    for order in ORDERS.values():
        close(order(number)(x), wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_layers(name):
    layer, x, run = layer_of(name)
    parameters = {key: torch.stack([t, 2 * t, t + 1]) for key, t in layer.named_parameters()}

    class Called(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return run(self.layer, x)

    def apply(parameters, x):
        return functional_call(Called(), {f"layer.{key}": t for key, t in parameters.items()}, (x,))

    alone = torch.stack([apply({key: t[i] for key, t in parameters.items()}, x) for i in range(3)])
    close(vmap(apply, in_dims=(0, None))(parameters, x), alone)
    close(vmap(run, in_dims=(None, 0))(layer, torch.stack([x, -x])), torch.stack([run(layer, x), run(layer, -x)]))


def test_recomputed_blocks_hold_one_graph_at_a_time():
    """Derivatives by transforms keep all of them; a plain backward does not."""
    x, held = torch.randn(6, 3, dtype=F64, requires_grad=True), []

    def fn(rows, x):
        y = x[rows].exp()
        held.append(y)
        return y

    y = recompute_blocks(fn, [x], [slice(0, 2), slice(2, 6)], reduce="cat", dim=0)
    assert not any(t.requires_grad for t in held)
    close(torch.autograd.grad(y.sum(), x)[0], x.exp().detach())
