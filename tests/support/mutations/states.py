"""What a layer writes of itself, and reads again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structconv.roles import state_keys
from structconv.testing.use import Use
from tests.support.calls import check_now
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import masks, other, trains

__all__: list[str] = []

#: Names that say where in an expression something stands, which a change of the expression changes.
PLACES = {"mechanism", "operands", "held", "conv", "weights"}


@mutation()
def a_state_is_written(use: Use) -> None:
    """Keys name roles; tensors are those of the layer, contiguous, each once, as safetensors wants them."""
    from safetensors.torch import load, save

    state = use.layer.state_dict()
    assert sorted(state) == sorted(set(state_keys(use.layer).values()))
    for key, t in state.items():
        assert not PLACES & set(key.split(".")), f"{key} says where it stands, and not what it is for"
        assert t.is_contiguous(), f"{key} is not contiguous"
    held = {t.data_ptr() for t in (*use.layer.parameters(), *use.layer.buffers())}
    assert {t.data_ptr() for t in state.values()} <= held, "a state has copies"
    expected, written = use.copied(), save(state)
    for p in use.layer.parameters():
        p.data = other(p)
    use.layer.load_state_dict(load(written))
    check_now(use, "a written state was loaded", expected)


@mutation(trains)
def a_state_within_another_module(use: Use) -> None:
    """With a prefix, nested, beside another layer; assigned or copied; by roles and by modules."""
    expected, twin = use.copied(), use.copied()
    whole = nn.ModuleDict({"first": use.layer, "inner": nn.Sequential(twin.layer)})
    state = {key: t.clone() for key, t in whole.state_dict().items()}
    assert list(state) == [f"{place}{key}" for place in ("first.", "inner.0.") for key in use.layer.state_dict()]
    by_modules = {name: t.detach().clone() for name, t in (*whole.named_parameters(remove_duplicate=False),
                                                           *whole.named_buffers(remove_duplicate=False))}
    for assign in (False, True):
        for given in (state, by_modules):
            for p in whole.parameters():
                p.data = other(p)
            result: Any = whole.load_state_dict({key: t.clone() for key, t in given.items()}, assign=assign)
            assert not result.missing_keys and not result.unexpected_keys
            check_now(use, f"a nested state was loaded, assign={assign}", expected)
            check_now(twin, f"a nested state was loaded beside it, assign={assign}", expected)


@mutation(trains)
def a_state_that_does_not_fit(use: Use) -> None:
    """What is missing, left over or of another shape is named as it stands in the file; what fits is loaded."""
    state = {key: t.clone() for key, t in use.layer.state_dict().items()}
    optional = {id(t) for t in masks(use.layer)}
    keys, held = state_keys(use.layer), dict((*use.layer.named_parameters(), *use.layer.named_buffers()))
    needed = [key for name, key in keys.items() if name in held and id(held[name]) not in optional]
    for key in needed:
        rest = {name: t for name, t in state.items() if name != key}
        told = refused(use.layer, {**rest, "nobodys": torch.zeros(1)})
        assert f'"{key}"' in told and '"nobodys"' in told, told
        assert told.count('"') == 4, f"more is refused than {key} and nobodys: {told}"
        result: Any = use.layer.load_state_dict(rest, strict=False)
        assert result.missing_keys == [key], result
        told = refused(use.layer, {**rest, key: torch.zeros(3, 1, 4, 1, 5)})
        assert f"size mismatch for {key}:" in told, told
    check_now(use, "states that do not fit were refused")


def refused(layer: nn.Module, state: dict[str, Tensor]) -> str:
    """The error with which a state is refused."""
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a state that does not fit was loaded")
