"""Turn layers of PyTorch Geometric into ours and back, in place: the same parameters, names and options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from structconv.compat.copying import copied
from structconv.compat.pyg import attention, convolutions, heterogeneous, mixtures, norms, polynomials, relational
from structconv.compat.pyg.aggregations import SIMPLE
from structconv.compat.pyg.heterogeneous import Relations
from structconv.compat.pyg.layer import OF_MESSAGES, Layer
from structconv.compat.pyg.linear import Linear, LinearByType
from structconv.errors import ConfigError

__all__ = ["OURS", "counterpart", "expression", "is_layer", "is_ours", "turn"]

#: Our layers and norms, by their names in `torch_geometric.nn`.
OURS: dict[str, type[nn.Module]] = {
    name: getattr(module, name)
    for module in (attention, convolutions, heterogeneous, mixtures, polynomials, relational, norms)
    for name in module.__all__}
_NORMS: dict[str, type[nn.Module]] = {name: OURS[name] for name in norms.__all__}

_SIMPLE = (int, float, str, bool, type(None))
#: Arguments whose attribute has another name, or none.
_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "nn": lambda layer: layer.nn,
    "eps": lambda layer: getattr(layer, "initial_eps", layer.eps),
    "train_eps": lambda layer: isinstance(layer.eps, nn.Parameter),
    "edge_dim": lambda layer: None if layer.lin is None else layer.lin.in_channels,
    "root_weight": lambda layer: layer.root is not None,
    "K": lambda layer: len(layer.lins),
    "decomposed_layers": lambda layer: getattr(layer, "_decomposed_layers", 1),
    "metadata": lambda layer: (layer.node_types, layer.edge_types),
}
#: The linear layer whose bias is that of a layer, where the layer itself has none.
_BIASED = {"ClusterGCNConv": "lin_out", "GraphConv": "lin_rel", "SAGEConv": "lin_l", "SGConv": "lin", "SSGConv": "lin",
           "TransformerConv": "lin_key"}
#: The attributes of every module: parameters, buffers, hooks and the mode.
_OF_MODULES = vars(nn.Module()).keys()
_MESSAGE_HOOKS = tuple(f"_{name}_forward{when}_hooks" for name in ("propagate", "message", "aggregate",
                       "message_and_aggregate", "edge_update") for when in ("", "_pre"))


def _library() -> Any:
    return importlib.import_module("torch_geometric.nn")


def is_layer(module: nn.Module) -> bool:
    """Return True for a layer of PyTorch Geometric, or of a class derived from one."""
    of_theirs = isinstance(module, _library().MessagePassing) or counterpart(type(module)) in _NORMS.values()
    return of_theirs and not is_ours(module)


def is_ours(module: nn.Module) -> bool:
    """Return True for one of our layers, or of a class derived from one."""
    return isinstance(module, (Layer, *_NORMS.values()))


def counterpart(kind: type) -> type | None:
    """Our class for one of PyTorch Geometric's layers, theirs for one of ours; `None` for other classes."""
    name, library = kind.__name__, _library()
    own, their = OURS.get(name), getattr(library, name, None)
    if own is None:
        return None
    if kind is their:
        return own
    return their if kind is own or kind.__bases__ == (own, their) else None  # of a patch


