"""`Theta`: what every value of the weight can do, and the numerics that its kinds share."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import cast

import torch
from torch import Tensor

from structconv.bases.spec import Leaf
from structconv.errors import ShapeError
from structconv.structures.values import FrozenValue, key_of

__all__ = ["Theta", "check_letters", "held_tensors", "plus", "repeat_head", "sum_tensors", "wants_grad"]


class _Held(FrozenValue):
    """What the tensors among a value's fields say of it."""

    @property
    def static_key(self) -> Hashable:
        """The type, and of its tensors shapes, dtypes, and whether a gradient is wanted, which may change."""
        return type(self), *[(field.shape, field.dtype, field.requires_grad) if isinstance(field, Tensor)
                             else key_of(field) for field in self.__dict__.values()]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the numbers; none where Theta is fixed."""
        return held_tensors(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """The numbers' dtype, which x must share; `None` where there are no numbers."""
        return next((t.dtype for t in self.tensors), None)

    @property
    def device(self) -> torch.device | None:
        """Where the numbers are; `None` where there are none."""
        return next((t.device for t in self.tensors), None)


class Theta(_Held, abc.ABC):
    """A weight of K matrices from P input to Q output channels; letters as in eq. 8."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise `ShapeError` unless what it holds fits together."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """K, the number of matrices."""

    @property
    @abc.abstractmethod
    def in_channels(self) -> int:
        """P."""

    @property
    @abc.abstractmethod
    def out_channels(self) -> int:
        """Q."""

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """The tensor itself, (K, P, Q)."""

    @abc.abstractmethod
    def expand(self, x: Tensor) -> Tensor:
        """x Theta_k for each k: (..., M, P) -> (..., K, M, Q)."""

    @abc.abstractmethod
    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """sum_k r_k Theta_k + b: (..., K, N, P), (Q) or none -> (..., N, Q)."""

    #: Whether `join` sums the heads, so that they need not be told apart once the structure is applied.
    sums_heads: bool = True

    #: Whether `expand` and `contract` copy their K heads, because these do not lie as products take them.
    rearranges_heads: bool = False

    #: How many factors `expand` and `contract` multiply with, one after the other.
    factors: int = 1

    @property
    def head_channels(self) -> int:
        """What one head carries through the structure: D where Theta_k has two factors, else Q."""
        return self.out_channels

    def heads(self, x: Tensor) -> Tensor:
        """What the structure is applied to, head by head: (..., M, P) -> (..., K, M, head_channels)."""
        return self.expand(x)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """The output from what the heads gathered, and b: (..., K, N, head_channels), (Q) or none -> (..., N, Q)."""
        return plus(r.squeeze(-3) if r.shape[-3] == 1 else r.sum(-3), bias)

    @abc.abstractmethod
    def slice(self, start: int, stop: int) -> Theta:
        """The matrices start <= k < stop, in the same factors."""

    @abc.abstractmethod
    def expand_flops(self) -> int:
        """Flops of `expand` for one entry."""

    @abc.abstractmethod
    def contract_flops(self) -> int:
        """Flops of `contract` for one entry."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(K={self.size}, P={self.in_channels}, Q={self.out_channels})"


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + b, where there is b."""
    return y if bias is None else y + bias


def sum_tensors(terms: list[Tensor]) -> Tensor:
    """The sum of one tensor or more, without a leading zero."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def repeat_head(x: Tensor, size: int) -> Tensor:
    """(..., M, C) -> (..., K, M, C), all heads alike and none copied."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], size, *x.shape[-2:])


def held_tensors(theta: FrozenValue) -> tuple[Tensor, ...]:
    """The tensors among the fields of a value."""
    held = [field for field in theta.__dict__.values() if isinstance(field, Tensor | Leaf)]
    return cast("tuple[Tensor, ...]", tuple(held))


def wants_grad(theta: Theta) -> bool:
    """Whether one of the tensors requires a gradient."""
    return True in [tensor.requires_grad for tensor in theta.tensors]


def check_letters(theta: Theta, /, **letters: str) -> None:
    """Raise `ShapeError` unless each tensor has the dimensions that its letters name, equal letters of equal size."""
    sizes: dict[str, int] = {}
    for name, axes in letters.items():
        tensor = getattr(theta, name)
        if not isinstance(tensor, Tensor):
            continue
        if tensor.dim() != len(axes) or any(sizes.setdefault(letter, size) != size
                                            for letter, size in zip(axes, tensor.shape, strict=True)):
            expected = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
            raise ShapeError(type(theta).__name__, f"{name} must have shape ({expected})", tuple(tensor.shape))
