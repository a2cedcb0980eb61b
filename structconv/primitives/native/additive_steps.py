"""Steps of additive attention: few outputs at a time over the same inputs, as in decoding (Bahdanau et al. 2015).

What depends only on the inputs is made once, `StepInputs.of`. The backward of a step computes the gradient of its q,
which a recurrence waits for, and leaves the others; when all steps of a backward pass have run, one node gives those of
the inputs for all of them. It is the node through which the inputs came: the engine runs it after all that read them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.primitives.functions import pulled_back, transformed
from structconv.primitives.native import dispatch
from structconv.primitives.native.additive_dense import dense_additive_attention, factor_of
from structconv.primitives.native.dispatch import floats, unit
from structconv.primitives.native.edge_attention import LOGISTIC, activate, as_logistic
from structconv.primitives.native.loader import Core
from structconv.primitives.segments import masked_softmax

__all__ = ["FEW_OUTPUTS", "StepInputs", "additive_step"]

#: Outputs and inputs of a step at most: see kDecodeOutputs and kDecodeInputs in src/api.h.
FEW_OUTPUTS, FEW_INPUTS = 8, 4096


class _Numbers(NamedTuple):
    """The inputs as kernels read them, without gradients: k, exp(-rate k), x, and `amplitude` times the vector; which
    of them exist, (B, M) bytes, or `None` for all."""

    kernels: Core
    k: Tensor
    factor: Tensor
    x: Tensor
    vector: Tensor
    activation: str
    rate: float
    amplitude: float
    keep: Tensor | None


class StepInputs(NamedTuple):
    """k (M, B, D), x (M, B, C) and vector (B, D) of many steps, with their gradients; see `additive_step`."""

    numbers: _Numbers
    k: Tensor
    x: Tensor
    vector: Tensor
    left: _Left | None

    @classmethod
    def of(cls, k: Tensor, x: Tensor, vector: Tensor, activation: str, keep: Tensor | None = None) -> StepInputs | None:
        """Return the operands of steps; `None` if the native kernels cannot run them: other dtypes, too many inputs,
        or some |2 k| above 80, which has no factor. Only the inputs that `keep` (B, M) has true exist."""
        kernels = dispatch.usable(x, k.shape[0]) and dispatch.usable(k, x.shape[0])
        kind, rate, amplitude = as_logistic(activation, 0.0)
        if kernels is None or kind != LOGISTIC or not private.defers or {k.dtype, x.dtype} != {torch.float32} or not (
                0 < k.shape[0] <= FEW_INPUTS and x.shape[:2] == k.shape[:2] and vector.shape == k.shape[1:]):
            return None
        if keep is not None:
            absent = ~keep.mT.unsqueeze(-1)
            k, x = k.masked_fill(absent, 0), x.masked_fill(absent, 0)  # a NaN there would pass weights of zero
        with torch.no_grad():
            factor = factor_of(k, activation, 0.0)
            if factor is None:
                return None
            numbers = _Numbers(kernels, unit(k.detach()), unit(factor), unit(x.detach()),
                               floats(vector.detach() * amplitude), activation, rate, amplitude,
                               None if keep is None else keep.contiguous().view(torch.uint8))
        if not (torch.is_grad_enabled() and private.any_requires_grad(k, x, vector)):
            return cls(numbers, k, x, vector, None)
        left = _Left(numbers, (k.requires_grad, x.requires_grad, vector.requires_grad))
        k, x, vector = private.bound_apply(_Joined)(left, k, x, vector)
        return cls(numbers, k, x, vector, left)

    def take(self, q: Tensor) -> bool:
        """Return True if q (N, B, D) are outputs of a step."""
        return (q.dtype is torch.float32 and 0 < q.shape[0] <= FEW_OUTPUTS and q.is_cpu
                and q.shape[1:] == self.k.shape[1:])


def additive_step(q: Tensor, inputs: StepInputs) -> Tensor:
    """`dense_additive_attention` of outputs q (N, B, D), float32, that `inputs.take`: (N, B, C).

    Gradients of the inputs are added up over all steps of a backward pass; memory O(M B D) for all of them, and
    O(N B (M + C)) for each. With `create_graph` each step gives its own.

    Inputs that do not exist have weight zero; an output for which none does is zero.

    Cost: N M B (3 D + 2 C) flops, where some |2 q| is above 80 an exponential for each of N M B D activations more.
    """
    if torch.is_grad_enabled() and private.any_requires_grad(q, inputs.k):
        y: Tensor = private.bound_apply(_Step)(q, inputs.k, inputs.x, inputs.vector, inputs.numbers, inputs.left)
        return y
    return _forward(q, inputs.numbers)[0]


# -- the kernels --------------------------------------------------------------------------------------------------

def _forward(q: Tensor, own: _Numbers) -> tuple[Tensor, Tensor]:
    """y, and the weights (B, N, M)."""
    results: tuple[Tensor, Tensor] = own.kernels.additive_step(q, own.k, own.factor, own.x, own.vector, own.keep,
                                                             own.rate)
    return results


def _backward(q: Tensor, weights: Tensor, grad: Tensor, own: _Numbers, sums: _Sums | None) -> Tensor:
    """The gradient of q; what the others need is added to the sums."""
    grad_k, grad_vector, first = (None, None, True) if sums is None else sums.take(grad, weights)
    grad_q: Tensor = own.kernels.additive_step_backward(q, own.k, own.factor, own.x, own.vector, weights, grad, grad_k,
                                                        grad_vector, first, own.rate)
    return grad_q


# -- what steps leave ---------------------------------------------------------------------------------------------

class _Sums:
    """The sums of the steps of one backward pass: the gradients of k and v so far, and the parts of that of x."""

    def __init__(self, own: _Numbers, needed: tuple[bool, bool, bool]) -> None:
        self._k = dispatch.empty(own.k, own.k.shape) if needed[0] else None
        self._vector = torch.empty_like(own.vector) if needed[2] else None
        self._of_x = needed[1]
        self._grads: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._first = True

    def take(self, grad: Tensor, weights: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
        """Where to add the gradients of k and v of a step, and whether nothing is there yet."""
        if self._of_x:
            self._grads.append(grad)
            self._weights.append(weights)
        first, self._first = self._first, False
        return self._k, self._vector, first

    def gradients(self, amplitude: float) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of k, x and the vector."""
        return self._k, self._gradient_of_x(), None if self._vector is None else self._vector * amplitude

    def _gradient_of_x(self) -> Tensor | None:
        if not self._grads:
            return None
        with private.without_autocast("cpu"):
            return torch.bmm(torch.cat(self._weights, 1).mT, torch.cat(self._grads).transpose(0, 1)).transpose(0, 1)