def turn(layer: Any, more: bool = False) -> str | None:
    """Make a layer its counterpart, in place. Return `None`, or the reason for which it stays as it is.

    Args:
        more: it may have parameters that the layer was not made with.
    """
    kind = type(layer)
    other = counterpart(kind)
    if other is None:
        return "structconv has no such layer"
    if kind.__name__ in _NORMS:  # which have the same attributes
        if "forward" in vars(layer):
            return "its forward was changed after it was made"
        if "lin" in layer._modules:  # DiffGroupNorm
            new, pristine = (_made(one, layer.in_channels, layer.groups, device="meta").lin for one in (other, kind))
            _become(layer.lin, new, pristine)
        layer.__class__ = other
        return None
    if any(layer.__dict__.get(name) for name in _MESSAGE_HOOKS):
        return "it has hooks of messages, which structconv does not call"
    if any(isinstance(p, UninitializedParameter) for p in layer.parameters()):
        return "its channels are still unknown (-1). Call the model once before"
    if layer.aggr is None:
        return "its aggregation is a module of the user's"
    try:
        pristine, new = _built(kind, layer), _built(other, layer)
        changed = _difference(layer, pristine, more)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # the other layers of a model are converted all the same
        return f"it cannot be built again from its attributes: {type(error).__name__}: {error}"
    if changed is not None:
        return f"{changed} was changed after it was made"
    _become(layer, new, pristine)
    return None


def _made(kind: Any, *args: Any, **options: Any) -> Any:
    """A new layer of this class, also under a patch."""
    layer = kind.__new__(kind)
    inspect.unwrap(kind.__init__)(layer, *args, **options)
    return layer


def _built(kind: Any, layer: Any) -> Any:
    """A new layer of this class with the options of `layer`, without numbers."""
    names, options = dict(inspect.signature(kind).parameters), dict[str, Any]()
    of_types = "metadata" in names  # HGTConv, which takes no aggregation
    for name in (*names, *(() if of_types else ("aggr",)), "flow", "decomposed_layers"):
        if name == "bias":
            options[name] = getattr(layer, _BIASED.get(kind.__name__, ""), layer).bias is not None
        elif name in vars(layer) and name not in ("eps", "decomposed_layers"):
            options[name] = vars(layer)[name]
        elif name in _ARGUMENTS and (name in names or name == "decomposed_layers"):
            options[name] = _ARGUMENTS[name](layer)
    module = getattr(layer, "aggr_module", None)
    if module is not None and not of_types and options.get("aggr") not in SIMPLE:
        options["aggr"] = copied(module).to("meta")
    if of_types:
        widths = [lin.weight.shape[-1] for lin in layer.kqv_lin.lins.values()]
        options["in_channels"] = dict(zip(layer.kqv_lin.types, widths, strict=True))
    if "nn" in options:
        options["nn"] = copied(options["nn"]).to("meta")  # its parameters would be drawn again
    with torch.device("meta"):
        layer_of_pyg = _made(kind, **options)
        if "aggr" in options:
            layer_of_pyg.aggr = layer.aggr  # the name, where a module was given
        for path, lin in list(layer_of_pyg.named_modules()):
            if isinstance(getattr(lin, "weight", None), UninitializedParameter):
                width = layer.get_submodule(path).weight.shape[-1]
                if isinstance(lin, Linear):
                    lin.materialize(width)
                else:
                    lin.initialize_parameters(lin, (torch.empty(1, width),))
        for name, parameter in layer_of_pyg.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                parameter.materialize(layer.get_parameter(name).shape)
    return layer_of_pyg.train(layer.training)  # of the parts that `layer` does not have


def _difference(layer: nn.Module, pristine: nn.Module, more: bool) -> str | None:
    """The attribute or parameter that differs from that of a new layer with the same options, or `None`."""
    for name, expected in vars(pristine).items():
        if name in _OF_MODULES or not _is_simple(expected):
            continue
        value = vars(layer).get(name)
        if not _is_simple(value):  # a cached graph in the place of `None`
            if expected is None and name.startswith("_cached"):
                continue
            return f"its attribute {name!r}"
        if value != expected and name != "in_channels":
            return f"its attribute {name!r}"
    for name in ("forward", *OF_MESSAGES):
        if name in vars(layer):
            return f"its {name}"
    has, expects = ({name: t.shape for name, t in (*module.named_parameters(remove_duplicate=False),
                                                   *module.state_dict(keep_vars=True).items())}
                    for module in (layer, pristine))
    names = expects.keys() if more else has.keys() | expects.keys()
    differing = sorted(name for name in names if has.get(name) != expects.get(name))
    return f"its parameter {differing[0]!r}" if differing else None


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (isinstance(value, tuple | list) and all(map(_is_simple, value)))


