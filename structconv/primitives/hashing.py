"""Random numbers as a function of their indices, so that blocks and recomputation draw equal dropout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import ShapeError

__all__ = ["Drop", "drop_factors", "hash_bits", "hash_uniform"]

_MASK = 0xFFFFFFFF
# Two odd multipliers below 2^31, so that a product with 32 bits stays inside an int64: the pair that
# C. Wellons' "hash-prospector" search reports for two rounds with shifts 16, 15, 15 (public domain, 2018-2022).
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_GOLDEN = 0x1E3779B9


class Drop(NamedTuple):
    """Dropout on weights: with probability p, numbers from `hash_uniform(seed, batch, head, m N + n)`.

    Heads are `batch_heads` a batch entry: head k of the operator is head k % batch_heads of entry k // batch_heads.
    """

    p: float
    seed: Tensor | None
    batch_heads: int


def hash_uniform(seed: Tensor, *indices: Tensor) -> Tensor:
    """A uniform number in [0, 1) for every tuple of indices, a fixed function of (seed, i_1, ..., i_r).

    Args:
        seed: integer scalar tensor; all of its 64 bits count.
        indices: integer tensors that broadcast. Their order matters. Put the ones that vary over few elements first:
            the state of the first r of them is mixed at the size of those r.

    Returns:
        float32 of the broadcast shape, multiples of 2^-24.

    Two keys of 32 bits travel with the state, the second entering halfway through each mix, so that two rows (or two
    seeds) do not hold the same numbers in another order. Compiled and eager give the same bits, on any device. Not for
    cryptography. Cost: about 15 integer operations an element, in two tensors of 32 bits, or of 64 where it is traced.

    Raises:
        ShapeError: if an index or the seed is not of an integer type, or the seed is not a scalar.
    """
    state, key, low = _entered("hash_uniform", seed, indices)
    if low is not None and not torch.compiler.is_compiling():
        return _uniform(state, low, key)
    state = state if low is None else _mix(state ^ low, key)
    return (state >> 8).to(torch.float32) * 2.0**-24


def drop_factors(drop: Drop, head: Tensor, pair: Tensor, dtype: torch.dtype) -> Tensor:
    """0 with probability p, else 1 / (1 - p), for each head of the operator and pair m N + n; a seed is needed."""
    assert drop.seed is not None
    uniform = hash_uniform(drop.seed, head // drop.batch_heads, head % drop.batch_heads, pair)
    return (uniform >= drop.p).to(dtype) / (1 - drop.p)


def hash_bits(seed: Tensor, *indices: Tensor) -> Tensor:
    """The 32 random bits of every tuple of indices, of which `hash_uniform` keeps 24: int64 in [0, 2^32)."""
    state, key, low = _entered("hash_bits", seed, indices)
    return state if low is None else _mix(state ^ low, key)


def _entered(owner: str, seed: Tensor, indices: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """State and key after all indices except the last, and 32 bits of the last, if there is one."""
    if seed.dim() != 0 or any(t.is_floating_point() or t.dtype == torch.bool for t in (seed, *indices)):
        raise ShapeError(owner, "seed must be an integer scalar and the indices integers",
                         [(str(t.dtype), tuple(t.shape)) for t in (seed, *indices)])
    seed = seed.long()
    low, high = seed & _MASK, (seed >> 32) & _MASK
    state, key = _mix(low, high), _mix(high ^ _GOLDEN, low)
    for index in indices[:-1]:
        low = _fold(index)
        state, key = _mix(state ^ low, key), _mix(key ^ low ^ _GOLDEN, state)
    return state, key, _fold(indices[-1]) if indices else None


def _fold(index: Tensor) -> Tensor:
    """64 bits as 32."""
    index = index.long()
    return (index ^ (((index >> 32) & _MASK) * _FIRST)) & _MASK


def _uniform(state: Tensor, low: Tensor, key: Tensor) -> Tensor:
    """Convert `_mix(state ^ low, key)` to a number, in place and in int32, whose products wrap at 32 bits."""
    x = state.to(torch.int32) ^ low.to(torch.int32)
    shape = torch.broadcast_shapes(x.shape, key.shape)
    x = x if x.shape == shape else x.expand(shape).clone()
    shifted = torch.empty_like(x)
    _xor_shift(x, shifted, 16).mul_(_FIRST).bitwise_xor_(key.to(torch.int32))
    _xor_shift(x, shifted, 15).mul_(_SECOND)
    _xor_shift(x, shifted, 15)
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def _xor_shift(x: Tensor, shifted: Tensor, by: int) -> Tensor:
    """x ^ (x >> by) in place, with zeros shifted in."""
    torch.bitwise_right_shift(x, by, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << 32 - by) - 1))


def _mix(state: Tensor, key: Tensor) -> Tensor:
    """A bijection of 32 bits for every key: xor-shift, multiply, add the key, xor-shift, multiply, xor-shift."""
    state = ((state ^ (state >> 16)) * _FIRST) & _MASK
    state = state ^ key
    state = ((state ^ (state >> 15)) * _SECOND) & _MASK
    return state ^ (state >> 15)
