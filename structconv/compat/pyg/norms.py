"""Normalizations of the rows of each graph: their means and variances are those of the readouts."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from structconv import torch_compat as private
from structconv.compat.pyg.aggregations import sorted_starts
from structconv.compat.pyg.edges import group_count
from structconv.compat.pyg.linear import Linear, draw
from structconv.compat.pyg.pooling import pooled
from structconv.derived import derived, forget_changed
from structconv.nn.layer import refuse_script
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native.adjacency import unchanged
from structconv.primitives.native.layer import standardize_groups
from structconv.shapes import check_choice

#: Numbers of x times groups from which products of matrices are faster; float64 holds their differences for float32.
_LEAST_NUMBERS = 1 << 17

__all__ = ["DiffGroupNorm", "GraphNorm", "GraphSizeNorm", "InstanceNorm", "LayerNorm", "MeanSubtractionNorm",
           "MessageNorm", "PairNorm"]


def _means(x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    """The means of x (N, ...) over the rows of each graph; one row without `batch`."""
    flat = x.flatten(1) if x.dim() > 2 else x
    return pooled(flat, batch, size, "mean").reshape(-1, *x.shape[1:])


def _counts(x: Tensor, batch: Tensor, size: int | None) -> Tensor:
    """The number of rows of each graph (B, 1)."""
    size = group_count(batch) if size is None else size
    return x.new_zeros(size, 1).index_add_(0, batch, x.new_ones(x.shape[0], 1))


def _spread(y: Tensor, batch: Tensor | None) -> Tensor:
    """The row of y (B, ...) of each row's graph."""
    return y if batch is None else y.index_select(0, batch)


