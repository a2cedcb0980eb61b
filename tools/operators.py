"""Run every operator of torch that the library defines in every mode of torch, and print or write the table.

    python tools/operators.py [--write]

A mode is tried twice, with the native kernels and with torch's operators in their place (`STRUCTCONV_NATIVE=0`).
Derivatives in float32 are compared with those in float64, and these with finite differences; the rest with the plain
call. `--write` puts the table into docs/reference/operators.md, which a test compares with the operators.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "operators.md"
COLUMNS = ("CPU, native", "CPU, torch", "CUDA", "forward", "backward", "double backward", "vmap", "jvp", "compile",
           "export", "autocast")
Function = Callable[..., Tensor]


def _close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return result.shape == expected.shape and torch.allclose(result.double(), expected.double(), tolerance, tolerance)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def _first(fn: Function, tensors: list[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(fn(*inputs).tanh().sum(), inputs, create_graph=create_graph)


def _second(fn: Function, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    inputs = [t.detach().requires_grad_() for t in tensors]
    squares = sum(g.square().sum() for g in _first(fn, inputs, create_graph=True))
    return torch.autograd.grad(squares, inputs, materialize_grads=True)


def _tangent(fn: Function, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return (torch.func.jvp(fn, tuple(tensors), tuple(t.cos() for t in tensors))[1],)


def _alike(derivative: Callable[[Function, list[Tensor]], tuple[Tensor, ...]], fn: Function,
           tensors: list[Tensor]) -> bool:
    """Derivatives in float32, which native kernels compute, are those in float64."""
    wide = [t.double() for t in tensors]
    return all(map(lambda a, b: _close(a, b, 1e-3), derivative(fn, tensors), derivative(fn, wide)))


def _backward(fn: Function, tensors: list[Tensor]) -> bool:
    return _alike(_first, fn, tensors) and gradcheck(fn, _leaves(tensors), fast_mode=True)


def _double_backward(fn: Function, tensors: list[Tensor]) -> bool:
    return _alike(_second, fn, tensors) and gradgradcheck(fn, _leaves(tensors), fast_mode=True)


def _vmap(fn: Function, tensors: list[Tensor]) -> bool:
    many = [torch.stack([t, -t]) for t in tensors]
    return _close(torch.vmap(fn)(*many), torch.stack([fn(*tensors), fn(*(-t for t in tensors))]))


def _jvp(fn: Function, tensors: list[Tensor]) -> bool:
    return _alike(_tangent, fn, tensors) and gradcheck(fn, _leaves(tensors), fast_mode=True, check_forward_ad=True,
                                                       check_backward_ad=False)


def _compile(fn: Function, tensors: list[Tensor]) -> bool:
    torch._dynamo.reset()
    return _close(torch.compile(fn, fullgraph=True, backend="aot_eager")(*tensors), fn(*tensors))


def _export(fn: Function, tensors: list[Tensor]) -> bool:
    class Program(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return fn(*inputs)

    return _close(torch.export.export(Program(), tuple(tensors)).module()(*tensors), fn(*tensors))


def _autocast(fn: Function, tensors: list[Tensor]) -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        return _close(fn(*tensors), fn(*tensors).float(), 0.05) and _close(fn(*tensors), fn(*tensors), 0)


MODES: dict[str, Callable[[Function, list[Tensor]], bool]] = {
    "backward": _backward, "double backward": _double_backward, "vmap": _vmap, "jvp": _jvp, "compile": _compile,
    "export": _export, "autocast": _autocast}


def passes(mode: str, fn: Function, tensors: list[Tensor]) -> bool:
    """Whether an operator has the right answer in a mode; an error of torch or of the library is none."""
    try:
        return MODES[mode](fn, tensors)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        print(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False


def _cases() -> dict[str, tuple[Function, list[Tensor]]]:
    from tests.primitives.test_derivatives import CASES

    torch.manual_seed(0)
    return {name: (fn, [torch.randn(shape) for shape in shapes]) for name, (fn, shapes) in CASES.items()}


def _calls(fn: Function, tensors: list[Tensor]) -> tuple[bool, bool]:
    """Whether a call reaches a kernel of the native core, and whether it asks for one of Triton."""
    from structconv.primitives import triton
    from structconv.primitives.native.loader import core

    reached: set[str] = set()

    def noted(owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *arguments: (reached.add(kind), function(*arguments))[1])
        undo.append(lambda: setattr(owner, name, function))

    undo: list[Callable[[], None]] = []
    native = core()
    for name in native.operators() if native is not None else ():
        noted(native, name, "native")
    for name in ("usable", "usable_product"):
        noted(triton, name, "triton")
    with torch.no_grad():
        fn(*tensors)
    for step in undo:
        step()
    return "native" in reached, "triton" in reached


def measure() -> dict[str, dict[str, Any]]:
    """What became of every operator and mode in this process, with the result of the plain call."""
    result: dict[str, dict[str, Any]] = {}
    for name, (fn, tensors) in _cases().items():
        print(name, file=sys.stderr)
        native, triton = _calls(fn, tensors)
        result[name] = {"native": native, "triton": triton, "result": fn(*tensors).double().tolist(),
                       "modes": {mode: passes(mode, fn, tensors) for mode in MODES}}
    return result


def run(native: str) -> dict[str, dict[str, Any]]:
    """`measure` in a process of its own, with native kernels ("1") or without ("0")."""
    environment = {**os.environ, "STRUCTCONV_NATIVE": native, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'systems'}"}
    done = subprocess.run([sys.executable, __file__, "--measure"], stdout=subprocess.PIPE, text=True, check=True,
                          env=environment)
    measured: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def table(native: Mapping[str, Mapping[str, Any]], plain: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown, a row for each operator, from what `measure` found with and without native kernels."""
    lines = ["| operator | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, with_core in native.items():
        without = plain[name]
        equal = _close(torch.tensor(with_core["result"]), torch.tensor(without["result"]))
        cells = ["kernel" if with_core["native"] else "-", "yes", "Triton" if without["triton"] else "torch",
                 "yes" if equal else "no"]
        for mode in MODES:
            ways = with_core["modes"][mode], without["modes"][mode]
            cells.append({(True, True): "yes", (True, False): "native", (False, True): "torch"}.get(ways, "no"))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; write it into the docs if asked."""
    warnings.simplefilter("ignore")
    if "--measure" in sys.argv:
        print(json.dumps(measure()))
        return
    text = table(run("1"), run("0"))
    print(text)
    if "--write" in sys.argv:
        sys.path.insert(0, str(ROOT))
        from tools.pages import write_table

        write_table(PAGE, "operators.py", text)


if __name__ == "__main__":
    main()
