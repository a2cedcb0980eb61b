"""Random numbers that depend on where they are used, not on when: dropout that blocks and recomputation agree on."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.errors import ShapeError

__all__ = ["hash_uniform"]

_MASK = 0xFFFFFFFF
# Two odd multipliers below 2^31, so that a product with 32 bits stays inside an int64: the pair that
# C. Wellons' "hash-prospector" search reports for two rounds with shifts 16, 15, 15 (public domain, 2018-2022).
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_GOLDEN = 0x1E3779B9


def hash_uniform(seed: Tensor, *indices: Tensor) -> Tensor:
    """A uniform number in [0, 1) for every tuple of indices, a fixed function of (seed, i_1, ..., i_r).

    Args:
        seed: integer scalar tensor; all of its 64 bits count.
        indices: integer tensors that broadcast. Their order matters. Put the ones that vary over few elements first:
            the state of the first r of them is mixed at the size of those r.

    Returns:
        float32 of the broadcast shape, multiples of 2^-24.

    Two keys of 32 bits travel with the state, the second entering halfway through each mix, so that two rows (or two
    seeds) do not hold the same numbers in another order. Integer arithmetic that never overflows, on any device;
    compiled and eager give the same bits. Not for cryptography. Cost: about 15 integer operations an element.

    Raises:
        ShapeError: if an index or the seed is not of an integer type, or the seed is not a scalar.
    """
    if seed.dim() != 0 or any(t.is_floating_point() or t.dtype == torch.bool for t in (seed, *indices)):
        raise ShapeError("hash_uniform", "seed must be an integer scalar and the indices integers",
                         [(str(t.dtype), tuple(t.shape)) for t in (seed, *indices)])
    seed = seed.long()
    low, high = seed & _MASK, (seed >> 32) & _MASK
    state, key = _mix(low, high), _mix(high ^ _GOLDEN, low)
    for position, index in enumerate(indices):
        index = index.long()
        low = (index ^ (((index >> 32) & _MASK) * _FIRST)) & _MASK
        last = position == len(indices) - 1
        state, key = _mix(state ^ low, key), key if last else _mix(key ^ low ^ _GOLDEN, state)
    return (state >> 8).to(torch.float32) * 2.0**-24


def _mix(state: Tensor, key: Tensor) -> Tensor:
    """A bijection of 32 bits for every key: xor-shift, multiply, add the key, xor-shift, multiply, xor-shift."""
    state = ((state ^ (state >> 16)) * _FIRST) & _MASK
    state = state ^ key
    state = ((state ^ (state >> 15)) * _SECOND) & _MASK
    return state ^ (state >> 15)
