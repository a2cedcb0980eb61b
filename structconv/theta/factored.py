"""Theta as a product of two factors: separable, depthwise separable, low rank, blocks of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.bases.base import value
from structconv.errors import ShapeError
from structconv.primitives.products import contract_heads, expand_heads, product
from structconv.theta.base import Theta, check_letters, plus
from structconv.theta.whole import FullTheta

__all__ = ["ByHeadTheta", "DepthwiseSeparableTheta", "EyeBlocksTheta", "HeadBlocksTheta", "LowRankTheta",
           "SeparableTheta"]


@value
class SeparableTheta(Theta):
    """Theta_k = sum_h mix_kh filters_h (Andreoli 2019, eq. 9): H (K + P Q) numbers.

    mix (K, H), filters (H, P, Q). The mixing is done on the entries or on Theta, whichever is fewer flops an entry.
    """

    mix: Tensor
    filters: Tensor

    def check(self) -> None:
        check_letters(self, mix="KH", filters="HPQ")

    @property
    def size(self) -> int:
        return self.mix.shape[0]

    @property
    def rank(self) -> int:
        """H."""
        return self.mix.shape[1]

    @property
    def in_channels(self) -> int:
        return self.filters.shape[1]

    @property
    def out_channels(self) -> int:
        return self.filters.shape[2]

    def dense(self) -> Tensor:
        return torch.einsum("kh,hpq->kpq", self.mix, self.filters)

    def expand(self, x: Tensor) -> Tensor:
        if self._materialise(self.in_channels):
            return expand_heads(x, self._mixed())
        return _mix_heads(self.mix, expand_heads(x, self.filters))

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._materialise(self.out_channels):
            return contract_heads(r, self._mixed(), bias)
        return contract_heads(_mix_heads(self.mix.mT, r), self.filters, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return SeparableTheta(self.mix[start:stop], self.filters)

    def expand_flops(self) -> int:
        p, q = self.in_channels, self.out_channels
        return 2 * q * (self.size * p if self._materialise(p) else self.rank * (p + self.size))

    def contract_flops(self) -> int:
        p, q = self.in_channels, self.out_channels
        return 2 * p * (self.size * q if self._materialise(q) else self.rank * (q + self.size))

    def _materialise(self, channels: int) -> bool:
        """Whether K matrices of Theta cost an entry less than H filters and their mixing."""
        return self.size * channels <= self.rank * (channels + self.size)

    def _mixed(self) -> Tensor:
        return (self.mix @ self.filters.flatten(1)).unflatten(-1, self.filters.shape[1:])


@value
class DepthwiseSeparableTheta(Theta):
    """Theta_kpq = depthwise_kp pointwise_pq: P (K + Q) numbers (Xception's; eq. 9 with H = P, a diagonal pattern)."""

    depthwise: Tensor
    pointwise: Tensor

    def check(self) -> None:
        check_letters(self, depthwise="KP", pointwise="PQ")

    @property
    def size(self) -> int:
        return self.depthwise.shape[0]

    @property
    def in_channels(self) -> int:
        return self.depthwise.shape[1]

    @property
    def out_channels(self) -> int:
        return self.pointwise.shape[1]

    def dense(self) -> Tensor:
        return torch.einsum("kp,pq->kpq", self.depthwise, self.pointwise)

    def expand(self, x: Tensor) -> Tensor:
        return expand_heads(x, self.depthwise.unsqueeze(-1) * self.pointwise)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return product((r * self.depthwise.unsqueeze(-2)).sum(-3), self.pointwise, bias)

    def slice(self, start: int, stop: int) -> Theta:
        return DepthwiseSeparableTheta(self.depthwise[start:stop], self.pointwise)

    def expand_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.out_channels

    def contract_flops(self) -> int:
        return 2 * self.in_channels * (self.size + self.out_channels)


@value
class LowRankTheta(Theta):
    """Theta_k = values_g(k) outputs_k of rank D (eq. 13: value times output projection), g(k) = k // (K / G).

    values (G, P, D), outputs (K, D, Q): one value projection serves K / G consecutive heads (grouped queries).
    `heads` and `join` are the two halves, between which the structure is applied to D channels only.
    """

    values: Tensor
    outputs: Tensor
    sums_heads = False
    factors = 2

    def check(self) -> None:
        check_letters(self, values="GPD", outputs="KDQ")
        if isinstance(self.values, Tensor) and self.outputs.shape[0] % self.values.shape[0]:
            raise ShapeError("LowRankTheta", "the number of value projections must divide K",
                             f"G={self.values.shape[0]}, K={self.outputs.shape[0]}")

    @property
    def size(self) -> int:
        return self.outputs.shape[0]

    @property
    def in_channels(self) -> int:
        return self.values.shape[1]

    @property
    def out_channels(self) -> int:
        return self.outputs.shape[2]

    @property
    def _shared_by(self) -> int:
        """K / G, the number of heads that share a value projection."""
        return self.outputs.shape[0] // self.values.shape[0]

    def dense(self) -> Tensor:
        return torch.einsum("kpd,kdq->kpq", self._head_values(), self.outputs)

    @property
    def head_channels(self) -> int:
        return self.values.shape[2]

    def heads(self, x: Tensor) -> Tensor:
        """x values_g(k): (..., M, P) -> (..., K, M, D)."""
        r = expand_heads(x, self.values)
        return r if self._shared_by == 1 else r.repeat_interleave(self._shared_by, dim=-3)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """sum_k r_k outputs_k: (..., K, N, D) -> (..., N, Q)."""
        return contract_heads(r, self.outputs, bias)

    def expand(self, x: Tensor) -> Tensor:
        return self.heads(x) @ self.outputs

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r @ self._head_values(), bias)

    def slice(self, start: int, stop: int) -> Theta:
        step = self._shared_by
        if start % step or stop % step:
            return LowRankTheta(self._head_values()[start:stop], self.outputs[start:stop])
        return LowRankTheta(self.values[start // step:stop // step], self.outputs[start:stop])

    def inner_flops(self) -> int:
        """Flops of `heads` for one entry."""
        return 2 * self.values.shape[0] * self.in_channels * self.head_channels

    def outer_flops(self) -> int:
        """Flops of `join` for one entry."""
        return 2 * self.size * self.head_channels * self.out_channels

    def expand_flops(self) -> int:
        return self.inner_flops() + self.outer_flops()

    def contract_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.head_channels + self.outer_flops()

    def _head_values(self) -> Tensor:
        return self.values if self._shared_by == 1 else self.values.repeat_interleave(self._shared_by, dim=0)


class _Blocks(Theta):
    """Head k fills the k-th block of output channels."""

    sums_heads = False

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """Blocks side by side: (..., K, N, D) -> (..., N, K D)."""
        return plus(r.movedim(-3, -2).flatten(-2), bias)

    def slice(self, start: int, stop: int) -> Theta:
        return FullTheta(self.dense()[start:stop])


@value
class HeadBlocksTheta(_Blocks):
    """Head k fills the k-th block of D output channels: Theta_kpq = values_k,p,q-kD, Q = K D (concatenated heads).

    It is a `LowRankTheta` whose second factor places a block, and is never multiplied with.
    """

    values: Tensor

    def check(self) -> None:
        check_letters(self, values="KPD")

    @property
    def size(self) -> int:
        return self.values.shape[0]

    @property
    def in_channels(self) -> int:
        return self.values.shape[1]

    @property
    def out_channels(self) -> int:
        return self.size * self.head_channels

    @property
    def head_channels(self) -> int:
        return self.values.shape[2]

    def dense(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.values.dtype, device=self.values.device)
        return torch.einsum("kpd,kj->kpjd", self.values, eye).flatten(-2)

    def heads(self, x: Tensor) -> Tensor:
        return expand_heads(x, self.values)

    def expand(self, x: Tensor) -> Tensor:
        place = torch.eye(self.size, dtype=x.dtype, device=x.device)
        return (self.heads(x).unsqueeze(-2) * place[:, None, :, None]).flatten(-2)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r @ self.values, bias)

    def inner_flops(self) -> int:
        """Flops of `heads` for one entry."""
        return 2 * self.size * self.in_channels * self.head_channels

    def outer_flops(self) -> int:
        """Flops of `join` for one entry."""
        return 0

    expand_flops = inner_flops
    contract_flops = inner_flops


@value
class EyeBlocksTheta(_Blocks):
    """Head k hands on the k-th of K blocks of D channels: Theta_kpq = [p = q and p // D = k]; no numbers."""

    size: int = 1
    channels: int = 1

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def out_channels(self) -> int:
        return self.channels

    @property
    def head_channels(self) -> int:
        return self.channels // self.size

    def heads(self, x: Tensor) -> Tensor:
        """The blocks of channels: (..., M, K D) -> (..., K, M, D)."""
        return x.unflatten(-1, (self.size, self.head_channels)).movedim(-2, -3)

    def dense(self) -> Tensor:
        block = torch.arange(self.channels) // self.head_channels
        own = (block == torch.arange(self.size).unsqueeze(-1)).to(torch.get_default_dtype())
        return torch.diag_embed(own)

    def expand(self, x: Tensor) -> Tensor:
        block = torch.arange(self.channels, device=x.device) // self.head_channels
        own = block == torch.arange(self.size, device=x.device).unsqueeze(-1)
        return torch.where(own.unsqueeze(-2), x.unsqueeze(-3), 0)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        own = r.unflatten(-1, (self.size, self.head_channels)).diagonal(dim1=-4, dim2=-2)
        return plus(own.mT.flatten(-2), bias)

    def expand_flops(self) -> int:
        return self.size * self.channels

    contract_flops = expand_flops


@value
class ByHeadTheta(Theta):
    """No weight: heads come in, (..., K, M, C), and go out as they are."""

    size: int = 1
    channels: int = 1
    sums_heads = False

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def out_channels(self) -> int:
        return self.channels

    def heads(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-3)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """r_k + b_k: (..., K, N, C), (K, C) or none -> (..., K, N, C)."""
        return r if bias is None else r + bias.unsqueeze(-2)

    def dense(self) -> Tensor:
        raise NotImplementedError

    def expand(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def slice(self, start: int, stop: int) -> Theta:
        return ByHeadTheta(stop - start, self.channels)

    def expand_flops(self) -> int:
        return 0

    contract_flops = expand_flops


def _mix_heads(mix: Tensor, r: Tensor) -> Tensor:
    """sum_h mix_kh r_h: (K, H) and (..., H, M, C) -> (..., K, M, C)."""
    return (mix @ r.flatten(-2)).unflatten(-1, r.shape[-2:])
