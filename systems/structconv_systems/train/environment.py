"""What a run, or a report, says of where it was made: versions, the commit, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "environment", "processor", "version", "versions"]

#: What the extras bring, beside torch.
PACKAGES = ("numpy", "scipy", "networkx", "scikit-learn", "matplotlib", "rich", "safetensors", "tokenizers",
            "sacrebleu", "rdkit", "tensorboard")


def environment() -> dict[str, Any]:
    """Versions, threads and machine, for the record of a run; imports torch."""
    import torch

    return {"structconv": version("structconv"), "commit": _commit(), "packages": versions(PACKAGES),
            "python": platform.python_version(), "torch": torch.__version__,
            "platform": platform.platform(), "processor": processor(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": ["structconv", *sys.argv[1:]]}


def version(package: str) -> str | None:
    """The installed version of a package; `None` where there is none."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    return {name: found for name in packages if (found := version(name)) is not None}


def _commit() -> str | None:
    """The commit that the package was read from, with a plus sign where files were changed; `None` outside git."""
    source = Path(__file__).parents[1]

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("log", "-1", "--format=%h", "--", str(source))
    return commit + ("+" if git("status", "--porcelain", "--", str(source)) else "") if commit else None


def processor() -> str:
    """The processor's name as Linux gives it, else what Python knows of it."""
    known = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in known.read_text().splitlines()
             if line.startswith("model name")] if known.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
