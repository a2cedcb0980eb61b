"""Layers on a second device, beside themselves on the CPU: `python -m tests.on_second_device STEP` prints what differs.

STEP is 1 for a `Conv` over every specimen, n for one of n.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from structconv.testing.use import Use
from tests.support import second_device
from tests.support.layers import drawn_uses, in_float32


def moved(value: Any) -> Any:
    """An argument on the second device."""
    if isinstance(value, Tensor):
        return value.detach().to(second_device.DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: moved(item) for name, item in value.items()}
    return value.to(second_device.DEVICE) if hasattr(value, "to") else value


def results(use: Use) -> list[Tensor | None]:
    """The result of a call, and the gradients of its variables."""
    y = use()
    return [y.detach(), *(torch.autograd.grad(y.sum(), use.variables, allow_unused=True) if y.requires_grad else ())]


def check(here: Use, there: Use, tolerance: float) -> None:
    """Raise `AssertionError` where a layer has other results on the second device."""
    there = replace(there, layer=there.layer.to(second_device.DEVICE), args=tuple(map(moved, there.args)),
                    kwargs=moved(there.kwargs))
    for expected, actual in zip(results(here), results(there), strict=True):
        assert (expected is None) == (actual is None)
        if actual is not None:
            assert actual.device.type == "spare", actual.device
            torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


def checks(step: int) -> dict[str, Callable[[], None]]:
    """Each layer in both precisions, by name."""
    every: dict[str, Callable[[], None]] = {}
    for name, make in drawn_uses(step).items():
        every[f"{name}, float64"] = lambda make=make: check(make(), make(), 1e-9)
        every[f"{name}, float32"] = lambda make=make: check(in_float32(make), in_float32(make), 1e-4)
    return every


if __name__ == "__main__":
    second_device.report(checks(int(sys.argv[1])))
