"""Trees of training state as JSON beside named tensors, without pickles; and the states of the random generators."""

import random
from typing import Any

import torch
from torch import Tensor

from structconv.errors import StructureError

__all__ = ["capture_generators", "pack", "restore_generators", "seed_everything", "unpack"]

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def pack(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON part of a tree of dictionaries, lists, tuples, scalars and tensors; the tensors go into `tensors`.

    A tensor becomes ``{"__tensor__": name}`` and is stored, on the CPU and contiguous, under that name, which starts
    with `prefix`. Dictionaries keep keys that are not texts as pairs.

    Raises:
        StructureError: the tree holds a value of another type.
    """
    if isinstance(tree, Tensor):
        tensors[prefix] = tree.detach().cpu().contiguous().clone()
        return {_TENSOR: prefix}
    if isinstance(tree, dict):
        if all(isinstance(key, str) and not key.startswith("__") for key in tree):
            return {key: pack(value, f"{prefix}.{key}", tensors) for key, value in tree.items()}
        return {_ITEMS: [[key, pack(value, f"{prefix}.{key}", tensors)] for key, value in tree.items()]}
    if isinstance(tree, (list, tuple)):
        packed = [pack(value, f"{prefix}.{index}", tensors) for index, value in enumerate(tree)]
        return packed if isinstance(tree, list) else {_TUPLE: packed}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise StructureError("pack", f"{prefix} must be a tensor, a scalar, a text or a container of them",
                         type(tree).__name__)


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(packed, list):
        return [unpack(value, tensors) for value in packed]
    if not isinstance(packed, dict):
        return packed
    if _TENSOR in packed:
        return tensors[packed[_TENSOR]]
    if _TUPLE in packed:
        return tuple(unpack(value, tensors) for value in packed[_TUPLE])
    if _ITEMS in packed:
        return {key: unpack(value, tensors) for key, value in packed[_ITEMS]}
    return {key: unpack(value, tensors) for key, value in packed.items()}


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture_generators() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, as a tree for `pack`."""
    import numpy as np

    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": {"keys": torch.from_numpy(np.asarray(keys).astype("int64")), "position": int(position),
                       "has_gauss": int(has_gauss), "gauss": float(gauss)}}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """The inverse of `capture_generators`; generators of devices that are absent now are left alone."""
    import numpy as np

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy_state = state["numpy"]
    np.random.set_state(("MT19937", numpy_state["keys"].numpy().astype("uint32"), numpy_state["position"],
                         numpy_state["has_gauss"], numpy_state["gauss"]))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
