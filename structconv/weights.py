"""`Weight`: modules that hold the numbers of Theta, whole or in factors, and yield it as a value.

A weight is first a configuration (`Separable(rank=2)`); a layer binds a copy of it to its sizes. Numbers are drawn so
that outputs have the variance of the inputs: for white x,

    Var(y_q) = Var(x) sum_k e_k sum_p Var(Theta_kpq),   e_k = mean_n sum_m A_kmn^2,

and factors are drawn so that the product of their variances makes the sum one. Factors whose sum runs over k only are
scaled by their actual sum, so that the variance does not depend on a draw of few numbers.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from structconv import torch_private as private
from structconv.errors import ConfigError, ShapeError
from structconv.shapes import check_choice, check_divides, check_positive
from structconv.theta import (
    ConcatTheta,
    DepthwiseSeparableTheta,
    DepthwiseTheta,
    EyeBlocksTheta,
    EyeTheta,
    FullTheta,
    GroupedTheta,
    HeadBlocksTheta,
    LowRankTheta,
    MixtureTheta,
    SeparableTheta,
    SharedTheta,
    Theta,
)
from structconv.written import written

__all__ = ["Depthwise", "DepthwiseSeparable", "Eye", "EyeBlocks", "Full", "Grouped", "HeadBlocks", "LowRank",
           "MixtureWeights", "Separable", "Shared", "Weight", "WeightList"]

Energy = float | Tensor | None


class Weight(nn.Module, abc.ABC):
    """A configuration of Theta; `bound` makes a module with parameters, and calling that module yields Theta.

    Example:

        >>> from structconv import Conv, Identity, Weight
        >>> isinstance(Conv(Identity(), 4, 8).weight, Weight)
        True
    """

    size: int = 0
    in_channels: int = 0
    out_channels: int = 0

    def bound(self, size: int | Sequence[int], in_channels: int, out_channels: int, *, dtype: torch.dtype | None = None,
              device: torch.device | str | None = None) -> Self:
        """A copy of this configuration with parameters for K, P and Q, drawn by `reset_parameters`.

        Args:
            size: K, or the K of each part of a basis `a | b`.
            in_channels: P.
            out_channels: Q.
            dtype, device: of the parameters; torch's defaults if absent.

        Raises:
            ConfigError: if a size is not positive, or the channels do not suit the configuration.
        """
        weight = copy.deepcopy(self)
        owner = type(self).__name__
        sizes = (size,) if isinstance(size, int) else tuple(size)
        weight.size = check_positive(owner, "size", sum(sizes))
        weight.in_channels = check_positive(owner, "in_channels", in_channels)
        weight.out_channels = check_positive(owner, "out_channels", out_channels)
        weight._make(_Maker(sizes, dtype, device))
        weight.reset_parameters()
        return weight

    def forward(self) -> Theta:
        """Theta, as a value of `structconv.theta` over this module's parameters."""
        if not self.size:
            raise ConfigError(type(self).__name__, "weight must be bound to sizes before it is called", "unbound",
                              "A layer binds its weight; by hand: weight.bound(size, in_channels, out_channels).")
        return self._theta()

    @abc.abstractmethod
    def _make(self, new: _Maker) -> None:
        """Make the parameters for the sizes that are now known."""

    @abc.abstractmethod
    def _theta(self) -> Theta:
        """Theta from the parameters."""

    @abc.abstractmethod
    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        """Draw the parameters so that Var(y) = `variance` Var(x).

        Args:
            energy: e_k = mean_n sum_m A_kmn^2, one for all k or one for each (K,), or the Gram matrix
                mean_n sum_m A_kmn A_k'mn (K, K), whose off-diagonal counts where matrices share a Theta. 1 if absent.
            variance: the ratio of the variances.
        """

    @abc.abstractmethod
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply Theta by a number, in place, on one of its factors."""

    def extra_repr(self) -> str:
        sizes = f"K={self.size}, P={self.in_channels}, Q={self.out_channels}"
        return ", ".join(filter(None, [written(self), sizes if self.size else ""]))


class _Maker:
    """Makes parameters of one dtype on one device, for a basis whose parts have these sizes."""
    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device

    def __call__(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


class _Whole(Weight):
    """One parameter `theta`, whose last dimension but one is the fan-in."""

    theta: nn.Parameter = private.parameter()

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        total = _total(energy, self.size)
        _draw(self.theta, variance / (self.theta.shape[-2] * _positive(total)))

    def scale_(self, factor: float | Tensor) -> None:
        _scale(self.theta, factor)


class Full(_Whole):
    """Theta (K, P, Q) whole: K P Q numbers.

    Example:

        >>> from structconv import Conv, Full, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Full(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        768
    """

    def _make(self, new: _Maker) -> None:
        self.theta = new(self.size, self.in_channels, self.out_channels)

    def _theta(self) -> Theta:
        return _over(FullTheta, {"theta": self.theta})


class Grouped(_Whole):
    """Block-diagonal Theta: channels in `groups` groups, each of which feeds one; K P Q / G numbers.

    Example:

        >>> from structconv import Conv, Grouped, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Grouped(groups=4), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        192
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = check_positive("Grouped", "groups", groups)

    def _make(self, new: _Maker) -> None:
        p, q = (check_divides("Grouped", "groups", self.groups, name, getattr(self, name))
                for name in ("in_channels", "out_channels"))
        self.theta = new(self.size, self.groups, p, q)

    def _theta(self) -> Theta:
        return _over(GroupedTheta, {"theta": self.theta})


class Shared(_Whole):
    """One Theta (P, Q) for all k: P Q numbers. Its variance counts the energy of the sum of all matrices.

    Example:

        >>> from structconv import Conv, Shared, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Shared(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        256
    """

    def _make(self, new: _Maker) -> None:
        self.theta = new(self.in_channels, self.out_channels)

    def _theta(self) -> Theta:
        return _over(SharedTheta, {"theta": self.theta, "size": self.size})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        gram = isinstance(energy, Tensor) and energy.dim() == 2
        total = float(energy.sum()) if gram else _total(energy, self.size)  # type: ignore[union-attr]
        _draw(self.theta, variance / (self.in_channels * _positive(total)))


class Separable(Weight):
    """Theta_k = sum_h mix_kh filters_h (Andreoli 2019, eq. 9): H (K + P Q) numbers.

    With rank 1 all channels share one pattern over k; for a pattern a channel see `DepthwiseSeparable`.

    Example:

        >>> from structconv import Conv, Separable, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Separable(rank=2), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        518
    """

    mix: nn.Parameter = private.parameter()
    filters: nn.Parameter = private.parameter()

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = check_positive("Separable", "rank", rank)

    def _make(self, new: _Maker) -> None:
        self.mix = new(self.size, self.rank)
        self.filters = new(self.rank, self.in_channels, self.out_channels)

    def _theta(self) -> Theta:
        return _over(SeparableTheta, {"mix": self.mix, "filters": self.filters})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        _draw_mixing(self.mix, _energies(energy, self.size), dims=(0, 1))
        _draw(self.filters, variance / self.in_channels)

    def scale_(self, factor: float | Tensor) -> None:
        _scale(self.mix, factor)


class DepthwiseSeparable(Weight):
    """Theta_kpq = depthwise_kp pointwise_pq (Chollet 2017): P (K + Q) numbers, one pattern over k a channel.

    Example:

        >>> from structconv import Conv, Shifts
        >>> from structconv.weights import DepthwiseSeparable
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=DepthwiseSeparable(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        304
    """

    depthwise: nn.Parameter = private.parameter()
    pointwise: nn.Parameter = private.parameter()

    def _make(self, new: _Maker) -> None:
        self.depthwise = new(self.size, self.in_channels)
        self.pointwise = new(self.in_channels, self.out_channels)

    def _theta(self) -> Theta:
        return _over(DepthwiseSeparableTheta, {"depthwise": self.depthwise, "pointwise": self.pointwise})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        _draw_mixing(self.depthwise, _energies(energy, self.size), dims=(0,))
        _draw(self.pointwise, variance / self.in_channels)

    def scale_(self, factor: float | Tensor) -> None:
        _scale(self.depthwise, factor)


class LowRank(Weight):
    """Theta_k = value_g(k) output_k of rank `dim` (Andreoli 2019, eq. 13): attention's value and output projections.

    Args:
        dim: D, channels a head between the two.
        shared_by: heads that share one value projection (grouped queries); must divide K.

    Example:

        >>> from structconv import Conv, LowRank, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=LowRank(4), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        384
    """

    value: nn.Parameter = private.parameter()
    output: nn.Parameter = private.parameter()

    def __init__(self, dim: int, shared_by: int = 1) -> None:
        super().__init__()
        self.dim = check_positive("LowRank", "dim", dim)
        self.shared_by = check_positive("LowRank", "shared_by", shared_by)

    def _make(self, new: _Maker) -> None:
        self.value = new(check_divides("LowRank", "shared_by", self.shared_by, "size", self.size),
                         self.in_channels, self.dim)
        self.output = new(self.size, self.dim, self.out_channels)

    def _theta(self) -> Theta:
        return _over(LowRankTheta, {"values": self.value, "outputs": self.output})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        total = _total(energy, self.size)
        _draw(self.value, 1 / self.in_channels)
        _draw(self.output, variance / (self.dim * _positive(total)))

    def scale_(self, factor: float | Tensor) -> None:
        _scale(self.output, factor)


class HeadBlocks(_Whole):
    """Head k fills the k-th of K blocks of output channels (concatenated heads, as in GAT): P Q numbers.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.weights import HeadBlocks
        >>> layer = Conv(DotProduct(heads=4, dim=8).softmax(), 16, 32, weight=HeadBlocks(), bias=False)
        >>> layer.weight().dense().shape                             # (K, P, Q); head k fills outputs 8 k ... 8 k + 7
        torch.Size([4, 16, 32])
    """

    def _make(self, new: _Maker) -> None:
        dim = check_divides("HeadBlocks", "size", self.size, "out_channels", self.out_channels)
        self.theta = new(self.size, self.in_channels, dim)

    def _theta(self) -> Theta:
        return _over(HeadBlocksTheta, {"values": self.theta})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        _draw(self.theta, variance / (self.in_channels * _positive(_total(energy, self.size) / self.size)))


class Depthwise(Weight):
    """Every channel by itself: K Q numbers; Q = `multiplier` P, outputs of one channel beside each other.

    Args:
        multiplier: outputs of a channel.
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

    depthwise: nn.Parameter = private.parameter()

    def __init__(self, multiplier: int = 1, *, heads: int | None = None, normalize: str = "none") -> None:
        super().__init__()
        self.multiplier = check_positive("Depthwise", "multiplier", multiplier)
        self.heads = None if heads is None else check_positive("Depthwise", "heads", heads)
        check_choice("Depthwise", "normalize", normalize, ("none", "softmax"))
        self.normalize = normalize

    def _make(self, new: _Maker) -> None:
        wanted = self.multiplier * self.in_channels
        if self.out_channels != wanted:
            raise ConfigError("Depthwise", f"out_channels must be multiplier * in_channels = {wanted}",
                              self.out_channels)
        if self.heads is not None:
            check_divides("Depthwise", "heads", self.heads, "in_channels", self.in_channels)
        self.depthwise = new(self.size, self.heads or self.in_channels, self.multiplier)

    def _theta(self) -> Theta:
        depthwise: Tensor = self.depthwise
        if self.normalize == "softmax":
            depthwise = depthwise.softmax(0)
        if self.heads is not None:
            depthwise = depthwise.repeat_interleave(self.in_channels // self.heads, 1)
        return _over(DepthwiseTheta, {"depthwise": depthwise})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        if self.normalize == "softmax":
            _draw(self.depthwise, 1 / self.size)
        else:
            _draw_mixing(self.depthwise, _energies(energy, self.size), dims=(0,))
            _scale(self.depthwise, variance ** 0.5)

    def scale_(self, factor: float | Tensor) -> None:
        if self.normalize == "none":
            _scale(self.depthwise, factor)


class Eye(Weight):
    """Theta_k = the identity, P = Q: nothing to draw, to scale or to train.

    Example:

        >>> from structconv import Conv, Eye, Shifts
        >>> layer = Conv(Shifts([-1, 0, 1]), 16, 16, weight=Eye(), bias=False)
        >>> sum(parameter.numel() for parameter in layer.parameters())
        0
    """

    def _make(self, new: _Maker) -> None:
        if self.in_channels != self.out_channels:
            raise ConfigError(type(self).__name__, f"out_channels must equal in_channels={self.in_channels}",
                              self.out_channels)

    def _theta(self) -> Theta:
        return EyeTheta(self.size, self.in_channels)

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        """Nothing is drawn: Var(y) follows from the basis."""

    def scale_(self, factor: float | Tensor) -> None:
        """Nothing is scaled."""


class EyeBlocks(Eye):
    """Head k hands on the k-th of K blocks of P / K channels, P = Q: nothing to draw, to scale or to train.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import DynamicShifts
        >>> from structconv.weights import EyeBlocks
        >>> Conv(DynamicShifts([-1, 0, 1], heads=4), 16, 16, weight=EyeBlocks())(torch.randn(9, 16)).shape
        torch.Size([9, 16])
    """

    def _make(self, new: _Maker) -> None:
        super()._make(new)
        check_divides("EyeBlocks", "size", self.size, "in_channels", self.in_channels)

    def _theta(self) -> Theta:
        return EyeBlocksTheta(self.size, self.in_channels)


class WeightList(Weight):
    """One weight for each part of a basis `a | b`, in order; the variance is shared in proportion to their K.

    They are its children by their numbers, so that a layer has `weight.0.theta`, `weight.1.theta`, ...

    Example:

        >>> from structconv import Conv, Full, Identity, Separable, Shifts
        >>> layer = Conv(Shifts([-1, 1]) | Identity(), 4, 8, weight=[Separable(rank=1), Full()])
        >>> layer.weight
        WeightList([Separable(1, K=2, P=4, Q=8), Full(K=1, P=4, Q=8)])
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
        if not weights or not all(isinstance(weight, Weight) for weight in weights):
            raise ConfigError("WeightList", "weights must be one or more Weight modules", repr(weights))
        self._hold(weights)

    def _hold(self, weights: Sequence[Weight]) -> None:
        for number, weight in enumerate(weights):
            self.add_module(str(number), weight)

    @property
    def weights(self) -> list[Weight]:
        """The weights, in order."""
        return cast("list[Weight]", list(self._modules.values()))

    def _make(self, new: _Maker) -> None:
        if len(new.sizes) != len(self.weights):
            raise ConfigError("WeightList", f"weights must be {len(new.sizes)}, one for each part of the basis",
                              len(self.weights))
        self._hold(self._bound_parts(new))

    def _bound_parts(self, new: _Maker) -> list[Weight]:
        return [weight.bound(size, self.in_channels, self.out_channels, dtype=new.dtype, device=new.device)
                for weight, size in zip(self.weights, new.sizes, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.weights))}])"

    def _theta(self) -> Theta:
        parts = tuple(private.called(weight) for weight in self.weights)
        return parts[0] if len(parts) == 1 else ConcatTheta(parts)

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        at = 0
        for weight in self.weights:
            span = slice(at, at + weight.size)
            at += weight.size
            part = energy[(span,) * energy.dim()] if isinstance(energy, Tensor) and energy.dim() else energy
            weight.reset_parameters(part, variance * weight.size / self.size)

    def scale_(self, factor: float | Tensor) -> None:
        for weight in self.weights:
            weight.scale_(factor)


