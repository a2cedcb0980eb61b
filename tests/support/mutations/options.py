"""Options that are assigned: those of mechanisms are fixed."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from structconv import ConfigError, Mechanism
from structconv.mechanisms.expression import options
from structconv.nn.layer import Layer
from structconv.testing.checks import same
from structconv.testing.use import Use
from tests.support.calls import as_written, check_now
from tests.support.mutations.register import mutation

#: What a planner is held to: values are the same.
UNSEEN = ("path", "max_bytes")


@mutation()
def options_assigned(use: Use) -> None:
    """Those of mechanisms are fixed, which an error says, and so are those of layers that no call would notice; any
    other counts from the next call on, or raises."""
    use()
    for module in list(use.layer.modules()):
        for name, held in list(options(module).items()):
            for value in _alternatives(held):
                if isinstance(module, Mechanism) and not name.startswith("_"):
                    _check_refused(module, name, value)
                elif isinstance(module, Layer) and name not in UNSEEN and not name.startswith("_"):
                    _check_counts(use, module, name, value)
                elif not name.startswith("_"):
                    _check_noticed(use, module, name, value)
    check_now(use, "after options were assigned")


def _has_containers(use: Use) -> bool:
    return any(isinstance(held, list | dict) for module in use.layer.modules() if isinstance(module, Mechanism)
               for held in options(module).values())


@mutation(_has_containers)
def options_in_place(use: Use) -> None:
    """What a list or a dict among a mechanism's options holds may change, and counts from the next call on."""
    use()
    for module in use.layer.modules():
        for held in list(options(module).values()) if isinstance(module, Mechanism) else []:
            if isinstance(held, list):
                held[:] = held[::-1]
            elif isinstance(held, dict):
                held.update(zip(held, list(held.values())[::-1], strict=True))
            check_now(use, f"{held!r} was changed in place")


def _check_refused(module: nn.Module, name: str, value: Any) -> None:
    before = getattr(module, name)
    said = ""
    try:
        setattr(module, name, value)
    except ConfigError as error:
        said = str(error)
    assert said, f"{type(module).__name__}.{name} was assigned without an error"
    assert name in said, f"{said} does not name {name}"
    assert "new layer" in said, f"{said} does not say what to do"
    assert getattr(module, name) is before, f"{name} was assigned and refused"


def _check_counts(use: Use, module: nn.Module, name: str, value: Any) -> None:
    """An attribute of a layer is refused as a mechanism's is, or the next call shows it."""
    before, expected = getattr(module, name), use().detach()
    try:
        setattr(module, name, value)
    except ConfigError:
        _check_refused(module, name, value)
        return
    try:
        same(use().detach(), expected, name)
    except (ValueError, RuntimeError, TypeError, AttributeError, AssertionError, IndexError):
        return
    finally:
        setattr(module, name, before)
    raise AssertionError(f"{type(module).__name__}.{name} = {value!r} does nothing")


def _check_noticed(use: Use, module: nn.Module, name: str, value: Any) -> None:
    before = getattr(module, name)
    setattr(module, name, value)
    what = f"{type(module).__name__}.{name} = {value!r}"
    try:
        with as_written():
            expected = use()
    except (ValueError, RuntimeError, TypeError, AttributeError, AssertionError, IndexError):
        expected = None
    if expected is not None:
        with suppress(ValueError):
            same(use().detach(), expected.detach(), what)
    setattr(module, name, before)


def _alternatives(option: Any) -> Iterator[Any]:
    """Other values of the kind of an option."""
    if isinstance(option, bool):
        yield not option
    elif isinstance(option, int | float):
        yield option + 1
    elif isinstance(option, str):
        yield from ({"sym", "row", "sum", "count", "sender", "receiver", "forward", "backward"} - {option})
    elif option is None:
        yield 1
    elif isinstance(option, tuple) and option:
        yield option[::-1] if option[::-1] != option else (*option, option[-1])
        yield from ((changed, *option[1:]) for changed in _alternatives(option[0]))
    elif callable(option):
        yield torch.sigmoid
    else:
        yield None
