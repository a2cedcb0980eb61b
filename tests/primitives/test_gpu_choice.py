"""When the GPU kernels cannot be used, torch's operators are, and whoever asks learns why. Needs no Triton."""

import sys
import warnings

import pytest
import torch

from structconv.primitives.csr import spmm
from structconv.primitives.layout import compress
from structconv.primitives.native import dispatch
from structconv.primitives.triton import choice


@pytest.fixture
def product(monkeypatch):
    """A product that asks for the GPU kernels, with its result; the answers are forgotten before and after."""
    monkeypatch.setattr(choice, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "usable", lambda x, edges: None)
    source, target = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])
    layouts = compress(target, source, 2), compress(source, target, 2)
    for cached in (choice._probe, choice._say):
        cached.cache_clear()
    yield lambda: spmm(*layouts, None, torch.tensor([[1.0], [10.0]])).flatten().tolist()
    for cached in (choice._probe, choice._say):
        cached.cache_clear()


class Broken:
    @staticmethod
    def probe(device):
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize(("kernels", "reason"), [
    (None, "GPU kernels are not available.*ModuleNotFoundError"), (Broken, "no C compiler")])
def test_kernels_that_cannot_be_imported_or_run(product, monkeypatch, kernels, reason):
    monkeypatch.setitem(sys.modules, "structconv.primitives.triton.kernels", kernels)
    with pytest.warns(UserWarning, match=reason):
        assert product() == [11.0, 10.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product() == [11.0, 10.0]  # said once


def test_kernels_that_are_turned_off(product, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_TRITON", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product() == [11.0, 10.0]


def test_status_says_what_there_is(product, monkeypatch):
    if not torch.cuda.is_available():
        assert choice.status().startswith("no CUDA device; ")
    monkeypatch.setenv("STRUCTCONV_TRITON", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert choice.status() == "torch operators instead: STRUCTCONV_TRITON=0 turns them off"
