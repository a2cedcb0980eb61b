"""Compiles the kernels with a driver and runs them under AddressSanitizer, else valgrind; one run an instruction set.

    python tests/native/run.py [valgrind]

Exit status 0 if nothing is found. Says which checker watched, and says so when there is none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "structconv" / "primitives" / "native" / "build.py"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


def load_build():
    """The package's own build file, without the package."""
    spec = importlib.util.spec_from_file_location("native_build", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(build) -> list[Path]:
    """What the driver is compiled with."""
    return [build.SOURCES / f"{name}.cpp" for name in (*build.kernels(), "isa")]


def compiled(build, cxx: str, level: str, extra: tuple[str, ...], folder: Path) -> Path:
    """The driver with the kernels of one instruction set."""
    flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-fno-exceptions", "-fno-rtti")]
    command = [*cxx.split(), *flags, *build.LEVELS[level], *extra, "-O1", "-fopenmp", f"-DSC_ISA={level}",
               f"-I{build.SOURCES}"]

    def compile_one(source: Path) -> str:
        made = folder / f"{source.stem}-{level}.o"
        subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*sources(build), HERE / "kernels.cpp"]))
    target = folder / level
    subprocess.run([*command, *objects, "-o", str(target)], check=True)
    return target


def runnable(build, cxx: str, folder: Path) -> list[str]:
    """The instruction sets of this processor."""
    probe = folder / "probe.so"
    subprocess.run([*cxx.split(), "-shared", "-fPIC", str(build.SOURCES / "isa.cpp"), "-o", str(probe)], check=True)
    library = ctypes.CDLL(str(probe))
    return [level for level in build.levels() if library.structconv_runs(list(build.LEVELS).index(level))]


def sanitizes(cxx: str, folder: Path) -> bool:
    """Whether the compiler's sanitizers link and run here."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    commands = ([*cxx.split(), *SANITIZE, str(source), "-o", str(folder / "empty")], [str(folder / "empty")])
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def main() -> int:
    build = load_build()
    cxx = build.compiler()
    if cxx is None:
        print("no C++ compiler: the native kernels are not tested")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sanitized = "valgrind" not in sys.argv[1:] and sanitizes(cxx, folder)
        valgrind = None if sanitized else shutil.which("valgrind")
        checker = "AddressSanitizer" if sanitized else "valgrind" if valgrind else "no memory checker"
        # valgrind knows no AVX-512; libgomp keeps its pool, which is no leak
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "ASAN_OPTIONS": "detect_leaks=0"}
        status = 0
        for level in runnable(build, cxx, folder):
            if valgrind and level == "avx512":
                continue
            program = compiled(build, cxx, level, SANITIZE if sanitized else ("-g",), folder)
            prefix = [valgrind, "-q", "--error-exitcode=1"] if valgrind else []
            print(f"{level}, under {checker}:", flush=True)
            status |= subprocess.run([*prefix, str(program)], env=environment, check=False).returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
