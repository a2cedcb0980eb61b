"""Calls every native operator with arguments that are wrong in one or two places, as `raw_calls` does the public ones.

A sealed layout is replaced, cut or converted; nobody writes into one. Guarded, a call that leaves a part of its result
unwritten has another answer the second time, when new memory is full of something else.

    python -m [tests.native.guarded] tests.primitives.raw_processes FOLDER ROUNDS
"""

import contextlib
import faulthandler
import random
import sys
import time
import warnings

import torch
from torch import Tensor

from structconv.primitives.native.loader import core
from tests.native import guarded
from tests.primitives.raw_calls import E, K, M, N, changed, mutated, plain, said, same, with_backwards

SEALED: list[Tensor] = []
LONGEST = 10.0  # seconds of a call


def recorded(native):
    """The first call of each operator by the public operators, and of the others one by hand."""
    calls = {}

    def keep(name, operator):
        def call(*arguments):
            calls.setdefault(name, arguments)
            return operator(*arguments)

        return call

    originals = {name: getattr(native, name) for name in native.operators()}
    for name, operator in originals.items():
        setattr(native, name, keep(name, operator))
    with_backwards(torch.float32)
    for name, operator in originals.items():
        setattr(native, name, operator)
    r, index, ones = torch.randn, torch.randint(N, (2, E)), torch.ones(E + M)
    side, _ = native.adjacency(torch.randint(M, (2, E)), M, M, True, True, 2, ones, False)
    back = native.transpose(side)
    layout, _, _ = native.layouts(index, M, M)
    x, theta, both, heads, starts = r(M, 3), r(1, 3, 4), r(2, 3, 4), r(M, K, 3), torch.tensor([0, 3, M])
    drop, cache = (0.3, 5, K), (torch.zeros(1, K, M, 4), torch.zeros(1, K, M, 3))
    _, y2, numbers = native.attend_forward(side, heads, r(K, 3), r(K, 3), r(K, 3), 0.2, *drop, True)
    dots = x, r(K * 2, 3), r(K * 2), r(K * 2, 3), None, r(K * 4, 3), r(K * 4), r(K * 4)
    y, table, peaks = native.attend_dots_forward(side, *dots, K, 0.5, *drop, True)
    of_x = x, r(K, 3, 4), r(K, 4), r(K, 4), r(K * 4)
    results = native.attend_layer_forward(side, *of_x, 0.2, *drop, True)
    scored = x, r(K, 3, 4), r(K * 4, 3), r(K * 4), r(K, 4), r(K * 4)
    actual = native.attend_pairs_forward(side, *scored, 0.2, *drop)
    entries = r(2, 3, 5), r(K * 2, 5), r(K * 2), r(K * 2, 5), None, r(K * 4, 5), r(K * 4), r(6, K * 4), r(6)
    entries = *entries, torch.rand(2, 1, 1, 3) < 0.7
    relative = r(K, 1, 5), torch.randint(5, (9,))
    y_of, *kept = native.attend_entries_forward(*entries[:-1], *relative, K, 0.5, True, False, True)
    second = 1 << 20  # the number of the second axis is that times this
    image, steps = (r(2, 4, 9, 7), r(4, 2, 3, 2), r(2, 4, 5, 6)), (2 + second, 1, 1 + second, 2)
    windows = 2 + 3 * second, 2 + 2 * second, second, False
    pairs = r(2, 4, 9, 5), r(2, 2, 7, 5), r(2, 2, 7, 3), r(2, 1, 9, 7)
    of_pairs = native.attention_forward(*pairs, True, 0.5, 0.3, 7, True, False)[:2]
    _, weights = native.additive_step(r(2, K, 4), r(M, K, 4), torch.rand(M, K, 4), heads, r(K, 4), None, 2.0)
    calls |= {
        "outside": (index, [M, N]), "edges": (index, M, M, starts, starts), "first_loop": (index,),
        "batch": (torch.tensor([[0, 1, 2], [2, 1, 0]]), starts),
        "messages": (side, x, r(E + M, 3)), "messages_backward": (side, back, x, r(E + M, 3), x, True, True),
        "starts": (torch.tensor([0, 0, 2]), None),
        "pool_evenly_backward": (starts, x, r(2, 3), 1, 0.5), "center": (starts, x, 1, 2.0),
        "center_backward": (starts, x, x, 1, 2.0), "scatter": (x, torch.arange(M) % 2, 2, 2),
        "scatter_backward": (x, torch.arange(M) % 2, r(M, 3), r(M, 3), 2, 5),
        "pool": (starts, x, 5, 0.5), "pool_backward": (starts, x, r(2, 3), r(2, 3), 5, 0.5),
        "norm": (starts, x, r(3), r(3), r(3), 0, 2, 0.1, 2.0),
        "norm_backward": (starts, x, r(3), r(3), r(3), x, 1, 1, 0.1, 2.0),
        "adjacency": (index, M, M, True, True, 2, ones, False), "transpose": (side,), "sums": (side, x),
        "sums_backward": (side, back, x, x),
        "spmm_into": (layout, r(E), False, r(2, M, 3), r(2, M, 3), 2, 2.0, -1.0),
        "maxima": (side, x), "maxima_backward": (side, back, x, x, x), "convolve": (side, x, theta, r(4), True, True),
        "convolve_backward": (side, back, x, theta, r(4), x, r(M, 4), True, True, True, True),
        "convolve_linear": (side, x, r(4, 3), r(4, 2), r(M, 2), r(4), True, True),
        "convolve_linear_backward": (side, back, x, r(4, 3), r(4, 2), r(M, 2), r(4), x, r(M, 4), *[True] * 5, True),
        "convolve_with_self": (side, x, both, r(4), 1, True),
        "convolve_with_self_backward": (side, back, x, both, r(4), x, r(M, 4), True, True, True, 1),
        "attend_forward": (side, heads, r(K, 3), r(K, 3), r(K, 3), 0.2, *drop, True),
        "attend_backward": (side, back, heads, r(K, 3), r(K, 3), r(K, 3), heads, y2, numbers, heads, 0.2, *drop),
        "attend_layer_forward": (side, *of_x, 0.2, *drop, True),
        "attend_layer_backward": (side, back, *of_x, *results, results[0], True, 0.2, *drop),
        "attend_pairs_forward": (side, *scored, 0.2, *drop),
        "attend_pairs_backward": (side, back, *scored, *actual, actual[0], True, 0.2, *drop),
        "attend_dots_forward": (side, *dots, K, 0.5, *drop, True),
        "attend_dots_backward": (side, back, *dots, y, table, peaks, y, True, K, 0.5, *drop),
        "attend_entries_forward": (*entries[:-1], *relative, K, 0.5, True, False, True),
        "attend_entries_weighted": (*entries, K, 0.5, True, True),
        "attend_entries_backward": (*entries[:-1], relative[0], *kept, y_of, True, relative[1], K, 0.5, True, False),
        "images": (*image[:2], r(4), *steps), "images_backward": (*image, *steps, True, True, True),
        "window_means": (image[0], *windows), "window_means_backward": (r(2, 4, 4, 4), [9, 7], *windows),
        "project": (x, r(3, 4), r(4)), "outer": (x, r(M, 4)), "factor": (heads, 2.0),
        "additive_step": (r(2, K, 4), r(M, K, 4), torch.rand(M, K, 4), heads, r(K, 4), None, 2.0),
        "additive_step_backward": (r(2, K, 4), r(M, K, 4), torch.rand(M, K, 4), heads, r(K, 4), weights, r(2, K, 3),
                                   torch.zeros(M, K, 4), torch.zeros(K, 4), True, 2.0),
        "drop_block": (r(K, 3, M), r(K, 3, M), r(K, 3, M), 0, 3, N, *drop),
        "attention_forward": (*pairs, True, 0.5, 0.3, 7, True, True),
        "attention_backward": (*pairs, *of_pairs, r(2, 4, 9, 3), True, 0.5, 0.3, 7, True),
        "attention_step": (r(1, 3), r(K * 4, 3), r(K * 4), r(1, 3), r(K * 4, 3), r(K * 4), r(1, 3), r(K * 3, 3),
                           r(K * 3), *cache, r(5, K * 3), r(5), 0.5, r(K, M),
                           torch.rand(2, dtype=torch.float64), 1.5, True, 7),
        "sample": (torch.tensor([0, 3, E]), torch.randint(N, (E,)), torch.randperm(E), None, torch.arange(N),
                   torch.rand(E, dtype=torch.float64), torch.tensor([1, 0, 1]), torch.tensor([0, 1, 2]),
                   torch.tensor([N, 2, 3]), 2, False, False, 5, 1, 0),
        "number": (torch.full((64, 1), -1), torch.randint(9, (20,)), 0, 1),
    }
    SEALED.extend((side, back, layout, *(t for t in calls["affine_backward"][:2])))
    return calls


