"""Rows by groups: readouts of the graphs of a batch, and `softmax`, `scatter` and `spmm` of `torch_geometric.utils`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.matrices import adjacency
from structconv.compat.pyg.aggregations import check_floating, in_any_order, in_groups, pool_extreme
from structconv.compat.pyg.edges import edges_to_outputs, gather, graph_of, group_count, memberships
from structconv.compat.pyg.linear import project
from structconv.compat.pyg.tracing import traceable
from structconv.derived import is_plain
from structconv.errors import ConfigError
from structconv.primitives.segments import segment_softmax
from structconv.primitives.sorting import numbered_by_count
from structconv.shapes import check_choice

__all__ = ["JumpingKnowledge", "global_add_pool", "global_max_pool", "global_mean_pool", "pooled", "scatter", "softmax",
           "spmm"]


def global_add_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """The sum of the rows of each graph: x (..., N, C), `batch` (N,) -> (..., B, C), B = `size` or the largest + 1.

    Example:

        >>> from structconv.compat.pyg import global_add_pool
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> global_add_pool(x, batch).tolist()
        [[4.0], [7.0]]
    """
    return pooled(x, batch, size, "add")


def global_mean_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """The mean of the rows of each graph; see `global_add_pool`.

    Example:

        >>> from structconv.compat.pyg import global_mean_pool
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> global_mean_pool(x, batch).tolist()
        [[2.0], [7.0]]
    """
    return pooled(x, batch, size, "mean")


def global_max_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """The largest number of each channel of each graph, zero of one without rows; see `global_add_pool`.

    Example:

        >>> from structconv.compat.pyg import global_max_pool
        >>> x, batch = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])   # two graphs
        >>> global_max_pool(x, batch).tolist()
        [[3.0], [7.0]]
    """
    return pooled(x, batch, size, "max")


def pooled(x: Tensor, batch: Tensor | None, size: int | None, kind: str) -> Tensor:
    """The "add" or "sum", "mean", "max" or "min" of the rows of each group."""
    if not is_compiling() and private.tracing() is not None:  # which fixes the number of groups
        return _traced(x, batch, int(batch.max()) + 1 if size is None and batch is not None else size, kind)
    if x.dim() == 1:
        return pooled(x.unsqueeze(-1), batch, size, kind).squeeze(-1)
    if batch is None and x.shape[-2] and x.is_floating_point():
        one = x.dim() == 2
        if kind in ("max", "min"):
            if x.requires_grad:  # of equal numbers the first has the gradient
                return (x.max(-2, one) if kind == "max" else x.min(-2, one)).values
            return x.amax(-2, one) if kind == "max" else x.amin(-2, one)
        return x.mean(-2, one) if kind == "mean" else x.sum(-2, one)
    if batch is None:
        y = pooled(x, torch.zeros(x.shape[-2], dtype=torch.int64, device=x.device), 1, kind)
        return y if x.dim() == 2 else y.squeeze(-2)
    direct = in_groups(x, batch, size, "sum" if kind == "add" else kind, lambda x: _of_members(x, batch, size, kind))
    return _of_members(x, batch, size, kind) if direct is None else direct


_traced = traceable(pooled)


def _of_members(x: Tensor, batch: Tensor, size: int | None, kind: str) -> Tensor:
    """`pooled` by the graph from rows to groups."""
    owner = f"global_{kind}_pool"
    check_floating(owner, x)
    members = memberships(owner, batch, x.shape[-2], size)
    if kind in ("max", "min"):
        return pool_extreme(x, members, kind)
    return project(x, adjacency(members, (None, "count") if kind == "mean" else None, x.dtype), None)


# -- functions of torch_geometric.utils ---------------------------------------------------------------------------

def softmax(src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None,
            dim: int = 0) -> Tensor:
    """exp(src_e) / sum of exp(src_f) over the entries f of the same group, along `dim`.

    Args:
        index: the group of each entry (E,), in any order. ptr: where each group starts, and the end; it comes first.
        num_nodes: the number of groups, else the largest index + 1.

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check_values("softmax", src, dim)
    if ptr is not None and ptr.dim() == 1:
        sizes = ptr.diff()
        num_nodes = sizes.shape[0]
        index = numbered_by_count(sizes, src.shape[dim])
    if index is None or index.dim() != 1 or index.shape[0] != src.shape[dim]:
        raise ConfigError("softmax", f"index must be of shape (E={src.shape[dim]},)", _described(index))
    groups = group_count(index) if num_nodes is None else num_nodes

    def composed(rows: Tensor, index: Tensor) -> Tensor:
        return segment_softmax(rows, index, groups, rows=True)

    def weights(rows: Tensor) -> Tensor:
        direct = in_any_order(rows, index, groups, "softmax", composed)
        if direct is None and is_plain(index):
            memberships("softmax", index, len(index), groups)  # which checks them
        return composed(rows, index) if direct is None else direct

    return _by_rows(src, dim, weights)


