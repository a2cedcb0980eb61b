"""Dropout of a block of dense weights, by the native kernel: the numbers of the hash, also beyond 32 bits of pairs."""

from __future__ import annotations

import pytest
import torch

from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import core

P, SEED = 0.3, 2**40 + 12345


@pytest.mark.parametrize("gradient", [False, True], ids=["in place", "with a gradient"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("heads", "rows", "columns", "first_head", "last_row", "outputs"), [
    (1, 1, 1, 0, 0, 1), (4, 7, 33, 2, 19, 41), (3, 64, 300, 0, 63, 64), (2, 5, 70, 5, 2**27 + 11, 2**28 + 3)])
def test_a_block_is_dropped_by_the_hash(heads, rows, columns, first_head, last_row, outputs, threads, gradient):
    kernels = core()
    if kernels is None:
        pytest.skip("the native core cannot be built here")
    weights, grad = torch.randn(heads, rows, columns), torch.randn(heads, rows, columns)
    head = torch.arange(first_head, first_head + heads).view(-1, 1, 1)
    pair = torch.arange(columns) * outputs + (last_row - torch.arange(rows)).unsqueeze(-1)
    uniform = hash_uniform(torch.tensor(SEED), head // 2, head % 2, pair)
    factor = torch.where(uniform >= P, 1 / (1 - P), 0.0)
    dropped, through = torch.empty_like(weights) if gradient else weights.clone(), grad.clone() if gradient else None
    known = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        kernels.drop_block(weights if gradient else dropped, dropped, through, first_head, last_row, outputs, P, SEED,
                           2)
    finally:
        torch.set_num_threads(known)
    torch.testing.assert_close(dropped, weights * factor)
    if through is not None:
        torch.testing.assert_close(through, grad * factor)
