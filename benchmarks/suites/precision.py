"""The gain of autocast to bfloat16 in time and in memory: ours and torch's, beside float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import Case, Comparison, Entrant, Size, copied, leaf
from structconv.mechanisms import Identity
from structconv.nn import Conv, MultiheadAttention

__all__ = ["CASES"]

#: Of max |y|, and of max |gradient|: some units of bfloat16, summed over a layer's four products.
TOLERANCE = 16 * torch.finfo(torch.bfloat16).eps


def _entrant(name: str, layer: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, low: bool) -> Entrant:
    def run() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
            return call(x).float()

    return Entrant(name=name, run=run, inputs=(x,), parameters=tuple(layer.parameters()))


def _comparison(ours: nn.Module, module: nn.Module, apply: Callable[[Tensor], Tensor], x: Tensor, size: str
                ) -> Comparison:
    """Ours under autocast against ours in float32, and torch's in both."""
    entrants: list[Any] = [("ours", ours, ours, True), ("ours float32", ours, ours, False),
                           ("torch bfloat16", module, apply, True), ("torch float32", module, apply, False)]
    own, *peers = [_entrant(name, layer, call, x.detach().clone().requires_grad_(), low)
                   for name, layer, call, low in entrants]
    return Comparison(ours=own, peers=tuple(peers), size=size, tolerance=TOLERANCE)


def _linear(size: Size) -> Comparison:
    entries, channels = size.pick(1024, 8192), 512
    ours: Any = Conv(Identity(), channels, channels)
    module = nn.Linear(channels, channels)
    copied(module.weight, ours.weight.theta[0].mT, module.bias)
    return _comparison(ours, module, module, leaf(entries, channels), f"{entries} entries, {channels} to {channels}")


def _multihead(size: Size) -> Comparison:
    length, channels, heads = size.pick(256, 1024), 256, 8
    module = nn.MultiheadAttention(channels, heads, batch_first=True)
    ours = MultiheadAttention.from_torch(module)
    return _comparison(ours, module, lambda x: module(x, x, x, need_weights=False)[0], leaf(2, length, channels),
                       f"B=2, N={length}, {channels} channels, {heads} heads")


CASES = (
    Case(suite="precision", name="linear-bfloat16", build=_linear),
    Case(suite="precision", name="multihead-bfloat16", build=_multihead),
)