class _Left:
    """The sums of the backward passes that are under way, by their numbers: one may start within another."""

    def __init__(self, numbers: _Numbers, needed: tuple[bool, bool, bool]) -> None:
        self._numbers, self._needed = numbers, needed
        self._sums: dict[int, _Sums] = {}

    def sums(self, node: Any) -> _Sums | None:
        """Where a step leaves what it does; `None` where this pass does not come to the gradients of the inputs."""
        if not private.will_run(node):
            return None
        task = private.backward_task()
        sums = self._sums.get(task)
        if sums is None:
            sums = self._sums[task] = _Sums(self._numbers, self._needed)
        return sums

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the sums of all steps of this pass."""
        sums = self._sums.pop(private.backward_task(), None)
        return (None, None, None) if sums is None else sums.gradients(self._numbers.amplitude)


class _Joined(torch.autograd.Function):
    """k, x and the vector as they are; what steps have left joins their gradients."""

    @staticmethod
    def forward(ctx: Any, left: _Left, k: Tensor, x: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.left, ctx.dtype = left, vector.dtype
        ctx.set_materialize_grads(False)
        return k.detach(), x.detach(), vector.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_k, of_x, of_vector = ctx.left.gradients()
        of_vector = None if of_vector is None else of_vector.to(ctx.dtype)
        return None, *map(_plus, grads, (of_k, of_x, of_vector))


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Step(torch.autograd.Function):
    """One step, whose gradients but that of q are left to `_Joined`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, own: _Numbers, left: _Left | None) -> Tensor:
        y, weights = _forward(q, own)
        ctx.own, ctx.left = own, left
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, x, vector, weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        *operands, weights = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(grad):
            return *pulled_back(_whole(ctx.own), operands, ctx.needs_input_grad[:4], [grad]), None, None
        sums = None if ctx.left is None else ctx.left.sums(operands[1].grad_fn)
        return _backward(operands[0], weights, grad, ctx.own, sums), None, None, None, None, None


def _whole(own: _Numbers) -> Any:
    if own.keep is None:
        return lambda q, k, x, vector: dense_additive_attention(q, k, x, vector, activation=own.activation)
    absent = own.keep == 0

    def among_kept(q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        active = activate(q.unsqueeze(1) + k, LOGISTIC, own.rate)
        scores = torch.einsum("nmhd,hd->nhm", active, vector * own.amplitude).masked_fill(absent, -torch.inf)
        return torch.einsum("nhm,mhc->nhc", masked_softmax(scores, None, -1), x)

    return among_kept
