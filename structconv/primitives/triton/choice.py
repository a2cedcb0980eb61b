"""Decide if the GPU kernels can be used, for operators and for `structconv doctor`."""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from structconv.primitives.native.indices import LIMIT

__all__ = ["DEVICES", "MAX_CHANNELS", "status", "usable", "usable_product", "working"]

DEVICES = ("cuda",)
MAX_CHANNELS = 1024
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_TURNED_OFF = "STRUCTCONV_TRITON=0 turns them off"


def usable(x: Tensor, edges: int) -> Any:
    """`structconv.primitives.triton.kernels`, if their attention can take x (., K, C); else None.

    On a GPU: float32, bfloat16 or float16, C of at most `MAX_CHANNELS`, since a row of one head stays in registers,
    and like all sizes `edges` below 2^31 - 1.
    """
    return None if x.shape[-1] > MAX_CHANNELS else usable_product(x, edges)


def usable_product(x: Tensor, edges: int, programs: int = 0) -> Any:
    """The same for products, which take any number of channels; `programs` is rows of values times rows."""
    if x.device.type not in DEVICES or x.dtype not in _STORED or max(edges, programs, *x.shape) >= LIMIT:
        return None
    kernels, reason = _probe(x.device)
    if kernels is None:
        _say(reason)
    return kernels


def working(device: torch.device) -> bool:
    """Return True if programs that Triton compiles run on this device. O(1) after the first call."""
    return _probe(device)[0] is not None


def status() -> str:
    """One line for `structconv doctor`: Triton's version and the GPU, or why the kernels are not used."""
    if not torch.cuda.is_available():
        return f"no CUDA device; {_version() or 'Triton is not installed'}"
    kernels, reason = _probe(torch.device("cuda", torch.cuda.current_device()))
    if kernels is None:
        return f"torch operators instead: {reason}"
    return f"{_version() or 'triton'}, {torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}"


def _version() -> str | None:
    try:
        return f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        return None


@cache
def _say(reason: str) -> None:
    """Warn once where the kernels are missing unasked."""
    if reason != _TURNED_OFF:
        message = f"structconv's GPU kernels are not available, torch's operators are used: {reason}"
        warnings.warn(message, stacklevel=4)


@cache
def _probe(device: torch.device) -> tuple[Any, str]:
    """(the kernels, "") after one of them has run on the device, or (None, why not).

    Triton finds out at its first launch that it lacks a C compiler or does not know the GPU, by exceptions of many
    kinds; each of them means here that torch's operators must do.
    """
    if os.environ.get("STRUCTCONV_TRITON", "1") == "0":
        return None, _TURNED_OFF
    try:
        kernels = importlib.import_module("structconv.primitives.triton.kernels")
        kernels.probe(device)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return kernels, ""
