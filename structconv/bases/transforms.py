"""Fixed orthogonal bases: the discrete Fourier transform, and the wavelets of Haar."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structconv.errors import ConfigError
from structconv.shapes import check_positive

__all__ = ["fourier_basis", "haar_basis"]


def fourier_basis(num_entries: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The discrete Fourier transform of M entries as two matrices (2, M, M): `Given(fourier_basis(M))`.

    A_0^T x is the real part of the transform and A_1^T x the imaginary one: A_0mn = cos(2 pi m n / M) and
    A_1mn = -sin(2 pi m n / M), exact at multiples of a quarter turn. Divide by sqrt(M) for a unitary one.

    Raises:
        ConfigError: if M is not a positive integer.

    Example:

        >>> from structconv.bases import fourier_basis
        >>> fourier_basis(4).shape                             # real and imaginary parts, M, N
        torch.Size([2, 4, 4])
    """
    check_positive("fourier_basis", "num_entries", num_entries)
    number = torch.arange(num_entries)
    turns = number.unsqueeze(1) * number % num_entries
    eighth = torch.tensor([_circle(i, num_entries) for i in range(num_entries)], dtype=torch.float64)
    return eighth[turns].movedim(-1, 0).to(dtype or torch.get_default_dtype()).contiguous()


def _circle(part: int, whole: int) -> tuple[float, float]:
    """cos and -sin of 2 pi part / whole."""
    quarter, rest = divmod(4 * part, whole)
    cos, sin = math.cos(math.pi * rest / (2 * whole)), math.sin(math.pi * rest / (2 * whole))
    for _ in range(quarter):
        cos, sin = -sin, cos
    return cos + 0.0, -sin + 0.0


def haar_basis(num_entries: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The orthonormal wavelets of Haar on M entries, a power of two, as one matrix (1, M, M).

    A^T x are the coefficients. The first is the mean times sqrt(M); then come differences of halves, of quarters, ...
    each level from left to right. A is orthogonal, so that A^T goes there and A comes back:
    `Given(haar).transpose()`. (A. Haar 1910.)

    Raises:
        ConfigError: if M is not a power of two.

    Example:

        >>> from structconv.bases import haar_basis
        >>> haar_basis(2)
        tensor([[[ 0.7071,  0.7071],
                 [ 0.7071, -0.7071]]])
    """
    if num_entries < 1 or num_entries & (num_entries - 1):
        raise ConfigError("haar_basis", "num_entries must be a power of two", num_entries, "Pad with zeros.")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < num_entries:
        size = matrix.shape[0]
        coarse = matrix.repeat_interleave(2, 0)
        fine = torch.eye(size, dtype=torch.float64).repeat_interleave(2, 0)
        fine[1::2] *= -1
        matrix = torch.cat([coarse, fine], 1) / math.sqrt(2)
    return matrix.unsqueeze(0).to(dtype or torch.get_default_dtype())
