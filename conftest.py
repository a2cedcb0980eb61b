"""Fixtures and settings of all tests: one thread, one seed, one Hypothesis profile, the data beside the repository."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.support.registered import own_register

settings.register_profile("structconv", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("structconv")


def pytest_configure() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # before the first product, as docs/guarantees.md has it
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, by whichever test comes first


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No garbage is sought while cases are collected, a million objects, nor among these later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed from which every test starts, in each of the three generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Generator[None]:
    """Kernels that the tests of a module register are removed after them."""
    with own_register():
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data sets: STRUCTCONV_DATA, or shared/data beside the repository."""
    folder = Path(os.environ.get("STRUCTCONV_DATA", Path(__file__).parents[1] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; name their folder by STRUCTCONV_DATA")
    return folder
