"""Checks an installed wheel: its native kernels run, and layers on them agree with float64 by torch's operators.

    python -I tools/check_wheel.py

Run it outside of a checkout, by the Python of an environment without a compiler. Exit status 0 if all holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv import GATConv, GCNConv, Graph, MultiheadAttention
from structconv.primitives import native


def counted(core: Any) -> list[str]:
    """Replace the operators of the core by ones that add their name to the list."""
    called: list[str] = []

    def counting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append(name)
            return operator(*arguments)

        return call

    for name in core.operators():
        setattr(core, name, counting(name, getattr(core, name)))
    return called


def results(layer: torch.nn.Module, x: Tensor, *more: Any) -> list[Tensor]:
    """The output, and the gradients of its weighted sum in x and all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x, *more)
    weights = torch.linspace(0.5, 1, y.numel()).to(y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def main() -> None:
    status = native.status()
    print(f"torch {torch.__version__}; native kernels: {status.level}, {status.origin}, {status.path}")
    assert status.available and status.origin == "installed", status.reason
    called = counted(native.core())
    torch.manual_seed(0)
    graph = Graph(torch.randint(300, (2, 2000)), num_nodes=300)
    heads = MultiheadAttention(32, 4)
    cases = [("GCN", GCNConv(16, 24), (torch.randn(300, 16), graph)),
             ("GAT", GATConv(16, 8, heads=4), (torch.randn(300, 16), graph)),
             ("multi-head attention", heads, (torch.randn(2, 50, 32),))]
    for name, layer, arguments in cases:
        called.clear()
        result = results(layer, *arguments)
        used = sorted(set(called))
        expected = results(layer.double(), arguments[0].double(), *arguments[1:])
        error = max(float((a - b).abs().max() / b.abs().max().clamp_min(1))
                    for a, b in zip(result, expected, strict=True))
        print(f"{name}: {error:.1e} from float64, by {', '.join(used) or 'no native operator'}")
        assert error < 1e-5, name
        assert used or layer is heads, f"{name} ran no native operator"  # a kernel for all pairs is cheapest there


if __name__ == "__main__":
    main()
