"""What a call of a layer gives, and what eq. 8 over dense tensors makes of it.

The latter uses no plan, no kernel and no derived value: a layer whose result differs is stale, or ignores a change.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn

from structconv import derived as derivation
from structconv.planning import Plan, plan_for
from structconv.planning import plan as planning
from structconv.planning.problem import Call, Image, PartInputs
from structconv.testing.checks import same_gradients
from structconv.testing.use import Use
from structconv.weights.factored import Projections


@contextmanager
def forgotten() -> Iterator[None]:
    """No plan is known and nothing was derived."""
    with mock.patch.object(planning, "_PLANS", {}), mock.patch.object(derivation, "_ENTRIES", {}):
        yield


@contextmanager
def as_written() -> Iterator[None]:
    """Every product is eq. 8 over dense tensors, of a basis that is made for this call."""
    with ExitStack() as stack:
        stack.enter_context(forgotten())
        for module in _planning_modules():
            stack.enter_context(mock.patch.object(module, "plan_for", _dense_plan))
        yield


@cache
def _planning_modules() -> list[ModuleType]:
    """Those that ask for plans."""
    return [module for name, module in sys.modules.items() if name.startswith("structconv.")
            and getattr(module, "plan_for", None) is plan_for]


def _dense_plan(call: Call, path: str | None = None, max_bytes: int | None = None, image: Image | None = None) -> Plan:
    def run(call: Call) -> Tensor:
        x = _joined_inputs(call.x) if image is None else call.x.flatten(-image.axes).mT
        a = call.materialized().dense(x.dtype)
        y = torch.einsum("...kmn,...mp,kpq->...nq", a, x, call.theta.dense().to(x.dtype))
        if call.relative is not None:
            y = y + call.theta.join(torch.einsum("...kmn,mnd->...knd", a, _relative(call.relative, *a.shape[-2:])))
        if isinstance(call.theta, Projections) and call.theta.value_bias is not None:
            y = y + call.theta.value_bias @ call.theta.low_rank(x).output.flatten(0, 1)
        y = y if call.bias is None else y + call.bias
        return y if image is None else y.mT.unflatten(-1, image.outputs())

    return Plan(run, run, "as it is written", (), "")


def _joined_inputs(x: Tensor | PartInputs) -> Tensor:
    """x; of a mixture that of each part at its own entries and channels, (..., M_1 + M_2 + ..., P_1 + P_2 + ...)."""
    if not isinstance(x, PartInputs):
        return x
    lead, rows, before = torch.broadcast_shapes(*(own.shape[:-2] for own in x.parts)), [], 0
    for own in x.parts:
        after = sum(part.shape[-1] for part in x.parts) - before - own.shape[-1]
        rows.append(torch.nn.functional.pad(own, (before, after)).expand(*lead, -1, -1))
        before += own.shape[-1]
    return torch.cat(rows, -2)


def _relative(table: Tensor, inputs: int, outputs: int) -> Tensor:
    """(M, N, D): the vector of each pair's relative position."""
    clip = table.shape[0] // 2
    position = torch.arange(inputs).unsqueeze(1) - torch.arange(outputs)
    return table[position.clamp(-clip, clip) + clip]


def check_now(use: Use, what: str, expected: Use | None = None) -> None:
    """The layer gives now, gradients included, what eq. 8 gives; both times it is called, cached and not."""
    with as_written():
        reference = (use if expected is None else expected)()
    for turn in ("", ", called again"):
        same_gradients(use(), reference, use.variables if expected is None else use.arguments, f"{what}{turn}")


def with_tensors(layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A deep copy with other numbers in its parameters."""
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in tensors:
                parameter.copy_(tensors[name])
    return twin
