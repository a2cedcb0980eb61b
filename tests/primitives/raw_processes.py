"""Wrong calls of operators, each kind in a copy of one process that has imported torch.

    python -m tests.primitives.raw_processes FOLDER ROUNDS CASE...

FOLDER/CASE.out and CASE.err hold what a copy writes; a line with the case and the exit status of each is printed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which the first gradient of an operator imports

from tests.native import guarded
from tests.primitives import raw_calls, raw_native

ROUNDS = int(sys.argv[2])


def beside_a_tensor() -> None:
    """A process of its own for each place; prints how it ended."""
    guarded.enable()
    tensors = [torch.zeros(5) for _ in range(2)]  # one begins after a page, the other ends before one
    for beside in (0, -4, 20):
        child = os.fork()
        if not child:
            for t in tensors:
                ctypes.c_float.from_address(t.data_ptr() + beside).value  # noqa: B018
            os._exit(0)
        print(os.waitpid(child, 0)[1])


CASES = {"without_kernels": lambda: raw_calls.run("0", 2, ROUNDS),
         "with_kernels": lambda: raw_calls.run("1", 0, ROUNDS),
         "native": lambda: raw_native.run(0, 4 * ROUNDS), "beside": beside_a_tensor}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[3:]:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 1
            try:
                for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
                    os.dup2(os.open(Path(sys.argv[1]) / f"{name}.{kind}", os.O_CREAT | os.O_WRONLY), stream.fileno())
                CASES[name]()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(name, os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
