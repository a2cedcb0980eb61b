"""Runs a module in a process whose tensors lie between pages that nobody may touch: see guard.c.

    python -m tests.native.guarded MODULE [ARGUMENT...]

What a kernel reads or writes beside a tensor ends the process. Within it, `poison` says what new memory is full of.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_GUARD = "STRUCTCONV_GUARD"  # the library, in the environment of the process that is guarded


def build(folder: Path) -> Path | None:
    """The library, compiled in a folder; None where there is no compiler, or the system is not Linux."""
    cc = shutil.which(os.environ.get("CC", "cc"))
    if cc is None or sys.platform != "linux":
        return None
    subprocess.run([cc, "-O1", "-shared", "-fPIC", Path(__file__).with_name("guard.c"), "-o", folder / "guard.so",
                    "-ldl"], check=True)
    return folder / "guard.so"


def environment(library: Path) -> dict[str, str]:
    """That of a guarded process."""
    return {**os.environ, "LD_PRELOAD": str(library), _GUARD: str(library), "OMP_NUM_THREADS": "1"}


def enable() -> ctypes.CDLL | None:
    """Guard all tensors made from now on, if the process is one that is guarded."""
    if _GUARD not in os.environ:
        return None
    library = ctypes.CDLL(os.environ[_GUARD])
    library.guard_blocks.restype = ctypes.c_size_t
    assert library.guard_enable()
    import torch

    before = library.guard_blocks()
    tensor = torch.empty(5)
    assert library.guard_blocks() == before + 1 and tensor.isnan().all()
    return library


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        if library is None:
            print("no C compiler, or not Linux: nothing is guarded")
            return 1
        return subprocess.run([sys.executable, "-m", *sys.argv[1:]], env=environment(library), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
