"""Bases without structure: a stored tensor, and the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.pairs import Pairs
from structconv.derived import derived
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.shapes import NO_TENSORS, alike, check_device, check_positive
from structconv.structures.graph import Graph

__all__ = ["Dense", "Identity"]


def check_heads(basis: Basis, r: Tensor) -> None:
    """Raise `ShapeError` unless `r` is (..., K, M, C), where an axis of heads of size 1 is expanded to K."""
    if r.dim() < 3 or r.shape[-2] != basis.num_inputs or r.shape[-3] not in (1, basis.size):
        raise ShapeError(type(basis).__name__, f"r must have shape (..., K={basis.size}, M={basis.num_inputs}, C)",
                         tuple(r.shape), "Heads are dim -3, entries dim -2, channels dim -1.")


@value
class Dense(Basis):
    """A stored tensor a (..., K, M, N).

    Every primitive is one matrix product: 2 K M N C flops, no memory beyond its output.

    Raises:
        ShapeError: if `a` has fewer than three dimensions or is not floating, or x has another dtype.

    Example:

        >>> from structconv import Dense
        >>> Dense(torch.ones(2, 4, 3)).analysis(torch.ones(4, 5)).shape       # K, N, C
        torch.Size([2, 3, 5])
    """

    ENTRY_COUNTS = ("a",)

    a: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.a, NO_TENSORS):
            raise ConfigError("Dense", "a must be a floating tensor of shape (..., K, M, N)", type(self.a).__name__)
        if type(self.a) is Tensor and (self.a.dim() < 3 or not self.a.is_floating_point()):
            got = f"{text_of(self.a.shape)} of {self.a.dtype}"
            raise ShapeError("Dense", "a must be a floating tensor of shape (..., K, M, N)", got,
                             "For one matrix write Dense(a.unsqueeze(0)).")

    @property
    def size(self) -> int:
        return self.a.shape[-3]

    @property
    def num_inputs(self) -> int:
        return self.a.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.a.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.a.shape[:-3])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the entries, which x must share."""
        return self.a.dtype

    @property
    def device(self) -> torch.device:
        return self.a.device

    has_scores = True

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.a if dtype is None else self.a.to(dtype)

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        return alike("Dense", r, self.a, name="r", other_name="a").mT @ r

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Dense")
        a = alike("Dense", x, self.a, other_name="a")
        return (a.mT.flatten(-3, -2) @ x).unflatten(-2, (self.size, self.num_outputs))

    def synthesis(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        a = alike("Dense", r, self.a, name="r", other_name="a")
        if r.shape[-3] != self.size:
            return a.sum(-3).mT @ r.squeeze(-3)
        return a.flatten(-3, -2).mT @ r.flatten(-3, -2)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.pick(self.a)

    def by_outputs(self, inputs: int, outputs: int, dtype: torch.dtype, owner: Any) -> Tensor:
        """The entries of all pairs, (..., 1 or B, K, N, M)."""
        a = self.a.mT.to(dtype)
        return a if a.dim() > 3 else a.unsqueeze(0)

    def _transposed(self) -> Basis:
        return Dense(self.a.mT)

    def __repr__(self) -> str:
        return f"Dense(a={tuple(self.a.shape)}, {self.a.dtype})"


@value
class Identity(Basis):
    """`size` times the identity of `n` entries: A_k x = x; a layer over it is a 1x1 convolution.

    Args:
        n: number of entries, M = N.
        size: K.
        device: where the pairs of `pattern()` are listed; the products follow their x.

    Example:

        >>> from structconv.bases import Identity
        >>> Identity(5).size, Identity(5).num_outputs
        (1, 5)
    """

    ENTRY_COUNTS = ("n",)

    n: int
    size: int = 1
    device: torch.device = torch.device("cpu")

    def __init__(self, n: int, size: int = 1, device: torch.device | str = "cpu") -> None:
        if isinstance(n, int) and (type(n) is not int or n < 0):
            check_positive("Identity", "n", n)
        if isinstance(size, int) and (type(size) is not int or size < 1):
            check_positive("Identity", "size", size)
        if type(device) is not torch.device:
            device = check_device("Identity", device)
        self.__dict__.update(n=n, size=size, device=device)

    @property
    def num_inputs(self) -> int:
        return self.n

    @property
    def num_outputs(self) -> int:
        return self.n

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.eye(self.n, dtype=dtype, device=self.device).expand(self.size, self.n, self.n)

    def apply(self, r: Tensor) -> Tensor:
        check_heads(self, r)
        return r.expand(*r.shape[:-3], self.size, *r.shape[-2:])

    def analysis(self, x: Tensor) -> Tensor:
        self.check_input(x, "Identity")
        return x.unsqueeze(-3).expand(*x.shape[:-2], self.size, *x.shape[-2:])

    def pattern(self) -> Graph:
        diagonal = torch.arange(self.n, device=self.device)
        return derived(self, "pattern", lambda: Graph(torch.stack([diagonal, diagonal]), num_nodes=self.n))

    def evaluate(self, pairs: Pairs) -> Tensor:
        same = (pairs.source_index() == pairs.target_index()).to(pairs.dtype)
        return same.expand(self.size, *same.shape)

    def _transposed(self) -> Basis:
        return self

    def __repr__(self) -> str:
        return f"Identity({self.n})" if self.size == 1 else f"Identity({self.n}, size={self.size})"
