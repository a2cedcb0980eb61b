"""Aggregations: how the messages to an output become one row.

A message is a row of x times the factor of its edge, a `Sparse` matrix. Sums, means, moments and the softmax are
matrices applied to functions of x: no row of each edge is formed where the edges have no factors.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.bases.matrices import adjacency
from structconv.bases.scores import Affine, Bilinear
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.edges import edges_to_outputs, gather, group_count, memberships
from structconv.compat.pyg.linear import Linear, LinearByType, project
from structconv.compat.pyg.operator import attend, is_few
from structconv.compat.pyg.tracing import is_tracing, traceable
from structconv.derived import derived, is_plain, values_known
from structconv.errors import ConfigError, nearest
from structconv.nn.layer import refuse_script
from structconv.nn.pooling import GroupPool, of_groups
from structconv.planning.precision import cast as cast_to
from structconv.planning.precision import promoted_dtype
from structconv.primitives.native.adjacency import unchanged
from structconv.primitives.native.layer import group_starts, pool_groups, scatter_rows
from structconv.primitives.native.node import is_direct
from structconv.primitives.segments import is_few_rows, segment_max, segment_softmax, segment_sum, sum_of_rows
from structconv.primitives.sorting import numbered_by_count
from structconv.structures.graph import Graph
from structconv.torch_compat import all_plain, any_autocast, calls_forward, forward_level

try:  # where it is installed, its own layers take our aggregations
    from torch_geometric.nn import Aggregation as Base
except ImportError:
    Base = nn.Module

calls_forward(Base.__call__)  # besides checks

__all__ = ["SIMPLE", "MaxAggregation", "MeanAggregation", "MinAggregation", "MultiAggregation", "PowerMeanAggregation",
           "SoftmaxAggregation", "StdAggregation", "SumAggregation", "VarAggregation", "aggregate", "aggregation",
           "check_floating", "counts", "in_any_order", "in_groups", "pool_extreme", "shares", "sorted_starts"]

#: Aggregations without options, which need no module.
SIMPLE = ("add", "sum", "mean", "max", "min")
#: Sums of the messages and of their squares, computed once for all aggregations of a list.
Known = dict[str, Tensor]


class _Aggregation(Base):
    """An aggregation without parameters."""

    #: The kind of `in_groups`, where it does not depend on options.
    kind: ClassVar[str | None] = None
    __prepare_scriptable__ = refuse_script

    def forward(self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, dim_size: int | None = None,
                dim: int = -2) -> Tensor:
        """Rows (..., N, C) of x (..., E, C), one for each group.

        Args:
            index: the group of each row (E,). ptr: where each group starts, and the end, in its place.
            dim_size: the number of groups, else the largest index + 1.
            dim: where rows are.
        """
        if dim_size is None and index is not None and is_tracing():  # which fixes the number of groups
            dim_size = int(index.max()) + 1
        if index is None and ptr is not None and x.dim() == 2 and dim in (-2, 0) and not is_tracing():
            dim_size, index = ptr.shape[0] - 1, derived(  # groups that rise, which one kernel can read
                ptr, ("groups", len(x)), lambda: numbered_by_count(ptr.diff(), len(x)))
            y = self._in_groups(x, index, dim_size)
            if y is not None:
                return y
        return self._of_rows(x, index, ptr, dim_size, dim)

    @calls_forward
    def __call__(self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, dim_size: int | None = None,
                 dim: int = -2, **options: Any) -> Tensor:
        """`forward`, or the same by one kernel, which needs none of the checks of PyTorch Geometric's `__call__`."""
        if index is not None and ptr is None and x.dim() == 2 and dim in (-2, 0) and not options and _computes(self):
            y = self._in_groups(x, index, dim_size)
            if y is not None:
                return y
        return cast(Tensor, super().__call__(x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **options))

    def _in_groups(self, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
        """The rows in groups, by one kernel; `None` where none can compute them."""
        kind, t = self._pooling()
        return None if kind is None else in_groups(
            x, index, size, kind, lambda x: cast(Tensor, self._of_rows(x, index, None, size, -2)), t)

    def _pooling(self) -> tuple[str | None, float]:
        """The kind of `in_groups`, and its t."""
        return self.kind, 1.0

    @traceable
    def _of_rows(self, x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int) -> Tensor:
        check_floating(type(self).__name__, x)
        rows = x.movedim(dim, -2)
        count = rows.shape[-2]
        if index is None:
            sizes = x.new_tensor([count], dtype=torch.int64) if ptr is None else ptr.diff()
            dim_size, index = sizes.shape[0], numbered_by_count(sizes, count)
        members = memberships(type(self).__name__, index, count, dim_size)
        return self._rule(self, rows, Sparse(members), {}).movedim(-2, dim)

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        """One row (..., N, C) for each output, of the rows of x (..., M, C) and the factor of each edge.

        Args:
            how: the module, ours or PyTorch Geometric's of the same name; or the name.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set all parameters to their first values."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _computes(how: Any) -> bool:
    """Return True if the aggregation is one of ours, without hooks or another `forward`."""
    return isinstance(how, _Aggregation) and type(how).forward is _Aggregation.forward and all_plain(how)


class SumAggregation(_Aggregation):
    """sum_e m_e.

    Example:

        >>> from structconv.compat.pyg import SumAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> SumAggregation()(x, group).tolist()
        [[4.0], [7.0]]
    """

    kind = "sum"

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        if "sum" not in known:
            known["sum"] = project(x, messages, None)
        return known["sum"]


class MeanAggregation(_Aggregation):
    """The mean of m_e.

    Example:

        >>> from structconv.compat.pyg import MeanAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> MeanAggregation()(x, group).tolist()
        [[2.0], [7.0]]
    """

    kind = "mean"

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        return SumAggregation._rule(how, x, messages, known) / counts(messages.graph, x.dtype)


_MEAN = MeanAggregation()


class MaxAggregation(_Aggregation):
    """The largest of m_e in each channel.

    Example:

        >>> from structconv.compat.pyg import MaxAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> MaxAggregation()(x, group).tolist()
        [[3.0], [7.0]]
    """

    kind = "max"

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        x, graph = (x, messages.graph) if messages.values is None else _rows(x, messages)
        return pool_extreme(x, graph, "max")


class MinAggregation(_Aggregation):
    """The smallest of m_e in each channel.

    Example:

        >>> from structconv.compat.pyg import MinAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> MinAggregation()(x, group).tolist()
        [[1.0], [7.0]]
    """

    kind = "min"

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        x, graph = (x, messages.graph) if messages.values is None else _rows(x, messages)
        return pool_extreme(x, graph, "min")


class VarAggregation(_Aggregation):
    """mean(m_e^2) - mean(m_e)^2; with `semi_grad` the first has no gradient.

    Example:

        >>> from structconv.compat.pyg import VarAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> VarAggregation()(x, group).tolist()
        [[1.0], [0.0]]
    """

    def __init__(self, semi_grad: bool = False) -> None:
        super().__init__()
        self.semi_grad = semi_grad

    def _pooling(self) -> tuple[str | None, float]:
        return None if self.semi_grad else "var", 1.0

    def _in_groups(self, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
        y = super()._in_groups(x, index, size)
        if y is not None:
            return y
        mean = _MEAN._in_groups(x, index, size)  # of groups in any order
        squares = None if mean is None else _MEAN._in_groups(
            (x.detach() if self.semi_grad else x).square(), index, size)
        return None if squares is None else squares - cast(Tensor, mean).square()

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        name = "squares, no gradient" if how.semi_grad else "squares"
        if name not in known:
            rows, values, squared = x.detach() if how.semi_grad else x, messages.values, messages
            if values is not None:
                values = values.detach() if how.semi_grad else values
                squared = Sparse(messages.graph, values.square())
            known[name] = project(rows.square(), squared, None)
        mean = MeanAggregation._rule(how, x, messages, known)
        return known[name] / counts(messages.graph, x.dtype) - mean.square()


class StdAggregation(_Aggregation):
    """The root of the variance, zero where that is at most 1e-5.

    Example:

        >>> from structconv.compat.pyg import StdAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> StdAggregation()(x, group).tolist()
        [[1.0], [0.0]]
    """

    def __init__(self, semi_grad: bool = False) -> None:
        super().__init__()
        self.var_aggr = VarAggregation(semi_grad)

    def _in_groups(self, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
        variances = self.var_aggr._in_groups(x, index, size) if _computes(self.var_aggr) else None
        return None if variances is None else _root(variances)

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        return _root(_aggregate(how.var_aggr, x, messages, known))


class _Learned(_Aggregation):
    """An aggregation with one number, or one for each channel, that may be learned."""

    name: ClassVar[str]

    def __init__(self, number: float, learn: bool, channels: int) -> None:
        super().__init__()
        if channels != 1 and not learn:
            raise ConfigError(type(self).__name__, "channels must be 1 without learn=True", channels)
        self.learn, self.channels, self._first = learn, channels, number
        setattr(self, self.name, nn.Parameter(torch.full((channels,), float(number))) if learn else number)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.learn:
            getattr(self, self.name).fill_(self._first)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(learn={self.learn})"


class SoftmaxAggregation(_Learned):
    """sum_e softmax_e(t m_e) m_e in each channel; with `semi_grad` the softmax has no gradient.

    Example:

        >>> from structconv.compat.pyg import SoftmaxAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> SoftmaxAggregation(t=0.0)(x, group).tolist()                # t = 0: the mean; large: the maximum
        [[2.0], [7.0]]
    """

    name = "t"

    def __init__(self, t: float = 1.0, learn: bool = False, semi_grad: bool = False, channels: int = 1) -> None:
        super().__init__(t, learn, channels)
        if learn and semi_grad:
            raise ConfigError("SoftmaxAggregation", "semi_grad must be False with learn=True", semi_grad)
        self.semi_grad = semi_grad

    def _pooling(self) -> tuple[str | None, float]:
        if not isinstance(self.t, int | float):
            return None, 1.0
        return "fixed softmax" if self.semi_grad else "softmax", float(self.t)

    def _in_groups(self, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
        y = super()._in_groups(x, index, size)
        return _softmax_sums(self, x, index, size) if y is None else y

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        x, graph = (x, messages.graph) if messages.values is None else _rows(x, messages)
        sums = _softmax_sums(how, gather(x, graph), graph.target, graph.num_outputs) if x.dim() == 2 else None
        if sums is not None:
            return sums
        scaled = _scaled(how, x)
        none, scores = scaled.new_zeros(()).expand(*x.shape[:-2], x.shape[-1], graph.num_outputs), None
        if x.dim() == 2 and is_few(graph, x.shape[1]):
            scores = Bilinear((1 + none).unsqueeze(-1), scaled.mT.unsqueeze(-1))
        return attend(x, x.mT.unsqueeze(-1), Affine(scaled.mT, none) if scores is None else scores, graph)[0]


def _scaled(how: Any, x: Tensor) -> Tensor:
    """The scores t x of a `SoftmaxAggregation`."""
    scaled = x if isinstance(how.t, int | float) and how.t == 1 else x * how.t
    return scaled.detach() if how.semi_grad else scaled


def _softmax_sums(how: Any, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
    """`SoftmaxAggregation` of rows (E, C) in groups of any order; `None` where no kernel and no operator can read x."""
    if not (is_plain(index) and index.shape == x.shape[:1] and len(index) and x.is_floating_point()):
        return None
    groups = group_count(index) if size is None else size
    weights = in_any_order(_scaled(how, x), index, groups, "softmax",
                           lambda rows, index: segment_softmax(rows, index, groups, rows=True))
    if weights is None:
        return None

    def sum_of(rows: Tensor, index: Tensor) -> Tensor:
        return segment_sum(rows, index, groups, rows=True)

    messages = weights * x
    sums = in_any_order(messages, index, groups, "sum", sum_of)
    return sum_of(messages, index) if sums is None else sums


class PowerMeanAggregation(_Learned):
    """mean(m_e^p)^(1 / p) in each channel, m_e and the mean limited to [clamp_min, clamp_max].

    Example:

        >>> from structconv.compat.pyg import PowerMeanAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> PowerMeanAggregation(p=2.0)(x, group).round(decimals=4).tolist()
        [[2.2360999584198], [7.0]]
    """

    name = "p"

    def __init__(self, p: float = 1.0, learn: bool = False, channels: int = 1, clamp_min: float | None = 1e-4,
                 clamp_max: float | None = 100.0) -> None:
        super().__init__(p, learn, channels)
        self.min_value, self.max_value = clamp_min, clamp_max

    def _pooling(self) -> tuple[str | None, float]:
        return "mean" if isinstance(self.p, int | float) and self.p == 1 else None, 1.0

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        if isinstance(how.p, int | float) and how.p == 1:
            return MeanAggregation._rule(how, x, messages, known)
        x, graph = (x, messages.graph) if messages.values is None else _rows(x, messages)
        y = x.clamp(how.min_value, how.max_value).pow(how.p)
        y = project(y, adjacency(graph, None, x.dtype, weighted=False), None)
        return (y / counts(graph, x.dtype)).clamp(how.min_value, how.max_value).pow(1 / how.p)


class MultiAggregation(_Aggregation):
    """Several aggregations of the same messages, joined.

    Each keeps its own `semi_grad`. PyTorch Geometric fuses aggregations of x (E, C): there the `semi_grad` of one
    variance counts for all, that of a standard deviation has no effect, and two of one class are computed wrongly.

    Args:
        aggrs: names or modules. aggrs_kwargs: options of each.
        mode: "cat", side by side; "proj", those mapped by a linear layer; "attn", attention between them; or their
            "sum", "mean", "max", "min", "logsumexp", "std" or "var".
        mode_kwargs: `in_channels` and `out_channels` of "proj" and "attn", `num_heads`, and options of their layers.

    Example:

        >>> from structconv.compat.pyg import MultiAggregation
        >>> x, group = torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([0, 0, 1])
        >>> MultiAggregation(["mean", "max"])(x, group).tolist()
        [[2.0, 3.0], [7.0, 7.0]]
    """

    def __init__(self, aggrs: Sequence[Any], aggrs_kwargs: Sequence[dict[str, Any]] | None = None, mode: str = "cat",
                 mode_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__()
        owner, more = "MultiAggregation", dict(mode_kwargs or {})
        options = [{}] * len(aggrs) if aggrs_kwargs is None else aggrs_kwargs
        if not aggrs or len(options) != len(aggrs):
            raise ConfigError(owner, "aggrs must not be empty, and aggrs_kwargs have options for each of them",
                              f"{len(aggrs)} and {len(options)}")
        self.aggrs = nn.ModuleList(_module(owner, one, own) for one, own in zip(aggrs, options, strict=True))
        self.mode = mode
        self.in_channels, self.out_channels = more.pop("in_channels", None), more.pop("out_channels", None)
        modes = ("cat", "proj", "attn", *_COMBINED)
        if mode not in modes:
            raise ConfigError(owner, f"mode must be one of {', '.join(modes)}", repr(mode), nearest(mode, modes))
        if mode in ("proj", "attn"):
            if self.in_channels is None or self.out_channels is None:
                raise ConfigError(owner, f"mode_kwargs must have in_channels and out_channels for mode={mode!r}",
                                  sorted(mode_kwargs or {}))
            if isinstance(self.in_channels, int):
                self.in_channels = [self.in_channels] * len(aggrs)
            if mode == "proj":
                self.lin = Linear(sum(self.in_channels), self.out_channels, **more)
            else:
                self.lin_heads = LinearByType({str(i): width for i, width in enumerate(self.in_channels)},
                                              self.out_channels)
                self.multihead_attn = nn.MultiheadAttention(self.out_channels, more.pop("num_heads", 1), **more)

    def reset_parameters(self) -> None:
        for one in self.aggrs:
            one.reset_parameters()  # type: ignore[operator]
        if self.mode == "proj":
            self.lin.reset_parameters()
        if self.mode == "attn":
            self.lin_heads.reset_parameters()
            self.multihead_attn._reset_parameters()

    def get_out_channels(self, in_channels: int) -> int:
        """The channels of the output, from those of the messages."""
        if self.out_channels is not None:
            return int(self.out_channels)
        return in_channels * len(self.aggrs) if self.mode == "cat" else in_channels

    def _in_groups(self, x: Tensor, index: Tensor, size: int | None) -> Tensor | None:
        if not all(map(_computes, self.aggrs)):
            return None
        parts = [cast(_Aggregation, one)._in_groups(x, index, size) for one in self.aggrs]
        return None if any(part is None for part in parts) else self.combine(cast("list[Tensor]", parts))

    @staticmethod
    def _rule(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
        return cast(Tensor, how.combine([_aggregate(one, x, messages, known) for one in how.aggrs]))

    def combine(self, parts: list[Tensor]) -> Tensor:
        """The outputs of the aggregations (..., N, C) as one."""
        if len(parts) == 1:
            return parts[0]
        if self.mode == "cat":
            return torch.cat(parts, -1)
        if self.mode == "proj":
            return cast(Tensor, self.lin(torch.cat(parts, -1)))
        if self.mode == "attn":
            rows = self.lin_heads({str(i): part for i, part in enumerate(parts)})
            x = torch.stack([rows[str(i)] for i in range(len(parts))])
            return cast(Tensor, self.multihead_attn(x, x, x)[0].mean(0))
        return _COMBINED[self.mode](torch.stack(parts))

    def __repr__(self) -> str:
        return f"MultiAggregation([\n{''.join(f'  {one},' + chr(10) for one in self.aggrs)}], mode={self.mode})"


_COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "max": lambda x: x.max(0).values,
    "min": lambda x: x.min(0).values, "logsumexp": lambda x: x.logsumexp(0), "std": lambda x: x.std(0),
    "var": lambda x: x.var(0)}
_MODULES: dict[str, type[_Aggregation]] = {
    "add": SumAggregation, "sum": SumAggregation, "mean": MeanAggregation, "max": MaxAggregation,
    "min": MinAggregation, "var": VarAggregation, "std": StdAggregation, "softmax": SoftmaxAggregation,
    "powermean": PowerMeanAggregation}
#: By class, ours or PyTorch Geometric's of the same name.
_RULES: dict[str, Callable[[Any, Tensor, Sparse, Known], Tensor]] = {
    **{kind.__name__: kind._rule for kind in _MODULES.values()}, "MultiAggregation": MultiAggregation._rule}


def aggregation(owner: str, aggr: Any, options: dict[str, Any] | None) -> nn.Module | None:
    """The module of an aggregation, `None` for one of `SIMPLE`.

    Args:
        aggr: a name, a module, or a list of both. Names that are not ours, and modules, are PyTorch Geometric's.

    Raises:
        ConfigError: if there is no such aggregation.
    """
    if isinstance(aggr, str) and aggr in SIMPLE and not options:
        return None
    try:
        return _module(owner, aggr, options or {})
    except TypeError as error:
        raise ConfigError(owner, f"aggr_kwargs must be the arguments of {aggr!r}", error) from error


def _module(owner: str, aggr: Any, options: dict[str, Any]) -> nn.Module:
    if isinstance(aggr, list | tuple):
        return MultiAggregation(aggr, **options)
    if isinstance(aggr, nn.Module):
        return aggr
    if isinstance(aggr, str):
        name = aggr.lower().removesuffix("aggregation")
        if name in _MODULES:
            return _MODULES[name](**options)
        if find_spec("torch_geometric") is not None:
            try:
                return cast(nn.Module, importlib.import_module("torch_geometric.nn.resolver").aggregation_resolver(
                    aggr, **options))
            except ValueError as error:
                if "Could not resolve" not in str(error):
                    raise
    raise ConfigError(owner, f"aggr must be one of {', '.join(map(repr, _MODULES))}, a list of them, or an aggregation "
                      "of PyTorch Geometric", repr(aggr), nearest(str(aggr), tuple(_MODULES)))


def aggregate(how: Any, x: Tensor, messages: Sparse) -> Tensor:
    """One row (..., N, C) for each output, of the rows of x (..., M, C) and the factor of each edge.

    Args:
        how: one of `SIMPLE`, or a module. One of PyTorch Geometric that has no rule here is called with the messages.
    """
    if any_autocast():  # products with float32 weights are float32, and so are their moments
        x = cast_to(x, promoted_dtype(x, messages))
    return _aggregate(how, x, messages, {})


def _aggregate(how: Any, x: Tensor, messages: Sparse, known: Known) -> Tensor:
    kind: Any = _MODULES[how] if isinstance(how, str) else type(how)
    own = kind.__module__ == __name__ or kind.__module__.startswith("torch_geometric.nn.aggr.")
    rule = _RULES.get(kind.__name__) if own and (isinstance(how, str) or all_plain(how)) else None
    if rule is not None:
        return rule(how, x, messages, known)
    rows, edges = _rows(x, messages)
    return cast(Tensor, how(rows, edges.target.long(), dim_size=edges.num_outputs, dim=-2))


def _rows(x: Tensor, messages: Sparse) -> tuple[Tensor, Graph]:
    """The messages (..., E, C), and the graph from them to the outputs."""
    rows = gather(x, messages.graph)
    if messages.values is not None:
        values = messages.values if messages.values.dim() == 1 else messages.values.squeeze(-2)
        rows = rows * values.unsqueeze(-1)
    return rows, edges_to_outputs(messages.graph)


def _root(variances: Tensor) -> Tensor:
    y = variances.clamp(min=1e-5).sqrt()
    return y.masked_fill(y <= math.sqrt(1e-5), 0.0)


#: Aggregations of rows in any order that a kernel computes, and numbers up to which sorted ones are no faster.
_IN_ANY_ORDER, _FEW_NUMBERS = frozenset(("sum", "mean", "max", "min")), 1 << 16


def sorted_starts(x: Tensor, index: Tensor, size: int | None, *others: Tensor | None) -> Tensor | None:
    """The first row of each group, and the number of rows; `None` where groups do not rise, or no kernel can read x or
    one of the other tensors."""
    if x.dim() != 2 or not is_direct(x, *others) or not is_plain(index) or index.dim() != 1 or len(index) != x.shape[0]:
        return None
    return group_starts(index, size)  # again in each call: it takes less time than to remember it


def in_groups(x: Tensor, index: Tensor, size: int | None, kind: str, otherwise: Callable[[Tensor], Tensor],
              t: float = 1.0) -> Tensor | None:
    """The rows of x (E, C) in groups by one node of autograd; `None` where no kernel can read x, or where groups of a
    "softmax" or of "var" do not rise.

    Args:
        index: the group of each row. size: the number of groups, else the largest index + 1.
        kind, t: see `pool_groups`. otherwise: the same function of x by differentiable operators.
    """
    starts, any_order = None, kind in _IN_ANY_ORDER
    if not any_order or x.numel() > _FEW_NUMBERS:
        starts = sorted_starts(x, index, size)
    if starts is not None:
        return pool_groups(x, starts, kind, unchanged(index, otherwise), t)
    return in_any_order(x, index, size, kind, lambda x, _: otherwise(x)) if any_order else None


def in_any_order(x: Tensor, index: Tensor, size: int | None, kind: str, composed: Callable[[Tensor, Tensor], Tensor]
                 ) -> Tensor | None:
    """The rows of x (E, C) in groups by `scatter_rows`, or of float64 by torch's operators; `None` where neither can
    read x."""
    if not is_plain(index) or index.shape != x.shape[:1]:
        return None
    try:
        groups = int(index.max()) + 1 if size is None else size
        if kind == "sum" and index.dtype is torch.int64 and is_few_rows(x):
            return sum_of_rows(x, index, groups)
        if x.dim() != 2:
            return None
        return scatter_rows(x, index, groups, kind, composed) if is_direct(x) else _in_other_dtypes(
            x, index, groups, kind, composed)
    except (IndexError, RuntimeError, TypeError, ValueError):  # the general path raises the error
        return None


def _in_other_dtypes(x: Tensor, index: Tensor, groups: int, kind: str, composed: Callable[[Tensor, Tensor], Tensor]
                     ) -> Tensor | None:
    """`in_any_order` of 16-bit types by the kernels, in float32, and of float64 on a CPU by torch's operators."""
    if kind in ("sum", "mean") and x.numel() > _FEW_NUMBERS:  # a product with a matrix takes less time
        return None
    if index.dtype not in (torch.int32, torch.int64) or not groups:  # the general path checks them
        return None
    if x.dtype in (torch.float16, torch.bfloat16):
        wide = x.float()
        y = scatter_rows(wide, index, groups, kind, composed) if is_direct(wide) else None
        return None if y is None else y.to(x.dtype)
    if x.dtype is not torch.float64 or not x.is_cpu or not values_known(x, index) or forward_level() >= 0:
        return None
    if kind == "softmax":
        return composed(x, index)
    if kind in ("max", "min"):
        return segment_max(x, index, groups, rows=True) if kind == "max" else -segment_max(-x, index, groups, rows=True)
    sums = segment_sum(x, index, groups, rows=True)
    return sums if kind == "sum" else sums / index.bincount(minlength=groups).clamp(min=1).unsqueeze(-1)


def check_floating(owner: str, x: Tensor) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise ConfigError(owner, "x must be floating", x.dtype, "Convert it: x.float().")


def shares(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over the number of edges into the target of each edge, by which a mean weighs them."""
    return derived(graph.edge_index, ("shares", graph.num_outputs, dtype), lambda: cast(
        Tensor, adjacency(graph, (None, "count"), dtype, weighted=False).values))


def counts(graph: Graph, dtype: torch.dtype) -> Tensor:
    """The number of edges into each output (N, 1), at least 1."""
    return derived(graph.edge_index, ("counts", graph.num_outputs, dtype), lambda: project(
        torch.ones(graph.num_inputs, 1, dtype=dtype, device=graph.edge_index.device), Sparse(graph), None).clamp(min=1))


def pool_extreme(x: Tensor, graph: Graph, aggr: str) -> Tensor:
    """The "max" or "min" of the rows of x (..., M, C) that reach each output: (..., N, C)."""
    if not x.shape[-1]:
        return project(x, Sparse(graph), None)
    if aggr == "min":
        return -pool_extreme(-x, graph, "max")
    pool = GroupPool(x.shape[-1], "max") if is_compiling() else _max_pool(x.shape[-1])
    y = of_groups(x, graph, "max", pool) if x.shape[0] == graph.num_inputs else None
    return pool(x, graph) if y is None else y


@cache
def _max_pool(channels: int) -> GroupPool:
    return GroupPool(channels, "max")
