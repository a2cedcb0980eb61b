"""One process at a time in a run's folder."""

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from structconv.errors import ConfigError

__all__ = ["in_turn", "locked"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder; the system lets go of it when the process ends, however that is.

    Raises:
        ConfigError: another one holds it; its process, machine and start are named.
    """
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            raise ConfigError("Run", f"{folder} must be free", f"held by {holder}",
                              "Wait until it ends, or interrupt it.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Hold a folder, after whoever holds it now; nothing is written into it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
