"""`merge_linear`: neighboring linear layers become one where that is cheaper (Andreoli 2019, Proposition 3)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized

from structconv import torch_compat as private
from structconv.compat import torch as own
from structconv.compat.conversion import Report, Walk, class_of, count_parameters, replaced, wide
from structconv.errors import ConfigError, StructconvError
from structconv.mechanisms.given import Identity
from structconv.mechanisms.grids import Cuboid, Shifts
from structconv.nn.composition import compose
from structconv.nn.conv import Conv
from structconv.nn.expressed import Expressed, children_of_expression
from structconv.nn.grids import Conv1d, Conv2d, Conv3d, OnGrid

__all__ = ["merge_linear"]

M = TypeVar("M", bound=nn.Module)
_TRANSPOSED: dict[type, Callable[..., torch.Tensor]] = {
    kind: function for function, *kinds in (
        (functional.conv_transpose1d, nn.Conv1d, own.Conv1d), (functional.conv_transpose2d, nn.Conv2d, own.Conv2d),
        (functional.conv_transpose3d, nn.Conv3d, own.Conv3d)) for kind in kinds}
#: Hooks of `state_dict` and `load_state_dict`.
_STATE_HOOKS = {name for name in vars(nn.Module()) if "state_dict" in name}
_OURS = (Conv, Conv1d, Conv2d, Conv3d, OnGrid)
#: Mechanisms, which hold nothing, in whose place `compose` may put another one.
_REPLACED = (Cuboid, Identity, Shifts)


def merge_linear(model: M, *, pairs: Iterable[tuple[str, str]] = (), example: Any = None, inplace: bool = False
                 ) -> tuple[M, Report]:
    """Compose linear layers that follow each other, where the composition takes fewer multiplications.

    Two maps with Theta', Theta'' and matrices A', A'' are one with Theta' Theta'' and A' A''. Outputs are equal up to
    rounding. Layers are neighbors if they follow each other in a `torch.nn.Sequential`, or if you name them in `pairs`.
    The first of two becomes the composition and the second `torch.nn.Identity`, so that other names stay. The identity
    in place of a `Conv` takes its structure too.

    - `torch.nn.Linear` and `Linear`; P -> Q -> R costs P Q + Q R, merged P R.
    - torch's or `structconv.compat.torch`'s convolutions of one kind, without groups. The second must have no padding,
      unless the first is 1x1 with stride 1, no padding and no bias.
    - layers of `structconv` that `structconv.compose` takes.

    A pair stays as it is, with the reason in the report, if a layer or its parameters are used elsewhere too, if it has
    hooks, a parametrization, or buffers or children that were added, if one of both is frozen, or if dtypes or devices
    differ. Merged layers train otherwise: one map has its own gradient steps, and no longer the rank of a product.
    Merge before inference, or on purpose.

    Args:
        model: not changed, unless `inplace`.
        pairs: names (first, second) of layers of which the second computes on the output of the first, and nothing else
            reads that. The names are not checked against the `forward` of the model, so give an `example`.
        example: as in `convert`.

    Raises:
        ConfigError: a name in `pairs` is no module of the model.

    Example:

        >>> from structconv import merge_linear
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 4), torch.nn.ReLU())
        >>> merged, report = merge_linear(model, example=torch.randn(5, 8))
        >>> merged[0], report.parameters
        (Linear(in_features=8, out_features=4, bias=True), (836, 36))
    """
    pairs = list(pairs)
    modules = dict(model.named_modules())
    for name in (name for pair in pairs for name in pair):
        if name not in modules or not name:
            raise ConfigError("merge_linear", "pairs must name modules of the model", repr(name))

    def turn(walk: Walk, model: nn.Module) -> None:
        parts: list[Any] = [part for named in (model.named_modules, model.named_parameters)
                            for _, part in named(remove_duplicate=False)]
        uses = Counter(map(id, parts))  # `parts` stays until the end, so that no merged layer gets one of these ids
        for names in (*_chains(model), *pairs):
            first = names[0]
            for second in names[1:]:
                if not _try(walk, model, first, second, uses):
                    first = second

    model, report = replaced(model, example, inplace, turn)
    return model, dataclasses.replace(report, kept={})


def _chains(model: nn.Module) -> list[list[str]]:
    """The names of the layers of each `Sequential`, in order; containers that are shared once."""
    return [[f"{name}.{child}" if name else child for child in module._modules]
            for name, module in model.named_modules() if type(module) is nn.Sequential and len(module)]


def _try(walk: Walk, model: nn.Module, first: str, second: str, uses: Counter[int]) -> bool:
    """Merge two layers. Return False if the second stays."""
    one, two = model.get_submodule(first), model.get_submodule(second)
    if not (_is_linear(one) and _is_linear(two)):
        return False
    both = f"{first} and {second}"
    try:
        merged = _reason(one, two, uses) or _merged(one, two)
    except StructconvError as error:
        walk.refused[both] = str(error)
        return False
    if isinstance(merged, str):
        walk.refused[both] = merged
        return False
    expression = f"{type(one).__name__} @ {type(two).__name__}"
    model.set_submodule(first, merged)
    model.set_submodule(second, (_Identity if type(two) is Conv else nn.Identity)().train(two.training))
    before, *_ = walk.converted.get(first, (type(one).__name__,))
    walk.converted[first] = before, type(merged).__name__, expression
    walk.converted[second] = type(two).__name__, "Identity", ""
    return True


class _Identity(nn.Identity):
    """The identity, with the arguments of `Conv`."""

    def forward(self, x: torch.Tensor, *_: Any, return_weights: bool = False,  # type: ignore[override]
                **__: Any) -> torch.Tensor:
        """Return x."""
        if return_weights:
            raise ConfigError("merge_linear", "return_weights must be False for a layer that was merged", "True",
                              "Merge the model without this pair.")
        return x


def _is_linear(module: nn.Module) -> bool:
    kind = class_of(module)
    return kind is nn.Linear or kind in _TRANSPOSED or kind in _OURS


def _reason(one: nn.Module, two: nn.Module, uses: Counter[int]) -> str | None:
    """The reason why two layers must stay two, or `None`."""
    parameters = [p for layer in (one, two) for p in layer.parameters()]
    if any(uses[id(part)] > 1 for part in (one, two, *parameters)):
        return "a layer or a parameter is used more than once"
    modules = [module for layer in (one, two) for module in layer.modules()]
    if any(map(is_parametrized, modules)):
        return "a layer has a parametrization"
    if not private.all_plain(*modules) or any(hooks for module in modules for name, hooks in vars(module).items()
                                              if name in _STATE_HOOKS):
        return "a layer has hooks"
    added = [name for layer in (one, two) for name in _added(layer)]
    if added:
        return f"{added[0]!r} was added to a layer"
    if len({p.requires_grad for p in parameters}) > 1:
        return "one of them is frozen"
    if len({(p.dtype, p.device) for p in parameters}) > 1:
        return "dtypes or devices differ"
    return None


def _added(layer: nn.Module) -> list[str]:
    """The names of parameters, buffers and children that were added to a layer: a merged layer would lack them."""
    known: dict[str, nn.Module | None] = {"weight": None, "bias": None}
    if isinstance(layer, OnGrid):
        known = {"conv": layer.conv}
    elif isinstance(layer, Expressed):
        known |= {"relative_value": None, **children_of_expression(layer)}
    names = [name for name in (*layer._parameters, *layer._buffers, *layer._modules) if name not in known]
    for part in known.values():
        if isinstance(part, Conv):
            names += _added(part)
        elif type(part) in _REPLACED:
            names += [*part._parameters, *part._buffers, *part._modules]  # type: ignore[union-attr]
    return names


@torch.no_grad()
def _merged(one: Any, two: Any) -> nn.Module | str:
    """The composition; the reason as text if there is none, or if it is not cheaper."""
    if isinstance(one, _OURS) or isinstance(two, _OURS):
        if not (isinstance(one, _OURS) and isinstance(two, _OURS)):
            return "they are layers of two libraries"
        merged: nn.Module = compose(one, two)
        costs = count_parameters(merged), count_parameters(one) + count_parameters(two)
    elif type(one) is nn.Linear and type(two) is nn.Linear:
        (q, p), (r, between) = one.weight.shape, two.weight.shape
        if q != between:
            return "their channels do not fit"
        costs = p * r, p * q + q * r
        merged = _linear(one, two) if costs[0] < costs[1] else one
    elif type(one) in _TRANSPOSED and type(one) is type(two):
        reason = _refusal(one, two)
        if reason is not None:
            return reason
        taps = [math.prod(layer.kernel_size) for layer in (one, two)]
        size = _kernel_size(one, two)
        p, q, r = one.in_channels, one.out_channels, two.out_channels
        costs = math.prod(size) * p * r, math.prod(two.stride) * taps[0] * p * q + taps[1] * q * r
        merged = _convolution(one, two) if costs[0] < costs[1] else one
    else:
        return "they are of two kinds"
    if costs[0] >= costs[1]:
        return f"merged they would cost {costs[0]:,} multiplications an output instead of {costs[1]:,}"
    parameter = next(iter((*one.parameters(), *two.parameters())), None)
    if parameter is not None:
        merged.requires_grad_(parameter.requires_grad)
    return merged.train(two.training)


def _linear(one: nn.Linear, two: nn.Linear) -> nn.Linear:
    layer = nn.Linear(one.weight.shape[1], two.weight.shape[0], one.bias is not None or two.bias is not None,
                      device=one.weight.device, dtype=one.weight.dtype)
    layer.weight.copy_(wide(two.weight) @ wide(one.weight))
    _set_bias(layer, one, two, two.weight)
    return layer


def _set_bias(layer: Any, one: Any, two: Any, weight: torch.Tensor) -> None:
    """Add up the bias of the second, and that of the first times the weight (R, Q) of the second."""
    if layer.bias is not None:
        bias = wide(torch.zeros_like(layer.bias))
        bias = bias if one.bias is None else wide(weight) @ wide(one.bias)
        layer.bias.copy_(bias if two.bias is None else bias + wide(two.bias))


def _refusal(one: Any, two: Any) -> str | None:
    """Why the product of two convolutions is not a convolution of this kind, or `None`."""
    if any(layer.weight.shape != (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
           or not all(isinstance(sizes, tuple | str) for sizes in (layer.stride, layer.dilation, layer.padding))
           for layer in (one, two)):
        return "attributes do not fit a weight that was replaced, or are no tuples"
    if one.out_channels != two.in_channels:
        return "their channels do not fit"
    if one.groups != 1 or two.groups != 1:
        return "they have groups"
    if isinstance(one.padding, str) or isinstance(two.padding, str):
        return "their padding is a word"
    pointwise = [math.prod(layer.kernel_size) == 1 for layer in (one, two)]
    if any(two.padding) and not (pointwise[0] and one.bias is None and not any(one.padding)
                                 and all(step == 1 for step in one.stride)):
        return "the second pads the output of the first"
    if not any(pointwise) and any(step != 1 for step in (*one.dilation, *two.dilation)):
        return "they are dilated"
    return None


def _kernel_size(one: Any, two: Any) -> tuple[int, ...]:
    if math.prod(one.kernel_size) == 1:
        return tuple(two.kernel_size)
    return tuple((b - 1) * step + a for a, b, step in zip(one.kernel_size, two.kernel_size, one.stride, strict=True))


def _convolution(one: Any, two: Any) -> nn.Module:
    """y_n = sum_j W''_j sum_i W'_i x_(s' (s'' n + j) + i): the weight at s' j + i is W''_j W'_i."""
    first = math.prod(one.kernel_size) == 1
    dilation = tuple(a * b for a, b in zip(two.dilation, one.stride, strict=True)) if first else one.dilation
    padded = two if any(two.padding) else one
    layer: Any = type(one)(one.in_channels, two.out_channels, _kernel_size(one, two),
                           tuple(a * b for a, b in zip(one.stride, two.stride, strict=True)), padded.padding, dilation,
                           1, one.bias is not None or two.bias is not None, padded.padding_mode,
                           device=one.weight.device, dtype=one.weight.dtype)
    weight = _TRANSPOSED[type(one)](wide(two.weight), wide(one.weight), stride=1 if first else one.stride)
    layer.weight.copy_(weight)
    _set_bias(layer, one, two, two.weight.flatten(2).sum(-1))
    return layer