def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """Reduce the entries of `src` along `dim` that have the same `index` (E,); zero where there is none.

    Args:
        dim_size: the number of groups, else the largest index + 1.
        reduce: "sum" or "add", "mean", "max" or "min".

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check_values("scatter", src, dim)
    check_choice("scatter", "reduce", reduce, ("sum", "add", "mean", "max", "min"))
    if not isinstance(index, Tensor) or index.dim() != 1 or index.shape[0] != src.shape[dim]:
        raise ConfigError("scatter", f"index must be of shape (E={src.shape[dim]},)", _described(index))
    return _by_rows(src, dim, lambda rows: pooled(rows, index, dim_size, reduce))


def spmm(src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
    """A x of a sparse matrix A (N, M) and x (M, C): the "sum" or "add", "mean", "max" or "min" of a_nm x_m over m.

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check_values("spmm", other, 0)
    check_choice("spmm", "reduce", reduce, ("sum", "add", "mean", "max", "min"))
    if type(src) is not Tensor or src.layout is torch.strided or src.requires_grad or other.dim() != 2:
        raise ConfigError("spmm", "src must be a sparse matrix of torch without a gradient, and other (M, C)",
                          f"{type(src).__name__} and {_described(other)}")
    graph = graph_of("spmm", src, other.shape[0], None, "source_to_target")
    messages = adjacency(graph, (None, "count") if reduce == "mean" else None, other.dtype)
    if reduce in ("max", "min"):
        rows = gather(other, graph)
        rows = rows if messages.values is None else rows * messages.values.unsqueeze(-1)
        return pool_extreme(rows, edges_to_outputs(graph), reduce)
    return project(other, messages, None)


def _by_rows(src: Tensor, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of rows (E, C) of a tensor whose entries lie along `dim`."""
    if dim == 0 and src.dim() == 2:
        return function(src)
    moved = src.movedim(dim, 0)
    y = function(moved.reshape(moved.shape[0], prod(moved.shape[1:])))
    return y.reshape(y.shape[0], *moved.shape[1:]).movedim(0, dim).contiguous()  # theirs is; programs use `view`


def _check_values(owner: str, src: Any, dim: int) -> None:
    if type(src) is not Tensor or not src.is_floating_point() or not -src.dim() <= dim < src.dim():
        raise ConfigError(owner, "the values must be a floating tensor that has the dimension dim", _described(src))


def _described(value: Any) -> Any:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


# -- outputs of several layers ------------------------------------------------------------------------------------

class JumpingKnowledge(nn.Module):
    """The outputs of all layers, joined: side by side ("cat"), the largest ("max"), or their mean weighted by an LSTM
    ("lstm"). Arguments and parameters: those of `torch_geometric.nn.JumpingKnowledge`.

    Example:

        >>> from structconv.compat.pyg import JumpingKnowledge
        >>> first, second = torch.randn(3, 8), torch.randn(3, 8)
        >>> JumpingKnowledge("cat")([first, second]).shape
        torch.Size([3, 16])
        >>> torch.equal(JumpingKnowledge("max")([first, second]), torch.maximum(first, second))
        True
    """

    def __init__(self, mode: str, channels: int | None = None, num_layers: int | None = None) -> None:
        nn.Module.__init__(self)
        self.mode = mode.lower()
        check_choice("JumpingKnowledge", "mode", self.mode, ("cat", "max", "lstm"))
        self.channels, self.num_layers, self.lstm, self.att = channels, num_layers, None, None
        if self.mode == "lstm":
            if channels is None or num_layers is None:
                raise ConfigError("JumpingKnowledge", "channels and num_layers must be given for 'lstm'",
                                  f"{channels} and {num_layers}")
            width = num_layers * channels // 2
            self.lstm = nn.LSTM(channels, width, bidirectional=True, batch_first=True)
            self.att = nn.Linear(2 * width, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]

    def forward(self, xs: list[Tensor]) -> Tensor:
        """T outputs (N, C) -> (N, T C) for "cat", else (N, C)."""
        if self.mode == "cat":
            return torch.cat(xs, -1)
        if self.mode == "max":
            if torch.is_grad_enabled() or len(xs) == 1:
                return torch.stack(xs, 0).max(0).values  # of equal numbers the first has the gradient
            y = xs[0]
            for other in xs[1:]:
                y = torch.maximum(y, other)
            return y
        assert self.lstm is not None and self.att is not None  # for torch.jit.script
        x = torch.stack(xs, 1)
        share = self.att(self.lstm(x)[0]).softmax(1)
        return (x * share).sum(1)

    def __repr__(self) -> str:
        more = f", channels={self.channels}, layers={self.num_layers}" if self.mode == "lstm" else ""
        return f"{type(self).__name__}({self.mode}{more})"
