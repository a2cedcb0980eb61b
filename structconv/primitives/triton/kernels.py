"""Every kernel under one name, for `choice.usable` to import when there is a GPU."""

from __future__ import annotations

import torch

from structconv.primitives.native.indices import Csr
from structconv.primitives.triton.affine import affine_backward, affine_forward
from structconv.primitives.triton.product import sddmm, spmm
from structconv.primitives.triton.queries import (
    additive_backward,
    additive_forward,
    bilinear_backward,
    bilinear_forward,
    packed_backward,
    packed_forward,
)

__all__ = ["additive_backward", "additive_forward", "affine_backward", "affine_forward", "bilinear_backward",
           "bilinear_forward", "packed_backward", "packed_forward", "probe", "sddmm", "spmm"]


def probe(device: torch.device) -> None:
    """Run one small product, so that whatever keeps Triton from working here shows."""
    index = torch.zeros(1, dtype=torch.int32, device=device)
    layout = Csr(torch.tensor([0, 1], dtype=torch.int32, device=device), index, index)
    spmm(layout, None, torch.ones(1, 1, 1, device=device), None, 1, 1, 1.0, 0.0)
