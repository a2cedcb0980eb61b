"""Blocks with recomputation: the numbers of the plain loop, the memory of one block."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from structconv.errors import ConfigError, ShapeError
from structconv.primitives.blocks import recompute_blocks

F64 = torch.float64


def slices(size, step):
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def attention(block, q, k, v):
    return torch.softmax(q[..., block, :] @ k.transpose(-1, -2), -1) @ v


def operands(n=11, dtype=F64):
    torch.manual_seed(0)
    return [torch.randn(2, n, 3, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("blocks", [slices(11, 4), slices(11, 1), slices(11, 11), [range(5), range(5, 11)]])
def test_concatenation_equals_the_whole(blocks):
    inputs = operands()
    got, expected = recompute_blocks(attention, inputs, blocks, reduce="cat"), attention(slice(None), *inputs)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad(y, inputs, weight) for y in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_sum_equals_the_whole_and_leaves_inputs_alone():
    q, k = torch.randn(5, 9, dtype=F64, requires_grad=True), torch.randn(9, 4, dtype=F64, requires_grad=True)
    def run(q, k):
        return recompute_blocks(lambda block, q, k: q[:, block] @ k[block], [q, k], slices(9, 2), reduce="sum")

    torch.testing.assert_close(run(q, k), q @ k)
    assert gradcheck(run, (q, k), fast_mode=True)
    x = torch.ones(3)
    assert torch.equal(recompute_blocks(lambda block, x: x, [x], [0, 1, 2], reduce="sum"), torch.full((3,), 3.0))
    assert torch.equal(x, torch.ones(3))


def test_gradients_that_autograd_shares_are_not_summed_twice():
    x, y = (torch.randn(4, 2, dtype=F64, requires_grad=True) for _ in range(2))
    def run(x, y):
        return recompute_blocks(lambda block, x, y: (x + y) * block, [x, y], [1, 2, 3], reduce="sum")

    assert gradcheck(run, (x, y), fast_mode=True)


def test_pieces_whose_length_is_not_their_slice():
    x = torch.arange(12.0, requires_grad=True).reshape(1, 12, 1)
    got = recompute_blocks(lambda block, x: x[:, block][:, ::2], [x], slices(12, 4), reduce="cat")
    assert torch.equal(got, x[:, ::2])
    with pytest.raises(ShapeError, match="piece"):
        recompute_blocks(lambda block, x: x[:, block.start:block.stop - (block.start > 0)], [x], slices(12, 4),
                         reduce="cat")


def test_unused_and_constant_inputs():
    q, k, unused = torch.randn(6, 2, requires_grad=True), torch.randn(6, 2), torch.randn(3, requires_grad=True)
    index = torch.arange(6)
    run = recompute_blocks(lambda block, q, k, index, unused: q[index[block]] * k[block], [q, k, index, unused],
                           slices(6, 2), reduce="cat")
    grads = torch.autograd.grad(run.sum(), [q, unused], allow_unused=True)
    assert torch.equal(grads[0], k) and grads[1] is None
    plain = recompute_blocks(lambda block, k: k[block], [k], slices(6, 2), reduce="cat")
    assert torch.equal(plain, k) and not plain.requires_grad


def test_a_block_without_gradient():
    x = torch.ones(4, 1, requires_grad=True)
    got = recompute_blocks(lambda block, x: x[block] if block.start else x[block].detach(), [x], slices(4, 2),
                           reduce="cat")
    got.sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 1, 1]


def test_keeps_one_graph_at_a_time():
    alive, peak = 0, 0

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nonlocal alive, peak
            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Token:
        def __init__(self):
            nonlocal alive, peak
            alive += 1
            peak = max(peak, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    x = torch.randn(12, 2, requires_grad=True)
    y = recompute_blocks(lambda block, x: Counted.apply(x[block]), [x], slices(12, 2), reduce="cat")
    assert alive == 0
    y.sum().backward()
    assert alive == 0 and peak <= 2
    peak = 0
    y = torch.cat([Counted.apply(x[block]) for block in slices(12, 2)])
    assert peak == 6


def test_autocast_of_the_forward_holds_in_the_backward():
    seen = []

    def product(block, a, b):
        out = a[block] @ b
        seen.append(out.dtype)
        return out

    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = recompute_blocks(product, [a, b], slices(4, 2), reduce="cat")
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 4
    seen.clear()
    y = recompute_blocks(product, [a, b], slices(4, 2), reduce="cat")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
    assert seen == [torch.float32] * 4


@pytest.mark.parametrize("blocks", [slices(4, 4), slices(4, 2)])
def test_differentiates_twice(blocks):
    x, y = torch.randn(4, 2, dtype=F64, requires_grad=True), torch.randn(4, 2, dtype=F64, requires_grad=True)

    def run(x, y):
        squared = x * x
        return recompute_blocks(lambda block, x, s, y: (x * s * y.sum(0))[block], [x, squared, y], blocks,
                                reduce="cat")

    assert gradcheck(run, (x, y), fast_mode=True)
    assert gradgradcheck(run, (x, y), fast_mode=True)
    (g,) = torch.autograd.grad(run(x, y).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * x * y.sum(0))


def test_bad_arguments():
    with pytest.raises(ConfigError, match="block"):
        recompute_blocks(attention, operands(), [], reduce="cat")
    with pytest.raises(ConfigError, match="mean"):
        recompute_blocks(attention, operands(), slices(11, 4), reduce="mean")


@pytest.mark.parametrize("reduce", ["cat", "sum"])
def test_a_tensor_that_is_reached_by_a_closure_has_its_gradient(reduce):
    x, t = (torch.randn(4, 2, dtype=F64, requires_grad=True) for _ in range(2))

    def run(x, t):
        scale = t.exp()
        return recompute_blocks(lambda block, x: (x * scale)[block], [x], slices(4, 2), reduce=reduce)

    assert gradcheck(run, (x, t), fast_mode=True)
    assert gradcheck(run, (x.detach(), t), fast_mode=True)
    calls = []
    recompute_blocks(lambda block, x: (calls.append(block), x[block])[1], [x], slices(4, 2), reduce=reduce)
    assert calls == slices(4, 2)                       # what it is found by is not computed twice
