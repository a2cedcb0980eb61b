"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor"]


def processor() -> str:
    """The processor's name as Linux gives it, else what Python knows of it."""
    known = Path("/proc/cpuinfo")
    if known.is_file():
        with known.open() as lines:  # one part for each core: read only up to the first name
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
