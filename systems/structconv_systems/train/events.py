"""Measurements as event files for TensorBoard, if `tensorboard` is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Events"]


class Events:
    """The event files of a training from a given step on; measurements after the step are replaced.

    Writes nothing if `tensorboard` is not installed.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self._writer: Any = None
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=after + 1)

    def append(self, step: int, values: dict[str, float]) -> None:
        """Add what a step measured."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
