"""The precision of two layers under autocast, beside their own in float32."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

NARROW = [torch.bfloat16, torch.float16]


def results(run: Any, layer: nn.Module, leaves: list[torch.Tensor], dtype: torch.dtype | None = None
            ) -> list[torch.Tensor]:
    """The output, the gradients of its product with fixed numbers, and the other results; the call under autocast to
    this dtype, and the backward outside of it, as torch recommends."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = run(layer)
    more = y[1:] if isinstance(y, tuple) else ()
    y = y[0] if isinstance(y, tuple) else y
    leaves = [*leaves, *(p for p in layer.parameters() if not isinstance(p, UninitializedParameter))]
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    gradients = torch.autograd.grad((y.float() * weights).sum(), leaves, allow_unused=True,
                                    materialize_grads=True) if y.requires_grad else ()
    return [y.detach(), *gradients, *(t.detach() for t in more)]


class Errors:
    """The largest differences to results of float32, relative to the largest of these; summed over calls, by a name."""

    def __init__(self) -> None:
        self.own: defaultdict[str, float] = defaultdict(float)
        self.peer: defaultdict[str, float] = defaultdict(float)

    def add(self, own: Any, peer: Any, exact: Any, exact_peer: Any) -> None:
        assert [t.dtype for t in own] == [t.dtype for t in peer]
        for name, part in (("y", slice(1)), ("others", slice(1, None))):
            right = exact_peer[part]
            if all(bool(t.isfinite().all()) for t in peer[part]):  # not where theirs overflows, or normalizes zeros
                scale = max((float(t.abs().max()) for t in right if t.numel()), default=0.0) or 1.0
                self.own[name] += apart(own[part], exact[part]) / scale
                self.peer[name] += apart(peer[part], right) / scale

    def compare(self, layer: nn.Module, peer: nn.Module, run: Any, leaves: Any, dtype: torch.dtype) -> None:
        """Add the results of `run(layer, *leaves)` under autocast."""
        def called(leaves: Any, dtype: torch.dtype | None = None) -> list[list[torch.Tensor]]:
            return [results(lambda one: run(one, *leaves), each, leaves, dtype) for each in (layer, peer)]

        exact = called([leaf.detach().float().requires_grad_(leaf.requires_grad) for leaf in leaves])
        self.add(*called(leaves, dtype), *exact)

    def check(self) -> None:
        for name, own in self.own.items():
            assert own <= 1.5 * self.peer[name] + 1e-4, (name, own, self.peer[name])


def apart(narrow: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max((float((a.float() - b.float()).abs().max()) for a, b in zip(narrow, exact, strict=True) if b.numel()),
               default=0.0)
