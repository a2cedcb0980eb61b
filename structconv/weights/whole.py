"""Theta as one tensor: whole, block diagonal, shared, by channel, or fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.errors import ConfigError
from structconv.primitives.products import contract_heads, expand_heads, product
from structconv.shapes import check_choice, check_divides, check_positive
from structconv.weights.base import (
    Energy,
    Weight,
    draw,
    draw_mixing,
    energies_of,
    plus,
    repeat_head,
    scale,
    total_energy,
)

__all__ = ["ByHead", "Depthwise", "Eye", "Fixed", "Full", "Grouped", "Shared", "as_weight"]


class Full(Weight, theta="KPQ"):
    """Theta (K, P, Q) whole: K P Q numbers. `expand` and `contract` are one matrix product each.

    Example:

        >>> from structconv import Conv, Full, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Full(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        768
    """

    theta: Tensor

    def _draw(self, theta: Full, energy: Energy, variance: float) -> None:
        draw(theta.theta, variance / (theta.theta.shape[-2] * total_energy(energy, theta.size)))

    def dense(self) -> Tensor:
        return self.theta

    def expand(self, x: Tensor) -> Tensor:  # the default, without the call of `dense`
        return expand_heads(x, self.theta)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return contract_heads(r, self.theta, bias)


Weight._of_dense = Full.of


class Grouped(Weight, theta="KGPQ"):
    """Block-diagonal Theta: `groups` groups of channels, each read by one group of outputs; K P Q / G numbers.

    theta (K, G, P/G, Q/G): group g of Q reads group g of P.

    Example:

        >>> from structconv import Conv, Grouped, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Grouped(groups=4), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        192
    """

    theta: Tensor
    rearranges_heads = True

    def __init__(self, groups: int) -> None:
        self.groups = check_positive("Grouped", "groups", groups)

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        return {"G": self.groups, "P": check_divides("Grouped", "groups", self.groups, "in_channels", in_channels),
                "Q": check_divides("Grouped", "groups", self.groups, "out_channels", out_channels)}

    def _draw(self, theta: Grouped, energy: Energy, variance: float) -> None:
        draw(theta.theta, variance / (theta.theta.shape[-2] * total_energy(energy, theta.size)))

    @property
    def in_channels(self) -> int:
        return self.theta.shape[1] * self.theta.shape[2]

    @property
    def out_channels(self) -> int:
        return self.theta.shape[1] * self.theta.shape[3]

    def dense(self) -> Tensor:
        eye = torch.eye(self.theta.shape[1], dtype=self.dtype, device=self.device)
        return torch.einsum("kgpq,gf->kgpfq", self.theta, eye).flatten(1, 2).flatten(-2)

    def expand(self, x: Tensor) -> Tensor:
        size, groups, p, q = self.theta.shape
        x_GMP = x.unflatten(-1, (groups, p)).movedim(-2, -3)
        r_GMKQ = (x_GMP @ self.theta.permute(1, 2, 0, 3).flatten(-2)).unflatten(-1, (size, q))
        return r_GMKQ.movedim(-2, -4).movedim(-3, -2).flatten(-2)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        r_KNGP = r.unflatten(-1, self.theta.shape[1:3])
        r_GNKP = r_KNGP.movedim(-2, -4).movedim(-3, -2).flatten(-2)
        return plus((r_GNKP @ self.theta.transpose(0, 1).flatten(1, 2)).movedim(-3, -2).flatten(-2), bias)

    def expand_flops(self) -> int:
        return 2 * self.size * self.in_channels * self.theta.shape[3]

    contract_flops = expand_flops


class Depthwise(Weight, depthwise="KPJ"):
    """Every channel separately: K Q numbers; Q = `multiplier` P, the outputs of each channel next to each other.

    Theta_kpq = depthwise_kpj where q = p J + j, else 0, with depthwise (K, P, J), as torch's grouped convolutions.

    Args:
        multiplier: J, outputs of a channel.
        heads: H patterns over k, each shared by P / H consecutive channels (K H `multiplier` numbers); P of them if
            absent.
        normalize: "softmax" for weights e^w_k / sum_k e^w_k, so that each output is a mean over k: lightweight
            convolution (Wu et al. 2019, eq. 4 and 5). The variance of y then follows from the basis.

    Example:

        >>> from structconv import Conv, Depthwise, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Depthwise(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        48
    """

    depthwise: Tensor

    def __init__(self, multiplier: int = 1, *, heads: int | None = None, normalize: str = "none") -> None:
        self.multiplier = check_positive("Depthwise", "multiplier", multiplier)
        self.heads_by = None if heads is None else check_positive("Depthwise", "heads", heads)
        check_choice("Depthwise", "normalize", normalize, ("none", "softmax"))
        self.normalize = normalize

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        expected = self.multiplier * in_channels
        if out_channels != expected:
            raise ConfigError("Depthwise", f"out_channels must be multiplier * in_channels = {expected}", out_channels)
        if self.heads_by is not None:
            check_divides("Depthwise", "heads", self.heads_by, "in_channels", in_channels)
        return {"P": self.heads_by or in_channels, "J": self.multiplier}

    def _derived(self, theta: Depthwise, in_channels: int) -> Depthwise:
        depthwise = theta.depthwise
        if self.normalize == "softmax":
            depthwise = depthwise.softmax(0)
        if self.heads_by is not None:
            depthwise = depthwise.repeat_interleave(in_channels // self.heads_by, 1)
        return Depthwise._over({"depthwise": depthwise})

    def _scaled(self) -> str | None:
        return "depthwise" if self.normalize == "none" else None

    def _draw(self, theta: Depthwise, energy: Energy, variance: float) -> None:
        if self.normalize == "softmax":
            draw(theta.depthwise, 1 / theta.size)
        else:
            draw_mixing(theta.depthwise, energies_of(energy, theta.size), dims=(0,))
            scale(theta.depthwise, variance ** 0.5)

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

    def expand_flops(self) -> int:
        return self.size * self.out_channels

    def contract_flops(self) -> int:
        return 2 * self.size * self.out_channels


class Shared(Weight, theta="PQ"):
    """One Theta (P, Q) for all k: P Q numbers. Its variance counts the energy of the sum of all matrices.

    Example:

        >>> from structconv import Conv, Shared, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Shared(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        256
    """

    theta: Tensor
    size: int = 1

    def _draw(self, theta: Shared, energy: Energy, variance: float) -> None:
        gram = isinstance(energy, Tensor) and energy.dim() == 2
        total = float(energy.sum()) if gram else total_energy(energy, theta.size)  # type: ignore[union-attr]
        draw(theta.theta, variance / (theta.in_channels * (total if total > 0 else 1.0)))

    def dense(self) -> Tensor:
        return self.theta.expand(self.size, *self.theta.shape)

    def expand(self, x: Tensor) -> Tensor:
        return repeat_head(product(x, self.theta), self.size)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(r.sum(-3), self.theta, bias)

    def expand_flops(self) -> int:
        return 2 * self.in_channels * self.out_channels

    def contract_flops(self) -> int:
        return self.in_channels * (self.size + 2 * self.out_channels)


class Fixed(Weight):
    """A weight without numbers: as many output as input channels, and nothing to draw, to scale or to train."""

    size: int = 1
    channels: int = 1

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        if in_channels != out_channels:
            raise ConfigError(type(self).__name__, f"out_channels must equal in_channels={in_channels}", out_channels)
        return {}

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def out_channels(self) -> int:
        return self.channels

    def expand_flops(self) -> int:
        return self.size * self.channels

    contract_flops = expand_flops


class Eye(Fixed):
    """Theta_k = the identity, P = Q: nothing to draw, to scale or to train. x keeps its dtype and device.

    Example:

        >>> from structconv import Conv, Eye, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Eye(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        0
    """

    def dense(self) -> Tensor:
        return torch.eye(self.channels).expand(self.size, self.channels, self.channels)

    def expand(self, x: Tensor) -> Tensor:
        return repeat_head(x, self.size)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.join(r, bias)

    def expand_flops(self) -> int:
        return 0


class ByHead(Eye):
    """No weight and no sum over k: `join` returns the heads separately."""

    sums_heads = False

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """r_k + b_k: (..., K, N, C), (K, C) or none -> (..., K, N, C)."""
        return r if bias is None else r + bias.unsqueeze(-2)


def as_weight(theta: Weight | Tensor) -> Weight:
    """`theta` itself, or a `Full` around a tensor (K, P, Q)."""
    if isinstance(theta, Tensor):
        return Full.of(theta)
    if not theta.is_value:
        raise ConfigError(type(theta).__name__, "theta must have numbers", repr(theta),
                          "Make them by hand, Full.of(tensor), or bind it: weight.bound(size, P, Q)().")
    return theta
