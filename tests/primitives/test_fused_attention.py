"""The kernel of attention over all pairs against sums in float64, pair by pair: masks, shared heads, odd sizes, NaN."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.forward_ad import dual_level
from torch.utils.flop_counter import FlopCounterMode

from structconv.compat import torch as compat
from structconv.primitives.fused_attention import all_pairs, exact_attention
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import core
from tests.support.drawn import EVERY
from tests.support.threads import on_threads

needs_kernel = pytest.mark.skipif(core() is None, reason="the native kernels are turned off")
SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 70, 130)


def expected_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
                drop: Any = (0.0, 0, 1)) -> Tensor:
    """The formula in float64. Absent pairs read zeros instead of numbers, and outputs without pairs are zero."""
    query, key, value = (t.double() for t in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    exists = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    exists = exists.tril() if causal else exists
    if mask is not None:
        exists = exists & (mask if mask.dtype == torch.bool else mask > -torch.inf)
    keys, values = (t.unsqueeze(-3).masked_fill(~exists.unsqueeze(-1), 0) for t in (key, value))
    scores = scale * (query.unsqueeze(-2) * keys).sum(-1)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double().masked_fill(~exists, 0)
    highest = scores.detach().masked_fill(~exists, -1e30).amax(-1, keepdim=True)
    weights = (scores - highest).masked_fill(~exists, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    if drop[0]:
        batch, heads, outputs, inputs = map(torch.arange, weights.shape)
        pairs = torch.cartesian_prod(batch, heads, outputs, inputs).view(*weights.shape, 4).unbind(-1)
        kept = hash_uniform(torch.tensor(drop[1]), *pairs[:2], pairs[3] * weights.shape[2] + pairs[2]) >= drop[0]
        weights = weights * kept / (1 - drop[0])
    return weights.unsqueeze(-2).matmul(values).squeeze(-2)


def strided(shape: tuple[int, ...], kind: str) -> Tensor:
    """Random numbers (B, K, N, C), stored in this order, by rows, or as a part of a wider tensor."""
    batch, heads, rows, channels = shape
    if kind == "rows":
        return torch.randn(batch, rows, heads, channels).transpose(1, 2)
    return torch.randn(batch, heads, rows, 2 * channels)[..., 1:channels + 1] if kind == "part" else torch.randn(shape)


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    batch, groups, shared = (draw(st.integers(1, 3)) for _ in range(3))
    outputs, inputs = draw(st.sampled_from(SIZES)), draw(st.sampled_from((*SIZES, 520)))
    depth, channels = (draw(st.sampled_from((1, 3, 8, 16, 20, 40))) for _ in range(2))
    lies = st.sampled_from(("whole", "rows", "part"))
    tensors = [strided(shape, draw(lies)) for shape in (
        (batch, groups * shared, outputs, depth), (batch, groups, inputs, depth), (batch, groups, inputs, channels))]
    shape = tuple(draw(st.sampled_from((1, size))) for size in (batch, groups * shared, outputs, inputs))
    kind = draw(st.sampled_from(("none", "bool", "float", "both")))
    mask: Tensor | None = None
    if kind != "none":
        exists = torch.rand(shape) < draw(st.sampled_from((0.1, 0.7)))
        mask = exists if kind == "bool" else torch.randn(shape)
        mask = mask.masked_fill(~exists, -torch.inf) if kind == "both" else mask
        mask = mask[0, 0] if draw(st.booleans()) and shape[:2] == (1, 1) else mask
    drop = draw(st.sampled_from((0.0, 0.4))), draw(st.integers(0, 1 << 40)), groups * shared
    return tensors, mask, draw(st.booleans()), draw(st.sampled_from((depth ** -0.5, 1.0, -0.3, 0.0))), drop


@needs_kernel
@settings(max_examples=400 if EVERY else 60)
@given(cases())
def test_values_and_gradients_are_those_of_sums_in_float64(case: Any) -> None:
    """As near as those of one operator after the other in float32 are."""
    tensors, mask, *options = case
    one = torch.eye(tensors[1].shape[2]).expand(*tensors[1].shape[:2], -1, -1)  # whose sums are the weights

    def one_by_one(*tensors: Any) -> Any:
        return all_pairs(*tensors[:4], causal=tensors[4], scale=tensors[5], drop=tensors[6])

    results = []
    kinds = (exact_attention, torch.float32), (expected_of, torch.float64), (one_by_one, torch.float32)
    for function, dtype in kinds:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        bias = mask if mask is None or mask.dtype == torch.bool else mask.detach().to(dtype).requires_grad_()
        y = function(*leaves, bias, *options)
        assert y is not None
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        inputs = leaves if bias is mask else [*leaves, bias]
        results.append([y, *torch.autograd.grad(y, inputs, grad.to(dtype))])
        with torch.no_grad():
            y, weights = (exact_attention(*tensors, mask, *options, weighted=True) if function is exact_attention else
                          (y, function(*tensors[:2], one, mask, *options)))
        assert torch.equal(y, results[-1][0])
        results[-1].append(weights)
    for own, expected, plain in zip(*results, strict=True):
        size, error = max(1.0, float(expected.abs().max())), float((plain - expected).abs().max())
        torch.testing.assert_close(own.double(), expected.double(), rtol=0.0, atol=3e-5 * size + 4 * error)


@needs_kernel
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_one_key_has_no_gradient_of_its_score(p: float) -> None:
    query, key, value = (torch.randn(1, 2, n, c, requires_grad=True) for n, c in ((130, 8), (1, 8), (1, 40)))
    y = exact_attention(query, key, value, None, False, 0.3, (p, 5, 2))
    assert not any(g.any() for g in torch.autograd.grad(y, [query, key], torch.randn(1, 2, 130, 40)))


@needs_kernel
@pytest.mark.parametrize("channels", [8, 17, 64])
@pytest.mark.parametrize("outputs", [1, 2, 33])
@pytest.mark.parametrize("inputs", [64, 65, 600])
def test_weights_of_one_have_no_gradient_of_their_scores(inputs: int, outputs: int, channels: int) -> None:
    query, key = torch.full((1, 2, outputs, 8), 30.0), torch.zeros(1, 1, inputs, 8)
    key[:, :, inputs // 2] = 30.0
    leaves = [t.requires_grad_() for t in (query, key)]
    y = exact_attention(*leaves, 1e3 * torch.randn(1, 1, inputs, channels), None, False, 0.3)
    assert not any(g.any() for g in torch.autograd.grad(y, leaves, torch.randn_like(y)))


@needs_kernel
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["causal", "padding", "table"])
def test_what_has_no_pair_may_be_anything(kind: str, wrong: float) -> None:
    """In keys, values, and queries and gradients of outputs that have no pair with a key."""
    sizes = 2, 4, 70, 9
    tensors, grad = [torch.randn(sizes) for _ in range(3)], torch.randn(sizes)
    query, key, value = tensors
    exists = {"causal": None, "padding": torch.arange(70).expand(2, 1, 1, 70) < 60,
              "table": (torch.arange(70) < 60) & (torch.arange(70).unsqueeze(-1) != 3)}[kind]
    seen = 60 if kind == "causal" else 70
    results = []
    for bad in (False, True):
        if bad:
            key[:, :, 60:], value[:, :, 60:] = wrong, wrong
            if kind == "table":
                query[:, :, 3], grad[:, :, 3] = wrong, wrong
        leaves = [query[:, :, :seen].clone().requires_grad_(), *(t.clone().requires_grad_() for t in (key, value))]
        y = exact_attention(*leaves, exists, kind == "causal", 0.3)
        results.append([y, *torch.autograd.grad(y, leaves, grad[:, :, :seen])])
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)


@needs_kernel
@pytest.mark.parametrize("number", [1e4, -1e6, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_large_numbers_in_a_mask_leave_gradients_right(number: float, outputs: int, weighted: bool) -> None:
    """One operator after the other in float32, which rounds the scores likewise, has the same weights."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, size, 4, generator=generator) for size in (outputs, 70, 70)]
    mask, results = torch.zeros(outputs, 70), []
    mask[0] = number
    for exact in (True, False):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = (all_pairs(*leaves, mask, causal=False, scale=0.5) if not exact else
             exact_attention(*leaves, mask, False, 0.5, weighted=weighted))
        y = y[0] if type(y) is tuple else y
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@needs_kernel
def test_a_query_that_is_not_a_number_reaches_no_gradient_of_keys_without_a_pair() -> None:
    leaves = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    leaves[0][:, :, 2] = torch.nan
    leaves = [t.requires_grad_() for t in leaves]
    for t in torch.autograd.grad(exact_attention(*leaves, None, True, 0.5).sum(), leaves)[1:]:
        assert t[:, :, 3:].isfinite().all() and t[:, :, :3].isnan().all()


