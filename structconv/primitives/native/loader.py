"""Finds the native core, or builds it at first use, and loads it next to torch's OpenMP runtime.

In this order: the object built at installation; one in the user's cache folder, named after sources, flags, compiler
and instruction set; one built there now. Where none of this works, one warning says why, and torch's operators are
used. `STRUCTCONV_NATIVE=0` in the environment turns the core off.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.files import cache_folder
from structconv.primitives.memory import new_empty
from structconv.primitives.native import build

__all__ = ["CALLED", "Core", "Status", "core", "loaded", "status"]

_RUNTIMES = ("libgomp", "libomp", "libiomp")
_LOG = logging.getLogger("structconv")
_TURNED_OFF = "STRUCTCONV_NATIVE=0 turns it off"
_NOT_FOR_THIS = f"it is not made for {sys.platform}"


@dataclass(frozen=True)
class Status:
    """The state of the native core.

    Args:
        available: True if it is used.
        reason: why not, or None.
        path: the shared object.
        origin: "installed", "cache" or "built now".
        level: "avx512", "avx2" or "generic".
        compiler: who built it in the cache; None for an installed one.
        runtime: the OpenMP runtime it shares with torch; None: it runs on one thread.
        threads: how many it would use now.
    """

    available: bool
    reason: str | None = None
    path: str | None = None
    origin: str | None = None
    level: str | None = None
    compiler: str | None = None
    runtime: str | None = None
    threads: int = 1


class Core:
    """The loaded kernels: one attribute an operator of src/operators.cpp, called past the lookup of `torch.ops`."""

    def __init__(self, library: ctypes.CDLL, level: str, status: Status) -> None:
        self.status = status
        register, self._named = library.structconv_register, library.structconv_operator
        register.restype = self._named.restype = ctypes.c_char_p
        register.argtypes, self._named.argtypes = [ctypes.c_char_p, ctypes.c_char_p], [ctypes.c_int64]
        number = next(_NUMBER)
        self.space = f"{_SPACE}_{number}" if number else _SPACE
        if (wrong := register(self.space.encode(), level.encode())) is not None:
            raise build.BuildError(f"native core refused: {wrong.decode(errors='replace').splitlines()[0]}")
        self._library = torch.library.Library(self.space, "IMPL")
        for name in self.operators():  # what autograd would do, the functions of this package have done
            self._library.impl(name, torch.library.fallthrough_kernel, "AutogradCPU")

    def operators(self) -> list[str]:
        """Their names."""
        return [name.decode() for name in iter(map(self._named, itertools.count()).__next__, None)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """An operator that is called for the first time."""
        if name.startswith("_"):
            raise AttributeError(name)
        function: Callable[..., Any] = private.bound(getattr(getattr(torch.ops, self.space), name).default)
        setattr(self, name, function)
        return function


def _large(shape: list[int], half: bool) -> Tensor:
    """Memory for a large result of an operator."""
    return new_empty(_NOTHING, tuple(shape), torch.bfloat16 if half else torch.float32)


_SPACE, _NUMBER, _NOTHING = "structconv_native", itertools.count(), torch.empty(0)
#: Operators that C++ calls: `large` allocates memory, `product` is implemented in `products`.
CALLED = torch.library.Library(_SPACE, "FRAGMENT")
CALLED.define("large(int[] shape, bool half) -> Tensor")
CALLED.impl("large", _large, "CompositeExplicitAutograd")
CALLED.define("product(Tensor x, Tensor w, Tensor? bias, bool turned) -> Tensor")


def core() -> Core | None:
    """The kernels, or None where torch's operators must do; the first call loads or builds, or warns that it failed."""
    loaded, reason = _outcome()
    if loaded is None:
        _say(reason)
    return loaded


def loaded() -> Core | None:
    """The kernels if they have been loaded: nothing is built."""
    return core() if _outcome.cache_info().currsize else None


@cache
def _say(reason: str | None) -> None:
    """Warn once if the kernels are missing and were not turned off."""
    if reason not in (_TURNED_OFF, _NOT_FOR_THIS):
        message = f"structconv's native kernels are not available, torch's operators are used: {reason}"
        warnings.warn(message, stacklevel=5)


def status() -> Status:
    """Return the state that `structconv doctor` shows. Loads or builds the core if that was not tried yet."""
    loaded, reason = _outcome()
    if loaded is None:
        return Status(False, reason)
    threads = torch.get_num_threads() if loaded.status.runtime else 1
    return replace(loaded.status, threads=threads)


@cache
def _outcome() -> tuple[Core | None, str | None]:
    if os.environ.get("STRUCTCONV_NATIVE", "1") == "0":
        return None, _TURNED_OFF
    if sys.byteorder != "little" or sys.maxsize < 2**32 or os.name == "nt":
        return None, _NOT_FOR_THIS
    try:
        return _find(), None
    except (OSError, AttributeError, ValueError, build.BuildError) as error:
        return None, str(error)


def _find() -> Core:
    runtime = _share_runtime()
    path = build.installed()
    if build.is_sound(path):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(path))
            level = _level(library, build.levels())
            return Core(library, level, Status(True, None, str(path), "installed", level, None, runtime))
    cxx = build.compiler()
    if cxx is None:
        raise build.BuildError("no C++ compiler was found; install g++, or name one in CXX")
    said, level = build.version(cxx), _torch_level()
    path = cache_folder() / f"core-{level}-{build.digest(cxx, said, level, str(runtime is not None))}.so"
    origin = "cache"
    if not build.is_sound(path):
        with build.locked(path):
            if not build.is_sound(path):
                _LOG.warning("building structconv's native kernels once, for %s, in %s: half a minute%s", level, path,
                             "; the file there is damaged" if path.is_file() else "")
                build.build(path, [level], openmp=runtime is not None, cxx=cxx)
                origin = "built now"
                if not build.is_sound(path):
                    raise build.BuildError(f"{path} is not what was built")
    library = ctypes.CDLL(str(path))
    return Core(library, _level(library, (level,)), Status(True, None, str(path), origin, level, said, runtime))


def _level(library: ctypes.CDLL, compiled: tuple[str, ...]) -> str:
    """The fastest of the compiled levels that this processor runs; an editable installation has but one."""
    runs = [level for level in compiled if hasattr(library, f"structconv_spmm_{level}")
            and library.structconv_runs(list(build.LEVELS).index(level))]
    if not runs:
        raise OSError(f"this processor runs none of {', '.join(compiled)}")
    return runs[-1]


def _torch_level() -> str:
    """The level to build for, by what torch found the processor to be."""
    level = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "generic")
    return level if level in build.levels() else "generic"


def _share_runtime() -> str | None:
    """Open the symbols of the OpenMP runtime that torch has loaded to what is loaded next, so that there is one pool.

    A second runtime would mean twice the threads for the same cores. None: torch has none that can be found.
    """
    for path in sorted(_loaded_libraries(), key=lambda path: "/torch/" not in path):
        if Path(path).name.startswith(_RUNTIMES):
            with contextlib.suppress(OSError):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return path
    return None


def _loaded_libraries() -> list[str]:
    """Paths of the shared objects in this process, where the system lists them."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    return sorted(path for path in paths if ".so" in path)
