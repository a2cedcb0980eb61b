"""`python -m structconv`: the command `structconv`."""

from __future__ import annotations

import sys

from structconv.cli import main

if __name__ == "__main__":
    sys.exit(main())
