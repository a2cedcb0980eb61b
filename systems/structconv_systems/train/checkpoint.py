"""Checkpoints: one folder each, safetensors and JSON, hashed, renamed into place; corrupt ones are skipped."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from structconv.errors import ConfigError, StructureError
from structconv.files import flush_folder, write_flushed
from structconv_systems.data.text import sha256_of

__all__ = ["Checkpoint", "Checkpoints"]

_WEIGHTS, _STATE, _TREE, _MANIFEST = "weights.safetensors", "state.safetensors", "state.json", "manifest.json"
#: Keys that mark tensors, tuples and dictionaries with other keys than texts, which JSON lacks.
_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A training's state after `step` steps.

    Attributes:
        step: steps done.
        weights: the model's `state_dict`.
        state: everything else as a tree of dictionaries, lists, scalars and tensors: optimizer, generators, stopping
            rule, best weights.
        final: the training is over and `weights` are the ones it chose.

    Example:

        >>> from structconv_systems.train.checkpoint import Checkpoint
        >>> checkpoint = Checkpoint(step=10, weights={"bias": torch.zeros(2)}, state={"stopped": False})
        >>> checkpoint.ends(10), checkpoint.ends(20)
        (True, False)
    """

    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]
    final: bool = False

    def ends(self, steps: int) -> bool:
        """Return True if a training of at most `steps` steps is over."""
        return self.step >= steps or bool(self.state["stopped"])


class Checkpoints:
    """The checkpoints of one training, newest last, in a folder of their own.

    Each is a folder ``step-00000050`` (or ``final``) with ``weights.safetensors``, ``state.safetensors``,
    ``state.json``, which has its step too, and ``manifest.json`` with the SHA-256 of the other three. It is written
    under another name, flushed to disk, and renamed. Nothing in it is a pickle.

    Args:
        folder: created when the first checkpoint is saved.
        keep: number of checkpoints to keep; older ones are removed after a new one is in place.

    Example:

        >>> from tempfile import TemporaryDirectory
        >>> from structconv_systems.train.checkpoint import Checkpoint, Checkpoints
        >>> folder = TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name)
        >>> _ = checkpoints.save(Checkpoint(step=10, weights={"bias": torch.zeros(2)}, state={"rate": 0.1}))
        >>> checkpoints.latest(print).weights
        {'bias': tensor([0., 0.])}
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and return its folder; remove the oldest ones, and those of later steps, which are corrupt
        or the final one of a training that goes on."""
        name = _name(checkpoint.step, checkpoint.final)
        partial, place = self.folder / f".{name}.partial", self.folder / name
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, checkpoint)
        if place.exists():
            shutil.rmtree(place)
        os.replace(partial, place)
        flush_folder(self.folder)
        files = self.files()
        last = files.index(place) + 1
        for other in (*files[:max(last - self.keep, 0)], *files[last:]):
            shutil.rmtree(other)
        return place

    def files(self) -> list[Path]:
        """Return the folders of the checkpoints, oldest first, unverified."""
        final = self.folder / "final"
        return sorted(self.folder.glob("step-*")) + ([final] if final.is_dir() else [])

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest sound checkpoint, if any; `warn` names each corrupt one."""
        files = self.files()
        for place in reversed(files):
            try:
                return load(place)
            except StructureError as error:
                warn(f"{error} It is passed over.")
        if files:
            warn(f"No checkpoint in {self.folder} is sound.")
        return None

    def final(self, warn: Callable[[str], None]) -> Checkpoint:
        """The checkpoint of the finished training.

        Raises:
            ConfigError: the training is not finished.
        """
        checkpoint = self.latest(warn)
        if checkpoint is None or not checkpoint.final:
            raise ConfigError("Checkpoints", f"the training in {self.folder} must be finished",
                              "no final checkpoint", "Continue it with `structconv resume RUN`.")
        return checkpoint


def load(place: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        StructureError: a file is missing or differs from its hash in the manifest, or the folder names another step.
    """
    from safetensors.torch import load_file

    for name, expected in _manifest(place).items():
        path = place / name
        actual = sha256_of(path) if path.is_file() else "no such file"
        if actual != expected:
            raise StructureError("Checkpoint", f"{path} must have SHA-256 {expected}", actual, "It is corrupt.")
    tree = json.loads((place / _TREE).read_bytes())
    _check_tree(place, tree)
    return Checkpoint(step=tree["step"], final=tree["final"], state=unpack(tree["state"], load_file(place / _STATE)),
                      weights=load_file(place / _WEIGHTS))


def _name(step: int, final: bool) -> str:
    return "final" if final else f"step-{step:08d}"


def _check_tree(place: Path, tree: Any) -> None:
    """Raise `StructureError` unless the state is of the step in the name of the folder."""
    if not isinstance(tree, dict) or tree.keys() != {"step", "final", "state"}:
        raise StructureError("Checkpoint", f"{place / _TREE} must hold step, final and state", "something else",
                             "It is of an older version; start anew.")
    if place.name != (expected := _name(tree["step"], tree["final"])):
        raise StructureError("Checkpoint", f"{place} must be named {expected} as its state says", place.name,
                             "It was renamed.")


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    tree = {"step": checkpoint.step, "final": checkpoint.final, "state": pack(checkpoint.state, "state", tensors)}
    weights: dict[str, Tensor] = {}
    for name, value in checkpoint.weights.items():
        pack(value, name, weights)
    write_flushed(folder / _WEIGHTS, save(weights))
    write_flushed(folder / _STATE, save(tensors))
    write_flushed(folder / _TREE, json.dumps(tree).encode())
    hashes = {name: sha256_of(folder / name) for name in (_WEIGHTS, _STATE, _TREE)}
    write_flushed(folder / _MANIFEST, json.dumps({"sha256": hashes}, indent=2).encode())
    flush_folder(folder)


def _manifest(place: Path) -> dict[str, str]:
    """Return the hashes by file."""
    path = place / _MANIFEST
    try:
        hashes: dict[str, str] = json.loads(path.read_bytes())["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StructureError("Checkpoint", f"{path} must list three files with their hashes",
                             f"{type(error).__name__}: {error}", "It is corrupt.") from error
    if not isinstance(hashes, dict) or set(hashes) != {_WEIGHTS, _STATE, _TREE}:
        raise StructureError("Checkpoint", f"{path} must list three files with their hashes", "other contents",
                             "It is corrupt.")
    return hashes


def pack(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON part of a tree of dictionaries, lists, tuples, scalars and tensors; the tensors go into
    `tensors`.

    A tensor becomes ``{"__tensor__": name}``, where the name starts with `prefix`, and is stored on the CPU.
    Dictionaries with keys that are not texts become pairs.

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
    """Invert `pack`."""
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
