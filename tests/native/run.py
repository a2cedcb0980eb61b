"""Runs the tests of the native kernels under AddressSanitizer and UBSan, once for each instruction set.

    python -m tests.native.run [PYTEST ARGUMENT...]

Exit status 0 if nothing is found. A tensor is a block of exactly its size: what a kernel reads or writes beside it is
found, whichever test it is in. Without arguments, all operators are called wrongly first: primitives/raw_native.py, and
52,000 times without the checkers, between guarded pages.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from structconv.primitives.native import build, loader
from tests.native import guarded

ROOT = Path(__file__).parents[2]
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
TESTS = ("tests/compat/test_pyg_norms.py", "tests/compat/test_torch.py", "tests/compat/test_steps.py",
         "tests/compat/test_pyg.py::test_attention_among_few_nodes_is_one_node_of_autograd",
         "tests/compat/test_pyg.py::test_messages_with_attributes_are_one_node_and_so_are_their_derivatives",
         "tests/primitives", "tests/kernels/test_attention_step.py", "tests/kernels/test_new_graphs.py",
         "tests/kernels/test_window_attention.py", "tests/nn/test_direct.py",
         "tests/nn/test_step_gradients.py", "tests/test_loaders.py")
#: What starts processes or compilers, or needs no kernel.
LEFT_OUT = "not triton and not compile and not program and not native_build and not memory and not raw_calls"
RAW_CALLS = """from tests.native import run
from tests.primitives import raw_native
run.pytest_configure()
raw_native.run(0, 12)"""


def runtimes(cxx: str) -> str | None:
    """The sanitizers' libraries, to be loaded before all others; None where the compiler has none."""
    actual = [subprocess.run([*cxx.split(), f"-print-file-name={name}"], capture_output=True, text=True,
                            check=True).stdout.strip() for name in ("libasan.so", "libubsan.so")]
    return " ".join(actual) if all(map(os.path.isabs, actual)) else None


def pytest_configure() -> None:
    """In the process that runs the tests: the core is the one that is checked, and memory beside tensors is watched."""
    tensor = torch.ones(5)
    watched = ctypes.CDLL(None).__asan_address_is_poisoned
    watched.argtypes = [ctypes.c_void_p]
    assert watched(tensor.data_ptr() + tensor.nbytes) and not watched(tensor.data_ptr())
    build.installed = lambda: Path(os.environ["STRUCTCONV_CHECKED_CORE"])
    core = loader.core()
    assert core is not None and core.status.path == os.environ["STRUCTCONV_CHECKED_CORE"]


def raw_calls(environment: dict[str, str]) -> int:
    """Make wrong calls of every operator; 0 if none ends the process or has a wrong answer."""
    done = subprocess.run([sys.executable, "-c", RAW_CALLS], env=environment, cwd=ROOT, capture_output=True, text=True,
                          check=False)
    wrong = done.returncode != 0 or "wrong" in done.stdout
    print(done.stdout, done.stderr.rpartition("\ncalls ")[2] if wrong else "", flush=True)
    return int(wrong)


def guarded_calls() -> int:
    """Make wrong calls between pages that nobody may touch; 0 if none ends the process or has a wrong answer."""
    cases = ["with_kernels", "native"]
    with tempfile.TemporaryDirectory() as folder:
        library = guarded.build(Path(folder))
        assert library is not None
        done = subprocess.run([sys.executable, "-m", "tests.primitives.raw_processes", folder, "200", *cases],
                              env=guarded.environment(library), cwd=ROOT, capture_output=True, text=True, check=False)
        said, errors = ("".join(path.read_text()[-3000:] for path in Path(folder).glob(f"*.{kind}"))
                        for kind in ("out", "err"))
    wrong = done.stdout.split() != ["with_kernels", "0", "native", "0"] or "wrong" in said
    print("between guarded pages:", said, *([done.stderr, errors] if wrong else []), flush=True)
    return int(wrong)


def main() -> int:
    cxx = build.compiler()
    preload = None if cxx is None else runtimes(cxx)
    if cxx is None or preload is None:
        print("no C++ compiler with AddressSanitizer: the native kernels are not checked")
        return 1
    levels, status = build.levels(), 0 if sys.argv[1:] else guarded_calls()
    build.FLAGS = (*(flag for flag in build.FLAGS if flag not in ("-O3", "-fno-exceptions", "-fno-rtti")), *SANITIZE)
    build.OPERATOR_FLAGS = (*build.OPERATOR_FLAGS, *SANITIZE, "-fno-sanitize=vptr")  # torch's classes have no typeinfo
    with tempfile.TemporaryDirectory() as folder:
        for level in levels[:levels.index(loader._torch_level()) + 1]:
            print(f"{level}:", flush=True)
            target = Path(folder) / f"{level}.so"
            build.build(target, [level], cxx=cxx)
            options = "detect_leaks=0:allocator_may_return_null=1"  # too large a size is an exception
            environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": options,
                           "OMP_NUM_THREADS": "1", "STRUCTCONV_CHECKED_CORE": str(target)}
            if not sys.argv[1:]:
                status |= raw_calls(environment)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.native.run", "-k", LEFT_OUT]
            done = subprocess.run([*command, *(sys.argv[1:] or TESTS)], env=environment, cwd=ROOT, check=False)
            status |= done.returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