def is_layout(value):
    return isinstance(value, Tensor) and value.dtype is torch.int32 and value.dim() == 1 and value.shape[0] > 16


def replaced(layout, rng):
    """What is no layout, or another one."""
    return rng.choice([layout[1:], layout[:-1], layout[:18], layout.long(), layout.to("meta"), torch.zeros_like(layout),
                       torch.randint(-9, 99, layout.shape, dtype=torch.int32), None,
                       torch.stack([layout, layout], 1)[:, 0], layout.clone(), *SEALED])


def attempt(name, operator, arguments, poison):
    """Return True if the call raised an exception; print a wrong answer."""
    copies = [t.clone() if isinstance(t, Tensor) and t.layout is torch.strided else t for t in arguments]
    poison(0xff)  # NaN, and -1
    begin = time.perf_counter()
    try:
        actual = operator(*arguments)
    except Exception:
        return True
    finally:
        if (seconds := time.perf_counter() - begin) > LONGEST:
            print(f"wrong: {name} took {seconds:.0f} s: {list(map(said, arguments))}")
    poison(0x3c)  # 0.0115, and 10^9
    with contextlib.suppress(Exception):  # a copy may be refused for what it is no more: empty, expanded
        if actual is not None and not same(actual, operator(*map(plain, copies))) and name not in (
                "layouts", "verify", "number"):  # the second call of `number` finds what the first has entered
            print(f"wrong: {name} has another answer for views: {list(map(said, arguments))}")
    return False


def run(seed: int, rounds: int) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    rng, refused, made, native = random.Random(seed), 0, 0, core()
    torch.manual_seed(seed)
    guard = guarded.enable()
    poison = (lambda byte: None) if guard is None else guard.guard_poison
    calls = recorded(native)
    assert set(calls) == set(native.operators()), set(native.operators()) - set(calls)
    for name, arguments in calls.items():
        operator = getattr(native, name)
        operator(*arguments)
        for _ in range(rounds):
            given = [t.clone() if isinstance(t, Tensor) else t for t in arguments]
            for at in rng.sample(range(len(given)), min(len(given), rng.choice((1, 1, 2)))):
                with contextlib.suppress(RuntimeError, IndexError):  # not every change fits every tensor
                    value = given[at]
                    given[at] = (replaced(value, rng) if is_layout(value) else
                                 [changed(value[0], rng), *value[1:]] if isinstance(value, (list, tuple))
                                 and value and isinstance(value[0], Tensor) else mutated(value, rng))
            print(f"calls {name}: {list(map(said, given))}", file=sys.stderr, flush=True)
            refused += attempt(name, operator, given, poison)
            made += 1
    print(f"{made} calls, {refused} refused" + (f", {guard.guard_blocks()} guarded tensors" if guard else ""))
