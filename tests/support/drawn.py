"""Which cases of a test run: all with STRUCTCONV_EVERY_TEST=1 (`make test-every`), otherwise those that are drawn."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")
EVERY = bool(os.environ.get("STRUCTCONV_EVERY_TEST"))
#: A test that takes seconds and whose subject other tests share.
slow = pytest.mark.skipif(not EVERY, reason="runs with STRUCTCONV_EVERY_TEST=1 (make test-every)")


def drawn(cases: Iterable[T], step: int) -> list[T]:
    """One of so many near-equal cases; all of them with STRUCTCONV_EVERY_TEST=1 (`make test-every`)."""
    return list(cases)[::1 if EVERY else step]


@contextmanager
def part(name: str) -> Iterator[None]:
    """A part of a test, which starts from the seed of every test and is named where it fails."""
    torch.manual_seed(0)
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {name}")
        raise
