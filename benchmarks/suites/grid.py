"""Convolutions on images: cuboids against torch's own, irregular offsets against what torch's users would write."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Case, Comparison, Entrant, Size, entrant, leaf
from benchmarks.rates import products
from structconv.mechanisms import Shifts
from structconv.nn import Conv, Conv1d, Conv2d, OnGrid

__all__ = ["CASES", "build_conv2d"]

#: Five offsets within radius 8 that no small cuboid holds.
OFFSETS = ((0, 0), (-8, 3), (5, -7), (7, 8), (-4, -6))
_RADIUS = 8


def build_conv2d(batch: int, in_channels: int, out_channels: int, side: int, **options: Any) -> Comparison:
    """A layer of torch's, and ours made from it."""
    module = nn.Conv2d(in_channels, out_channels, **options)
    ours = Conv2d.from_torch(module)
    x, x_peer = leaf(batch, in_channels, side, side), leaf(batch, in_channels, side, side)
    outputs = side // module.stride[0]
    flops = 2.0 * batch * outputs**2 * module.weight.numel()
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x),
                      peers=(entrant("torch conv2d", module, lambda: module(x_peer), x_peer),),
                      size=f"{batch}x{in_channels}x{side}x{side} to {out_channels}",
                      least=products(flops))


def _conv2d(options: dict[str, Any], size: Size) -> Comparison:
    return build_conv2d(2 if size.quick else 8, 64, 64, 56, kernel_size=3, padding=1, **options)


def _conv1d(size: Size) -> Comparison:
    """Dilated, as in audio models."""
    module = nn.Conv1d(64, 64, 3, padding=4, dilation=4)
    ours, length = Conv1d.from_torch(module), 2048 if size.quick else 16384
    x, x_peer = leaf(4, 64, length), leaf(4, 64, length)
    flops = 2.0 * 4 * length * module.weight.numel()
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x),
                      peers=(entrant("torch conv1d", module, lambda: module(x_peer), x_peer),),
                      size=f"4x64x{length} to 64", least=products(flops))


def _irregular(size: Size) -> Comparison:
    """y_n = sum_k x_(n - Delta_k) Theta_k + b for five scattered offsets, with zeros around the image."""
    batch, channels, side = 1 if size.quick else 8, 64, 56
    ours: Any = OnGrid(Conv(Shifts(OFFSETS), channels, channels), 2)
    theta, bias = ours.conv.weight.theta.detach(), ours.conv.bias.detach()
    shape = (batch, channels, side, side)
    x, result = leaf(*shape), []
    for name, run in (("torch embedded", _embedded), ("torch slices", _slices)):
        x_peer = leaf(*shape)
        own = theta.clone().requires_grad_(), bias.clone().requires_grad_()
        result.append(Entrant(name=name, run=partial(run, x_peer, *own), inputs=(x_peer,), parameters=own))
    flops = 2.0 * batch * side**2 * theta.numel()
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x), peers=tuple(result),
                      size=f"{batch}x{channels}x{side}x{side} to {channels}, {len(OFFSETS)} offsets of radius "
                           f"{_RADIUS}",
                      least=products(flops))


def _embedded(x: Tensor, theta: Tensor, bias: Tensor) -> Tensor:
    """In a dense kernel of 17x17."""
    width = 2 * _RADIUS + 1
    rows, columns = torch.tensor(OFFSETS).neg().add(_RADIUS).unbind(1)
    kernel = theta.new_zeros(width, width, *theta.shape[1:]).index_put((rows, columns), theta)
    return F.conv2d(x, kernel.permute(3, 2, 0, 1), bias, padding=_RADIUS)


def _slices(x: Tensor, theta: Tensor, bias: Tensor) -> Tensor:
    """As a sum of 1x1 convolutions of slices of the padded image."""
    height, width = x.shape[-2:]
    padded, total = F.pad(x, (_RADIUS,) * 4), bias[:, None, None]
    for (row, column), weight in zip(OFFSETS, theta, strict=True):
        piece = padded[..., _RADIUS - row:_RADIUS - row + height, _RADIUS - column:_RADIUS - column + width]
        total = total + F.conv2d(piece, weight.mT[..., None, None])
    return total


CASES = (
    Case(suite="grid", name="conv2d-3x3", build=partial(_conv2d, {})),
    Case(suite="grid", name="conv2d-stride-2", build=partial(_conv2d, {"stride": 2}), headline=False),
    Case(suite="grid", name="conv2d-groups-8", build=partial(_conv2d, {"groups": 8}), headline=False),
    Case(suite="grid", name="conv1d-dilated", build=_conv1d, headline=False),
    Case(suite="grid", name="irregular-r8", build=_irregular),
)