class MixtureWeights(WeightList):
    """One weight for each part of a mixture, each with the P of the x that its part reads; P is their sum.

    Args:
        weights: one for each part, or one of which each has a copy.
        channels: P of each part.

    Example:

        >>> from structconv import Conv, Identity
        >>> layer = Conv(Identity().of("words") | Identity().of("tags"), {"words": 4, "tags": 2}, 8)
        >>> layer({"words": torch.randn(5, 4), "tags": torch.randn(5, 2)}).shape
        torch.Size([5, 8])
    """

    def __init__(self, weights: Weight | Sequence[Weight], channels: Sequence[int]) -> None:
        super().__init__([weights] * len(channels) if isinstance(weights, Weight) else weights)
        self.channels = tuple(channels)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, channels={self.channels})"

    def _bound_parts(self, new: _Maker) -> list[Weight]:
        each = zip(self.weights, new.sizes, self.channels, strict=True)
        return [weight.bound(size, channels, self.out_channels, dtype=new.dtype, device=new.device)
                for weight, size, channels in each]

    def _theta(self) -> Theta:
        return _over(MixtureTheta, {"parts": tuple(private.called(weight) for weight in self.weights)})


def _over(kind: type[Theta], held: dict[str, Any]) -> Theta:
    """Theta over these fields, unchecked: a plan for it checks, once."""
    theta = object.__new__(kind)
    theta.__dict__.update(held)
    return theta


