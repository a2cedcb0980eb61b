"""The environment of a run or report: versions, commit and machine."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import structconv
from structconv.commands.versions import PACKAGES, version, versions
from structconv.machine import processor

__all__ = ["environment"]


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, threads and machine, for the record of a run on a device; imports torch."""
    import torch

    return {"structconv": version("structconv"), "commit": _commit(), "packages": versions(PACKAGES),
            "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(),
            "processor": _name(device), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": ["structconv", *sys.argv[1:]]}


def _name(device: str) -> str:
    """The name of a processor or graphics card."""
    if device == "cpu":
        return processor()
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{processor()} ({device})"


def _commit() -> str | None:
    """The commit that both packages were read from, with a plus sign where files were changed; `None` outside git."""
    source = Path(__file__).parents[1]
    library = Path(structconv.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None:
        return None
    paths = [str(place) for place in (source, library) if place.is_relative_to(top)]  # a library elsewhere is no part
    commit = git("log", "-1", "--format=%h", "--", *paths)
    return commit + ("+" if git("status", "--porcelain", "--", *paths) else "") if commit else None
