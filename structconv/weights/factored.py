"""Theta as a product of two factors: separable, depthwise separable, low rank, blocks of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases.tree import Function, Shared, tensor
from structconv.errors import ConfigError, ShapeError
from structconv.primitives.products import contract_heads, expand_heads, product, split_heads
from structconv.shapes import check_divides, check_positive
from structconv.weights.base import (
    BoundWeight,
    Energy,
    Factor,
    Weight,
    draw,
    draw_mixing,
    energies_of,
    plus,
    total_energy,
)
from structconv.weights.whole import Fixed, Full

__all__ = ["DepthwiseSeparable", "EyeBlocks", "HeadBlocks", "LowRank", "Projections", "Separable"]


class Separable(Weight, mix="KH", filters="HPQ"):
    """Theta_k = sum_h mix_kh filters_h (Andreoli 2019, eq. 9): H (K + P Q) numbers.

    mix (K, H), filters (H, P, Q). The mixing is done on the entries or on Theta, whichever is fewer flops an entry.
    With rank 1 all channels share one pattern over k; for a pattern a channel see `DepthwiseSeparable`.

    Example:

        >>> from structconv import Conv, Separable, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Separable(rank=2), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        518
    """

    mix: Tensor
    filters: Tensor

    def __init__(self, rank: int) -> None:
        self.rank = check_positive("Separable", "rank", rank)

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        return {"H": self.rank}

    def _draw(self, theta: Separable, energy: Energy, variance: float) -> None:
        draw_mixing(theta.mix, energies_of(energy, theta.size), dims=(0, 1))
        draw(theta.filters, variance / theta.in_channels)

    def dense(self) -> Tensor:
        return torch.einsum("kh,hpq->kpq", self.mix, self.filters)

    def expand(self, x: Tensor) -> Tensor:
        if self._multiplies_first(self.in_channels):
            return expand_heads(x, self._mixed())
        return _mix_heads(self.mix, expand_heads(x, self.filters))

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._multiplies_first(self.out_channels):
            return contract_heads(r, self._mixed(), bias)
        return contract_heads(_mix_heads(self.mix.mT, r), self.filters, bias)

    def expand_flops(self) -> int:
        return 2 * self.out_channels * self._flops(self.in_channels)

    def contract_flops(self) -> int:
        return 2 * self.in_channels * self._flops(self.out_channels)

    def _flops(self, channels: int) -> int:
        """Multiplications for one channel on the other side."""
        size, rank = self.mix.shape
        return min(size * channels, rank * (channels + size))

    def _multiplies_first(self, channels: int) -> bool:
        """Return True if an entry costs less with K matrices of Theta than with H filters and their mixing."""
        size, rank = self.mix.shape
        return size * channels <= rank * (channels + size)

    def _mixed(self) -> Tensor:
        return (self.mix @ self.filters.flatten(1)).unflatten(-1, self.filters.shape[1:])


class DepthwiseSeparable(Weight, depthwise="KP", pointwise="PQ"):
    """Theta_kpq = depthwise_kp pointwise_pq (Chollet 2017): P (K + Q) numbers, one pattern over k a channel.

    depthwise (K, P), pointwise (P, Q): eq. 9 with H = P and a diagonal pattern.

    Example:

        >>> from structconv import Conv, Shifts
        >>> from structconv.weights import DepthwiseSeparable
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=DepthwiseSeparable(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        304
    """

    depthwise: Tensor
    pointwise: Tensor

    def _draw(self, theta: DepthwiseSeparable, energy: Energy, variance: float) -> None:
        draw_mixing(theta.depthwise, energies_of(energy, theta.size), dims=(0,))
        draw(theta.pointwise, variance / theta.in_channels)

    def dense(self) -> Tensor:
        return self.depthwise.unsqueeze(-1) * self.pointwise

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return product((r * self.depthwise.unsqueeze(-2)).sum(-3), self.pointwise, bias)

    def contract_flops(self) -> int:
        return 2 * self.in_channels * (self.size + self.out_channels)


class _TwoFactors(Weight):
    """A product of two factors: `heads` multiplies by one, (G, P, D), and `join` by the other."""

    sums_heads = False
    factors = 2

    def inner_flops(self) -> int:
        """Flops of `heads` for one entry."""
        return 2 * self.groups * self.in_channels * self.head_channels  # type: ignore[attr-defined]

    def outer_flops(self) -> int:
        """Flops of `join` for one entry."""
        return 2 * self.size * self.head_channels * self.out_channels

    def expand_flops(self) -> int:
        return self.inner_flops() + self.outer_flops()


class LowRank(_TwoFactors, value="GPD", output="KDQ"):
    """Theta_k = value_g(k) output_k of rank `dim` (Andreoli 2019, eq. 13): attention's value and output projections.

    value (G, P, D), output (K, D, Q), g(k) = k // (K / G). `heads` and `join` are the two halves, between which the
    structure is applied to D channels only. A layer holds them as linear layers, `weight.value` and `weight.output`,
    whose matrices are (G D, P) and (Q, K D). Any module of the same shapes may take the place of either.

    Args:
        dim: D, channels a head between the two.
        shared_by: heads that share one value projection (grouped queries); must divide K.

    Example:

        >>> from structconv import Conv, LowRank, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=LowRank(4), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        384
    """

    value: Tensor
    output: Tensor
    LINEAR: ClassVar[Mapping[str, str]] = {"value": "GD, P", "output": "Q, KD"}

    def __init__(self, dim: int, shared_by: int = 1) -> None:
        self.dim = check_positive("LowRank", "dim", dim)
        self.shared_by = check_positive("LowRank", "shared_by", shared_by)

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        return {"D": self.dim, "G": check_divides("LowRank", "shared_by", self.shared_by, "size", size)}

    def _of_modules(self, module: BoundWeight) -> Weight | None:
        value, output = module._modules["value"], module._modules["output"]
        if type(value) is type(output) is Factor and private.all_plain(value, output):
            return None
        return Projections.by(module, self.shared_by, self.dim)

    def _scaled(self) -> str:
        return "output"

    def _draw(self, theta: LowRank, energy: Energy, variance: float) -> None:
        draw(theta.value, 1 / theta.in_channels)
        draw(theta.output, variance / (theta.head_channels * total_energy(energy, theta.size)))

    def check(self) -> None:
        super().check()
        if self.output.shape[0] % self.value.shape[0]:
            raise ShapeError("LowRank", "the number of value projections must divide K",
                             f"G={self.value.shape[0]}, K={self.output.shape[0]}")

    @property
    def inner(self) -> Tensor:
        """The factor by which `heads` multiplies, (G, P, D)."""
        return self.value

    @property
    def groups(self) -> int:
        """G, the number of value projections."""
        return self.value.shape[0]

    @property
    def _repeats(self) -> int:
        """K / G, the number of heads that share a value projection."""
        return self.output.shape[0] // self.value.shape[0]

    def dense(self) -> Tensor:
        return torch.einsum("kpd,kdq->kpq", self._head_values(), self.output)

    @property
    def head_channels(self) -> int:
        return self.value.shape[2]

    def heads(self, x: Tensor) -> Tensor:
        """x value_g(k): (..., M, P) -> (..., K, M, D)."""
        r, repeats = expand_heads(x, self.value), self.output.shape[0] // self.value.shape[0]
        return r if repeats == 1 else r.repeat_interleave(repeats, dim=-3)

    def stored_heads(self, x: Tensor) -> Tensor | Shared:
        r = expand_heads(x, self.value)
        return r if self._repeats == 1 else Shared(r, self._repeats)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """sum_k r_k output_k: (..., K, N, D) -> (..., N, Q)."""
        return contract_heads(r, self.output, bias)

    def expand(self, x: Tensor) -> Tensor:
        return self.heads(x) @ self.output

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r @ self._head_values(), bias)

    def slice(self, start: int, stop: int) -> Weight:
        step = self._repeats
        if start % step or stop % step:
            return LowRank.of(self._head_values()[start:stop], self.output[start:stop])
        return LowRank.of(self.value[start // step:stop // step], self.output[start:stop])

    def contract_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.head_channels + self.outer_flops()

    def _head_values(self) -> Tensor:
        return self.value if self._repeats == 1 else self.value.repeat_interleave(self._repeats, dim=0)


class Projections(_TwoFactors):
    """Theta_k = V_g(k) O_k of a `LowRank` whose factors are other modules, or have hooks: the modules are called.

    A value or an output projection becomes such a module by an adapter of low rank, quantization or a parametrization.
    `heads` and `join` call each module once, on the entries, because a module or a hook may do more than multiply by a
    matrix; a plan uses only these two. All other methods multiply by the matrices of both, which cost a call with P and
    with K D entries.

    Args:
        value, output: the modules, without a bias. groups, dim: G and D.
        trained: whether their parameters require a gradient.
        value_bias: (K D,), added to the inputs of the output's module, or `None`.
    """

    value: Function
    output: Function
    size: int = 1
    groups: int = 1
    dim: int = 1
    in_channels: int = 1
    out_channels: int = 1
    trained: bool = False
    value_bias: Tensor | None = None
    orders = ("between",)

    @classmethod
    def by(cls, module: BoundWeight, shared_by: int, dim: int) -> Projections:
        """The weight over the modules that replace the factors of a bound `LowRank`."""
        parts: list[Any] = [module._modules[name] for name in ("value", "output")]
        for name, part in zip(("value", "output"), parts, strict=True):
            if isinstance(getattr(part, "bias", None), Tensor):
                raise ConfigError("LowRank", f"the module at {name} must be without a bias", repr(part),
                                  "Give it bias=False; a layer adds its bias itself.")
        trained = any(p.requires_grad for part in parts for p in part.parameters())
        value, output = map(Function, parts)
        return cls._over({"value": value, "output": output, "size": module.size, "groups": module.size // shared_by,
                          "dim": dim, "in_channels": module.in_channels, "out_channels": module.out_channels,
                          "trained": trained, "value_bias": None})

    def check(self) -> None:
        """Nothing: modules check their inputs themselves."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The first parameter of each module, whose dtype x must share; none of a module that runs under autocast, or
        that loads its parameters in its call."""
        return tuple(t for part in (self.value, self.output) if part.precision is None for t in part.parameters[:1]
                     if not t.is_meta)

    @property
    def requires_grad(self) -> bool:
        return self.trained or (self.value_bias is not None and self.value_bias.requires_grad)

    @property
    def head_channels(self) -> int:
        return self.dim

    def heads(self, x: Tensor) -> Tensor:
        """x V_g(k): (..., M, P) -> (..., K, M, D)."""
        result: Tensor = tensor(self.stored_heads(x))
        return result

    def stored_heads(self, x: Tensor) -> Tensor | Shared:
        r = split_heads(self.value(x), self.groups, self.dim)
        return r if self.groups == self.size else Shared(r, self.size // self.groups)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """sum_k r_k O_k: (..., K, N, D) -> (..., N, Q)."""
        entries = r.transpose(-3, -2).flatten(-2)
        return plus(self.output(entries if self.value_bias is None else entries + self.value_bias), bias)

    def low_rank(self, like: Tensor | None = None) -> LowRank:
        """The current matrices of both modules."""
        value, output = (_matrix(module, channels, like) for module, channels in
                         ((self.value, self.in_channels), (self.output, self.size * self.dim)))
        return LowRank.of(split_heads(value, self.groups, self.dim), output.unflatten(0, (self.size, self.dim)))

    def dense(self) -> Tensor:
        return self.low_rank().dense()

    def expand(self, x: Tensor) -> Tensor:
        return self.low_rank(x).expand(x)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.low_rank(r).contract(r, bias)

    def slice(self, start: int, stop: int) -> Weight:
        return self.low_rank().slice(start, stop)

    contract_flops = _TwoFactors.expand_flops


class _Blocks(Weight):
    """Head k fills the k-th block of output channels."""

    sums_heads = False

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """Blocks side by side: (..., K, N, D) -> (..., N, K D)."""
        return plus(r.movedim(-3, -2).flatten(-2), bias)

    def slice(self, start: int, stop: int) -> Weight:
        return Full.of(self.dense()[start:stop])


class HeadBlocks(_Blocks, theta="KPD"):
    """Head k fills the k-th of K blocks of output channels (concatenated heads, as in GAT): P Q numbers.

    theta (K, P, D), Q = K D. It is a `LowRank` whose second factor selects a block, and is never multiplied with.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.weights import HeadBlocks
        >>> layer = Conv(DotProduct(heads=4, dim=8).softmax(), 16, 32, weight=HeadBlocks(), bias=False)
        >>> layer.weight().dense().shape                             # (K, P, Q); head k fills outputs 8 k ... 8 k + 7
        torch.Size([4, 16, 32])
    """

    theta: Tensor

    @property
    def groups(self) -> int:
        """K: each head has a matrix of its own."""
        return self.size

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        return {"D": check_divides("HeadBlocks", "size", size, "out_channels", out_channels)}

    def _draw(self, theta: HeadBlocks, energy: Energy, variance: float) -> None:
        draw(theta.theta, variance * theta.size / (theta.in_channels * total_energy(energy, theta.size)))

    @property
    def inner(self) -> Tensor:
        """The factor by which `heads` multiplies, (K, P, D)."""
        return self.theta

    @property
    def out_channels(self) -> int:
        return self.size * self.head_channels

    @property
    def head_channels(self) -> int:
        return self.theta.shape[2]

    def dense(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.theta.dtype, device=self.theta.device)
        return torch.einsum("kpd,kj->kpjd", self.theta, eye).flatten(-2)

    def heads(self, x: Tensor) -> Tensor:
        return expand_heads(x, self.theta)

    def expand(self, x: Tensor) -> Tensor:
        eye = torch.eye(self.size, dtype=x.dtype, device=x.device)
        return (self.heads(x).unsqueeze(-2) * eye[:, None, :, None]).flatten(-2)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r @ self.theta, bias)

    def inner_flops(self) -> int:
        """Flops of `heads` for one entry."""
        return 2 * self.size * self.in_channels * self.head_channels

    def outer_flops(self) -> int:
        """Flops of `join` for one entry."""
        return 0

    expand_flops = contract_flops = inner_flops


class EyeBlocks(_Blocks, Fixed):
    """Head k hands on the k-th of K blocks of P / K channels, P = Q: nothing to draw, to scale or to train.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import DynamicShifts
        >>> from structconv.weights import EyeBlocks
        >>> Conv(DynamicShifts([-1, 0, 1], heads=4), 16, 16, weight=EyeBlocks())(torch.randn(9, 16)).shape
        torch.Size([9, 16])
    """

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        extents = super()._extents(size, in_channels, out_channels)
        check_divides("EyeBlocks", "size", size, "in_channels", in_channels)
        return extents

    @property
    def head_channels(self) -> int:
        return self.channels // self.size

    def heads(self, x: Tensor) -> Tensor:
        """The blocks of channels: (..., M, K D) -> (..., K, M, D)."""
        return x.unflatten(-1, (self.size, self.head_channels)).movedim(-2, -3)

    def dense(self) -> Tensor:
        return self.slice(0, self.size).dense()

    def expand(self, x: Tensor) -> Tensor:
        return self.slice(0, self.size).expand(x)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        own = r.unflatten(-1, (self.size, self.head_channels)).diagonal(dim1=-4, dim2=-2)
        return plus(own.mT.flatten(-2), bias)

    def slice(self, start: int, stop: int) -> Weight:
        return _EyeBlocksOfSomeHeads.of(stop - start, self.channels, start, self.size)


class _EyeBlocksOfSomeHeads(Fixed):
    """Some heads of an `EyeBlocks`: head k copies the (first + k)-th of `blocks` blocks of channels."""

    first: int = 0
    blocks: int = 1

    def _selected(self, device: torch.device | None = None) -> Tensor:
        """The channels of each head, (K, P) of booleans."""
        block = torch.arange(self.channels, device=device) // (self.channels // self.blocks)
        return block == torch.arange(self.first, self.first + self.size, device=device).unsqueeze(-1)

    def dense(self) -> Tensor:
        return torch.diag_embed(self._selected().to(torch.get_default_dtype()))

    def expand(self, x: Tensor) -> Tensor:
        return torch.where(self._selected(x.device).unsqueeze(-2), x.unsqueeze(-3), 0)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(torch.where(self._selected(r.device).unsqueeze(-2), r, 0), bias)

    def slice(self, start: int, stop: int) -> Weight:
        return self.of(stop - start, self.channels, self.first + start, self.blocks)


def _mix_heads(mix: Tensor, r: Tensor) -> Tensor:
    """sum_h mix_kh r_h: (K, H) and (..., H, M, C) -> (..., K, M, C)."""
    return (mix @ r.flatten(-2)).unflatten(-1, r.shape[-2:])


def _matrix(module: Function, channels: int, like: Tensor | None) -> Tensor:
    """The matrix (P, Q) by which a module multiplies."""
    like = next(iter(module.parameters), None) if like is None else like
    eye = torch.eye(channels) if like is None else torch.eye(channels, dtype=like.dtype, device=like.device)
    return module(eye)
