"""Hashed uniforms: they look uniform and independent, and depend on nothing but the indices; dropout by them."""

import pytest
import torch

from structconv.errors import ShapeError
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import core
from tests.support.threads import on_threads

ROWS, COLS = torch.arange(256).unsqueeze(1), torch.arange(512)
SEED = torch.tensor(7)


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 2**40 + 3])
def test_uniform(seed):
    u = hash_uniform(torch.tensor(seed), ROWS, COLS)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    # chi-square with 63 degrees of freedom: mean 63, standard deviation 11.2
    assert 25 < chi_square(torch.histc(u.double(), 64, 0, 1)) < 125
    assert abs(u.double().mean().item() - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (16, 0), (0, 256)])
def test_neighbors_are_independent(shift):
    u = hash_uniform(SEED, ROWS, COLS)
    v = hash_uniform(SEED, ROWS + shift[0], (COLS + shift[1]) % 512)
    joint = torch.stack([(u * 8).floor(), (v * 8).floor()]).long().reshape(2, -1)
    counts = torch.zeros(64).index_add(0, joint[0] * 8 + joint[1], torch.ones(joint.shape[1]))
    assert chi_square(counts) < 125


def test_seeds_and_index_order_give_unrelated_numbers():
    u = hash_uniform(SEED, ROWS, COLS).flatten().double()
    bound = 5 / u.numel() ** 0.5
    for other in (hash_uniform(torch.tensor(8), ROWS, COLS), hash_uniform(SEED, COLS, ROWS),
                  hash_uniform(torch.tensor(7 + 2**32), ROWS, COLS), hash_uniform(SEED, ROWS, COLS + 2**32),
                  hash_uniform(SEED, torch.tensor(0), ROWS, COLS)):
        correlation = torch.corrcoef(torch.stack([u, other.flatten().double()]))[0, 1]
        assert abs(correlation.item()) < bound


def test_rows_do_not_hold_the_same_numbers_in_another_order():
    u = hash_uniform(SEED, torch.arange(4096).unsqueeze(1), torch.arange(64))
    assert torch.unique(u.sort(1).values, dim=0).shape[0] == 4096


def test_blocks_and_edge_lists_see_the_same_numbers():
    whole = hash_uniform(SEED, ROWS, COLS)
    assert torch.equal(whole[30:50, 7:19], hash_uniform(SEED, ROWS[30:50], COLS[7:19]))
    m, n = torch.randint(256, (100,)), torch.randint(512, (100,))
    assert torch.equal(whole[m, n], hash_uniform(SEED, m, n))
    assert torch.equal(whole[m, n], hash_uniform(SEED, m.int(), n.int()))


def test_the_numbers_themselves_are_fixed():
    got = (hash_uniform(torch.tensor(123), torch.arange(3), torch.tensor(5)) * 2**24).long().tolist()
    assert got == reference([123, 0], [[i, 5] for i in range(3)])


def reference(seed, rows):
    """The documented mix with Python's unbounded integers."""
    mask = 0xFFFFFFFF

    def mix(state, key):
        state = ((state ^ (state >> 16)) * 0x21F0AAAD) & mask
        state = ((state ^ key ^ ((state ^ key) >> 15)) * 0x735A2D97) & mask
        return state ^ (state >> 15)

    out = []
    for row in rows:
        state, key = mix(*seed), mix(seed[1] ^ 0x1E3779B9, seed[0])
        for index in row:
            state, key = mix(state ^ index, key), mix(key ^ index ^ 0x1E3779B9, state)
        out.append(state >> 8)
    return out


def test_compiled_and_eager_give_the_same_bits():
    compiled = torch.compile(hash_uniform, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(SEED, ROWS, COLS), hash_uniform(SEED, ROWS, COLS))


def test_indices_are_integers():
    with pytest.raises(ShapeError, match="integer"):
        hash_uniform(SEED, torch.rand(3))
    with pytest.raises(ShapeError, match="scalar"):
        hash_uniform(torch.tensor([1, 2]), ROWS)


P, DROP_SEED = 0.3, 2**40 + 12345


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
    uniform = hash_uniform(torch.tensor(DROP_SEED), head // 2, head % 2, pair)
    factor = torch.where(uniform >= P, 1 / (1 - P), 0.0)
    dropped, through = torch.empty_like(weights) if gradient else weights.clone(), grad.clone() if gradient else None
    on_threads(lambda: kernels.drop_block(weights if gradient else dropped, dropped, through, first_head, last_row,
                                          outputs, P, DROP_SEED, 2), [threads])
    torch.testing.assert_close(dropped, weights * factor)
    if through is not None:
        torch.testing.assert_close(through, grad * factor)
