"""Wrong calls of operators, each kind in a copy of one process that has imported torch.

    python -m tests.primitives.raw_processes FOLDER ROUNDS CASE...

FOLDER/CASE.out and CASE.err hold what a copy writes; a line with the case and the exit status of each is printed.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # which the first gradient of an operator imports

from tests.primitives import raw_calls, raw_native

ROUNDS = int(sys.argv[2])


CASES = {"without_kernels": lambda: raw_calls.run("0", 2, ROUNDS),
         "with_kernels": lambda: raw_calls.run("1", 0, ROUNDS),
         "native": lambda: raw_native.run(0, 4 * ROUNDS)}


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
