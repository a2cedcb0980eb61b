"""`Layer`: what all layers share, arguments, parameters and explanations; `Linear`: a linear layer of unknown width."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.dense import Identity
from structconv.bases.matrices import adjacency
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.edges import edges_to_outputs, gather, graph_of
from structconv.compat.pyg.operator import apply
from structconv.errors import ConfigError, ShapeError, StructconvError, nearest
from structconv.memo import derived
from structconv.nn.pooling import GroupPool
from structconv.primitives.products import linear
from structconv.structures.graph import Graph
from structconv.weights import Eye, Full

try:  # where it is installed, its tools (explainers, to_hetero, summary) find our layers as its own
    from torch_geometric.nn import MessagePassing
except ImportError:
    MessagePassing = nn.Module

__all__ = ["Channels", "Layer", "Linear", "Nodes", "draw", "glorot", "is_plain", "pair", "pool_extreme", "project"]

Channels = int | tuple[int, int]
#: x (..., M, P), or sources and targets.
Nodes = Tensor | tuple[Tensor, Tensor | None]


class Linear(nn.Linear):
    """x W^T + b with P = -1 for the channels of the first x. Parameters `weight` (Q, P) and `bias` (Q).

    Args:
        in_channels, out_channels: P and Q.
        bias: add b.
        weight_initializer: "glorot", "uniform" or None, which draws as torch's linear layer.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True,
                 weight_initializer: str | None = None) -> None:
        nn.Module.__init__(self)
        self.in_channels, self.out_channels, self.weight_initializer = in_channels, out_channels, weight_initializer
        self.in_features, self.out_features = in_channels, out_channels  # by which torch's tools know a linear layer
        self.weight: Any = (nn.Parameter(torch.empty(out_channels, in_channels)) if in_channels > 0
                            else UninitializedParameter())
        self.bias: Any = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.reset_parameters()

    @property
    def is_lazy(self) -> bool:
        """Whether the number of input channels is still unknown."""
        return isinstance(self.weight, UninitializedParameter)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters anew; they wait for the first x where P is unknown."""
        if self.is_lazy:
            return
        rows, columns = self.weight.shape
        bound = math.sqrt(6 / (rows + columns)) if self.weight_initializer == "glorot" else 1 / math.sqrt(columns)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(columns)
            self.bias.uniform_(-bound, bound)

    def materialize(self, in_channels: int) -> None:
        """Make the weight for so many input channels, if there is none yet."""
        if self.is_lazy:
            self.in_channels = self.in_features = in_channels
            self.weight.materialize((self.out_channels, in_channels))
            self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """(..., P) -> (..., Q)."""
        self.materialize(input.shape[-1])
        if input.shape[-1] != self.in_channels:
            raise ShapeError("Linear", f"x must have shape (..., M, P={self.in_channels})", tuple(input.shape))
        return linear(input, self.weight, self.bias)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if self.is_lazy and isinstance(weight, Tensor) and not isinstance(weight, UninitializedParameter):
            self.materialize(weight.shape[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars or self.is_lazy)

    def __repr__(self) -> str:
        return f"Linear({self.in_channels}, {self.out_channels}, bias={self.bias is not None})"


class Layer(MessagePassing):
    """A layer with the arguments of PyTorch Geometric's `MessagePassing`, computed by the operator of eq. 8.

    Args:
        aggr: "add" or "sum", "mean", "max" or "min" of the messages; the first in `aggregations` if absent.
        flow: "source_to_target", or "target_to_source", which turns the edges around.
        node_dim, decomposed_layers, aggr_kwargs: only PyTorch Geometric's defaults.

    Raises:
        ConfigError: for arguments that are unknown or not supported; it names them.
    """

    aggregations: ClassVar[tuple[str, ...]] = ("add", "sum", "mean", "max", "min")
    #: What `repr` shows beside the channels.
    shown: ClassVar[tuple[str, ...]] = ()
    # What explainers set: whether to multiply messages by a mask of the edges, the mask, which edges are no loops, and
    # whether the mask goes through a sigmoid.
    explain: bool | None = None
    decomposed_layers: int = 1
    aggr_module: None = None
    fuse: bool = False
    _edge_mask: Tensor | None
    _loop_mask: Tensor | None = None
    _apply_sigmoid: bool = True

    def __init__(self, aggr: str | None = None, *, flow: str = "source_to_target", node_dim: int = -2,
                 decomposed_layers: int = 1, aggr_kwargs: dict[str, Any] | None = None, **unknown: Any) -> None:
        nn.Module.__init__(self)
        owner, aggr = type(self).__name__, self.aggregations[0] if aggr is None else aggr
        known = ("aggr", "flow", "node_dim", "decomposed_layers", "aggr_kwargs")
        if unknown:
            name = next(iter(unknown))
            raise ConfigError(owner, "every argument must be one of PyTorch Geometric's layer", ", ".join(unknown),
                              nearest(name, known))
        limits = (("aggr", aggr, self.aggregations), ("flow", flow, ("source_to_target", "target_to_source")),
                  ("node_dim", node_dim, (-2, 0)), ("decomposed_layers", decomposed_layers, (1,)),
                  ("aggr_kwargs", aggr_kwargs or None, (None,)))
        for name, value, allowed in limits:
            if not any(value is one or (isinstance(value, str | int) and value == one) for one in allowed):
                raise ConfigError(owner, f"{name} must be one of {', '.join(map(repr, allowed))}", repr(value),
                                  "Others are not supported here: use PyTorch Geometric's layer.")
        self.aggr, self.flow, self.node_dim = aggr, flow, node_dim
        self._edge_mask, self._constants = None, cast("dict[str, float]", {})
        self._message_forward_hooks: dict[int, Any] = OrderedDict()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            setattr(cls, "forward", _named(cls.__dict__["forward"]))  # noqa: B010 - mypy refuses an assignment
        overridden = {"message", "message_and_aggregate", "aggregate", "update", "edge_update"} & cls.__dict__.keys()
        if overridden:  # no call would read them
            raise ConfigError(cls.__name__, "a subclass must leave message passing as it is", ", ".join(overridden),
                              "Derive it from PyTorch Geometric's layer.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def _refused(self, *_: Any, **__: Any) -> Any:
        """What this class of PyTorch Geometric has and ours has not."""
        raise ConfigError(type(self).__name__, "a call must be of the layer itself", "one of message passing",
                          "No messages are formed here: propagate, message and their hooks do nothing. Use PyTorch "
                          "Geometric's layer for them.")

    propagate = message = message_and_aggregate = aggregate = update = edge_updater = edge_update = jittable = _refused
    register_propagate_forward_pre_hook = register_propagate_forward_hook = _refused
    register_message_forward_pre_hook = register_message_forward_hook = _refused
    register_aggregate_forward_pre_hook = register_aggregate_forward_hook = _refused
    register_message_and_aggregate_forward_pre_hook = register_message_and_aggregate_forward_hook = _refused
    register_edge_update_forward_pre_hook = register_edge_update_forward_hook = _refused

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew, in PyTorch Geometric's order."""
        for child in self._modules.values():  # one that has two names is drawn twice
            if child is not None:
                draw(child)
        for name, parameter in self._parameters.items():
            if name == "bias" and parameter is not None:
                parameter.zero_()
            elif parameter is not None and name not in ("_edge_mask", *self._constants):
                glorot(parameter)
        for name, number in self._constants.items():
            getattr(self, name).fill_(number)

    def _register(self, name: str, trained: bool, number: float) -> None:
        """Make one number a parameter where it is trained, else a buffer."""
        if trained:
            self.register_parameter(name, nn.Parameter(torch.full((1,), float(number))))
        else:
            self.register_buffer(name, torch.full((1,), float(number)))
        self._constants[name] = float(number)

    def __repr__(self) -> str:
        words = [str(self.__dict__[name]) for name in ("in_channels", "out_channels", "channels")
                 if name in self.__dict__]
        words += [f"{name}={getattr(self, name)}" for name in self.shown]
        return f"{type(self).__name__}({', '.join(words)})"

    # What forward passes are made of.

    def _graph(self, edges: Any, x: Tensor, targets: Tensor | None = None, size: Any = None, *,
               weight: Tensor | None = None, attr: Tensor | None = None) -> Graph:
        """The graph of a call from the rows of x to those of the targets, or of `size`."""
        owner = type(self).__name__
        inputs = x.shape[-2]
        outputs = targets.shape[-2] if targets is not None else None if size is None else size[1]
        for name, letter, at, rows in (("sources", "M", 0, inputs), ("targets", "N", 1, outputs)):
            if size is not None and size[at] is not None and size[at] != rows:
                raise ShapeError(owner, f"size must have {letter}={rows}, the number of {name}", tuple(size))
        return graph_of(owner, edges, inputs, outputs, self.flow, weight, attr)

    def _mask(self, graph: Graph) -> Tensor | None:
        """The factor of each edge that an explainer has set; 1 for loops that the layer has appended."""
        if not self.explain:
            return None
        mask = self._edge_mask
        if mask is None:
            raise ConfigError(type(self).__name__, "_edge_mask must be set where explain is True", "none")
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        if mask.shape[0] != graph.num_edges:
            mask = mask if self._loop_mask is None else mask[self._loop_mask]
            mask = torch.cat([mask, mask.new_ones(graph.num_edges - mask.shape[0])])
        return mask

    def _messages(self, messages: Sparse, dtype: torch.dtype) -> Sparse:
        """The matrix with which messages are summed: divided by the number of edges into each output for "mean", and
        multiplied by an explainer's mask."""
        graph, values, mask = messages.graph, messages.values, self._mask(messages.graph)
        if self.aggr == "mean":
            shares = _shares(graph, dtype)
            values = shares if values is None else values * shares
        if mask is not None:
            values = mask if values is None else values * mask
        return messages if values is messages.values else Sparse(graph, values)

    def _aggregated(self, x: Tensor, messages: Sparse, lin: nn.Module | None = None, root: nn.Module | None = None,
                    x_root: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """lin(aggregated messages) + root(x_root) + bias.

        Args:
            messages: the factor of each edge's message.
        """
        messages = self._messages(messages, x.dtype)
        if self.aggr in ("max", "min"):
            y = project(self._extreme(x, messages), Identity(messages.num_outputs), lin, bias)
        else:
            y = project(x, messages, lin, bias)
        return y if root is None or x_root is None else y + root(x_root)

    def _of_edges(self, rows: Tensor, edges: Graph) -> Tensor:
        """The aggregated messages, which are rows (..., E, C) of the edges."""
        mask, graph = self._mask(edges), edges_to_outputs(edges)
        rows = rows if mask is None else rows * mask.unsqueeze(-1)
        if self.aggr in ("max", "min"):
            return pool_extreme(rows, graph, self.aggr)
        return project(rows, Sparse(graph, _shares(graph, rows.dtype) if self.aggr == "mean" else None), None)

    def _extreme(self, x: Tensor, messages: Sparse) -> Tensor:
        """The largest or smallest message of each channel, zero where there is none."""
        graph = messages.graph
        if messages.values is not None:
            x, graph = gather(x, graph) * messages.values.unsqueeze(-1), edges_to_outputs(graph)
        return pool_extreme(x, graph, self.aggr)


#: Owners of errors that the user of a layer has not made.
_INNER = ("Conv", "Graph", "Layer", "Linear", "Sparse", "Typed", "layouts")


def _named(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same method; errors of what it is made of name the class of the layer."""
    @wraps(forward)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return forward(self, *args, **options)
        except StructconvError as error:
            if error.owner in _INNER:
                error.rename(type(self).__name__)
            raise

    return called


def _shares(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over the number of edges into the target of each edge, by which a mean weighs them."""
    return derived(graph.edge_index, ("shares", graph.num_outputs, dtype), lambda: cast(
        Tensor, adjacency(graph, (None, "count"), dtype, weighted=False).values))


def pool_extreme(x: Tensor, graph: Graph, aggr: str) -> Tensor:
    """The "max" or "min" of the rows of x (..., M, C) that reach each output: (..., N, C)."""
    if not x.shape[-1]:
        return project(x, Sparse(graph), None)
    pool = _max_pool(x.shape[-1])
    return pool(x, graph) if aggr == "max" else -pool(-x, graph)


@cache
def _max_pool(channels: int) -> GroupPool:
    return GroupPool(channels, "max")


def project(x: Tensor, basis: Basis, lin: nn.Module | None, bias: Tensor | None = None) -> Tensor:
    """lin(A^T x) + bias; without `lin` A^T x. Theta is the weight of `lin` unless that is wrapped or replaced."""
    if lin is not None and is_plain(lin):
        lin.materialize(x.shape[-1])  # type: ignore[operator]
        return apply(x, basis, _theta(lin), lin.bias if bias is None else bias)  # type: ignore[arg-type]
    y = apply(x, basis, Eye.of(1, x.shape[-1]), bias if lin is None else None)
    if lin is None:
        return y
    y = lin(y)
    return y if bias is None else y + bias


def is_plain(lin: nn.Module) -> bool:
    """Whether calling it only multiplies and adds, with nobody told of the call."""
    return type(lin) is Linear and not private.intercepted(lin)


def _theta(lin: Any) -> Full:
    return Full.of(lin.weight.mT.unsqueeze(0))


def pair(x: Any) -> tuple[Tensor, Tensor | None]:
    """Sources and targets."""
    if not (isinstance(x, Tensor) or (isinstance(x, tuple | list) and len(x) == 2 and isinstance(x[0], Tensor))):
        raise ConfigError("Layer", "x must be a tensor (..., M, P), or a pair of those of sources and targets",
                          type(x).__name__)
    return (x, x) if isinstance(x, Tensor) else (x[0], x[1])


@torch.no_grad()
def glorot(parameter: Tensor) -> None:
    """Draw a parameter (..., P, Q) by the rule of Glorot and Bengio (2010), if its shape is known."""
    if not isinstance(parameter, UninitializedParameter):
        bound = math.sqrt(6 / sum(parameter.shape[-2:]))
        parameter.uniform_(-bound, bound)


def draw(module: nn.Module) -> None:
    """Reset a module, or its children where it cannot."""
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    else:
        for child in module.children():
            draw(child)
