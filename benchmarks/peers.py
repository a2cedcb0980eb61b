"""The other libraries, where they are installed: PyTorch Geometric, and DGL with stand-ins for two of its parts."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import types
import warnings
from functools import cache
from typing import Any, ClassVar

from structconv.commands.versions import version
from structconv.commands.versions import versions as installed

__all__ = ["dgl", "geometric", "pyg_lib", "versions"]

#: DGL's last release has binaries of these for older versions of torch only; its CPU operators do not use them.
_ABSENT_IN_DGL = ("dgl.graphbolt", "dgl.distributed")


@cache
def geometric() -> Any:
    """The module `torch_geometric.nn`, or `None`."""
    return _imported("torch_geometric.nn")


@cache
def pyg_lib() -> Any:
    """The module `torch_geometric` where it samples by pyg-lib, or `None`."""
    module = _imported("torch_geometric")
    if module is None or version("pyg-lib") is None:
        return None
    importlib.import_module("torch_geometric.sampler")
    return module


@cache
def dgl() -> Any:
    """The module `dgl`, or `None`; `dgl.nn.pytorch`, `dgl.ops` and `dgl.function` are loaded with it.

    Its import prints and warns about the parts that are replaced, which is not shown.
    """
    if version("dgl") is None:
        return None
    os.environ.setdefault("DGLBACKEND", "pytorch")
    for name in _ABSENT_IN_DGL:
        sys.modules.setdefault(name, _StandIn(name))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        module = _imported("dgl")
        for part in ("dgl.nn.pytorch", "dgl.ops", "dgl.function") if module is not None else ():
            importlib.import_module(part)
    return module


def versions() -> dict[str, str]:
    """The versions of torch and of the peers that are installed."""
    return installed(("torch", "torch-geometric", "dgl"))


class _StandIn(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []  # type: ignore[misc]

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _imported(name: str) -> Any:
    """A module, or `None` where it is not installed or its binaries do not fit this torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (ImportError, OSError):
        return None
