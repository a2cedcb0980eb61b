"""Versions of installed packages, and the name of the processor."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

__all__ = ["PACKAGES", "processor", "version", "versions"]

#: Packages that the library or `structconv-systems` uses, beside torch.
PACKAGES = ("numpy", "scipy", "networkx", "scikit-learn", "matplotlib", "rich", "safetensors", "tokenizers",
            "sacrebleu", "rdkit", "tensorboard")


def version(package: str) -> str | None:
    """Return the installed version of a package; `None` if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    return {name: number for name in packages if (number := version(name)) is not None}


def processor() -> str:
    """The processor's name as Linux gives it, else what Python knows of it."""
    known = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in known.read_text().splitlines()
             if line.startswith("model name")] if known.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