@needs_kernel
def test_numbers_that_are_none_stay_so_whatever_their_bits() -> None:
    for bits in (0x7fc00001, 0x7f800001, -1):
        key = torch.randn(1, 1, 3, 4)
        key[0, 0, 1] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert exact_attention(torch.randn(1, 1, 2, 4), key, torch.randn(1, 1, 3, 4), None, False, 0.5).isnan().all()


@pytest.mark.parametrize("program", [
    "f, x = scaled_dot_product_attention, [torch.randn(2, 3, 6, 4)] * 3",
    "f, x = MultiheadAttention(8, 2, batch_first=True), [torch.randn(2, 5, 8)] * 3"])
def test_the_first_use_of_a_process_may_be_compiled_whole(program: str) -> None:
    code = ("import torch\nfrom structconv.compat.torch import MultiheadAttention, scaled_dot_product_attention\n"
            f"{program}\ntorch.compile(f, fullgraph=True, dynamic=True, backend='aot_eager')(*x)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_kernel
def test_second_derivatives_are_those_of_products_with_and_without_numbers_that_no_pair_reads() -> None:
    generator = torch.Generator().manual_seed(0)
    for wrong in (0.0, torch.nan):
        query, key, value = (torch.randn(2, 2, 5, 3, generator=generator) for _ in range(3))
        key[0, :, 4], value[0, :, 4] = wrong, wrong
        mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
        mask[0, ..., 4] = False
        results = []
        for function, dtype in ((exact_attention, torch.float32), (expected_of, torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in (query, key, value)]
            first = torch.autograd.grad(function(*leaves, mask, True, 0.5).square().sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.sin().sum() for g in first), leaves))
        for own, expected in zip(*results, strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@needs_kernel
def test_weights_have_gradients_too() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 3, generator=generator) for heads in (4, 2, 2))
    one = torch.eye(5).expand(2, 2, 5, 5)
    results = []
    for of_y in (0.0, 1.0):
        for of_weights in (0.0, 1.0):
            grads = []
            for exact in (True, False):
                leaves = [t.clone().requires_grad_() for t in (query, key, value)]
                y, weights = (exact_attention(*leaves, None, True, 0.5, weighted=True) if exact else
                              (expected_of(*leaves, None, True, 0.5), expected_of(*leaves[:2], one, None, True, 0.5)))
                loss = of_y * y.square().sum() if of_y else 0.0
                loss = loss + of_weights * weights.square().sum() if of_weights else loss
                grads.append(torch.autograd.grad(loss, leaves, allow_unused=True) if of_y or of_weights else [])
            results.append(grads)
    for own, expected in results:
        for a, b in zip(own, expected, strict=True):
            assert (a is None or not a.any()) if b is None else torch.allclose(a.double(), b.double(), atol=1e-5)


