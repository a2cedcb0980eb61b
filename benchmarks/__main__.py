"""`python -m benchmarks ...` is `structconv bench ...`, of this checkout."""

from __future__ import annotations

import sys

from structconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
