"""Normalizations of the rows of each graph: their means and variances are those of the readouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from structconv.compat.pyg.edges import group_count
from structconv.compat.pyg.linear import Linear, draw
from structconv.compat.pyg.pooling import pooled
from structconv.nn.layer import refuse_script
from structconv.shapes import check_choice

__all__ = ["DiffGroupNorm", "GraphNorm", "GraphSizeNorm", "InstanceNorm", "LayerNorm", "MeanSubtractionNorm",
           "MessageNorm", "PairNorm"]


def _means(x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    """The means of x (N, ...) over the rows of each graph; one row without `batch`."""
    flat = x.flatten(1) if x.dim() > 2 else x
    return pooled(flat, batch, size, "mean").reshape(-1, *x.shape[1:])


def _counts(x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    """The number of rows of each graph (B, 1)."""
    if batch is None:
        return x.new_full((1, 1), len(x))
    size = group_count(batch) if size is None else size
    return x.new_zeros(size, 1).index_add_(0, batch, x.new_ones(len(x), 1))


def _spread(y: Tensor, batch: Tensor | None) -> Tensor:
    """The row of y (B, ...) of each row's graph."""
    return y if batch is None else y.index_select(0, batch)


def _centered(x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    return x - _spread(_means(x, batch, size), batch)


def _parameter(channels: int, device: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(channels, device=device))


class _Norm(nn.Module):
    """Base of the layers; parameters are a weight, a bias and a `mean_scale`, or some of them."""

    __prepare_scriptable__ = refuse_script

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the bias to 0 and other parameters to 1."""
        for name, parameter in self.named_parameters():
            parameter.fill_(float(name != "bias"))


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
        nn.Module.__init__(self)
        self.in_channels, self.eps = in_channels, eps
        self.weight, self.bias, self.mean_scale = (_parameter(in_channels, device) for _ in range(3))
        self.reset_parameters()

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        y = x - _spread(_means(x, batch, batch_size) * self.mean_scale, batch)
        scale = self.weight * (_means(y.square(), batch, batch_size) + self.eps).rsqrt()
        return torch.addcmul(self.bias, y, _spread(scale, batch))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels})"


class InstanceNorm(nn.InstanceNorm1d):
    """(x - mean(x)) / sqrt(var + eps) in each channel of each graph. Arguments: those of
    `torch_geometric.nn.InstanceNorm`.

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
        if of_batch:
            mean = _means(x, batch, batch_size)
            y = x - _spread(mean, batch)
            variance = _means(y.square(), batch, batch_size)
            if self.running_mean is not None:
                self._track(mean, variance, _counts(x, batch, batch_size))
        else:
            y, variance, batch = x - self.running_mean, self.running_var, None
        scale = (variance + self.eps).rsqrt()
        if self.weight is None:
            return y * _spread(scale, batch)
        return torch.addcmul(self.bias, y, _spread(self.weight * scale, batch))

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running mean and variance towards those of the graphs."""
        unbiased = variance * (count / (count - 1).clamp(min=1))
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
        nn.Module.__init__(self)
        check_choice("LayerNorm", "mode", mode, ("graph", "node"))
        self.in_channels, self.eps, self.affine, self.mode = in_channels, eps, affine, mode
        self.weight: Any = _parameter(in_channels, device) if affine else None
        self.bias: Any = _parameter(in_channels, device) if affine else None
        self.reset_parameters()

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        if self.mode == "node":
            return functional.layer_norm(x, (self.in_channels,), self.weight, self.bias, self.eps)
        if batch is None:
            y = x - x.mean()
            y = y / (y.std(unbiased=False) + self.eps)
        else:
            y = x - _spread(_means(x.mean(-1, keepdim=True), batch, batch_size), batch)
            variance = _means(y.square().mean(-1, keepdim=True), batch, batch_size)
            y = y * _spread((variance + self.eps).rsqrt(), batch)
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
        nn.Module.__init__(self)
        self.scale, self.scale_individually, self.eps = scale, scale_individually, eps

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        y = _centered(x, batch, batch_size)
        if self.scale_individually:
            return y * (self.scale / (self.eps + y.norm(2, -1, keepdim=True)))
        lengths = _means(y.square().sum(-1, keepdim=True), batch, batch_size)
        return y * _spread(self.scale * (self.eps + lengths).rsqrt(), batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class GraphSizeNorm(_Norm):
    """x / sqrt(N) by the number N of rows of each graph. Arguments: those of `torch_geometric.nn.GraphSizeNorm`.

    Example:

        >>> from structconv.compat.pyg import GraphSizeNorm
        >>> GraphSizeNorm()(torch.ones(4, 1)).flatten().tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        return x * _spread(_counts(x, batch, batch_size).rsqrt(), batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MeanSubtractionNorm(_Norm):
    """x - mean(x) of each graph. Arguments: those of `torch_geometric.nn.MeanSubtractionNorm`.

    Example:

        >>> from structconv.compat.pyg import MeanSubtractionNorm
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> MeanSubtractionNorm()(x, batch).tolist()
        [[-1.0], [1.0], [0.0]]
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Tensor:
        """x (N, C), the graph of each row (N,) and the number of graphs -> (N, C)."""
        return _centered(x, batch, dim_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


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
        return functional.normalize(msg, p=p, dim=-1) * x.norm(p=p, dim=-1, keepdim=True) * self.scale

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
        groups = self.lin(x).softmax(-1).unsqueeze(-1) * x.unsqueeze(-2)
        y: Tensor = self.norm(groups.flatten(1)).view_as(groups).sum(-2)
        return x + self.lamda * y

    @staticmethod
    def group_distance_ratio(x: Tensor, y: Tensor, eps: float = 1e-5) -> float:
        """The mean distance of rows of different classes y (N,) over that of rows of one class."""
        classes = [y == label for label in range(int(y.max()) + 1)]
        between = sum(float(torch.cdist(x[one], x[~one]).mean()) for one in classes) / (len(classes) - 1) ** 2
        within = sum(float(torch.cdist(x[one], x[one]).mean()) for one in classes) / len(classes)
        return between / (within + eps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, groups={self.groups})"