def _energies(energy: Energy, size: int) -> Tensor:
    """e_k for each k, float64 (K,)."""
    given = torch.as_tensor(1.0 if energy is None else energy, dtype=torch.float64, device="cpu").detach()
    if given.shape not in ((), (1,), (size,), (size, size)):
        raise ShapeError("reset_parameters", f"energy must be a number or have shape (K={size},) or (K, K)",
                         tuple(given.shape))
    return given.diagonal() if given.dim() == 2 else given.expand(size)


def _total(energy: Energy, size: int) -> float:
    """The sum of all e_k."""
    return float(size) if energy is None else float(_energies(energy, size).sum())


def _positive(total: float) -> float:
    """The sum, or 1 where every matrix is zero and no Theta could give the outputs a variance."""
    return total if total > 0 else 1.0


@torch.no_grad()
def _draw(parameter: Tensor, variance: float) -> None:
    """Uniform numbers of mean 0."""
    bound = (3 * variance) ** 0.5
    parameter.uniform_(-bound, bound)


@torch.no_grad()
def _draw_mixing(parameter: Tensor, energies: Tensor, dims: tuple[int, ...]) -> None:
    """Uniform numbers (K, ...), scaled so that the sum of e_k parameter_k^2 over `dims` is one."""
    parameter.uniform_(-1, 1)
    weights = energies.to(parameter).view(-1, *(1,) * (parameter.dim() - 1))
    total = (weights * parameter.square()).sum(dims, keepdim=True)
    parameter.div_(torch.where(total > 0, total, torch.ones_like(total)).sqrt())


@torch.no_grad()
def _scale(parameter: Tensor, factor: float | Tensor) -> None:
    parameter.mul_(factor)
