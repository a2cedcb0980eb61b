"""Calls every operator with arguments that are wrong in one or two places: an exception, or the answer that plain
copies of the arguments give. Run in a process of its own, since what it looks for ends one.

    python -m tests.primitives.raw_processes FOLDER ROUNDS
"""

import contextlib
import faulthandler
import os
import random
import sys
import warnings

import torch
from torch import Tensor

from structconv.primitives import (  # noqa: F401  (define operators)
    blocked_attention,
    conditioned,
    dense_additive,
    edge_attention,
    grouped,
    polynomials,
    products,
    shifted,
    window,
)
from structconv.primitives.layout import compress
from structconv.primitives.native.loader import core
from structconv.primitives.operator import OPERATORS

M, N, E, K = 7, 6, 20, 2


def layouts(m, n, dtype=torch.int64):
    g = torch.Generator().manual_seed(1)
    source, target = torch.randint(m, (E,), generator=g).to(dtype), torch.randint(n, (E,), generator=g).to(dtype)
    return *compress(target, source, n), *compress(source, target, m)


def valid(dtype):
    """Arguments of a right call of each operator, without those of the backward ones."""
    def r(*shape):
        return torch.randn(shape, dtype=dtype)

    joined, square, seed = layouts(M, N), layouts(M, M, torch.int32), torch.tensor(3)
    grid = ([M], [1], [1], [1], None, None, 0.5, 0.3, seed, K)
    offsets = torch.arange(M + M - 1) % 3
    return {
        "layouts": (torch.randint(5, (2, E)), 5, 6),
        "spmm": (*joined, r(2, E), r(2, M, 3), 2),
        "sddmm": (*joined, r(2, N, 3), r(1, M, 3), 2),
        "spmm_add": (*joined, r(E), r(2, M, 3), r(2, N, 3), 2.0, -1.0),
        "affine_attention": (*joined, r(M, K), r(N, K), r(M, K, 3), 0.2, 0.3, seed, K, True),
        "projected_attention": (*joined, r(M, K, 3), r(N, K, 3), r(K, 3), r(K, 3), r(K, 3) if dtype != torch.bfloat16
                                else None, 0.2, 0.3, seed, K, True),
        "bilinear_attention": (*joined, r(N, K, 4), r(M, K, 4), r(M, K, 3), r(K, E), 0.5, 0.3, seed, K),
        "packed_attention": (*joined, r(M, K * 7), r(N, K, 4), r(K, E), K, 4, 0.5, 0.3, seed, K),
        "additive_attention": (*joined, r(N, K, 4), r(M, K, 4), r(M, K, 3), r(K, 4), 1, 2.0, 0.3, seed, K),
        "dense_additive_attention": (r(N, K, 4), r(M, K, 4), r(M, K, 3), r(K, 4), 1, 2.0, True,
                                     torch.rand(M, K, 4), 0.3, seed, K),
        "window_attention": (r(M, K, 4), r(M, K, 4), r(M, K, 3), r(K, 3), *grid),
        "conditioned_product": (*joined, r(E, K), r(M, 3), r(K, 3, 4)),
        "affine_weights": (*joined, r(M, K), r(N, K), 0.2, 0.3, seed, K),
        "bilinear_weights": (*joined, r(N, K, 4), r(M, K, 4), r(K, E), 0.5, 0.3, seed, K),
        "additive_weights": (*joined, r(N, K, 4), r(M, K, 4), r(K, 4), 1, 2.0, 0.3, seed, K),
        "blocked_attention": (r(K, M, 4), r(K, M, 4), r(K, M, 3), r(K, M + M - 1), r(K, M, 3), offsets,
                              torch.ones(1, K, M, M) > 0, seed, "softmax", "identity", 1.0, True, 0.5, 0.3, K, 3),
        "polynomial_analysis": (*square, r(E), r(2, M, 3), 3, 1, True),
        "polynomial_synthesis": (*square, r(E), r(2, M, 3, 4), 3, 1, True),
        "shift_products": (r(2, M, 3), r(3, 3, 4), [-1, 0, 2], M),
        "shift_correlation": (r(2, M, 3), r(2, M, 4), [-1, 0, 2]),
        "group_products": (r(M, 4), r(3, 2, 2, 3), [0, 3, 3, M]),
        "group_outer": (r(M, 4), r(M, 6), [0, 3, 3, M], 2),
        "project": (r(M, 3), r(3, 4), r(4)),
        "project_relu": (r(M, 3), r(3, 4), r(4)),
        "outer": (r(M, 3), r(M, 4)),
    }


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    """The calls of backward operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "structconv":
            self.calls[func._schema.name.split("::")[1]] = args
        return func(*args, **(kwargs or {}))


def with_backwards(dtype):
    calls = valid(dtype)
    for name, arguments in list(calls.items()):
        leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
                  for t in arguments]
        actual = getattr(torch.ops.structconv, name)(*leaves)
        first = actual if isinstance(actual, Tensor) else actual[0]
        if first.requires_grad:
            with Recorded() as recorded:
                first.sum().backward()
            back = f"{name}_backward"
            if back in recorded.calls:
                calls[back] = tuple(t.detach() if isinstance(t, Tensor) else t for t in recorded.calls[back])
    return calls


INTEGERS = (-1, 0, 1, 2, 3, 7, 300, 1 << 40, -(1 << 40), (1 << 63) - 1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool,
          torch.complex64, torch.uint8)


def strided(t):
    return torch.stack([t, t], -1)[..., 0] if t.dim() else t


def bad_numbers(t, rng):
    t = t.clone()
    if t.numel() and t.dtype != torch.bool:
        value = rng.choice([-1, 5, 1000, 2**31 - 1, -2**31, 2**40 if t.dtype == torch.int64 else 2**30])
        t.view(-1)[rng.randrange(t.numel())] = value if not t.is_floating_point() else float("nan")
    return t


def changed(t, rng):
    """A tensor that is not as it should be."""
    dim = rng.randrange(t.dim()) if t.dim() else 0
    ways = [
        lambda: t.unsqueeze(dim), lambda: t.flatten(), lambda: t.new_zeros(()), lambda: t.new_zeros((0,)),
        lambda: t.narrow(dim, 0, t.shape[dim] // 2), lambda: torch.cat([t, t], dim), lambda: t.narrow(dim, 0, 0),
        lambda: t.to(rng.choice(DTYPES)), lambda: t.to("meta"), lambda: t.transpose(0, -1), lambda: strided(t),
        lambda: t[:1].expand(t.shape), lambda: ~t if t.dtype is torch.bool else torch._neg_view(t),
        lambda: t.to_sparse(), lambda: t.flip(0)[:0],
        lambda: bad_numbers(t, rng), lambda: bad_numbers(t, rng), lambda: bad_numbers(t, rng),
        lambda: t.clone().requires_grad_(), lambda: None, lambda: t.new_zeros(t.shape).set_(), lambda: t.repeat(2, 1),
        lambda: torch._efficientzerotensor(t.shape, dtype=t.dtype), lambda: t.expand(3, *t.shape),
        lambda: torch.stack([t, t])[1],
        lambda: torch.nn.Parameter(t), lambda: t.to_mkldnn(), lambda: t.as_strided(t.shape, (0,) * t.dim()),
    ]
    return rng.choice(ways)()


def mutated(value, rng):
    if isinstance(value, Tensor):
        return changed(value, rng)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(INTEGERS)
    if isinstance(value, float):
        return rng.choice([-1.0, 0.0, 1.0, 2.0, float("nan"), float("inf"), 1e30])
    if isinstance(value, str):
        return rng.choice(["", "tanh", "leaky_relu", "softmax", "none", "count", "x" * 100])
    if isinstance(value, list):
        return rng.choice([[], value[:-1], [*value, 1], [rng.choice(INTEGERS) for _ in value], value[::-1]])
    return rng.choice([None, 3, torch.zeros(2), torch.tensor(5)])


def plain(value):
    """The same argument without anything that only a view has."""
    if isinstance(value, Tensor) and not value.is_meta:
        value = value.detach() if value.layout is torch.strided else value.to_dense()
        return torch.empty_like(value, memory_format=torch.contiguous_format).copy_(value)
    return value


def same(a, b):
    if isinstance(a, Tensor):
        return a.shape == b.shape and (a.is_meta or b.is_meta or torch.allclose(
            a.detach().double(), b.detach().double(), rtol=1e-2, atol=1e-2, equal_nan=True))
    return all(map(same, a, b))


def said(value):
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), str(value.dtype), str(value.device), str(value.layout)


def attempt(name, arguments):
    """Whether the call raised an exception; what is wrong is printed."""
    operator = getattr(torch.ops.structconv, name)
    try:
        actual = operator(*arguments)
    except Exception:
        return True
    try:
        expected = operator(*map(plain, arguments))
    except Exception as error:
        print(f"wrong: {name} takes a view of what it refuses: {error}")
        return False
    if not same(actual, expected):
        print(f"wrong: {name} has another answer for views: {list(map(said, arguments))}")
    return False


def run(native: str, seed: int, rounds: int) -> None:
    os.environ["STRUCTCONV_NATIVE"] = native
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert (core() is not None) == (native == "1")
    rng, refused, made = random.Random(seed), 0, 0
    torch.manual_seed(seed)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        calls = with_backwards(dtype)
        assert set(calls) == set(OPERATORS), set(OPERATORS) ^ set(calls)
        for name, arguments in calls.items():
            assert not attempt(name, arguments), name
            for _ in range(rounds):
                given = list(arguments)
                for at in rng.sample(range(len(given)), rng.choice((1, 1, 2))):
                    with contextlib.suppress(RuntimeError, IndexError):  # not every change fits every tensor
                        given[at] = mutated(given[at], rng)
                print(f"calls {name} in {dtype}: "
                      f"{list(map(said, given))}", file=sys.stderr, flush=True)
                refused += attempt(name, given)
                made += 1
    print(f"{made} calls, {refused} refused")
