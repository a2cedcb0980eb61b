"""A kernel of one's own, the example of `your-own-kernel.md`."""

from __future__ import annotations

from functools import partial

import torch
from reversal import Reversal
from torch import Tensor

from structconv.kernels.orders import Application, Applied
from structconv.planning import Call, Cost, Problem, register


class Flips(Applied):
    """Blocks turned around by flips of the entries, where their widths divide the number of entries."""

    name, types, before = "flips", (Reversal,), ("primitives",)

    def match(self, problem: Problem) -> tuple[int, ...] | None:
        basis = problem.basis
        assert isinstance(basis, Reversal)
        return basis.widths if all(basis.n % width == 0 for width in basis.widths) else None

    def application_cost(self, match: tuple[int, ...], problem: Problem, channels: int, mode: str) -> Cost:
        moved = 2 * len(match) * problem.inputs * channels
        return Cost(bytes=problem.bytes(moved), calls=4 * len(match) + 1)

    def application(self, match: tuple[int, ...], problem: Problem) -> Application:
        return Application(partial(_flipped, match))


def _flipped(widths: tuple[int, ...], r: Tensor, call: Call) -> Tensor:
    """(..., K or 1, M, C) -> (..., K, M, C)."""
    heads = (r.select(-3, k % r.shape[-3]).unflatten(-2, (-1, width)) for k, width in enumerate(widths))
    return torch.stack([blocks.flip(-2).flatten(-3, -2) for blocks in heads], -3)


register(Flips())