def _become(old: Any, new: Any, pristine: Any) -> None:
    """Give `old` the class of `new`; its parameters, hooks, children and what a user has set on it stay."""
    if type(old) is type(new):  # it has two names in the layer
        return
    attrs = old.__dict__
    modules = dict(old.named_modules())
    for path, child in new.named_modules():
        own = modules.get(path)
        if path and _are_counterparts(type(own), type(child)):
            _become(own, child, pristine.get_submodule(path))
    shared = {name: attrs[name] for name in _OF_MODULES if name in attrs}
    shared["_parameters"] = {**{name: None for name, p in new._parameters.items() if p is None}, **attrs["_parameters"]}
    shared["_modules"] = {**new._modules, **{name: child for name, child in attrs["_modules"].items() if name in
                                             new._modules or name not in pristine._modules}}
    users = {name: value for name, value in attrs.items() if name not in pristine.__dict__ and name not in
             new.__dict__ and not name.startswith("_cached")}
    old.__class__ = type(new)
    old.__dict__ = {**new.__dict__, **users, **shared}


def _are_counterparts(own: type, other: type) -> bool:
    """Return True for two classes of a part of a layer, PyTorch Geometric's and ours."""
    library = _library()
    pairs = (Linear, library.Linear), (LinearByType, library.HeteroDictLinear), (Relations, library.HeteroLinear)
    dictionaries = issubclass(own, nn.ParameterDict) and issubclass(other, nn.ParameterDict)  # theirs renames keys
    return dictionaries or any({own, other} <= {*pair} for pair in pairs)


# -- what a layer is in the algebra -------------------------------------------------------------------------------

_SOFTMAX = ".masked(keep=STRUCTURE).softmax()"


def _gat(layer: Any) -> str:
    scores = f"BiAffine({layer.heads}, bilinear=False, on='projected')"
    scores = f"({scores} + EdgeBias({layer.edge_dim}, {layer.heads}))" if layer.edge_dim else scores
    return f"{scores}.leaky_relu({layer.negative_slope}){_SOFTMAX}"


def _messages(layer: Any) -> str:
    return f"Adjacency({'row' if layer.aggr == 'mean' else None!r})"


#: Sums, means and products. Layers of maxima have no matrix, and others more than one step: they are not listed.
_EXPRESSIONS: dict[str, Callable[[Any], str]] = {
    "GCNConv": lambda layer: f"Adjacency({'sym' if layer.normalize else None!r}, self_loops={layer.add_self_loops})",
    "SAGEConv": lambda layer: _messages(layer) + " | Identity()" * layer.root_weight,
    "GraphConv": lambda layer: f"{_messages(layer)} | Identity()",
    "GINConv": lambda layer: f"{_messages(layer)} | Identity()",
    "ChebConv": lambda layer: f"Chebyshev({len(layer.lins) - 1}, {layer.normalization!r})",
    "RGCNConv": lambda layer: (f"Relations({layer.num_relations}, {'row' if layer.aggr == 'mean' else None!r})"
                               + " | Identity()" * (layer.root is not None)),
    "GATConv": _gat,
    "GATv2Conv": lambda layer: f"Additive({layer.out_channels}, {layer.heads}){_SOFTMAX}",
    "TransformerConv": lambda layer: (f"DotProduct({layer.heads}, {layer.out_channels}, "
                                      f"bias={layer.lin_query.bias is not None}).scaled(){_SOFTMAX}"
                                      + " | Identity()" * layer.root_weight),
}


def expression(layer: Any) -> str:
    """The structure that a layer applies, as an expression of the library; "" where it is not one."""
    writer = _EXPRESSIONS.get(type(layer).__name__)
    return "" if writer is None or layer.aggr not in ("add", "sum", "mean") else writer(layer)
