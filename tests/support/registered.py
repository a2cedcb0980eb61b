"""`own_register`: kernels registered for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from structconv.planning import kernel


@contextmanager
def own_register() -> Iterator[None]:
    """Kernels that are registered within are removed after it."""
    before, known, lists = kernel.Registrations.count, dict(kernel._KERNELS), (kernel._ORDERED, kernel.OF_USERS)
    kept = [list(each) for each in lists]
    try:
        yield
    finally:
        if kernel.Registrations.count != before:
            kernel._KERNELS.clear()
            kernel._KERNELS.update(known)
            for each, of_before in zip(lists, kept, strict=True):
                each[:] = of_before
            kernel.PLANS.clear()
