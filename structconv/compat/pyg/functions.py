"""`softmax`, `scatter` and `spmm` of `torch_geometric.utils`, computed by our operator."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from structconv.bases.matrices import adjacency
from structconv.compat.pyg.aggregations import pool_extreme
from structconv.compat.pyg.edges import edges_to_outputs, gather, graph_of, group_count
from structconv.compat.pyg.linear import project
from structconv.compat.pyg.pooling import pooled
from structconv.errors import ConfigError
from structconv.primitives.segments import segment_softmax
from structconv.primitives.sorting import numbered_by_count
from structconv.shapes import check_choice

__all__ = ["scatter", "softmax", "spmm"]


def softmax(src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None,
            dim: int = 0) -> Tensor:
    """exp(src_e) / sum of exp(src_f) over the entries f of the same group, along `dim`.

    Args:
        index: the group of each entry (E,), in any order. ptr: where each group starts, and the end; it comes first.
        num_nodes: the number of groups, else the largest index + 1.

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check("softmax", src, dim)
    if ptr is not None and ptr.dim() == 1:
        sizes = ptr.diff()
        num_nodes = sizes.shape[0]
        index = numbered_by_count(sizes, src.shape[dim])
    if index is None or index.dim() != 1 or index.shape[0] != src.shape[dim]:
        raise ConfigError("softmax", f"index must be of shape (E={src.shape[dim]},)", _shape(index))
    groups = group_count(index) if num_nodes is None else num_nodes
    return segment_softmax(src.movedim(dim, -1), index, groups).movedim(-1, dim).contiguous()


def scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """Reduce the entries of `src` along `dim` that have the same `index` (E,); zero where there is none.

    Args:
        dim_size: the number of groups, else the largest index + 1.
        reduce: "sum" or "add", "mean", "max" or "min".

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check("scatter", src, dim)
    check_choice("scatter", "reduce", reduce, ("sum", "add", "mean", "max", "min"))
    if not isinstance(index, Tensor) or index.dim() != 1 or index.shape[0] != src.shape[dim]:
        raise ConfigError("scatter", f"index must be of shape (E={src.shape[dim]},)", _shape(index))
    moved = src.movedim(dim, 0)
    rows = moved.reshape(index.shape[0], prod(moved.shape[1:]))
    y = pooled(rows, index, dim_size, reduce)
    return y.reshape(y.shape[0], *moved.shape[1:]).movedim(0, dim).contiguous()  # theirs is; programs use `view`


def spmm(src: Any, other: Tensor, reduce: str = "sum") -> Tensor:
    """A x of a sparse matrix A (N, M) and x (M, C): the "sum" or "add", "mean", "max" or "min" of a_nm x_m over m.

    Raises:
        ConfigError: for arguments that only PyTorch Geometric's own function takes.
    """
    _check("spmm", other, 0)
    check_choice("spmm", "reduce", reduce, ("sum", "add", "mean", "max", "min"))
    if type(src) is not Tensor or src.layout is torch.strided or src.requires_grad or other.dim() != 2:
        raise ConfigError("spmm", "src must be a sparse matrix of torch without a gradient, and other (M, C)",
                          f"{type(src).__name__} and {_shape(other)}")
    graph = graph_of("spmm", src, other.shape[0], None, "source_to_target")
    messages = adjacency(graph, (None, "count") if reduce == "mean" else None, other.dtype)
    if reduce in ("max", "min"):
        rows = gather(other, graph)
        rows = rows if messages.values is None else rows * messages.values.unsqueeze(-1)
        return pool_extreme(rows, edges_to_outputs(graph), reduce)
    return project(other, messages, None)


def _check(owner: str, src: Any, dim: int) -> None:
    if type(src) is not Tensor or not src.is_floating_point() or not -src.dim() <= dim < src.dim():
        raise ConfigError(owner, "the values must be a floating tensor that has the dimension dim", _shape(src))


def _shape(value: Any) -> Any:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
