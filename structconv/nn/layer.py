"""`Layer`: the base of all layers, which stores its constructor arguments; `take` copies another module's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from structconv.arguments import check_arguments, check_constructor, explained
from structconv.errors import ConfigError, StructconvError

__all__ = ["Layer"]

Device = torch.device | str | int | None
F = TypeVar("F", bound=Callable[..., Any])
#: The names of all layers, which shared checks and inner layers give as the owner of an error.
_NAMES: set[str] = set()
#: Methods whose errors name the class of the layer.
_NAMED = frozenset(("forward", "basis", "plan", "plans", "prepare", "calibrate"))


class Layer(nn.Module):
    """A module whose constructor arguments are attributes; those that take effect only in the constructor are fixed.

    Example:

        >>> from structconv import GCNConv, MultiheadAttention
        >>> from structconv.nn import Layer
        >>> isinstance(GCNConv(8, 4), Layer), isinstance(MultiheadAttention(8, 2), Layer)
        (True, True)
    """

    #: Arguments that take effect only in the constructor: to assign one later is an error.
    fixed: ClassVar[frozenset[str]] = frozenset()
    #: True if the user passes it to another layer, whose errors keep its name.
    is_part: ClassVar[bool] = False
    #: True if `forward` names the class in errors itself, without a call in between.
    names_errors: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let errors name arguments of a wrong type, and the class that the user wrote."""
        super().__init_subclass__(**options)
        if not cls.is_part:
            _NAMES.add(cls.__name__)
        check_constructor(cls)
        if "__init__" in cls.__dict__:
            cls.__init__ = named(cls.__init__)  # type: ignore[method-assign]
        for method in _NAMED & cls.__dict__.keys():
            if method != "forward" or not cls.names_errors:
                own = cls.__dict__[method]
                setattr(cls, method, named(own if method == "forward" else explained(own)))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and name in self.__dict__:
            raise ConfigError(type(self).__name__, f"{name} is fixed once the layer is made", repr(value),
                              "Make a new layer.")
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise an error: `torch.jit.script` calls this method to compile the layer."""
        refuse_script(self)


def refuse_script(layer: nn.Module, remedy: str = "") -> NoReturn:
    """Raise the error of a layer that `torch.jit.script` cannot compile."""
    raise ConfigError(type(layer).__name__, "the model must be compiled by torch.compile or torch.export",
                      "torch.jit.script", remedy)


def named(method: F) -> F:
    """Wrap a method of a layer so that errors of its base or inner layers name the layer's class."""
    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except StructconvError as error:
            name_owner(self, error)
            raise
        except TypeError:
            check_arguments(method, (self, *args), kwargs)
            raise

    return called  # type: ignore[return-value]


def name_owner(layer: nn.Module, error: StructconvError) -> None:
    """Name the class that the user wrote, if an error names a shared check or an inner layer."""
    if error.owner in _NAMES:
        error.rename(type(layer).__name__)


def recorded(layer: nn.Module, x: Any, *others: Any, **options: Any) -> Any:
    """The node of a call that `torch.fx` traces: a layer is one module of the graph, as torch's layers are."""
    path = x.tracer.path_of_module(layer)
    if not path:
        raise ConfigError(type(layer).__name__, "torch.fx must trace a module that holds the layer", "the layer itself",
                          "Trace torch.nn.Sequential(layer).")
    return x.tracer.create_proxy("call_module", path, (x, *others), options)


def move(module: nn.Module, device: Device, dtype: torch.dtype | None) -> None:
    """Move a new module to a device and a dtype, if given."""
    if device is not None or dtype is not None:  # fake parameters cannot be moved
        module.to(device=device, dtype=dtype)


@torch.no_grad()
def take(parameter: Tensor | None, numbers: Tensor | None, like: Tensor | None) -> None:
    """Copy numbers into a parameter, which requires a gradient if `like` does."""
    if parameter is not None and numbers is not None and like is not None:
        parameter.copy_(numbers)
        parameter.requires_grad_(like.requires_grad)


def kind(module: Any) -> str:
    """The class of an object and its package, for an error: "torch's Conv2d"."""
    return f"{type(module).__module__.split('.')[0]}'s {type(module).__name__}"


@torch.no_grad()
def copy_parameters(drawn: nn.Module, module: nn.Module) -> None:
    """Copy the parameters of `drawn` into those of the same names."""
    parameters, new = dict(module.named_parameters()), dict(drawn.named_parameters())
    if parameters.keys() != new.keys():
        raise ConfigError("reset_parameters", "parameters must be those that the layer was made with",
                          ", ".join(sorted(parameters.keys() ^ new.keys())), "Make a new layer.")
    for name, parameter in parameters.items():
        parameter.copy_(new[name])
