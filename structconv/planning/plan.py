"""`Plan`: the order and the kernel by which eq. 8 is computed, and the reason. A plan is also the function that
computes it.

`plan_for(call)` is steps 2 and 3 of a call (build, key, plan, run):

- The key of a call has the types, options, dtypes and classes of sizes of basis, Theta and x, and no numbers.
- If a plan with this key exists, it is returned. Otherwise each kernel is matched with the problem, those that match
return a cost, and the cheapest is compiled (`decide`). Layers share plans.

`plan.run(call)` is step 4. A plan holds no tensor: its kernel reads them from the call.

While `torch.compile` or `torch.export` trace, no plan is remembered, and numbers of entries are nominal. The choice
then depends on K, P, Q and D only, and the traced program is valid for any number of entries.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.tree import shape_class, tree_key
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.planning import machine, tuning
from structconv.planning.cost import Cost
from structconv.planning.counts import Sizes
from structconv.planning.kernel import Kernel, Registrations, matching, registered
from structconv.planning.problem import Call, Image, PartInputs, Problem, Run
from structconv.planning.tables import PLANS as _PLANS
from structconv.planning.tables import Candidate, Plan
from structconv.planning.tuning import Autotuning
from structconv.shapes import check_alike, check_not_traced, layout_hint
from structconv.structures.values import EXACT, class_volume, key_of, tensors_in

__all__ = ["CAPACITY", "Candidate", "Plan", "check_path", "decide", "plan_for", "plans_version", "served"]

_grad_enabled = torch.is_grad_enabled
#: Plans that are stored; beyond this number, the older half is removed.
CAPACITY = 2048


def plan_for(call: Call, path: str | None = None, max_bytes: int | None = None, image: Image | None = None) -> Plan:
    """The plan of a call: the stored one with the key of the call, or a new one.

    A new plan takes `path`, if given, else the cheapest path of those that hold at most `max_bytes` beside their
    arguments and result; if all hold more, the one that holds least. `image` describes x and y that are images. Sizes,
    dtypes or devices that do not fit are a `ShapeError`.
    """
    if is_compiling():
        return _for_any_sizes(call, path, max_bytes, image)
    x, relative = call.x, call.relative
    facts = [*tree_key(call.basis)]
    for field in call.theta.__dict__.values():
        if type(field) is int:
            facts.append(field)
        elif isinstance(field, Tensor):
            facts += [field.shape, field.dtype, field.requires_grad]
        else:
            facts.append(key_of(field))
    shape: tuple[Any, ...] = x.shape
    if type(x) is PartInputs:
        shape = tuple([(part.shape if max_bytes is not None else shape_class(part.shape),
                        part.dtype, part.requires_grad) for part in x.parts])
    elif image is None and max_bytes is None and shape and max(shape) > EXACT:
        shape = shape_class(shape)
    key = (shape, x.dtype, x.device, x.requires_grad, _grad_enabled(), private.any_autocast() and private.autocast(),
           type(call.theta), *facts, call.projected is None, call.pending is None, call.reused is None,
           relative if relative is None else (relative.shape, call.output_positions is None), path, max_bytes,
           image and image.axes, Autotuning.enabled, machine.Measured.times)
    try:
        plan = _PLANS.get(key)
    except TypeError:
        _check_limits(path, max_bytes)
        if any(isinstance(size, torch.SymInt) for size in shape):  # of `make_fx`, whose programs hold for any sizes
            return _for_any_sizes(call, path, max_bytes, image)
        raise
    return _choose(key, call, path, max_bytes, image) if plan is None else plan


def _for_any_sizes(call: Call, path: str | None, max_bytes: int | None, image: Image | None) -> Plan:
    """The plan of a call that is traced, which is not stored."""
    return decide(_problem(call, call.materialized(), max_bytes, image, nominal=True), path)


def plans_version() -> Hashable:
    """A value that changes whenever earlier plans may differ from those that would be made now."""
    return Registrations.count, Autotuning.enabled, machine.Measured.times


def _choose(key: Hashable, call: Call, path: str | None, max_bytes: int | None, image: Image | None) -> Plan:
    _check_limits(path, max_bytes)
    if torch.jit.is_tracing():
        check_not_traced(*(t for t in tensors_in(call.basis) if not (t.dim() or t.is_floating_point())))
    problem = _problem(call, call.spec(), max_bytes, image, nominal=False)
    if len(_PLANS) >= CAPACITY:
        for old in list(_PLANS)[:CAPACITY // 2]:
            _PLANS.pop(old, None)
    plan = _PLANS[key] = decide(problem, path, call, key if Autotuning.enabled else None)
    return plan


def _check_limits(path: Any, max_bytes: Any) -> None:
    """Raise `ConfigError` if the limits of a plan have no meaning."""
    if not isinstance(path, str | None):
        raise ConfigError("plan", "path must be the name of an order, or None", repr(path))
    if max_bytes is not None and not (isinstance(max_bytes, int | float) and max_bytes >= 0):
        raise ConfigError("plan", "max_bytes must be a number of bytes, or None", repr(max_bytes))


def check_path(owner: str, path: str) -> None:
    """Raise `ConfigError` if no kernel computes in this order."""
    known = sorted({order for kernel in registered() for order in kernel.orders})
    if path not in known:
        raise ConfigError(owner, f"path must be one of {', '.join(map(repr, known))}, or None", repr(path))


def served(call: Call) -> Hashable:
    """The key of basis and Theta in a call."""
    return tree_key(call.basis), type(call.theta), tuple(t.shape for t in call.theta.tensors)


def decide(problem: Problem, path: str | None = None, call: Call | None = None, key: Hashable = None) -> Plan:
    """Compare the kernels that match a problem and choose the cheapest; see `plan_for`. With `key`, the class of the
    problem, those within `tuning.LIMIT` of the cheapest are timed on `call`, and the fastest is taken."""
    weighed = _weigh(problem, path)
    of_path = [w for w in weighed if path is None or w.path == path]
    allowed = [w for w in of_path if w.kernel.automatic(w.match, problem, w.path)] or of_path
    fitting = [w for w in allowed if problem.max_bytes is None or w.cost.peak_bytes <= problem.max_bytes]
    chosen = (_least(fitting, [w.seconds for w in fitting]) if fitting
              else _least(allowed, [w.cost.peak_bytes for w in allowed]))
    if is_compiling():
        return Plan(_compiled(chosen, problem), _weights(chosen, problem), "", (_candidate(chosen, ""),), "")
    times: tuning.Seconds = {}
    if key is not None and call is not None:
        survivors = [w for w in fitting if w.seconds <= tuning.LIMIT * chosen.seconds]
        runs = {w.label: _compiled(w, problem) for w in survivors}
        times = tuning.measured(runs, call, key) if len(survivors) > 1 else {}
        chosen = _least(survivors, [times.get(w.label, float("inf")) for w in survivors]) if times else chosen
    reason = "cheapest" if fitting else "smallest; all hold more than max_bytes"
    reason = reason if path is None else "asked for"
    others = sorted((w for w in weighed if w is not chosen), key=lambda w: w.seconds)
    rejected = [_candidate(w, _rejection(w, chosen, problem, path, times), times) for w in others]
    return Plan(_compiled(chosen, problem), _weights(chosen, problem), "measured" if times else reason,
                (_candidate(chosen, "", times), *rejected), _words(problem, call),
                parts=chosen.kernel.parts(chosen.match, problem), served=None if call is None else served(call),
                bind=None if type(chosen.kernel).bind is Kernel.bind else partial(chosen.kernel.bind, chosen.match))


def _problem(call: Call, basis: Basis, max_bytes: int | None, image: Image | None, nominal: bool) -> Problem:
    x, theta = call.x, call.theta
    parts = _parts(call, basis)
    for own, part in parts:
        _check(own, part, image)
    lead = () if nominal else torch.broadcast_shapes(*[_lead(own, part, image) for own, part in parts])
    batch = class_volume(lead)
    grad = torch.is_grad_enabled()
    relative = None if call.relative is None else call.relative.shape[0] // 2
    return Problem(basis, theta, x, Sizes(batch, x.dtype.itemsize, nominal), grad and x.requires_grad,
                   grad and theta.requires_grad, max_bytes, call.projected is not None, relative, image,
                   call.output_positions is not None, call.pending is not None, call.reused is not None)


def _parts(call: Call, basis: Basis) -> list[tuple[Call, Basis]]:
    """Return the call and its basis; of a mixture those of each part, with its x and Theta."""
    if type(call.x) is not PartInputs:
        return [(call, basis)]
    theta: Any = call.theta
    theta.check()
    for x in call.x.parts[1:]:
        check_alike("Conv", call.x.parts[0], x, other_name="that of other parts")
    each = zip(call.x.parts, theta.parts, cast(Any, basis).parts, strict=True)
    return [(call._replace(x=x, theta=own), part) for x, own, part in each]


def _lead(call: Call, basis: Basis, image: Image | None) -> torch.Size:
    """The leading dimensions of the result."""
    x = call.x
    if image is None and x.shape[-2] != basis.num_inputs:
        raise ShapeError("Conv", f"the basis must have as many inputs as x has entries, M={x.shape[-2]}",
                         f"M={basis.num_inputs} in {basis!r}", f"x has shape {text_of(x.shape)}, entries are dim -2; "
                         "the basis is what the mechanism's forward returns.")
    lead = x.shape[:-2] if image is None else x.shape[:-1 - image.axes]
    try:
        return torch.broadcast_shapes(lead, basis.batch_shape)
    except RuntimeError:
        raise ShapeError("Conv", f"leading dimensions of x must broadcast with the basis's {basis.batch_shape}",
                         tuple(x.shape)) from None


def _check(call: Call, basis: Basis, image: Image | None) -> None:
    x, theta = call.x, call.theta
    theta.check()
    if image is None and (x.dim() < 2 or x.shape[-1] != theta.in_channels):
        raise ShapeError("Conv", f"x must have shape (..., M, P={theta.in_channels})", tuple(x.shape),
                         layout_hint(x, theta.in_channels))
    if image is not None and (x.dim() <= image.axes or x.shape[-1 - image.axes] != theta.in_channels):
        raise ShapeError("Conv", f"images must have shape (..., P={theta.in_channels}, *S) with {image.axes} axes S",
                         tuple(x.shape))
    if image is not None and basis.num_outputs != math.prod(image.outputs()):
        raise ShapeError("Conv", f"the outputs of an image must lie on a grid, of N={basis.num_outputs} points",
                         image.outputs(), "A mechanism with other outputs than inputs says on which grid they lie by "
                         "output_structure(grid), or is called on entries, without axes.")
    if basis.size != theta.size:
        raise ShapeError("Conv", f"theta must have the basis's size K={basis.size}", f"K={theta.size} in {theta!r}",
                         "A layer makes as many matrices Theta_k as its mechanism's size says. A mechanism that "
                         "returns a tensor (A, M, N) has K = A: for a batch return (..., K, M, N).")
    for tensor in theta.tensors:
        check_alike("Conv", x, tensor)


class _Weighed(NamedTuple):
    """A path of a kernel, its cost, and its predicted time."""

    kernel: Kernel
    match: Any
    path: str
    cost: Cost
    seconds: float

    @property
    def label(self) -> str:
        """Its name among measurements."""
        return f"{self.path}: {self.kernel.label(self.path)}"


def _weigh(problem: Problem, path: str | None) -> list[_Weighed]:
    rates, itemsize = machine.rates(problem.x.device), problem.sizes.itemsize
    weighed = []
    for kernel, match, one in [*matching(problem, problem.theta.orders)] or matching(problem):
        cost = kernel.cost(match, problem, one)
        weighed.append(_Weighed(kernel, match, one, cost, cost.seconds(rates, itemsize)))
    known = sorted({w.path for w in weighed})
    if path is not None and path not in known:
        raise ConfigError("plan", f"path must be one of {', '.join(map(repr, known))} for "
                          f"{type(problem.basis).__name__}", repr(path))
    return weighed


def _compiled(weighed: _Weighed, problem: Problem) -> Run:
    """The function that computes the path, after the pending results of x unless its kernel computes them."""
    kernel = weighed.kernel
    run = _in_one_dtype(kernel.compile(weighed.match, problem, weighed.path), problem)
    run = run if problem.image is None or kernel.images else _of_images(run, problem.image)
    return run if kernel.pending or not problem.pending else lambda call: run(call.settled())


def _weights(weighed: _Weighed, problem: Problem) -> Run:
    return _in_one_dtype(weighed.kernel.weights(weighed.match, problem), problem)


def _in_one_dtype(run: Run, problem: Problem) -> Run:
    """Return the function that runs without autocast, so that no operator in a kernel casts, if this is a plan of calls
    under autocast."""
    if not private.any_autocast():
        return run
    kind = problem.x.device.type

    def plain(call: Call) -> Tensor:
        with private.without_autocast(kind):
            return run(call)

    return plain


def _of_images(run: Run, image: Image) -> Run:
    """Return the function for images, whose pixels are the entries in row-major order."""
    axes, outputs = image.axes, image.outputs()

    def of_images(call: Call) -> Tensor:
        return run(call._replace(x=call.x.flatten(-axes).mT)).mT.unflatten(-1, outputs)

    return of_images


def _least(weighed: list[_Weighed], measures: list[float]) -> _Weighed:
    """The first with the least measure, found in a loop that compilers can trace."""
    best = 0
    for i in range(1, len(weighed)):
        if measures[i] < measures[best]:
            best = i
    return weighed[best]


def _candidate(weighed: _Weighed, rejected: str, times: tuning.Seconds | None = None) -> Candidate:
    measured = None if times is None else times.get(weighed.label)
    name = weighed.kernel.label(weighed.path)
    return Candidate(weighed.path, name, weighed.cost, weighed.seconds, rejected, measured)


def _rejection(weighed: _Weighed, chosen: _Weighed, problem: Problem, path: str | None,
               times: tuning.Seconds) -> str:
    if path is not None and weighed.path != path:
        return "not asked for"
    if path is None and not weighed.kernel.automatic(weighed.match, problem, weighed.path):
        return "only on request"
    if problem.max_bytes is not None and weighed.cost.peak_bytes > problem.max_bytes:
        return f"over max_bytes={problem.max_bytes}"
    if weighed.label in times:
        return f"{times[weighed.label] / times[chosen.label]:.3g}x measured"
    return f"{weighed.seconds / chosen.seconds:.3g}x" if chosen.seconds else "not cheaper"


def _words(problem: Problem, call: Call | None) -> str:
    basis, theta, x = problem.basis, problem.theta, problem.x
    tensors = tensors_in(call.basis) if call is not None and torch.is_grad_enabled() else ()
    basis_grad = any(t.requires_grad for t in tensors)
    grads = [name for name, needed in (("x", problem.x_grad), ("theta", problem.theta_grad), ("the basis", basis_grad))
             if needed]
    phase = f"forward and backward to {' and '.join(grads)}" if grads else "forward"
    return (f"{type(basis).__name__} (K={basis.size}, M={basis.num_inputs}, N={basis.num_outputs}), {theta!r}, "
            f"x {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}, {phase}")
