"""Results on several numbers of threads."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def on_threads(run: Callable[[], T], counts: Iterable[int] = (1, 2, 3)) -> list[T]:
    """What a call gives on each number of threads; the number is put back."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    return results
