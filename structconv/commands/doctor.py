"""doctor: versions, threads, extras and the rates of the machine."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from structconv.commands.options import no_more
from structconv.commands.output import print_json
from structconv.commands.table import print_table
from structconv.commands.versions import PACKAGES, version
from structconv.machine import processor

__all__ = ["add"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "print versions, threads, optional packages and the cache folder"
    parser = verbs.add_parser("doctor", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.add_argument("--measure", action="store_true", help="measure the machine's rates again; takes seconds")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("doctor", rest)
    result = _findings(args.measure)
    if args.json:
        print_json(result)
    else:
        rows = [(key.replace("_", " "), _text(value)) for key, value in result.items()]
        print_table(("setting", "on this machine"), rows, texts=2)
        if result["copy_gbs"] is None:
            print("The machine's rates are not measured; structconv doctor --measure does it.")
    return 0


def _findings(measure: bool) -> dict[str, Any]:
    import torch

    from structconv.planning import machine
    from structconv.primitives import native, triton

    rates = machine.measure() if measure else machine.load()
    core = native.status()
    return {"structconv": version("structconv"), "structconv_systems": version("structconv-systems"),
            "python": platform.python_version(), "platform": platform.platform(),
            "processor": processor(), "cores": os.cpu_count(), "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(), "torch_capability": torch.backends.cpu.get_cpu_capability(),
            "torch_mkl": torch.backends.mkl.is_available(), "torch_onednn": torch.backends.mkldnn.is_available(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "native_kernels": _core(core), "native_threads": core.threads,
            "gpu_kernels": triton.status(),
            **{name: version(name) for name in PACKAGES}, "cache_folder": str(machine.cache_folder()),
            "matrix_products_gflops": rates and round(rates.gflops, 1),
            "copy_gbs": rates and round(rates.copy_gbs, 1), "gather_gbs": rates and round(rates.gather_gbs, 1)}


def _core(status: Any) -> str:
    """Describe the state of the native kernels."""
    if not status.available:
        return f"torch operators instead: {status.reason}"
    return f"{status.level}, {status.origin}" + (f", by {status.compiler}" if status.compiler else "")


def _text(value: object) -> str:
    if value is None:
        return "absent"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
