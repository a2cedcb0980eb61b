"""Theta as one tensor: whole, block diagonal, shared, fixed, or a different kind for each part of a basis."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import value
from structconv.errors import ShapeError
from structconv.primitives.products import contract_heads, expand_heads, product
from structconv.theta.base import Theta, check_letters, plus, repeat_head, sum_tensors

__all__ = ["ApartTheta", "ConcatTheta", "DepthwiseTheta", "EyeTheta", "FullTheta", "GroupedTheta", "SharedTheta",
           "as_theta"]


@value
class FullTheta(Theta):
    """theta (K, P, Q) as it is: K P Q numbers. `expand` and `contract` are one matrix product each."""

    theta: Tensor

    def check(self) -> None:
        check_letters(self, theta="KPQ")

    @property
    def size(self) -> int:
        return self.theta.shape[0]

    @property
    def in_channels(self) -> int:
        return self.theta.shape[1]

    @property
    def out_channels(self) -> int:
        return self.theta.shape[2]

    def dense(self) -> Tensor:
        return self.theta

    def expand(self, x: Tensor) -> Tensor:
        return expand_heads(x, self.theta)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return contract_heads(r, self.theta, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return FullTheta(self.theta[start:stop])

    def expand_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.out_channels

    contract_flops = expand_flops


@value
class GroupedTheta(Theta):
    """Block diagonal: theta (K, G, P/G, Q/G), K P Q / G numbers; group g of P feeds group g of Q."""

    theta: Tensor
    rearranges_heads = True

    def check(self) -> None:
        check_letters(self, theta="KGPQ")

    @property
    def size(self) -> int:
        return self.theta.shape[0]

    @property
    def groups(self) -> int:
        """G."""
        return self.theta.shape[1]

    @property
    def in_channels(self) -> int:
        return self.theta.shape[1] * self.theta.shape[2]

    @property
    def out_channels(self) -> int:
        return self.theta.shape[1] * self.theta.shape[3]

    def dense(self) -> Tensor:
        eye = torch.eye(self.groups, dtype=self.dtype, device=self.device)
        return torch.einsum("kgpq,gf->kgpfq", self.theta, eye).flatten(1, 2).flatten(-2)

    def expand(self, x: Tensor) -> Tensor:
        x_GMP = x.unflatten(-1, (self.groups, self.theta.shape[2])).movedim(-2, -3)
        r_GMKQ = (x_GMP @ self.theta.permute(1, 2, 0, 3).flatten(-2)).unflatten(-1, (self.size, self.theta.shape[3]))
        return r_GMKQ.movedim(-2, -4).movedim(-3, -2).flatten(-2)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        r_KNGP = r.unflatten(-1, (self.groups, self.theta.shape[2]))
        r_GNKP = r_KNGP.movedim(-2, -4).movedim(-3, -2).flatten(-2)
        return plus((r_GNKP @ self.theta.transpose(0, 1).flatten(1, 2)).movedim(-3, -2).flatten(-2), bias)

    def slice(self, start: int, stop: int) -> Theta:
        return GroupedTheta(self.theta[start:stop])

    def expand_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.theta.shape[3]

    contract_flops = expand_flops


@value
class DepthwiseTheta(Theta):
    """Theta_kpq = depthwise_kpj where q = p J + j, else 0: depthwise (K, P, J), Q = P J, K Q numbers.

    Output channels of one input channel are neighbours, as in torch's grouped convolutions.
    """

    depthwise: Tensor

    def check(self) -> None:
        check_letters(self, depthwise="KPJ")

    @property
    def size(self) -> int:
        return self.depthwise.shape[0]

    @property
    def in_channels(self) -> int:
        return self.depthwise.shape[1]

    @property
    def out_channels(self) -> int:
        return self.depthwise.shape[1] * self.depthwise.shape[2]

    def dense(self) -> Tensor:
        eye = torch.eye(self.in_channels, dtype=self.dtype, device=self.device)
        return torch.einsum("kpj,pr->krpj", self.depthwise, eye).flatten(-2)

    def expand(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-3).unsqueeze(-1) * self.depthwise.unsqueeze(-3)).flatten(-2)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return plus((r.unsqueeze(-1) * self.depthwise.unsqueeze(-3)).sum(-4).flatten(-2), bias)

    def slice(self, start: int, stop: int) -> Theta:
        return DepthwiseTheta(self.depthwise[start:stop])

    def expand_flops(self) -> int:
        return self.size * self.out_channels

    def contract_flops(self) -> int:
        return 2 * self.size * self.out_channels


@value
class SharedTheta(Theta):
    """Theta_k = theta (P, Q) for every k: P Q numbers."""

    theta: Tensor
    size: int = 1

    def check(self) -> None:
        check_letters(self, theta="PQ")

    @property
    def in_channels(self) -> int:
        return self.theta.shape[0]

    @property
    def out_channels(self) -> int:
        return self.theta.shape[1]

    def dense(self) -> Tensor:
        return self.theta.expand(self.size, *self.theta.shape)

    def expand(self, x: Tensor) -> Tensor:
        return repeat_head(product(x, self.theta), self.size)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(r.sum(-3), self.theta, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return SharedTheta(self.theta, stop - start)

    def expand_flops(self) -> int:
        return 2 * self.in_channels * self.out_channels

    def contract_flops(self) -> int:
        return self.in_channels * (self.size + 2 * self.out_channels)


@value
class EyeTheta(Theta):
    """Theta_k = the identity of P channels for every k: no numbers; x keeps its dtype and device."""

    size: int = 1
    channels: int = 1

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def out_channels(self) -> int:
        return self.channels

    def dense(self) -> Tensor:
        return torch.eye(self.channels).expand(self.size, self.channels, self.channels)

    def expand(self, x: Tensor) -> Tensor:
        return repeat_head(x, self.size)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return EyeTheta(stop - start, self.channels)

    def expand_flops(self) -> int:
        return 0

    def contract_flops(self) -> int:
        return self.size * self.channels


@value
class ApartTheta(EyeTheta):
    """The same without the sum over k: `join` leaves the heads apart, (..., K, N, C)."""

    size: int = 1
    channels: int = 1
    sums_heads = False

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return plus(r, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return ApartTheta(stop - start, self.channels)


@value
class ConcatTheta(Theta):
    """Weights side by side, one for each part of a basis `a | b`: sizes K add up."""

    parts: tuple[Theta, ...]

    def check(self) -> None:
        channels = {(part.in_channels, part.out_channels) for part in self.parts if isinstance(part, Theta)}
        if len(channels) > 1:
            raise ShapeError("ConcatTheta", "parts must share their channels (P, Q)", sorted(channels))

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def in_channels(self) -> int:
        return self.parts[0].in_channels

    @property
    def out_channels(self) -> int:
        return self.parts[0].out_channels

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors)

    def dense(self) -> Tensor:
        return torch.cat([part.dense().to(dtype=self.dtype, device=self.device) for part in self.parts])

    def expand(self, x: Tensor) -> Tensor:
        return torch.cat([part.expand(x) for part in self.parts], dim=-3)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        pieces = r.split([part.size for part in self.parts], dim=-3)
        terms = [part.contract(piece) for part, piece in zip(self.parts[:-1], pieces[:-1], strict=True)]
        return sum_tensors([*terms, self.parts[-1].contract(pieces[-1], bias)])

    def slice(self, start: int, stop: int) -> Theta:
        kept, at = [], 0
        for part in self.parts:
            low, high = max(start - at, 0), min(stop - at, part.size)
            if low < high:
                kept.append(part if (low, high) == (0, part.size) else part.slice(low, high))
            at += part.size
        return kept[0] if len(kept) == 1 else ConcatTheta(tuple(kept))

    def expand_flops(self) -> int:
        return sum(part.expand_flops() for part in self.parts)

    def contract_flops(self) -> int:
        return sum(part.contract_flops() for part in self.parts)


def as_theta(theta: Theta | Tensor) -> Theta:
    """`theta` itself, or a `FullTheta` around a tensor (K, P, Q)."""
    return theta if isinstance(theta, Theta) else FullTheta(theta)
