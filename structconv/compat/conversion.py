"""`convert`: a model of another library's layers on structconv; `to_torch` and `to_pyg` go back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from structconv import torch_compat as private
from structconv.compat import torch as own
from structconv.compat.copying import copied
from structconv.errors import ConfigError
from structconv.structures.exchange import require

__all__ = ["Report", "convert", "to_pyg", "to_torch"]

M = TypeVar("M", bound=nn.Module)
#: torch's classes and ours. Ours extend torch's and hold the same attributes, so that a layer changes only its class.
_TORCH: dict[type, type] = {getattr(nn, name): getattr(own, name) for name in own.__all__
                            if name not in ("scaled_dot_product_attention", "TransformerDecoder")}
_BACK = {ours: theirs for theirs, ours in _TORCH.items()}
#: The attribute that holds the former attention implementation of a transformers model.
_BEFORE = "_attention_before_structconv"


@dataclass(frozen=True)
class Report:
    """The report of `convert`, `to_torch`, `to_pyg` or `merge_linear`. `print` it, or read the fields.

    Args:
        converted: name of a module -> (class before, class after, expression of the library or "").
        refused: name of a module -> why it stays as it is, though it is of a kind that is converted.
        kept: class -> how many other modules without children there are.
        parameters: how many numbers the model trains or holds as parameters, before and after.
        difference: the largest absolute difference of outputs on the example; `None` without one.
        scale: the largest absolute output of the model before.

    Example:

        >>> from structconv import convert
        >>> model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.ReLU())
        >>> _, report = convert(model, example=torch.randn(2, 3, 9))
        >>> list(report.converted), report.kept, report.difference < 1e-5
        (['0'], {'ReLU': 1}, True)
    """

    converted: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)
    difference: float | None = None
    scale: float | None = None

    def dict(self) -> dict[str, Any]:
        """The fields, of plain values: `json.dumps(report.dict())`."""
        converted = [{"name": name, "before": before, "after": after, "expression": expression}
                     for name, (before, after, expression) in self.converted.items()]
        return {"converted": converted, "refused": dict(self.refused), "kept": dict(self.kept),
                "parameters": list(self.parameters), "difference": self.difference, "scale": self.scale}

    def __str__(self) -> str:
        lines = [f"converted: {len(self.converted)}, refused: {len(self.refused)}, "
                 f"parameters: {self.parameters[0]:,} -> {self.parameters[1]:,}"]
        for name, (before, after, expression) in self.converted.items():
            lines.append(f"  {name or '(the model)'}: {before} -> {after}" + (f" = {expression}" if expression else ""))
        lines += [f"  {name or '(the model)'} stays as it is: {reason}" for name, reason in self.refused.items()]
        if self.kept:
            lines.append("  other layers: " + ", ".join(f"{n} {kind}" for kind, n in sorted(self.kept.items())))
        if self.difference is not None:
            lines.append(f"  largest difference of outputs: {self.difference:.1e} (largest output {self.scale:.1e})")
        else:
            lines.append("  outputs not compared: pass example=")
        return "\n".join(lines)


def convert(model: M, *, example: Any = None, inplace: bool = False) -> tuple[M, Report]:
    """Replace the layers of torch, PyTorch Geometric and transformers in a model by structconv's.

    Parameters, buffers, hooks, names, `train` or `eval`, `requires_grad`, dtype and device stay. So do modules and
    parameters that are shared. The `state_dict` has the same keys and loads both ways.

    - torch: the layers of `structconv.compat.torch`, parametrized ones too.
    - PyTorch Geometric: the layers of `structconv.compat.pyg`.
    - transformers: `set_attn_implementation("structconv")` for models of the interface.

    A class that is derived from one of these layers stays as it is, because it may override methods. So do calls of
    functions, such as `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        model: it is not changed, unless `inplace`.
        example: inputs of a call, on which outputs are compared in evaluation mode: a tensor, a tuple of positional or
            a dictionary of keyword arguments.
        inplace: convert the modules of `model` itself; an optimizer keeps its parameters. If not, a deep copy.

    Returns:
        The converted model and the `Report`.

    Example:

        >>> from structconv.compat import convert, to_torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
        >>> ours, report = convert(model, example=torch.randn(2, 3, 9, 9))
        >>> print(report)
        converted: 1, refused: 0, parameters: 240 -> 240
          0: Conv2d -> structconv.compat.torch.Conv2d = Cuboid((3, 3), padding_mode='zeros')
          other layers: 1 BatchNorm2d
          largest difference of outputs: ...
        >>> original, _ = to_torch(ours)
    """
    return replaced(model, example, inplace, _to_ours)


def to_torch(model: M, *, example: Any = None, inplace: bool = False) -> tuple[M, Report]:
    """Replace the layers of `structconv.compat.torch` by torch's; transformers' models get their former attention.

    Arguments and results: as `convert`. Subclasses of our layers stay as they are.

    Example:

        >>> from structconv.compat import to_torch
        >>> from structconv.compat.torch import Conv2d
        >>> model, report = to_torch(Conv2d(3, 8, 3), example=torch.randn(2, 3, 9, 9))
        >>> type(model).__module__, report.difference < 1e-5
        ('torch.nn.modules.conv', True)
    """
    return replaced(model, example, inplace, _to_torch)


def to_pyg(model: M, *, example: Any = None, inplace: bool = False) -> tuple[M, Report]:
    """Replace the layers of `structconv.compat.pyg` by PyTorch Geometric's, which must be installed.

    Arguments and results: as `convert`.

    Example:

        >>> from structconv.compat import to_pyg
        >>> from structconv.compat.pyg import GCNConv
        >>> model, report = to_pyg(GCNConv(8, 4))
        >>> type(model).__module__
        'torch_geometric.nn.conv.gcn_conv'
    """
    require("torch_geometric.nn", "to_pyg", "tools")
    return replaced(model, example, inplace, _to_pyg)


class Walk:
    """The modules that a conversion converts or refuses, as in `Report`."""

    def __init__(self) -> None:
        self.converted: dict[str, tuple[str, str, str]] = {}
        self.refused: dict[str, str] = {}

    def set_attention(self, name: str, model: Any) -> bool:
        """Let a transformers model attend by structconv. Return False if transformers does not allow the choice."""
        try:
            model.set_attn_implementation("structconv")
        except ValueError as error:
            self.refused[name] = f"{type(model).__name__}: {error}"
            return False
        return True

    def refuse_others(self, prefix: str, model: nn.Module, registration: Any) -> None:
        """Enter the attention modules that do not use transformers' interface."""
        for path in registration.check(model):
            self.refused[prefix + path] = (f"{type(model.get_submodule(path)).__name__}: it computes attention without "
                                           "transformers' interface")


def replaced(model: M, example: Any, inplace: bool, turn: Callable[[Walk, nn.Module], None]) -> tuple[M, Report]:
    """Apply `turn` to a copy of a model, or to the model itself, and report on it."""
    if not isinstance(model, nn.Module):
        raise ConfigError("convert", "model must be a torch.nn.Module", type(model).__name__)
    before = None if example is None else outputs_of(model, example)
    count = count_parameters(model)
    model = model if inplace else copied(model)
    walk = Walk()
    turn(walk, model)
    named = walk.converted.keys() | walk.refused.keys()
    kept = Counter(type(module).__name__ for name, module in model.named_modules()
                   if name not in named and next(module.children(), None) is None)
    difference = scale = None
    if before is not None:
        difference, scale = largest_difference(before, outputs_of(model, example))
    return model, Report(walk.converted, walk.refused, dict(kept), (count, count_parameters(model)), difference, scale)


# -- each library -------------------------------------------------------------------------------------------------

def _to_ours(walk: Walk, model: nn.Module) -> None:
    pyg = import_module("structconv.compat.pyg.conversion") if "torch_geometric.nn" in sys.modules else None
    for name, module in list(model.named_modules()):
        kind = class_of(module)
        if pyg is not None and pyg.is_layer(module):
            before, reason = type(module).__name__, pyg.turn(module)
            if reason is None:
                walk.converted[name] = before, _full_name(type(module)), pyg.expression(module)
            else:
                walk.refused[name] = f"{before}: {reason}"
        elif kind in _TORCH:
            _swap(walk, name, module, _TORCH[kind])
        elif kind not in _BACK and isinstance(module, tuple(_TORCH)):
            lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
            walk.refused[name] = kind.__name__ + (
                ": its channels are still unknown. Call the model once before" if lazy else
                " is derived from a layer of torch, whose methods it may override")
        own.leave_fast_path(module)
    models = pretrained_in(model)
    formers = [_attention_of(module.config) for _, module in models]  # of all, since models may share a configuration
    for (name, module), former in zip(models, formers, strict=True):
        _to_structconv_attention(walk, name, module, former)


def _to_torch(walk: Walk, model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        kind = class_of(module)
        if kind in _BACK:
            _swap(walk, name, module, _BACK[kind])
            module.__dict__.pop("_mechanism", None)
        elif isinstance(module, tuple(_BACK)):
            walk.refused[name] = f"{kind.__name__} is derived from a layer of structconv"
        own.take_fast_path(module)
    formers: dict[int, Any] = {}  # by configuration, which models may share
    for name, module in [(name, part) for name, part in pretrained_in(model)
                         if _BEFORE in part.__dict__ or part.config._attn_implementation == "structconv"]:
        default = formers.get(id(module.config), "sdpa" if getattr(module, "_supports_sdpa", False) else "eager")
        former = formers[id(module.config)] = module.__dict__.get(_BEFORE, default)
        parts = former if isinstance(former, dict) else {}
        module.set_attn_implementation({part: value for part, value in parts.items() if value is not None} or former)
        for part, value in parts.items():
            if value is None:  # a configuration of no model, which had none
                getattr(module.config, part)._attn_implementation = None
        module.__dict__.pop(_BEFORE, None)
        text = former if isinstance(former, dict) else f'"{former}"'
        walk.converted[name] = type(module).__name__, f"attn_implementation={text}", ""


def _to_pyg(walk: Walk, model: nn.Module) -> None:
    pyg = import_module("structconv.compat.pyg.conversion")
    for name, module in list(model.named_modules()):
        if pyg.is_ours(module):
            before, reason = _full_name(type(module)), pyg.turn(module)
            if reason is None:
                walk.converted[name] = before, type(module).__name__, ""
            else:
                walk.refused[name] = f"{before}: {reason}"


def class_of(module: nn.Module) -> type:
    """The class of a module; without the one that a parametrization has put before it."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def _full_name(kind: type) -> str:
    module, pyg = kind.__module__, "structconv.compat.pyg"
    return f"{pyg if module.startswith(pyg) else module}.{kind.__name__}"


def _swap(walk: Walk, name: str, module: Any, other: type) -> None:
    """Give a module another class of the same attributes."""
    reason = None
    if "forward" in module.__dict__:
        reason = "its forward was replaced"
    elif _pads_otherwise(module):
        reason = "torch pads it as it was made, not by its padding"
    if reason is not None:
        walk.refused[name] = f"{class_of(module).__name__}: {reason}"
        return
    before, after = class_of(module), other
    if is_parametrized(module):
        members = {key: value for key, value in vars(type(module)).items() if key not in ("__dict__", "__weakref__")}
        other = type(type(module).__name__, (other,), members)
    module.__class__ = other
    is_ours = after in _BACK
    walk.converted[name] = (before.__name__ if is_ours else _full_name(before),
                            _full_name(after) if is_ours else after.__name__, _expression(module) if is_ours else "")


def _pads_otherwise(module: Any) -> bool:
    """Return True if the padding of a convolution that does not pad by zeros was changed, which torch does not read."""
    if getattr(module, "padding_mode", "zeros") == "zeros" or not isinstance(module.padding, tuple):
        return False
    return list(module._reversed_padding_repeated_twice) != [n for n in reversed(module.padding) for _ in range(2)]


def _expression(module: Any) -> str:
    """The structure that one of our layers applies, as an expression of the library."""
    if isinstance(module, nn.MultiheadAttention):
        bias = module.in_proj_bias is not None
        return f"DotProduct({module.num_heads}, {module.head_dim}, bias={bias}).scaled().softmax()"
    mechanism = getattr(module, "_mechanism_of", None)
    return "" if mechanism is None or getattr(module, "ceil_mode", False) else repr(mechanism())


def pretrained_in(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost models of transformers within a model."""
    library = sys.modules.get("transformers")
    if library is None:
        return []
    models: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel) and not any(name.startswith(f"{outer}." if outer else "")
                                                                   for outer, _ in models):
            models.append((name, module))
    return models


def _attention_of(config: Any) -> Any:
    """The attention implementation of a configuration; a dictionary, if it has parts with their own."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    own = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **own} if own else config._attn_implementation


def _to_structconv_attention(walk: Walk, name: str, model: Any, former: Any) -> None:
    from structconv.compat.transformers.interface import NAME, register

    registration = register()
    if NAME in (former, former.get("") if isinstance(former, dict) else None):
        return
    prefix = f"{name}." if name else ""
    walk.refuse_others(prefix, model, registration)
    routed = registration.routed(model)
    if not routed or not walk.set_attention(name, model):
        return
    model.__dict__[_BEFORE] = former
    for path in routed:
        module = model.get_submodule(path)
        walk.converted[prefix + path] = (type(module).__name__, f'attn_implementation="{NAME}"',
                                         "DotProduct().scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax()")


# -- outputs and parameters ---------------------------------------------------------------------------------------

def count_parameters(model: nn.Module) -> int:
    """How many numbers the parameters hold, shared ones once; those of unknown shape count as none."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))


@torch.no_grad()
def outputs_of(model: nn.Module, example: Any) -> list[Tensor]:
    """The tensors that a model returns for an example, in evaluation mode; what it changes in place is a copy."""
    example = private.pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, example)
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        outputs = (model(**example) if isinstance(example, dict) else
                 model(*example) if isinstance(example, tuple) else model(example))
    finally:
        for module in trained:
            module.training = True
    return [leaf.detach().clone() for leaf in private.pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def wide(t: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def largest_difference(before: list[Tensor], after: list[Tensor]) -> tuple[float, float]:
    """The largest absolute difference, and the largest number before. NaN where one of both is NaN, and inf as well."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf"), 0.0
    pairs = [(wide(a), wide(b)) for a, b in zip(before, after, strict=True) if a.numel()]
    differences = [torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max() for a, b in pairs]
    return (float(torch.stack(differences).max()) if differences else 0.0,
            float(torch.stack([a.nan_to_num().abs().max() for a, _ in pairs]).max()) if pairs else 0.0)
