"""What the machine is."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor"]


def processor() -> str:
    """The processor's name as Linux gives it, else what Python knows of it."""
    known = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in known.read_text().splitlines()
             if line.startswith("model name")] if known.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
