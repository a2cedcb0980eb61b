"""Measurements as event files for TensorBoard, if `tensorboard` is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

__all__ = ["events"]


@contextmanager
def events(folder: Path, after: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Within it a function that writes what a step measured; measurements after the step `after` are replaced."""
    if not find_spec("tensorboard"):
        yield lambda step, values: None
        return
    from torch.utils.tensorboard import SummaryWriter

    def written(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(folder), purge_step=after + 1) as writer:
        yield written
