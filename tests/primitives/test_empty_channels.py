"""Native operators of rows without channels, whose projections are their biases."""

import pytest
import torch

from structconv.primitives.native import core

native = core()
pytestmark = pytest.mark.skipif(native is None, reason="there are no native kernels")
r = torch.randn


@pytest.mark.parametrize("shape", [(40, 0), (2, 40, 0)], ids=str)
def test_attention_of_entries_is_the_bias_of_values(shape):
    query, key, value, output = (r(8, 0), r(8)), (r(8, 0), r(8)), (r(6, 0), r(6)), (r(4, 6), r(4))
    x, grad = r(shape), r(*shape[:-1], 4)
    tensors = x, *query, *key, *value, *output, None
    y, table, peaks, rows = native.attend_entries_forward(*tensors, None, 2, 0.5, False, False, True)
    same, weights = native.attend_entries_weighted(*tensors, 2, 0.5, False, True)
    assert torch.equal(y, same)
    torch.testing.assert_close(y, torch.nn.functional.linear(value[1], *output).expand_as(grad))
    torch.testing.assert_close(weights, torch.full((*shape[:-2], 40, 40), 1 / 40).view_as(weights))
    grads = native.attend_entries_backward(*tensors, table, peaks, rows, grad, True, None, 2, 0.5, False, False)
    assert grads[-1] is None
    grads = grads[:-1]
    assert [tuple(g.shape) for g in grads] == [tuple(t.shape) for t in tensors[:-1]]
    rows = grad.flatten(0, -2).sum(0)
    torch.testing.assert_close(grads[-1], rows)
    torch.testing.assert_close(grads[-3], rows @ output[0])


@pytest.mark.parametrize("heads", [0, 2], ids=["theta", "weight"])
def test_attention_along_edges_is_the_bias_of_values(heads):
    index = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 3, 3, 0]])
    side, _ = native.adjacency(index, 4, 4, True, True, 0, None, True)
    value = (r(6, 0), r(6)) if heads else (r(2, 0, 3), None)
    tensors = r(4, 0), r(8, 0), r(8), r(8, 0), r(8), *value, r(6)
    y, table, peaks = native.attend_dots_forward(side, *tensors, heads, 0.5, 0.0, 0, 1, True)
    torch.testing.assert_close(y, (tensors[-1] + (value[1] if heads else 0)).expand(4, 6))
    back = native.transpose(side)
    grads = native.attend_dots_backward(side, back, *tensors, y, table, peaks, y, True, heads, 0.5, 0.0, 0, 1)
    assert [g if g is None else g.shape for g in grads] == [t if t is None else t.shape for t in tensors]
    torch.testing.assert_close(grads[-1], y.sum(0))


def test_groups_have_no_numbers_to_standardize():
    x, none, starts = r(5, 0), r(0), torch.tensor([0, 2, 5])
    assert native.norm(starts, x, none, none, none, 0, 2, 0.1, 1.0).shape == x.shape
    grads = native.norm_backward(starts, x, none, none, none, x, 1, 2, 0.1, 1.0)
    assert [g.shape for g in grads] == [x.shape, none.shape, none.shape, none.shape]
