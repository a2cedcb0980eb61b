"""`ByRole`: keys of `state_dict` that say what a tensor is for, and not where in an expression it stands.

A layer over `(DotProduct(...).scaled() + RelativeBias(2)).softmax()` has `query.weight`, `key.weight`,
`relative_bias.table`, `theta`, `bias`, however the expression is nested, and whatever else is done to the scores. Names
in `named_parameters` remain those of the modules. Files by these names load too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

__all__ = ["ByRole", "state_keys"]

#: Tensors of masks: a file may lack them, or have those of a mask that is not there any more.
_OPTIONAL = re.compile(r"mask\d+(_\d+)*")
#: The role of a module that is no part of the package, as the function of a map.
_FOREIGN = "map"


class ByRole(nn.Module):
    """A module some of whose parts have no name of their own in its `state_dict`.

    What such a part holds goes by its own names, behind the part's `role` where it has one. Where two parts have the
    same name at the top, the first has it as it is and the next ones have it numbered: `query`, `query_1`, ... in the
    order in which they stand. A tensor, or a part, that stands in two places is listed once.
    """

    #: Submodules, or lists of them, whose names say nothing but where they are.
    nameless: ClassVar[tuple[str, ...]] = ()
    #: Names that are its own, whether or not there is such a parameter.
    reserved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """The tensors of this module by their roles, as `torch.nn.Module.state_dict` gives them by their modules."""
        prefix = options.get("prefix", args[1] if len(args) > 1 else "")
        state: dict[str, Any] = super().state_dict(*args, **options)
        keys = {prefix + old: prefix + new for old, new in _renamed(self).items()}
        for key in [key for key in state if key.startswith(prefix)]:
            tensor = state.pop(key)
            state.setdefault(keys.get(key, key), tensor)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
                              strict: bool, missing_keys: list[str], unexpected_keys: list[str],
                              error_msgs: list[str]) -> None:
        """As any module's, from keys by role or by module; what does not fit is named by its role."""
        keys, held, assigned = state_keys(self), _tensors(self), local_metadata.get("assign_to_params_buffers", False)
        for key in _without_a_place(state_dict, prefix, set(keys.values())):
            del state_dict[key]
        sought = {name: key for name, key in keys.items() if name != key and prefix + name not in state_dict}
        given = {name: state_dict[prefix + key] for name, key in sought.items() if prefix + key in state_dict}
        for key in {sought[name] for name in given} - keys.keys():
            del state_dict[prefix + key]
        for name in (name for name in sought if name in held):
            problem = _problem(prefix + sought[name], given.get(name), held[name], missing_keys, error_msgs)
            if problem:  # told here, so that the module itself finds nothing wrong
                given[name] = held[name] if assigned else held[name].detach()
        state_dict.update({prefix + name: tensor for name, tensor in given.items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)


def _without_a_place(state_dict: dict[str, Any], prefix: str, expected: set[str]) -> list[str]:
    """The tensors in a file of masks that are not there."""
    own = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    return [prefix + key for key in own if _OPTIONAL.fullmatch(key) and key not in expected]


def _problem(key: str, given: Any, held: Any, missing_keys: list[str], error_msgs: list[str]) -> bool:
    """Whether what a file has for a tensor does not fit, and say so."""
    if given is None:
        if not _OPTIONAL.fullmatch(key.rpartition(".")[2]) and key not in missing_keys:
            missing_keys.append(key)
        return True
    differs = hasattr(given, "shape") and given.shape != held.shape
    if differs:
        error_msgs.append(f"size mismatch for {key}: copying a param with shape {given.shape} from checkpoint, "
                          f"the shape in current model is {held.shape}.")
    return differs


def state_keys(module: nn.Module) -> dict[str, str]:
    """The key in `state_dict` of each parameter and persistent buffer, by its name in `named_parameters`."""
    found: dict[str, str] = {}
    taken: dict[str, tuple[int, str]] = {}
    for path, role, part in _parts(module, "", ""):
        for head in getattr(part, "reserved", ()):
            _free(role + head, (id(part), role + head), taken)
        for name, key in _own(part):
            head = _head(role + key)
            found[path + name] = _free(head, (id(part), head), taken) + (role + key).removeprefix(head)
    if isinstance(module, ByRole):
        first: dict[int, str] = {}
        for name, tensor in _tensors(module).items():
            if name in found:
                found[name] = first.setdefault(id(tensor), found[name])
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all names that they have."""
    return {**dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False))}


def _parts(module: nn.Module, path: str, role: str) -> Iterator[tuple[str, str, nn.Module]]:
    """The module, then its parts without a name and theirs, each with where it stands and the role it has."""
    yield path, role, module
    for name in getattr(module, "nameless", ()):
        child = module._modules.get(name)
        inside = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        for number, part in inside:
            if part is not None:
                own = getattr(part, "role", _FOREIGN)
                where = f"{path}{name}.{number}." if number else f"{path}{name}."
                yield from _parts(part, where, f"{role}{own}." if own else role)


def _own(part: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and keys of what a module holds itself, or in parts that have a name."""
    kept = [name for name in part._buffers if name not in part._non_persistent_buffers_set]
    for name in (*part._parameters, *kept):
        if (part._parameters if name in part._parameters else part._buffers)[name] is not None:
            yield name, name
    if type(part).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state", "_extra_state"
    for name, child in part._modules.items():
        if child is not None and name not in getattr(part, "nameless", ()):
            yield from ((f"{name}.{inner}", f"{name}.{key}") for inner, key in state_keys(child).items())


def _renamed(module: nn.Module) -> dict[str, str]:
    """The keys of a module, by those that its children's state dicts give."""
    keys, found = state_keys(module), {}
    for name, child in module._modules.items():
        for inner, key in ({} if child is None else state_keys(child)).items():
            found[f"{name}.{key}"] = keys[f"{name}.{inner}"]
    return found


def _head(key: str) -> str:
    """What a key is known by: its first name; of a parametrised tensor the name of the tensor."""
    names = key.split(".")
    return ".".join(names[:2] if names[0] == "parametrizations" else names[:1])


def _free(head: str, owner: tuple[int, str], taken: dict[str, tuple[int, str]]) -> str:
    """The name at the top for what a part has under it."""
    name, number = head, 0
    while taken.setdefault(name, owner) != owner:
        number += 1
        name = f"{head}_{number}"
    return name
