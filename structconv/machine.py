"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor"]


def processor() -> str:
    """Return the processor's name from Linux, else from Python."""
    processors = Path("/proc/cpuinfo")
    if processors.is_file():
        with processors.open() as lines:  # one part for each core: read only up to the first name
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
