"""Derivatives in both modes and of any order, batches, programs and contracts of every operator.

Forward derivatives are held against finite differences, everything of second order against a double backward.
"""

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.multiprocessing.reductions import StorageWeakRef

from structconv.errors import ConfigError, ShapeError
from structconv.primitives import products  # noqa: F401  (defines its operators)
from structconv.primitives.blocked_attention import Maps, Options, blocked_attention
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.conditioned import conditioned_product
from structconv.primitives.csr import sddmm, spmm, spmm_add
from structconv.primitives.dense_additive import dense_additive_attention
from structconv.primitives.edge_attention import (
    additive_attention,
    additive_weights,
    affine_attention,
    affine_weights,
    bilinear_attention,
    bilinear_weights,
    packed_attention,
    projected_attention,
)
from structconv.primitives.grouped import group_outer, group_products
from structconv.primitives.layout import compress
from structconv.primitives.operator import OPERATORS
from structconv.primitives.polynomials import polynomial_analysis, polynomial_synthesis
from structconv.primitives.segments import masked_softmax, segment_softmax
from structconv.primitives.shifted import shift_products
from structconv.primitives.window import window_attention
from tests.primitives.raw_calls import valid, with_backwards
from tests.support.drawn import EVERY, drawn
from tools import operators

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")
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
    "packed_attention": (lambda t, q, b: packed_attention(*JOINED, t, q, b, heads=K, depth=4, scale=0.5, **DROP),
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

F64 = torch.float64
#: Of the second derivatives of a number in its first argument.
ORDERS = {"forward of backward": lambda f: jacfwd(jacrev(f)), "hessian": hessian,
          "backward of backward": lambda f: jacrev(jacrev(f)), "backward of forward": lambda f: jacrev(jacfwd(f)),
          "forward of forward": lambda f: jacfwd(jacfwd(f)),
          "in parts": lambda f: jacrev(jacrev(f), chunk_size=3)}


def case(name, dtype=F64):
    """A number that depends on an operator's arguments, the arguments, and the places of all of them."""
    fn, shapes = ALL[name]
    torch.manual_seed(len(name))
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return (lambda *t: fn(*t).tanh().square().sum()), tensors, tuple(range(len(tensors)))


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def close(actual, expected, tol=1e-8):
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def test_no_operator_is_left_out():
    assert set(CASES) == {name for name in OPERATORS if not name.endswith("_backward")} - {"layouts"}


@pytest.mark.parametrize(("name", "kept"), {"blocked_attention": [False, False, True], "conditioned_product": [False],
                                            "bilinear_attention": [True, True]}.items())
def test_a_result_is_kept_for_the_backward_only_if_that_reads_it(name, kept):
    inputs = [t.requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
              for t in valid(torch.float32)[name]]
    results = getattr(torch.ops.structconv, name)(*inputs)
    results = (results,) if isinstance(results, torch.Tensor) else results
    loss, memory = results[0].sum(), [StorageWeakRef(t.untyped_storage()) for t in results]
    del results
    assert [not each.expired() for each in memory] == kept
    loss.backward()


@pytest.mark.parametrize(("dtype", "tol"), drawn([(F64, 1e-9), (torch.float32, 1e-5)], 2))
@pytest.mark.parametrize("name", ALL)
def test_gradients_of_transforms_are_those_of_autograd(name, dtype, tol):
    fn, tensors, every = case(name, dtype)
    expected = torch.autograd.grad(fn(*(inputs := leaves(tensors))), inputs)
    close(grad(fn, every)(*tensors), expected, tol)
    value, pull = vjp(fn, *tensors)
    close(value, fn(*tensors), tol)
    close(pull(torch.tensor(2.0, dtype=dtype)), tuple(2 * w for w in expected), 2 * tol)


def differences(fn, tensors, tangents, step=1e-6):
    ahead, behind = ([t + s * step * d for t, d in zip(tensors, tangents, strict=True)] for s in (1, -1))
    return (fn(*ahead) - fn(*behind)) / (2 * step)


def directions(tensors):
    return [torch.randn_like(t) for t in tensors]


def double_backward(fn, tensors, tangents):
    """The gradient of <gradient of fn, tangents>."""
    inputs = leaves(tensors)
    first = torch.autograd.grad(fn(*inputs), inputs, create_graph=True)
    actual = torch.autograd.grad(sum((g * d).sum() for g, d in zip(first, tangents, strict=True)), inputs,
                                allow_unused=True)
    return [torch.zeros_like(t) if h is None else h for h, t in zip(actual, inputs, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_forward_derivatives_are_those_of_differences(name):
    fn, (_, tensors, _) = ALL[name][0], case(name)
    tangents = directions(tensors)
    value, tangent = jvp(fn, tuple(tensors), tuple(tangents))
    close(value, fn(*tensors))
    close(tangent, differences(fn, tensors, tangents), 1e-6)
    for i, one in enumerate(tangents):
        single = [one if i == j else torch.zeros_like(d) for j, d in enumerate(tangents)]
        _, actual = jvp(lambda t, i=i: fn(*tensors[:i], t, *tensors[i + 1:]), (tensors[i],), (one,))
        assert actual.abs().max() > 0
        close(actual, differences(fn, tensors, single), 1e-6)
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
    expected = double_backward(fn, tensors, tangents)
    close(list(jvp(lambda *t: grad(fn, every)(*t), tuple(tensors), tuple(tangents))[1]), expected)
    close(list(grad(lambda *t: jvp(fn, t, tuple(tangents))[1], every)(*tensors)), expected)
    inputs = leaves(tensors)
    with forward.dual_level():
        number = fn(*(forward.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)))
        actual = torch.autograd.grad(forward.unpack_dual(number).tangent, inputs, retain_graph=True, allow_unused=True)
        close([torch.zeros_like(t) if f is None else forward.unpack_dual(f).primal
               for f, t in zip(actual, inputs, strict=True)], expected)
        actual = [forward.unpack_dual(g).tangent for g in torch.autograd.grad(number, inputs)]
        close([torch.zeros_like(t) if f is None else f for f, t in zip(actual, inputs, strict=True)], expected)


@pytest.mark.parametrize("name", ALL)
def test_second_derivatives_in_every_order(name):
    fn, tensors, _ = case(name)
    ways = torch.randn(4, tensors[0].numel(), dtype=F64)

    def number(t):
        return fn(tensors[0] + (t @ ways).view_as(tensors[0]), *tensors[1:])

    start = torch.randn(4, dtype=F64) / 8
    expected = torch.autograd.functional.hessian(number, start)
    for order in drawn(ORDERS.values(), 2):
        close(order(number)(start), expected)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_linear_in_those_of_the_result(name):
    """The graph was drawn before forward mode was entered."""
    fn, (_, tensors, _) = ALL[name][0], case(name)
    value, pull = vjp(fn, *tensors)
    cotangent, moved = torch.randn_like(value), torch.randn_like(value)
    close(jvp(pull, (cotangent,), (moved,)), (pull(cotangent), pull(moved)))
    y = fn(*(inputs := leaves(tensors)))
    with forward.dual_level():
        actual = torch.autograd.grad(y, inputs, forward.make_dual(cotangent, moved))
        close([forward.unpack_dual(g).tangent for g in actual], list(pull(moved)))


@pytest.mark.parametrize("name", drawn(ALL, 2))
def test_batches(name):
    fn, tensors, _ = case(name)
    op, many = ALL[name][0], [torch.stack([t, 2 * t, -t]) for t in tensors]
    expected = torch.stack([op(*(t[i] for t in many)) for i in range(3)])
    close(vmap(op)(*many), expected)
    close(vmap(op, in_dims=-1)(*(t.movedim(0, -1) for t in many)), expected)
    first = vmap(grad(fn), in_dims=(0, *(None,) * (len(many) - 1)))(many[0], *tensors[1:])
    close(first, torch.stack([grad(fn)(t, *tensors[1:]) for t in many[0]]))
    second = vmap(grad(lambda t: grad(fn)(t, *tensors[1:]).square().sum()))(many[0])
    close(second, torch.stack([grad(lambda t: grad(fn)(t, *tensors[1:]).square().sum())(t) for t in many[0]]))
    close(jacrev(lambda t: op(t, *tensors[1:]))(tensors[0]),
          torch.autograd.functional.jacobian(lambda t: op(t, *tensors[1:]), tensors[0]))


@pytest.mark.parametrize("name", list(ALL) if EVERY else list(ALL)[1::2])
def test_second_derivatives_of_all_arguments(name):
    """Of all arguments; of one within a function of another; and with the graph of autograd outside or inside."""
    fn, tensors, every = case(name)
    inputs = leaves(tensors)

    def squares(grads):
        return sum(g.square().sum() for g in grads)

    first = torch.autograd.grad(fn(*inputs), inputs, create_graph=True)
    expected = torch.autograd.grad(squares(first), inputs, retain_graph=True)
    close(grad(lambda *t: squares(grad(fn, every)(*t)), every)(*tensors), expected)
    close(torch.autograd.grad(squares(grad(fn, every)(*inputs)), inputs), expected)
    _, pull = vjp(fn, *inputs)
    close(torch.autograd.grad(squares(pull(torch.ones((), dtype=F64))), inputs), expected)
    for other in every[1:]:
        mixed, = torch.autograd.grad(first[other].square().sum(), inputs[0], retain_graph=True, materialize_grads=True)
        inner = grad(lambda t, at=other: grad(lambda *u: fn(t, *u), at - 1)(*tensors[1:]).square().sum())
        close(inner(tensors[0]), mixed)


#: A program takes seconds to make: one of each kind of operator; `make test-every`: all.
PROGRAMS = list(CASES) if EVERY else ["packed_attention", "spmm", "project_relu"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_gradients(name):
    fn, tensors, every = case(name)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: grad(fn, every)(*t), fullgraph=True, backend="aot_eager")
    close(compiled(*tensors), grad(fn, every)(*tensors))


CALLS = {dtype: with_backwards(dtype) for dtype in (torch.float32, F64, torch.bfloat16)}


@pytest.mark.parametrize(("name", "dtype"), [
    (name, dtype) for number, name in enumerate(sorted(CALLS[F64])) for at, dtype in enumerate(CALLS)
    if EVERY or at == number % 3])
def test_operators_hold_their_contract(name, dtype):
    """Also without the tensors that may be left out."""
    operator, arguments = getattr(torch.ops.structconv, name).default, CALLS[dtype][name]
    whole = dtype is torch.float32 and not name.endswith("_backward") and name != "layouts"
    tests = ("test_schema", "test_autograd_registration", "test_faketensor",
             *(["test_aot_dispatch_dynamic"] if whole else []))
    without = [i for i, argument in enumerate(operator._schema.arguments)
               if str(argument.type) == "Optional[Tensor]" and isinstance(arguments[i], torch.Tensor)]
    for left_out in (None, *without):
        given = [None if i == left_out else t.detach().clone().requires_grad_(t.is_floating_point())
                 if isinstance(t, torch.Tensor) else t for i, t in enumerate(arguments)]
        try:
            operator(*given)
        except (ShapeError, ConfigError):
            assert left_out is not None
            continue
        torch.library.opcheck(operator, tuple(given), test_utils=tests[:3] if left_out is not None else tests)


@pytest.mark.parametrize("name", [name for name in CALLS[F64] if name.endswith("_backward")])
def test_a_backward_operator_says_what_it_cannot(name):
    """Forward derivatives in its inputs: never a zero."""
    operator, arguments = getattr(torch.ops.structconv, name).default, CALLS[F64][name]
    at = next(i for i, t in enumerate(arguments) if isinstance(t, torch.Tensor) and t.is_floating_point())

    def call(t):
        return operator(*arguments[:at], t, *arguments[at + 1:])

    x, direction = arguments[at], torch.randn_like(arguments[at])
    with pytest.raises(NotImplementedError, match="forward"):
        jvp(call, (x,), (direction,))
    with forward.dual_level():
        moved = [forward.unpack_dual(g).tangent for g in call(forward.make_dual(x, direction))]
    assert any(t is not None and t.abs().max() > 0 for t in moved)


def test_values_of_a_recurrence_have_derivatives_too():
    for name in ("polynomial_analysis", "polynomial_synthesis"):
        layouts = SQUARE
        values, x = torch.randn(20, dtype=F64), torch.randn(*((1, 7, 2) if "ana" in name else (1, 7, 3, 2)), dtype=F64)
        operator = getattr(torch.ops.structconv, name)

        def number(values, x, operator=operator, layouts=layouts):
            return operator(*layouts[0], *layouts[1], values, x, 2, 0, True).tanh()

        assert torch.autograd.gradcheck(number, leaves([values, x]), check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(number, leaves([values, x]), fast_mode=True)


def test_the_page_of_operators_names_each():
    """`make test-every` measures its table anew."""
    rows = [line for line in operators.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} == set(CASES)
    if EVERY:
        assert operators.table(operators.run("1"), operators.run("0")).splitlines()[2:] == rows
