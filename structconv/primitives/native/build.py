"""Compiles the native core: every kernel once for each instruction set, and once the operators that torch calls.

Standard library only, and no import of the package: `tools/native_hook.py` runs this file where torch may not be
installed. The operators use headers of torch, those of its stable ABI, as of `TORCH_TARGET`: one binary serves every
version from there on, and every version of Python. The OpenMP runtime and torch are those that are in the process
already (see loader.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["FLAGS", "LEVELS", "ONCE", "SOURCES", "BuildError", "build", "build_own", "compiler", "digest", "headers",
           "installed", "is_sound", "kernels", "levels", "locked", "own_level", "version"]

SOURCES = Path(__file__).parent / "src"
ONCE = ("isa", "operators")  # the same for all instruction sets
TORCH_TARGET = "0x020a000000000000"  # torch 2.10, the oldest that runs it
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
OPERATOR_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}")
_AVX2 = ("-mavx2", "-mfma")
_OPENMP = sys.platform != "darwin"
LEVELS = {
    "generic": (),
    "avx2": _AVX2,
    "avx512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
}


class BuildError(RuntimeError):
    """The native core could not be compiled; the message says why."""


def levels() -> tuple[str, ...]:
    """The instruction sets worth compiling for this kind of processor, slowest first."""
    return tuple(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ("generic",)


def own_level() -> str:
    """The fastest instruction set that this processor runs, by a probe that is compiled for it.

    Raises:
        BuildError: if there is no compiler, or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.so"
        build(probe, (), openmp=False)
        runs = ctypes.CDLL(str(probe)).structconv_runs
        return [level for number, level in enumerate(LEVELS) if runs(number)][-1]


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, else g++, c++ or clang++, whichever is found first."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and name.strip() and shutil.which(name.split()[0]):
            return name
    return None


def version(cxx: str) -> str:
    """The first line of what the compiler says about itself.

    Raises:
        BuildError: if it cannot be run.
    """
    try:
        said = subprocess.run([*cxx.split(), "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{cxx} does not run: {error}") from error
    return said.stdout.partition("\n")[0]


def digest(*more: str) -> str:
    """A name for what would be built: the sources, the flags, and whatever else matters."""
    checksum = hashlib.sha256(repr((FLAGS, OPERATOR_FLAGS, LEVELS, more)).encode() + Path(__file__).read_bytes())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            checksum.update(path.name.encode() + path.read_bytes())
    return checksum.hexdigest()[:16]


def kernels() -> tuple[str, ...]:
    """The sources that are compiled for each instruction set."""
    return tuple(sorted(path.stem for path in SOURCES.glob("*.cpp") if path.stem not in ONCE))


def headers() -> Path:
    """The headers of the torch that is installed, which is not imported.

    Raises:
        BuildError: if there is none.
    """
    torch = importlib.util.find_spec("torch")
    for place in (torch.submodule_search_locations or ()) if torch else ():
        if (folder := Path(place) / "include").joinpath("torch", "csrc", "stable", "library.h").is_file():
            return folder
    raise BuildError("the headers of torch were not found")


def installed() -> Path:
    """Where the object built at installation lies, if there is one; named after the sources it was built from."""
    return Path(__file__).parent / f"core-{digest()}.so"


def build(target: Path, chosen: Sequence[str], *, openmp: bool = _OPENMP, cxx: str | None = None) -> None:
    """Compile the kernels for the `chosen` levels and put the shared object at `target`, in one atomic step, with its
    SHA-256 beside it.

    Args:
        target: path of the result; its folder is made.
        chosen: names out of `LEVELS`.
        openmp: several threads; without, everything runs on one. Not by default where compilers do not take the flag.
        cxx: the compiler; by default `compiler()`.

    Raises:
        BuildError: if there is no compiler or no torch, or the compiler fails.
    """
    cxx = cxx or compiler()
    if cxx is None:
        raise BuildError("no C++ compiler was found; install g++, or name one in CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        work = Path(folder)
        flags = (*FLAGS, *(("-fopenmp",) if openmp else ("-Wno-unknown-pragmas",)))
        units: list[tuple[str, str, tuple[str, ...]]] = [("isa", "isa", flags)]
        if chosen:
            each = "-DSC_EACH_LEVEL(X)=" + " ".join(f"X({level})" for level in chosen)
            units.append(("operators", "operators", (*OPERATOR_FLAGS, each, "-isystem", str(headers()))))
        for level in chosen:
            units += [(name, f"{name}-{level}", (*flags, f"-DSC_ISA={level}", *LEVELS[level])) for name in kernels()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda unit: _run([*cxx.split(), *unit[2], "-c", SOURCES / f"{unit[0]}.cpp",
                                             "-o", work / f"{unit[1]}.o"]), units))
        open_symbols = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,--as-needed"]
        built = work / target.name
        torch = [f"-L{headers().parent / 'lib'}", "-ltorch_cpu"] if chosen else []  # where its symbols are looked up
        objects = [work / f"{unit[1]}.o" for unit in units]
        _run([*cxx.split(), "-shared", *open_symbols, *objects, *torch, "-lm", "-o", built])
        with built.open("rb") as file:
            os.fsync(file.fileno())  # no name for what a crash may lose
        checked = work / "checksum"
        checked.write_text(_sha256(built))
        os.replace(checked, target.with_suffix(".sha256"))
        os.replace(built, target)


def build_own() -> Path:
    """Build the object of an editable installation: for this processor alone, which takes a third of the time.

    Returns:
        Its path. Processes that start together build once.

    Raises:
        BuildError: as `build` does.
    """
    target = installed()
    with locked(target):
        if not is_sound(target):
            build(target, [own_level()])
    return target


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold a lock file beside `target`, so that processes that start together build once.

    The result is moved in place atomically anyway: where files cannot be locked, the work is merely done twice.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with target.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_sound(path: Path) -> bool:
    """Return True if the object exists and has the checksum of its build."""
    try:
        return path.with_suffix(".sha256").read_bytes() == _sha256(path).encode()
    except OSError:
        return False


def _run(command: Sequence[str | Path]) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed on {Path(command[-3]).name}: {done.stderr.strip()[-800:]}")


if __name__ == "__main__":
    build_own()
