"""The device of a training, chosen by name; tasks moved to it, and models compiled for it."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError

__all__ = ["chosen", "compiled", "factories_on", "moved"]

#: In the order of `auto`.
_ACCELERATORS = ("cuda", "mps")


def chosen(name: str) -> str:
    """Return the device that an option names; for ``auto`` the first of ``cuda``, ``mps`` and ``cpu`` on this machine.

    Raises:
        ConfigError: the machine has no such device, or its torch was built without it.

    Example:

        >>> from structconv_systems.train.device import chosen
        >>> chosen("cpu")
        'cpu'
    """
    if name == "auto":
        return next((each for each in _ACCELERATORS if _present(each)), "cpu")
    if name != "cpu" and not _present(name):
        raise ConfigError("device", f"{name} must be there", f"torch {torch.__version__}, which finds none",
                          "Name another with --device, or use auto.")
    return name


def compiled(model: nn.Module) -> None:
    """Compile a model in place, for inputs of any size and with the random numbers of eager mode; names and copies
    stay."""
    model.compile(dynamic=True, options={"fallback_random": True})


def factories_on(device: str) -> Any:
    """Return a context in which new tensors lie on the device."""
    return nullcontext() if device == "cpu" else torch.device(device)


def moved(task: Any, device: str) -> Any:
    """Return a task whose model, and whose copy of its data, lie on a device: the same object on the CPU.

    The model and its parameters stay the same objects, so that the optimizer keeps them. Tensors, structures, and what
    holds them are copied: data that several tasks share stay where they are.

    Example:

        >>> from structconv_systems.train.device import moved
        >>> class Task:
        ...     model = torch.nn.Linear(2, 1)
        >>> task = Task()
        >>> moved(task, "cpu") is task
        True
    """
    if device == "cpu":
        return task
    task.model.to(device)
    packages = ("structconv_systems", type(task).__module__.partition(".")[0])
    done: dict[int, tuple[Any, Any]] = {}  # by identity what was moved, beside what it was, so that this stays

    def of(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value
        if id(value) in done:
            return done[id(value)][1]
        result: Any
        package = type(value).__module__.partition(".")[0]
        if isinstance(value, nn.Module | Tensor) or (package == "structconv" and hasattr(value, "to")):
            result = value.to(device)
        elif isinstance(value, dict):
            result = {key: of(item) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            items = map(of, value)
            result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif package in packages and hasattr(value, "__dict__"):
            result = copy.copy(value)
            done[id(value)] = value, result  # it may hold itself
            for key, item in vars(value).items():
                object.__setattr__(result, key, of(item))
        else:
            return value
        done[id(value)] = value, result
        return result

    return of(task)


def _present(name: str) -> bool:
    return bool(torch.get_device_module(name).is_available())
