"""`Layer`: what all layers share: arguments, parameters and explanations."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.parameter import UninitializedParameter

from structconv import torch_compat as private
from structconv.arguments import check_arguments, explained, is_own
from structconv.bases.base import Basis
from structconv.bases.dense import Identity
from structconv.bases.matrices import adjacency, lazy_adjacency
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.aggregations import SIMPLE, aggregate, aggregation, shares
from structconv.compat.pyg.edges import edges_to_outputs, graph_of, replaced_loops, without_edges, without_ones
from structconv.compat.pyg.linear import draw, glorot, project
from structconv.compat.pyg.tracing import record
from structconv.derived import derived
from structconv.errors import ConfigError, ShapeError, StructconvError
from structconv.nn.layer import refuse_script
from structconv.structures.graph import Graph

try:  # where it is installed, its tools (explainers, to_hetero, summary) find our layers as its own
    from torch_geometric.nn import MessagePassing
except ImportError:
    MessagePassing = nn.Module

__all__ = ["Channels", "Layer", "Nodes", "pair"]

Channels = int | tuple[int, int]
#: x (..., M, P), or sources and targets.
Nodes = Tensor | tuple[Tensor, Tensor | None]


#: The methods by which PyTorch Geometric's layers form messages and explainers change them; no call of ours reads them.
OF_MESSAGES = ("propagate", "message", "message_and_aggregate", "aggregate", "update", "edge_updater", "edge_update",
               "explain_message")


class Layer(MessagePassing):
    """A layer with the arguments of PyTorch Geometric's `MessagePassing`, computed by the operator of eq. 8.

    Args:
        aggr: how messages are aggregated: "add" or "sum", "mean", "max", "min", "var", "std", "softmax", "powermean",
            a list of them, or an aggregation of PyTorch Geometric; `aggregation` of the class if absent.
        aggr_kwargs: options of the aggregation.
        flow: "source_to_target", or "target_to_source", which turns the edges around.
        node_dim: only PyTorch Geometric's default.
        decomposed_layers: changes nothing: no message is stored that could be split.

    Raises:
        ConfigError: for arguments that are unknown or not supported; it names them.
    """

    aggregation: ClassVar[str] = "add"
    #: The options that `repr` shows beside the channels.
    shown: ClassVar[tuple[str, ...]] = ()
    # Set by explainers: if True, multiply messages by a mask of the edges, the mask, which edges are no loops, and
    # whether the mask goes through a sigmoid.
    explain: bool | None = None
    decomposed_layers: int = 1
    aggr: str | list[str]
    aggr_module: nn.Module | None
    fuse: bool = False
    _edge_mask: Tensor | None
    _loop_mask: Tensor | None = None
    _apply_sigmoid: bool = True

    def __init__(self, aggr: Any = None, *, flow: str = "source_to_target", node_dim: int = -2,
                 decomposed_layers: int = 1, aggr_kwargs: dict[str, Any] | None = None, **unknown: Any) -> None:
        nn.Module.__init__(self)
        owner, aggr = type(self).__name__, self.aggregation if aggr is None else aggr
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {next(iter(unknown))!r}")
        limits = ("flow", flow, ("source_to_target", "target_to_source")), ("node_dim", node_dim, (-2, 0))
        for name, value, allowed in limits:
            if value not in allowed:
                raise ConfigError(owner, f"{name} must be one of {', '.join(map(repr, allowed))}", repr(value),
                                  "Others are not supported here: use PyTorch Geometric's layer.")
        self.__dict__["aggr"] = _names(aggr)
        self.aggr_module = aggregation(owner, aggr, aggr_kwargs)
        self.flow, self.node_dim, self.decomposed_layers = flow, node_dim, decomposed_layers
        self._edge_mask, self._constants = None, cast("dict[str, float]", {})
        self._message_forward_hooks: dict[int, Any] = OrderedDict()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Another `aggr` takes effect as if the layer were made with it. A method of message passing
        is refused; a layer made under `patch()` becomes PyTorch Geometric's."""
        if name in OF_MESSAGES:
            self._need_messages(name)
            return setattr(self, name, value)
        if name == "aggr":
            self.aggr_module, value = aggregation(type(self).__name__, value, None), _names(value)
        super().__setattr__(name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        """Derive a class with messages of its own from PyTorch Geometric's layer, where that is installed."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = explained(cls.__dict__["__init__"])  # type: ignore[method-assign]
        if "forward" in cls.__dict__:
            setattr(cls, "forward", _named(cls.__dict__["forward"]))  # noqa: B010 - mypy refuses an assignment
        overridden = [name for name in OF_MESSAGES if not _is_ours(cls, name)]
        if overridden:  # no call of ours would read them
            left = [base.__name__ for base in cls.__bases__ if _theirs(base) is None]
            if left:
                raise ConfigError(cls.__name__, "a subclass must leave message passing as it is", ", ".join(overridden),
                                  f"Derive {cls.__name__ if MessagePassing is nn.Module else left[0]} from PyTorch "
                                  "Geometric's layer.")
            cls.__bases__ = tuple([cast(type, _theirs(base)) for base in cls.__bases__])

    def __prepare_scriptable__(self) -> Any:
        """Raise an error, where `torch.jit.script` asks for what it compiles."""
        refuse_script(self, "Or script PyTorch Geometric's layers: structconv.compat.to_pyg(model).")

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)

    def _refused(self, *_: Any, **__: Any) -> Any:
        """Raise an error that names what this class of PyTorch Geometric has and ours has not."""
        raise ConfigError(type(self).__name__, "a call must be of the layer itself", "one of message passing",
                          "No messages are formed here: propagate, message, explain_message and their hooks do "
                          "nothing. Use PyTorch Geometric's layer for them.")

    propagate = message = message_and_aggregate = aggregate = update = edge_updater = edge_update = _refused
    explain_message = jittable = _need_messages = _refused
    register_propagate_forward_pre_hook = register_propagate_forward_hook = _refused
    register_message_forward_pre_hook = register_message_forward_hook = _refused
    register_aggregate_forward_pre_hook = register_aggregate_forward_hook = _refused
    register_message_and_aggregate_forward_pre_hook = register_message_and_aggregate_forward_hook = _refused
    register_edge_update_forward_pre_hook = register_edge_update_forward_hook = _refused

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in PyTorch Geometric's order."""
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
        """Register one number as a parameter if it is trained, else as a buffer."""
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

    # The parts of forward passes.

    def _graph(self, edges: Any, x: Tensor, targets: Tensor | None = None, size: Any = None, *,
               weight: Tensor | None = None, attr: Tensor | None = None) -> Graph:
        """The graph of a call from the rows of x to those of the targets, or of `size`."""
        owner = type(self).__name__
        if x.dim() < 2:
            raise ShapeError(owner, "x must have shape (..., N, P)", tuple(x.shape))
        inputs = x.shape[-2]
        outputs = targets.shape[-2] if targets is not None else None if size is None else size[1]
        if size is not None:
            for name, letter, at, rows in (("sources", "M", 0, inputs), ("targets", "N", 1, outputs)):
                if size[at] is not None and size[at] != rows:
                    raise ShapeError(owner, f"size must have {letter}={rows}, the number of {name}", tuple(size))
        return graph_of(owner, edges, inputs, outputs, self.flow, weight, attr)

    def _without_values(self, graph: Graph, edges: Any) -> Graph:
        """The graph of a layer without weights of edges, whose `edges` are a matrix: as in PyTorch Geometric, values
        of torch's matrices count for the aggregations that it computes by a product with the matrix, and for no other.
        """
        if graph.edge_weight is None or (self.aggr in SIMPLE and not self.explain and isinstance(edges, Tensor)):
            return without_ones(graph, edges)
        return dataclasses.replace(graph, edge_weight=None)

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

    def _is_sum(self) -> bool:
        return self.aggr_module is None and self.aggr in ("add", "sum")

    def _is_matrix(self) -> bool:
        """Return True if messages are summed or averaged, so that a matrix aggregates them."""
        return self.aggr_module is None and self.aggr not in ("max", "min")

    def _replaced(self, graph: Graph) -> Tensor | None:
        """The edges of a graph with remaining loops that take no part, for aggregations that count edges."""
        return replaced_loops(graph) if is_compiling() and not self._is_sum() else None

    def _weighted(self, graph: Graph, dtype: torch.dtype) -> Sparse:
        """The matrix of the edges' weights, which a kernel may read itself if nothing else multiplies them."""
        plain_sum = self._is_sum() and not self.explain and not is_compiling()
        return lazy_adjacency(graph, None, dtype) if plain_sum else adjacency(graph, None, dtype)

    def _masked(self, messages: Sparse) -> Sparse:
        """The factors of the edges, multiplied by an explainer's mask."""
        mask = self._mask(messages.graph) if self.explain else None
        if mask is None:
            return messages
        return Sparse(messages.graph, mask if messages.values is None else messages.values * mask)

    def _messages(self, messages: Sparse, dtype: torch.dtype, lazy: bool = False) -> Sparse:
        """The matrix that sums or averages messages, with an explainer's mask; with `lazy` nothing reads its values."""
        if self.aggr != "mean":
            return self._masked(messages)
        graph, values, unread = messages.graph, messages.values, lazy and not self.explain and not is_compiling()
        if values is not None:
            dtype = values.dtype
        elif unread:
            return lazy_adjacency(graph, "row", dtype, weighted=False)
        share = shares(graph, dtype)
        if values is None or values.dim() > 1:
            return self._masked(Sparse(graph, share if values is None else values * share))
        weight = derived((graph.edge_index, values), ("weighted shares", graph.num_outputs, dtype),
                         lambda: values * share)
        graph = dataclasses.replace(graph, edge_weight=weight)
        return lazy_adjacency(graph, None, dtype) if unread else self._masked(Sparse(graph, weight))

    def _aggregated(self, x: Tensor, messages: Sparse, lin: nn.Module | None = None, root: nn.Module | None = None,
                    x_root: Tensor | None = None, bias: Tensor | None = None, absent: Tensor | None = None) -> Tensor:
        """lin(aggregated messages) + root(x_root) + bias.

        Args:
            messages: the factor of each edge's message.
            absent: which edges take no part (E,), or none.
        """
        if absent is not None:
            messages = Sparse(without_edges(messages.graph, absent), messages.values)
        root = None if x_root is None else root
        if self._is_matrix():
            matrix: Basis = self._messages(messages, x.dtype, lazy=True)
            if absent is None:
                return project(x, matrix, lin, bias, root, x_root)
        else:
            x = aggregate(self.aggr_module or self.aggr, x, self._masked(messages))
            self._check_width(x, bias if lin is None else getattr(lin, "weight", None))
            matrix = Identity(messages.num_outputs)
        if type(matrix) is Identity and bias is None:
            y = x if lin is None else lin(x)
        else:
            y = project(x, matrix, lin, bias)
        y = y if absent is None else y[..., :-1, :]
        return y if root is None else y + root(x_root)

    def _check_width(self, y: Tensor, tensor: Tensor | None) -> None:
        """Refuse an aggregation that gives another number of channels than the layer's next parameter takes."""
        if tensor is not None and not isinstance(tensor, UninitializedParameter) and y.shape[-1] != tensor.shape[-1]:
            raise ConfigError(type(self).__name__, f"aggr must keep the number of channels, {tensor.shape[-1]}",
                              y.shape[-1], "Several aggregations side by side need a layer that joins them, SAGEConv "
                              "for example, or aggr_kwargs={'mode': 'sum'}.")

    def _of_edges(self, rows: Tensor, edges: Graph, absent: Tensor | None = None) -> Tensor:
        """The aggregated messages, which are rows (..., E, C) of the edges; see `_aggregated`."""
        mask, graph = self._mask(edges), edges_to_outputs(edges if absent is None else without_edges(edges, absent))
        rows = rows if mask is None else rows * mask.unsqueeze(-1)
        messages = Sparse(graph, shares(graph, rows.dtype) if self.aggr == "mean" else None)
        y = (project(rows, messages, None) if self._is_matrix() else
             aggregate(self.aggr_module or self.aggr, rows, messages))
        return y if absent is None else y[..., :-1, :]


def _is_ours(kind: type, name: str) -> bool:
    """Return True if a class of a layer has the method of this name from our layers, and none before theirs."""
    owner = next(base for base in kind.__mro__ if name in base.__dict__)
    return issubclass(owner, Layer) and is_own(owner)


def _theirs(base: type) -> type | None:
    """PyTorch Geometric's layer in place of ours; `None` if there is none."""
    if not issubclass(base, Layer):
        return base
    if MessagePassing is nn.Module or not is_own(base):
        return None
    return cast(type, getattr(import_module("torch_geometric.nn"), base.__name__))


#: Owners of errors that the user of a layer has not made.
_INNER = ("Conv", "Graph", "Layer", "Linear", "Sparse", "Typed", "layouts")


def _names(aggr: Any) -> str | list[str]:
    return [str(one) for one in aggr] if isinstance(aggr, list | tuple) else str(aggr)


def _named(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that errors of its parts name the class of the layer, and that `torch.jit.trace` records it."""
    @wraps(forward)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        try:
            if not is_compiling() and private.tracing() is not None:
                return record(forward, (self, *args), options)
            return forward(self, *args, **options)
        except StructconvError as error:
            if error.owner in _INNER:
                error.rename(type(self).__name__)
            raise
        except TypeError:
            check_arguments(forward, (self, *args), options)
            raise

    return called


def pair(x: Any) -> tuple[Tensor, Tensor | None]:
    """Sources and targets."""
    if not (isinstance(x, Tensor) or (isinstance(x, tuple | list) and len(x) == 2 and isinstance(x[0], Tensor))):
        raise ConfigError("Layer", "x must be a tensor (..., M, P), or a pair of those of sources and targets",
                          type(x).__name__)
    return (x, x) if isinstance(x, Tensor) else (x[0], x[1])
