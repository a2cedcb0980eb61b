"""One case: our layer, other libraries' layers with equal weights, and the least possible work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rates import Work
from structconv.nn import Linear

__all__ = ["BOTH", "FORWARD", "PHASES", "Case", "Comparison", "Entrant", "Size", "copied", "entrant", "heads_to_rows",
           "in_torch", "leaf"]

#: Inference without gradients; the forward pass with gradients to every leaf.
FORWARD, BOTH = "forward", "both"
PHASES = (FORWARD, BOTH)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a case: `quick` for the short run, `edges` for a sweep over sizes."""

    quick: bool = False
    edges: int | None = None

    def pick(self, quick: int, full: int) -> int:
        """The sweep's number of edges if there is one, else that of the short or of the full run."""
        return self.edges or (quick if self.quick else full)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One implementation of a case.

    Args:
        name: who: "ours", or the peer.
        run: the forward pass, returning y.
        inputs: leaves whose gradients are compared across entrants, in the same order.
        parameters: the other leaves that get a gradient.
        phases: what it can do.
        needs: bytes it is expected to hold; it is left out where the machine has less.
        full_only: left out of the quick run: its first call compiles, or every call takes seconds.
    """

    name: str
    run: Callable[[], Tensor]
    inputs: tuple[Tensor, ...] = ()
    parameters: tuple[Tensor, ...] = ()
    phases: tuple[str, ...] = PHASES
    needs: float = 0.0
    full_only: bool = False

    def work(self, phase: str, upstream: Tensor | None) -> Callable[[], Sequence[Tensor]]:
        """The timed results: y, or y and the gradients of <y, upstream>, as a sequence of tensors."""
        if phase == FORWARD:
            return self._forward
        leaves = [*self.inputs, *self.parameters]

        def both() -> Sequence[Tensor]:
            y = self.run()
            return (y.detach(), *torch.autograd.grad(y, leaves, upstream))

        return both

    def _forward(self) -> Sequence[Tensor]:
        with torch.no_grad():
            return (self.run(),)


def entrant(name: str, layer: nn.Module, run: Callable[[], Tensor], *inputs: Tensor,
            phases: tuple[str, ...] = PHASES, needs: float = 0.0, full_only: bool = False) -> Entrant:
    """An entrant whose other leaves are the parameters of a layer, which is put into evaluation mode."""
    layer.eval()
    return Entrant(name=name, run=run, inputs=inputs, parameters=tuple(layer.parameters()), phases=phases,
                   needs=needs, full_only=full_only)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case, built.

    Args:
        ours, peers: the entrants; `peers` holds those that are installed.
        parts: pieces of ours against which it is held, called one after the other; their numbers are others.
        size: the sizes, in words.
        edges: E where the case is sparse.
        least: the work that no implementation avoids, by phase, where it is known.
        tolerance: of max |ours - peer| / max |peer|, over outputs and compared gradients.
    """

    ours: Entrant
    peers: tuple[Entrant, ...]
    size: str
    parts: tuple[Entrant, ...] = ()
    edges: int | None = None
    least: dict[str, Work] = field(default_factory=dict)
    tolerance: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A named case, not yet built.

    Args:
        suite, name: where it is listed.
        build: makes the tensors, the layers and their peers.
        headline: whether the quick run has it.
        swept: whether it is run at many numbers of edges for the plot.
        group: what its ratios are averaged with, in words.
    """

    suite: str
    name: str
    build: Callable[[Size], Comparison]
    headline: bool = True
    swept: bool = False
    group: str = ""


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers that want a gradient, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@torch.no_grad()
def copied(parameter: Tensor, value: Tensor, zeroed: Tensor | None = None) -> None:
    """Give a peer's parameter our numbers, and its bias zeros."""
    if parameter.shape != value.shape:
        raise ValueError(f"the peer's parameter has shape {tuple(parameter.shape)}, ours {tuple(value.shape)}")
    parameter.copy_(value)
    if zeroed is not None:
        zeroed.zero_()


def heads_to_rows(values_KPD: Tensor) -> Tensor:
    """(K, P, D) as a linear layer's weight (K D, P)."""
    return values_KPD.detach().mT.flatten(0, 1)


def in_torch(module: nn.Module) -> Any:
    """A copy whose linear layers are torch's, which have no activation."""
    result = copy.deepcopy(module)
    for part in result.modules():
        if type(part) is Linear:
            if part.activation is not None:
                raise ValueError(f"torch's linear layers have no activation, got {part}")
            part.__class__ = nn.Linear  # type: ignore[assignment]
    return result
