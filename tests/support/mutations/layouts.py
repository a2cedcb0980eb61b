"""Arguments and parameters of other sizes, memory layouts, dtypes and devices."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from structconv import Graph, KnowledgeGraph, ShapeError
from structconv.structures.values import map_tensors, tensors_in
from structconv.testing.checks import same
from structconv.testing.use import Use
from tests.support.calls import as_written, check_now, forgotten
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import cast, refusal, trains


@mutation()
def batches_of_all_sizes(use: Use) -> None:
    use()
    if any(t.dim() > 3 for t in use.arguments) or not use.arguments:
        return
    for lead in ((3,), (), (2, 1), (0,), (5,)):
        one = use.mapped(partial(_led, lead))
        try:
            with as_written():
                one()
        except (ValueError, RuntimeError):
            continue
        check_now(one, f"a batch of shape {lead}")
    check_now(use, "the first batch again")


def _led(lead: tuple[int, ...], t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return t
    one = t.detach().flatten(0, -3)[0] if t.dim() > 2 else t.detach()
    scales = torch.arange(reduce(int.__mul__, lead, 1), dtype=t.dtype).add(1).view(*lead, 1, 1)
    return (one * scales).requires_grad_()


def scattered(t: Tensor) -> Tensor:
    """Every other number in memory, from the third on."""
    wide = t.new_zeros(t.numel() * 2 + 3)
    view = wide[3:].as_strided(t.shape, [2 * s for s in t.contiguous().stride()], 3) if t.numel() else t
    with torch.no_grad():
        return view.copy_(t) if t.numel() else t


def negated(t: Tensor) -> Tensor:
    """The same numbers with the negative bit."""
    return torch.complex(t.detach(), -t.detach()).conj().imag if t.is_floating_point() else t


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scattered": lambda t: scattered(t.detach()), "negative bit": negated,
    "turned": lambda t: t.detach().mT.contiguous().mT if t.dim() > 1 else t.detach(),
    "expanded": lambda t: t.detach()[..., :1].expand_as(t) if t.dim() else t.detach()}


def _laid_out(layout: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    return layout(t).requires_grad_() if t.is_floating_point() else t


def _plain(layout: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The same numbers, one after the other."""
    if not t.is_floating_point():
        return t
    return layout(t).resolve_neg().clone(memory_format=torch.contiguous_format).requires_grad_()


@mutation()
def layouts_of_arguments(use: Use) -> None:
    use()
    for name, layout in LAYOUTS.items():
        one, plain = use.mapped(partial(_laid_out, layout)), use.mapped(partial(_plain, layout))
        with as_written():
            expected = plain()
        same(one().detach(), expected.detach(), f"arguments laid out as {name}")
        if one().requires_grad:
            actual, reference = (torch.autograd.grad(y.square().sum(), each.arguments, allow_unused=True)
                             for y, each in ((one(), one), (expected, plain)))
            for g, h in zip(actual, reference, strict=True):
                if h is not None:
                    same(torch.zeros_like(h) if g is None else g, h, f"gradients of arguments laid out as {name}")
    for structure in use.structures:
        weights = [t for t in tensors_in(structure) if t.is_floating_point()]
        if weights:
            check_now(use.on(lambda s: map_tensors(s, negated)), "weights with the negative bit")


@mutation(trains)
def layouts_of_parameters(use: Use) -> None:
    use()
    for name, layout in LAYOUTS.items():
        given = {key: layout(p).requires_grad_() for key, p in use.layer.named_parameters()}
        plain = {key: p.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
                 for key, p in given.items()}
        with as_written():
            expected = use.given(plain)
        same(use.given(given).detach(), expected.detach(), f"parameters laid out as {name}")


@mutation()
def dtypes_there_and_back(use: Use) -> None:
    use()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        low = cast(use, dtype)
        y = low()
        assert y.dtype == dtype, f"{dtype} gives {y.dtype}"
        with forgotten():
            expected = low.copied()()
        same(y.detach(), expected.detach(), f"cast to {dtype}", 8 * torch.finfo(dtype).eps)
    use.layer.to(torch.float64)


@mutation()
def another_dtype_of_x_is_refused(use: Use) -> None:
    """Nothing is converted silently; the next call is as before."""
    use()
    if not trains(use):
        return
    error = refusal(use.mapped(lambda t: t.detach().float() if t.is_floating_point() else t))
    assert isinstance(error, ShapeError), f"float32 in a float64 layer: {error!r}"
    assert "dtype" in str(error), f"it does not say what is wrong: {error}"
    check_now(use, "after a refused dtype")


@mutation()
def a_copy_on_the_meta_device(use: Use) -> None:
    use()
    there = dataclasses.replace(use, layer=copy.deepcopy(use.layer).to("meta")).mapped(
        lambda t: t.to("meta")).on(lambda s: s.to("meta") if isinstance(s, Graph | KnowledgeGraph) else s)
    try:
        y = there()
    except RuntimeError as error:  # lists of edges are read
        if not {"meta", "Meta", "device", "data-independent"} & set(str(error).split()):
            raise
    else:
        assert y.is_meta, "the result of a copy on the meta device is elsewhere"
        assert y.shape == use().shape, f"shape {tuple(y.shape)} on the meta device"
    check_now(use, "after a copy ran on the meta device")
