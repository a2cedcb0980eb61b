"""A decoding step of attention in one kernel: project the new entry, store its key and value, compute the output."""

from __future__ import annotations

from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases.tree import Projected, tensor
from structconv.kernels.dense_attention import Attended, ScaledDotProduct
from structconv.planning.kernel import register
from structconv.planning.problem import BoundRun, Call, Problem, Run
from structconv.primitives.native.loader import Core
from structconv.primitives.native.step import Heads, attention_step, core_for
from structconv.weights import LowRank

__all__ = ["AttentionStep"]


class AttentionStep(ScaledDotProduct):
    """One output that reads all entries, of which the last is still to be projected: softmax attention, Theta_k = V_k
    O_k.
    """

    name = "structconv.attention_step"
    before = ("torch.sdpa", *ScaledDotProduct.before)
    pending = True

    def match(self, problem: Problem) -> Attended | None:
        x, theta = problem.x, problem.theta
        if not problem.pending or not isinstance(theta, LowRank) or x.dim() > 3 or problem.outputs != 1:
            return None
        if x.dtype is not torch.float32 or x.device.type != "cpu":
            return None
        found = super().match(problem)
        plain = found is not None and found.bias is None and not (found.existing.masked or found.existing.causal)
        return found if plain else None

    def paths(self, match: Attended, problem: Problem) -> tuple[str, ...]:
        return ("between",)

    def compile(self, match: Attended, problem: Problem, path: str) -> Run:
        apart = super().compile(match, problem, path)

        def run(call: Call) -> Tensor:
            step, keys = _Step.of(match, call), match.key(call.basis)
            if step is None:
                call.compute()
                return apart(call)
            y = step.taken(keys, cast(Tensor, call.projected))
            call.pending.mark_written()
            return y

        return run

    def bind(self, match: Attended, call: Call) -> BoundRun | None:
        step, pending = _Step.of(match, call), call.pending
        if step is None or not step.projects(pending.x):
            return None
        keys, values = pending.rows(match.key(call.basis)), pending.rows(call.projected)

        def run(x: Tensor) -> Tensor | None:
            if private.watched() or x.shape != step.shape or core_for(x) is None:
                return None
            return step.of_entry(x).taken(keys.entries(), values.entries())

        return run


class _Step(NamedTuple):
    """The arguments of a step, beside the cache.

    Args:
        query, key, value: the new entry, or its projections.
        shape: the shape of the entry, (B, 1, P) or (1, P).
    """

    core: Core
    query: Heads
    key: Heads
    value: Heads
    output: Tensor
    bias: Tensor | None
    scale: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, match: Attended, call: Call) -> Self | None:
        """Return the step of a call; `None` if the kernel does not support it."""
        theta: Any = call.theta
        pending, values, keys = call.pending, call.projected, match.key(call.basis)
        if private.watched() or pending is None or values is None:
            return None
        x = pending.x
        if x.shape[-2] != 1 or keys.shape[:-1] != values.shape[:-1] or not pending.holds(keys):
            return None
        query, key = _heads(match.query(call.basis)), _heads(pending.computed(keys))
        value = Heads(x, theta.value.mT.flatten(0, 1)) if theta.groups == theta.size else _heads(theta.heads(x))
        output = theta.output.flatten(0, 1).mT
        core = core_for(*query, *key, *value, output, call.bias)
        if core is None or not (_alike(query, x, match.size) and _alike(key, x, keys.shape[-3])):
            return None
        return cls(core, query, key, value, output, call.bias, match.scale, x.shape)

    def projects(self, x: Tensor) -> bool:
        """Return True if query, key and value are projections of this entry."""
        return all(heads.weight is not None and heads.x is x for heads in (self.query, self.key, self.value))

    def of_entry(self, x: Tensor) -> Self:
        """Return the step for another entry, whose projections are query, key and value."""
        return self._replace(query=self.query._replace(x=x), key=self.key._replace(x=x), value=self.value._replace(x=x))

    def taken(self, keys: Tensor, values: Tensor) -> Tensor:
        """y, with the entry's key and values written to the last of those that are kept."""
        if keys.dim() == 3:
            keys, values = keys.unsqueeze(0), values.unsqueeze(0)
        y = attention_step(self.core, self.query, self.key, self.value, keys, values, self.output, self.bias,
                           self.scale)
        return y.view(*self.shape[:-1], y.shape[-1])


def _heads(leaf: Any) -> Heads:
    """One entry by heads, still to be multiplied or not."""
    if type(leaf) is Projected:
        return Heads(leaf.x, leaf.weight, leaf.bias)
    return Heads(tensor(leaf).contiguous())


def _alike(heads: Heads, x: Tensor, size: int) -> bool:
    """Return True if `heads` holds one entry for each element of the batch, like x, and `size` heads."""
    own, heads_too = heads.x.shape, heads.weight is None
    return own[-2] == 1 and own[:-2 - heads_too] == x.shape[:-2] and not (heads_too and own[-3] != size)


register(AttentionStep())
