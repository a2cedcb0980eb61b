"""Eq. (1) as it is written, over dense tensors: what every rule is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.theta import Theta, as_theta

__all__ = ["reference"]


def reference(x: Tensor, basis: Basis, theta: Theta | Tensor) -> Tensor:
    """y_nq = sum_kmp A_kmn x_mp Theta_kpq, by one einsum over `basis.dense()` and `theta.dense()`.

    Args:
        x: (..., M, P), in the dtype in which all is computed.
        basis: (..., K, M, N).
        theta: (K, P, Q), whole or in factors.

    Returns:
        (..., N, Q). O(K M N) memory and more; for tests and small sizes.
    """
    weight = as_theta(theta).dense().to(dtype=x.dtype, device=x.device)
    a = basis.dense(x.dtype).to(dtype=x.dtype, device=x.device)
    return torch.einsum("...kmn,...mp,kpq->...nq", a, x, weight)
