"""What a layer writes of itself, and reads again."""

from typing import Any

import torch
from torch import Tensor, nn

from structconv.mechanisms import Mixture, Operation
from structconv.nn.expressed import Expressed
from structconv.testing.use import Use
from tests.support.calls import check_now
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import masks, other, trains


def named_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a layer, by all names that they have."""
    passing = {f"{name}.{key}" if name else key for name, module in layer.named_modules(remove_duplicate=False)
               for key in module._non_persistent_buffers_set}
    return {**dict(layer.named_parameters(remove_duplicate=False)),
            **{name: t for name, t in layer.named_buffers(remove_duplicate=False) if name not in passing}}


def check_names(layer: nn.Module) -> None:
    """Keys of `state_dict` are the names of parameters and persistent buffers, one for each. No node of an expression
    is a child."""
    held, state = named_tensors(layer), layer.state_dict(keep_vars=True)
    assert state.keys() == held.keys(), f"keys of state_dict are not names: {sorted(state.keys() ^ held.keys())}"
    assert all(t is held[key] for key, t in state.items()), "a state has other tensors"
    assert len({id(t) for t in state.values()}) == len(state), "a tensor has two names"
    for name, module in layer.named_modules():
        if isinstance(module, Expressed):
            nodes = [own for own, part in module.named_children() if isinstance(part, Operation | Mixture)]
            assert not nodes, f"{name}: {nodes} are nodes of an expression"
            assert "mechanism" not in module._modules


@mutation()
def a_state_is_written(use: Use) -> None:
    """Keys are names; tensors are those of the layer and contiguous, as safetensors wants them."""
    from safetensors.torch import load, save

    check_names(use.layer)
    state = use.layer.state_dict()
    for key, t in state.items():
        assert t.is_contiguous(), f"{key} is not contiguous"
    expected, written = use.copied(), save(state)
    for p in use.layer.parameters():
        p.data = other(p)
    use.layer.load_state_dict(load(written))
    check_now(use, "a written state was loaded", expected)


@mutation(trains)
def a_state_within_another_module(use: Use) -> None:
    """With a prefix, nested, beside another layer; assigned or copied."""
    expected, twin = use.copied(), use.copied()
    whole = nn.ModuleDict({"first": use.layer, "inner": nn.Sequential(twin.layer)})
    state = {key: t.clone() for key, t in whole.state_dict().items()}
    assert list(state) == [f"{place}{key}" for place in ("first.", "inner.0.") for key in use.layer.state_dict()]
    for assign in (False, True):
        for p in whole.parameters():
            p.data = other(p)
        result: Any = whole.load_state_dict({key: t.clone() for key, t in state.items()}, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        check_now(use, f"a nested state was loaded, assign={assign}", expected)
        check_now(twin, f"a nested state was loaded beside it, assign={assign}", expected)


@mutation(trains)
def a_state_that_does_not_fit(use: Use) -> None:
    """What is missing, left over or of another shape is named as it stands in the file; what fits is loaded."""
    state = {key: t.clone() for key, t in use.layer.state_dict().items()}
    optional = {id(t) for t in masks(use.layer)}
    for key in [key for key, t in named_tensors(use.layer).items() if id(t) not in optional]:
        rest = {name: t for name, t in state.items() if name != key}
        told = refused(use.layer, {**rest, "nobodys": torch.zeros(1)})
        assert f'"{key}"' in told and '"nobodys"' in told, told
        assert told.count('"') == 4, f"more is refused than {key} and nobodys: {told}"
        result: Any = use.layer.load_state_dict(rest, strict=False)
        assert result.missing_keys == [key], result
        told = refused(use.layer, {**rest, key: torch.zeros(3, 1, 4, 1, 5)})
        assert f"size mismatch for {key}:" in told, told
    check_now(use, "states that do not fit were refused")


@mutation(trains)
def a_state_without_masks_or_with_those_of_others(use: Use) -> None:
    """Tensors of masks may be missing in a file, or there for masks that a layer has not."""
    state, optional = use.layer.state_dict(), {id(t) for t in masks(use.layer)}
    kept = {key: state[key] for key, t in named_tensors(use.layer).items() if id(t) not in optional}
    use.layer.load_state_dict(kept)
    for name, module in use.layer.named_modules():
        if isinstance(module, Expressed):
            key = f"{name}.mask_9.mask0" if name else "mask_9.mask0"
            use.layer.load_state_dict({**state, key: torch.ones(3, dtype=torch.bool)})
    check_now(use, "states with other masks were loaded")


def refused(layer: nn.Module, state: dict[str, Tensor]) -> str:
    """The error with which a state is refused."""
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a state that does not fit was loaded")
