"""Additive attention over all pairs, without (N, M) or (N, M, D) tensors: at once, or in steps of few outputs.

`dense_additive_attention` computes all outputs. `additive_step` computes few of them over the same inputs, as in
decoding (Bahdanau et al. 2015); what depends only on the inputs is computed once, by `StepInputs.of`. The backward of a
step computes the gradient of its q, which a recurrence waits for, and adds to the sums for the others. One node gives
the gradients of the inputs for all steps of a backward pass. The inputs came through that node, so the engine runs it
after all steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.errors import ShapeError, text_of
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.edge_attention import (
    LOGISTIC,
    activate,
    as_logistic,
    blocks_of,
    check_kind,
    scaled,
)
from structconv.primitives.functions import pulled_back, transformed
from structconv.primitives.hashing import Drop, drop_factors
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_numbers
from structconv.primitives.native.dispatch import floats, unit
from structconv.primitives.native.loader import Core
from structconv.primitives.operator import DROPOUT, differentiable_operator
from structconv.primitives.segments import masked_softmax

__all__ = ["FEW_OUTPUTS", "StepInputs", "additive_step", "dense_additive_attention", "factor_of"]

#: Outputs and inputs of a step at most: see kDecodeOutputs and kDecodeInputs in src/api.h.
FEW_OUTPUTS, FEW_INPUTS = 8, 4096


def dense_additive_attention(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, *, activation: str = "tanh",
                             slope: float = 0.2, causal: bool = False, dropout: float = 0.0,
                             seed: Tensor | None = None, batch_heads: int | None = None,
                             factor: Tensor | None = None) -> Tensor:
    """y_nh = sum_m p_hmn x_mh, p = softmax over m of <v_h, act(q_nh + k_mh)> (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        q, k, x, vector, activation, slope: as for `additive_attention`.
        causal: only the inputs m <= n.
        dropout, seed, batch_heads: as for `affine_attention`.
        factor: `factor_of(k, ...)` where it is at hand, as in many calls of the same k; its numbers alone are read.

    Returns:
        (N, K, C) of the dtype of x; exactly zero without inputs.

    With the factors a_n = exp(-2 q_n) and b_m = exp(-2 k_m) an activation tanh(q_n + k_m) = 2 / (1 + a_n b_m) - 1
    takes one product and one reciprocal; its absolute error stays below 2^-20, whatever cancels in q + k. Where some
    |2 q| or |2 k| is above 80, or is no number, exponentials of the sums are taken.

    Native kernels never read the pairs that `causal` leaves out; torch's operators, which stand in for other dtypes and
    devices, multiply their values by zero, through which a NaN passes.

    Cost: N M K (4 D + 2 C) flops; memory O((M + N) K (D + C)), as every pass computes the scores again. Derivatives
    of higher order go through blocks of (N, M, K, D).

    Raises:
        ShapeError: if sizes or dtypes do not fit each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    kind, parameter, amplitude = as_logistic(activation, slope)
    y: Tensor = _attend(q, k, x, scaled(vector, amplitude), kind, parameter, causal, factor, dropout, seed,
                        batch_heads)[0]
    return y


def factor_of(k: Tensor, activation: str, slope: float) -> Tensor | None:
    """exp(-rate k), of which and that of q the activation is made; `None` where it is no normal number, or not read."""
    kind, rate, _ = as_logistic(activation, slope)
    core = dispatch.usable(k, 0) if kind == LOGISTIC else None
    return None if core is None else core.factor(k, rate)


def _check(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int, parameter: float, causal: bool,
           factor: Tensor | None, *dropout: Any) -> None:
    check_kind(kind)
    if factor is not None:
        check_numbers("dense_additive_attention", k, factor)
        if factor.shape != k.shape or factor.dtype != torch.float32:
            raise ShapeError("dense_additive_attention", f"factor must have the shape {text_of(k.shape)} of k and "
                             "dtype float32", f"{text_of(factor.shape)} of {factor.dtype}")


# -- by torch's operators ------------------------------------------------------------------------------------------

def _composed(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, kind: int, parameter: float, causal: bool,
              factor: Tensor | None, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
    """Block by block of outputs."""
    m, n, head = (torch.arange(size, device=q.device) for size in (k.shape[0], q.shape[0], q.shape[1]))

    def of(rows: slice, q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        active = activate(q[rows].unsqueeze(1) + k, kind, parameter)
        scores = torch.einsum("nmhd,hd->nhm", active, vector.to(q.dtype))
        output = n[rows].view(-1, 1, 1)
        weights = masked_softmax(scores.masked_fill(m > output, -torch.inf) if causal else scores, None, -1)
        if p > 0 and seed is not None:
            pair = m * q.shape[0] + output
            weights = weights * drop_factors(Drop(p, seed, batch_heads), head.unsqueeze(-1), pair, q.dtype)
        return torch.einsum("nhm,mhc->nhc", weights, x)

    return recompute_blocks(of, [q, k, x, vector], blocks_of(q.shape[0], k.numel()), reduce="cat", dim=0)


_attend = differentiable_operator(
    "dense_additive_attention", "q N K D, k M K D, x M K C, any vector K D",
    f"int kind, float parameter, bool causal, Tensor? factor, {DROPOUT}", "y N K C, wide peaks N 2 K",
    kernel="dense_additive", composed=_composed, check=_check, edges=False)


# -- steps of few outputs ------------------------------------------------------------------------------------------

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
    sums: _SumsByPass | None

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
        sums = _SumsByPass(numbers, (k.requires_grad, x.requires_grad, vector.requires_grad))
        k, x, vector = private.bound_apply(_Inputs)(sums, k, x, vector)
        return cls(numbers, k, x, vector, sums)

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
        y: Tensor = private.bound_apply(_Step)(q, inputs.k, inputs.x, inputs.vector, inputs.numbers, inputs.sums)
        return y
    return _step(q, inputs.numbers)[0]


def _step(q: Tensor, own: _Numbers) -> tuple[Tensor, Tensor]:
    """y, and the weights (B, N, M)."""
    results: tuple[Tensor, Tensor] = own.kernels.additive_step(q, own.k, own.factor, own.x, own.vector, own.keep,
                                                               own.rate)
    return results


class _Sums:
    """The sums over the steps of one backward pass: the gradients of k and v, and the terms of that of x."""

    def __init__(self, own: _Numbers, needed: tuple[bool, bool, bool]) -> None:
        self._own, self._needs_x = own, needed[1]
        self._k = dispatch.empty(own.k, own.k.shape) if needed[0] else None
        self._vector = torch.empty_like(own.vector) if needed[2] else None
        self._grads: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._first = True

    def take(self, grad: Tensor, weights: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
        """Where to add the gradients of k and v of a step, and whether nothing is there yet."""
        if self._needs_x:
            self._grads.append(grad)
            self._weights.append(weights)
        first, self._first = self._first, False
        return self._k, self._vector, first

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of k, x and the vector."""
        x = None
        if self._grads:
            with private.without_autocast("cpu"):
                x = torch.bmm(torch.cat(self._weights, 1).mT, torch.cat(self._grads).transpose(0, 1)).transpose(0, 1)
        return self._k, x, None if self._vector is None else self._vector * self._own.amplitude


class _SumsByPass:
    """The sums of each backward pass that is under way, by its number: one may start within another."""

    def __init__(self, numbers: _Numbers, needed: tuple[bool, bool, bool]) -> None:
        self._numbers, self._needed = numbers, needed
        self._passes: dict[int, _Sums] = {}

    def of_step(self, node: Any) -> _Sums | None:
        """The sums to which a step adds; `None` where this pass does not come to the gradients of the inputs."""
        if not private.will_run(node):
            return None
        task = private.backward_task()
        sums = self._passes.get(task)
        if sums is None:
            sums = self._passes[task] = _Sums(self._numbers, self._needed)
        return sums

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of k, x and the vector by all steps of this pass."""
        sums = self._passes.pop(private.backward_task(), None)
        return (None, None, None) if sums is None else sums.gradients()


class _Inputs(torch.autograd.Function):
    """k, x and the vector as they are; the sums over the steps are added to their gradients."""

    @staticmethod
    def forward(ctx: Any, sums: _SumsByPass, k: Tensor, x: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.sums, ctx.dtype = sums, vector.dtype
        ctx.set_materialize_grads(False)
        return k.detach(), x.detach(), vector.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_k, of_x, of_vector = ctx.sums.gradients()
        of_vector = None if of_vector is None else of_vector.to(ctx.dtype)
        return None, *map(_plus, grads, (of_k, of_x, of_vector))


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Step(torch.autograd.Function):
    """One step, whose gradients but that of q are left to `_Inputs`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, own: _Numbers, sums: _SumsByPass | None
                ) -> Tensor:
        y, weights = _step(q, own)
        ctx.own, ctx.sums = own, sums
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, x, vector, weights)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        *operands, weights = ctx.saved_tensors
        own, q = ctx.own, operands[0]
        if torch.is_grad_enabled() or transformed(grad):
            return *pulled_back(_composed_step(own), operands, ctx.needs_input_grad[:4], [grad]), None, None
        sums = None if ctx.sums is None else ctx.sums.of_step(operands[1].grad_fn)
        grad_k, grad_vector, first = (None, None, True) if sums is None else sums.take(grad, weights)
        grad_q: Tensor = own.kernels.additive_step_backward(q, own.k, own.factor, own.x, own.vector, weights, grad,
                                                            grad_k, grad_vector, first, own.rate)
        return grad_q, None, None, None, None, None


def _composed_step(own: _Numbers) -> Any:
    """A step by differentiable operators: a function of q, k, x and the vector."""
    if own.keep is None:
        return lambda q, k, x, vector: dense_additive_attention(q, k, x, vector, activation=own.activation)
    absent = own.keep == 0

    def among_kept(q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> Tensor:
        active = activate(q.unsqueeze(1) + k, LOGISTIC, own.rate)
        scores = torch.einsum("nmhd,hd->nhm", active, vector * own.amplitude).masked_fill(absent, -torch.inf)
        return torch.einsum("nhm,mhc->nhc", masked_softmax(scores, None, -1), x)

    return among_kept