@needs_kernel
def test_outputs_without_pairs_are_zero_and_so_are_their_gradients() -> None:
    leaves = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    y = compat.scaled_dot_product_attention(*leaves, torch.zeros(5, 5, dtype=torch.bool))
    for t in (y, *torch.autograd.grad(y.sum(), leaves)):
        assert torch.equal(t, torch.zeros_like(t))


@needs_kernel
def test_a_result_that_is_changed_in_place_is_made_again_for_the_gradients() -> None:
    leaves = [torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)]
    grads = []
    for changed in (False, True):
        y = exact_attention(*leaves, None, False, 0.5)
        loss = (y * 2).sum()
        if changed:
            y.detach().zero_()
        grads.append(torch.autograd.grad(loss, leaves))
    assert all(map(torch.equal, *grads))


@needs_kernel
@pytest.mark.parametrize("weighted", [False, True])
def test_a_second_backward_pass_runs_under_a_mode_and_a_dual_level(weighted: bool) -> None:
    leaves = [torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)]
    y = exact_attention(*leaves, None, False, 0.5, weighted=weighted)
    y = y[0] if weighted else y
    expected = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    for context in (FlopCounterMode(display=False), dual_level()):
        with context:
            assert all(map(torch.equal, torch.autograd.grad(y.sum(), leaves, retain_graph=True), expected))


@needs_kernel
def test_numbers_do_not_depend_on_threads() -> None:
    tensors = [torch.randn(2, 4, 150, 32, requires_grad=True) for _ in range(3)]

    def run() -> list[Tensor]:
        y = exact_attention(*tensors, None, True, 0.2)
        return [y, *torch.autograd.grad(y.square().sum(), tensors)]

    assert all(map(torch.equal, *on_threads(run, (1, 2))))


@needs_kernel
def test_what_the_kernel_does_not_take_is_left_to_others() -> None:
    x, wide = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 300)
    for query, key, value, mask in ((x.double(), x.double(), x.double(), None), (wide, wide, wide, None),
                                    (x, x[:, :3], x[:, :3], None), (x, x, x[..., :0], None),
                                    (x, x, x, torch.ones(5, 5, dtype=torch.int64)), (x, x, x, torch.ones(4, 5)),
                                    (x[0], x[0], x[0], None), (x, x.bfloat16(), x, None)):
        assert exact_attention(query, key, value, mask, False, 1.0) is None