def _standardized(x: Tensor, batch: Tensor | None, size: int | None, center: str = "channel",
                  scale: str | None = None, *, eps: float = 0.0, gain: float = 1.0, shift: Tensor | None = None,
                  weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """gain weight (x - shift mean) scale + bias of the rows of each graph; see `standardize_groups`."""
    def composed(x: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        def means(t: Tensor, of: str) -> Tensor:
            return _means(t if of == "channel" else t.mean(-1, keepdim=True), batch, size)

        mean = means(x, center)
        y = x - _spread(mean if shift is None else mean * shift, batch)
        if scale is None:
            return y
        deviation = (means(y.square(), scale) + eps).sqrt()  # not rsqrt, whose gradient in float16 may be infinite
        y = y / _spread(deviation if gain == 1 else deviation / gain, batch)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    starts = None if batch is None else sorted_starts(x, batch, size, shift, weight, bias)
    if batch is None or starts is None:
        return composed(x, shift, weight, bias)
    again = unchanged(batch, composed)
    y = standardize_groups(x, starts, shift, weight, bias, again, center, scale, eps, gain)
    return composed(x, shift, weight, bias) if y is None else y


def _parameter(channels: int, device: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(channels, device=device))


class _Norm(nn.Module):
    """Base of the layers; parameters are a weight, a bias and a `mean_scale`, or some of them."""

    __prepare_scriptable__ = refuse_script

    def __init__(self) -> None:
        nn.Module.__init__(self)  # under `patch` PyTorch Geometric's class comes next in the order of bases

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the bias to 0 and other parameters to 1."""
        for name, parameter in self.named_parameters():
            parameter.fill_(float(name != "bias"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class GraphNorm(_Norm):
    """weight (x - s mean(x)) / sqrt(var + eps) + bias, by the mean of each graph, s and the variance of x - s mean(x).

    Arguments: those of `torch_geometric.nn.GraphNorm`.

    Example:

        >>> from structconv.compat.pyg import GraphNorm
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> GraphNorm(1)(x, batch).round(decimals=3).tolist()
        [[-1.0], [1.0], [0.0]]
    """

    def __init__(self, in_channels: int, eps: float = 1e-5, device: Any = None) -> None:
        super().__init__()
        self.in_channels, self.eps = in_channels, eps
        self.weight, self.bias, self.mean_scale = (_parameter(in_channels, device) for _ in range(3))
        self.reset_parameters()

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        return _standardized(x, batch, batch_size, scale="channel", eps=self.eps, shift=self.mean_scale,
                             weight=self.weight, bias=self.bias)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels})"


class InstanceNorm(nn.InstanceNorm1d):
    """(x - mean(x)) / sqrt(var + eps) in each channel of each graph. Arguments: those of
    `torch_geometric.nn.InstanceNorm`.

    A batch without rows whose `batch_size` is not given leaves the running statistics as they are.

    Example:

        >>> from structconv.compat.pyg import InstanceNorm
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> InstanceNorm(1)(x, batch).round(decimals=3).tolist()
        [[-1.0], [1.0], [0.0]]
    """

    __prepare_scriptable__ = refuse_script
    momentum: float
    running_mean: Any
    running_var: Any

    def __init__(self, in_channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False,
                 track_running_stats: bool = False, device: Any = None) -> None:
        nn.InstanceNorm1d.__init__(self, in_channels, eps, momentum, affine, track_running_stats, device=device)

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        of_batch = self.training or not self.track_running_stats
        if batch is None:
            return functional.instance_norm(x.mT.unsqueeze(0), self.running_mean, self.running_var, self.weight,
                                            self.bias, of_batch, self.momentum, self.eps).squeeze(0).mT
        if not of_batch:
            scale = (self.running_var + self.eps).rsqrt()
            y = (x - self.running_mean) * (scale if self.weight is None else self.weight * scale)
            return y if self.bias is None else y + self.bias
        if self.running_mean is not None and (x.shape[0] or batch_size is not None):
            self._track(x, batch, batch_size)
        return _standardized(x, batch, batch_size, scale="channel", eps=self.eps, weight=self.weight, bias=self.bias)

    @torch.no_grad()
    def _track(self, x: Tensor, batch: Tensor, size: int | None) -> None:
        """Move the running mean and variance towards those of the graphs."""
        mean, count = _means(x, batch, size), _counts(x, batch, size)
        unbiased = _means((x - _spread(mean, batch)).square(), batch, size) * (count / (count - 1).clamp(min=1))
        self.running_mean = torch.lerp(self.running_mean, mean.mean(0), self.momentum)
        self.running_var = torch.lerp(self.running_var, unbiased.mean(0), self.momentum)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_features})"


class LayerNorm(_Norm):
    """(x - mean(x)) / sqrt(var + eps) over all channels of each graph, or of each row with mode="node".

    Arguments: those of `torch_geometric.nn.LayerNorm`.

    Without `batch` the denominator is sqrt(var) + eps, as there.

    Example:

        >>> from structconv.compat.pyg import LayerNorm
        >>> x, batch = torch.tensor([[1.0, 5.0], [3.0, 3.0], [7.0, 9.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> LayerNorm(2)(x, batch).round(decimals=3).tolist()
        [[-1.4140000343322754, 1.4140000343322754], [0.0, 0.0], [-1.0, 1.0]]
    """

    def __init__(self, in_channels: int, eps: float = 1e-5, affine: bool = True, mode: str = "graph",
                 device: Any = None) -> None:
        super().__init__()
        check_choice("LayerNorm", "mode", mode, ("graph", "node"))
        self.in_channels, self.eps, self.affine, self.mode = in_channels, eps, affine, mode
        self.weight: Any = _parameter(in_channels, device) if affine else None
        self.bias: Any = _parameter(in_channels, device) if affine else None
        self.reset_parameters()

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        if self.mode == "node":
            return functional.layer_norm(x, (self.in_channels,), self.weight, self.bias, self.eps)
        if batch is not None:
            return _standardized(x, batch, batch_size, "all", "all", eps=self.eps, weight=self.weight, bias=self.bias)
        y = x - x.mean()
        y = y / (y.std(unbiased=False) + self.eps)
        return y if self.weight is None else torch.addcmul(self.bias, y, self.weight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, affine={self.affine}, mode={self.mode})"


class PairNorm(_Norm):
    """s (x - mean(x)) / sqrt(eps + mean(|x - mean(x)|^2)) of each graph, or by eps + |x - mean(x)| of each row.
    Arguments: those of `torch_geometric.nn.PairNorm`.

    Example:

        >>> from structconv.compat.pyg import PairNorm
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> PairNorm(scale=2.0)(x, batch).round(decimals=3).tolist()
        [[-2.0], [2.0], [0.0]]
    """

    def __init__(self, scale: float = 1.0, scale_individually: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.scale_individually, self.eps = scale, scale_individually, eps

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        if self.scale_individually:
            y = _standardized(x, batch, batch_size)
            return y * (self.scale / (self.eps + y.norm(2, -1, keepdim=True)))
        channels = max(x.shape[-1], 1)  # the length of a row is the root of the mean square by that of their number
        return _standardized(x, batch, batch_size, "channel", "all", eps=self.eps / channels,
                             gain=self.scale / math.sqrt(channels))


class GraphSizeNorm(_Norm):
    """x / sqrt(N) by the number N of rows of each graph. Arguments: those of `torch_geometric.nn.GraphSizeNorm`.

    Example:

        >>> from structconv.compat.pyg import GraphSizeNorm
        >>> GraphSizeNorm()(torch.ones(4, 1)).flatten().tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        if batch is None:
            return x / x.shape[0]**0.5  # which takes symbolic sizes; math.sqrt does not
        forget_changed(batch)
        return x * derived(batch, ("sizes", batch_size, x.dtype),
                           lambda: _spread(_counts(x.detach(), batch, batch_size).rsqrt(), batch))


class MeanSubtractionNorm(_Norm):
    """x - mean(x) of each graph. Arguments: those of `torch_geometric.nn.MeanSubtractionNorm`.

    Example:

        >>> from structconv.compat.pyg import MeanSubtractionNorm
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> MeanSubtractionNorm()(x, batch).tolist()
        [[-1.0], [1.0], [0.0]]
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        return _standardized(x, batch, dim_size)


class MessageNorm(nn.Module):
    """s |x| m / |m| of a row x and its messages m. Arguments: those of `torch_geometric.nn.MessageNorm`.

    Example:

        >>> from structconv.compat.pyg import MessageNorm
        >>> MessageNorm()(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])).tolist()
        [[0.0, 5.0]]
    """

    def __init__(self, learn_scale: bool = False, device: Any = None) -> None:
        nn.Module.__init__(self)
        self.scale = nn.Parameter(torch.empty(1, device=device), requires_grad=learn_scale)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        self.scale.fill_(1.0)

    def forward(self, x: Tensor, msg: Tensor, p: float = 2.0) -> Tensor:
        """x (N, C), messages (N, C') and the norm's p -> (N, C')."""
        lengths = msg.norm(p=p, dim=-1, keepdim=True).clamp_min(1e-12)
        return msg * (x.norm(p=p, dim=-1, keepdim=True) * self.scale / lengths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(learn_scale={self.scale.requires_grad})"


class DiffGroupNorm(nn.Module):
    """x + lamda sum_g BatchNorm(s_g x), s = softmax_g(x W): the batch norm of each of some groups, to which rows belong
    by learned shares. Arguments: those of `torch_geometric.nn.DiffGroupNorm`.

    Example:

        >>> from structconv.compat.pyg import DiffGroupNorm
        >>> DiffGroupNorm(8, groups=4)(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, in_channels: int, groups: int, lamda: float = 0.01, eps: float = 1e-5, momentum: float = 0.1,
                 affine: bool = True, track_running_stats: bool = True, device: Any = None) -> None:
        nn.Module.__init__(self)
        self.in_channels, self.groups, self.lamda = in_channels, groups, lamda
        self.lin = Linear(in_channels, groups, bias=False).to(device)
        self.norm = nn.BatchNorm1d(groups * in_channels, eps, momentum, affine, track_running_stats, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        draw(self.lin)
        draw(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C) -> (N, C)."""
        share, norm = self.lin(x).softmax(-1), cast(Any, self.norm)
        own = norm.training or norm.running_mean is None
        few = own and (len(x) < 2 or len(x) * norm.num_features < _LEAST_NUMBERS or x.dtype is torch.float64
                       or not x.is_cpu)
        if few or share.dtype is not x.dtype or type(norm) is not nn.BatchNorm1d or not private.all_plain(norm):
            groups = share.unsqueeze(-1) * x.unsqueeze(-2)
            y: Tensor = norm(groups.flatten(1)).view_as(groups).sum(-2)
            return x + self.lamda * y
        mean, variance = self._moments(share, x) if own else cast(Any, (norm.running_mean, norm.running_var))
        scale = (variance + norm.eps).rsqrt()
        scale = scale if norm.weight is None else norm.weight * scale
        offset = -mean * scale if norm.bias is None else norm.bias - mean * scale
        scale, offset = scale.view(self.groups, -1).to(x.dtype), offset.view(self.groups, -1).sum(0).to(x.dtype)
        return torch.addcmul(self.lamda * offset, x, 1 + self.lamda * (share @ scale))  # x times (1 + lamda s scale)

    def _moments(self, share: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance of each group and channel (G C), products of the shares s (N, G) and of x."""
        norm = cast(Any, self.norm)
        s, rows = share.double().mT / len(x), x.double()  # a difference of squares, in float64
        mean = (s @ rows).flatten()
        variance = (((s * share.mT) @ rows.square()).flatten() - mean.square()).clamp(min=0)
        if norm.training and norm.track_running_stats:
            with torch.no_grad():
                norm.num_batches_tracked.add_(1)
                step = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), step)
                norm.running_var.lerp_((variance * (len(x) / (len(x) - 1))).to(norm.running_var.dtype), step)
        dtype = sum_dtype(x.dtype)
        return mean.to(dtype), variance.to(dtype)

    @staticmethod
    def group_distance_ratio(x: Tensor, y: Tensor, eps: float = 1e-5) -> float:
        """The mean distance of rows of different classes y (N,) over that of rows of one class."""
        classes = [y == label for label in range(int(y.max()) + 1)]
        between = sum(float(torch.cdist(x[one], x[~one]).mean()) for one in classes) / (len(classes) - 1) ** 2
        within = sum(float(torch.cdist(x[one], x[one]).mean()) for one in classes) / len(classes)
        return between / (within + eps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, groups={self.groups})"
