"""Rotations of pairs of channels by angles that grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(t: Tensor, positions: Tensor, rates: Tensor, gain: float, halves: bool) -> Tensor:
    """(..., M, D) with its first d channels turned, pair j of entry m by the angle positions_m rates_j, times `gain`.

    Args:
        positions: (M,), or (B, 1, M) where the axes before M are a batch and heads. rates: (d / 2), float64.
        halves: pairs are channels j and j + d / 2; else 2j and 2j + 1.
    """
    turned = 2 * rates.shape[0]
    angle = positions.to(torch.float64).unsqueeze(-1) * rates
    cos, sin = ((gain * part).to(t.dtype) for part in (angle.cos(), angle.sin()))
    first, second = t[..., :turned].chunk(2, -1) if halves else (t[..., 0:turned:2], t[..., 1:turned:2])
    pairs = first * cos - second * sin, second * cos + first * sin
    y = torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)
    return y if turned == t.shape[-1] else torch.cat([y, t[..., turned:]], -1)
