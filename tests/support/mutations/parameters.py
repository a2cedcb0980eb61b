"""Parameters that change, by every route."""

import dataclasses
import gc
import io
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize, weight_norm

from structconv.mechanisms.given import Given
from structconv.mechanisms.operations import Factor
from structconv.planning import plan as planning
from structconv.structures.values import tensors_in
from structconv.testing.checks import same_gradients
from structconv.testing.use import Use
from tests.support.calls import as_written, check_now, with_tensors
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import of_the_package, other, own_structures, owners, trains


@mutation(trains)
def parameters_in_place(use: Use) -> None:
    use()
    with torch.no_grad():
        for p in use.layer.parameters():
            p.copy_(other(p))
    check_now(use, "parameters changed in place")


@mutation(trains)
def parameters_through_data(use: Use) -> None:
    use()
    for p in use.layer.parameters():
        p.data.mul_(1.5)
    check_now(use, "parameters changed through .data")
    for p in use.layer.parameters():
        p.data = other(p)
    check_now(use, ".data assigned")


@mutation(trains)
def a_state_is_loaded(use: Use) -> None:
    use()
    for assign in (False, True):
        state = {name: other(t) for name, t in use.layer.state_dict().items()}
        use.layer.load_state_dict(state, assign=assign)
        check_now(use, f"load_state_dict(assign={assign})")
    stream = io.BytesIO()
    torch.save(use.layer.state_dict(), stream)
    stream.seek(0)
    twin = use.copied()
    with torch.no_grad():
        for p in twin.layer.parameters():
            p.zero_()
    twin()
    twin.layer.load_state_dict(torch.load(stream))
    check_now(twin, "a saved state was loaded into a copy", use)


@mutation()
def a_state_is_loaded_into_empty_memory(use: Use) -> None:
    """All that a layer computes with is in its state, or made of its arguments."""
    expected = use.copied()
    state = {name: t.clone() for name, t in use.layer.state_dict().items()}
    use.layer.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for t in (*use.layer.parameters(), *use.layer.buffers()):
            t.zero_()
    use.layer.load_state_dict(state)
    check_now(use, "a state was loaded into empty memory", expected)


@mutation(lambda use: trains(use) and of_the_package(use.layer))
def parameters_drawn_anew(use: Use) -> None:
    """`reset_parameters` sets every parameter that was not given with the expression, in place."""
    given = {id(p) for module in use.layer.modules() if isinstance(module, Factor | Given)
                 for p in module.parameters(recurse=False)}
    held = list(use.layer.parameters())
    with torch.no_grad():
        for p in held:
            if id(p) not in given:
                p.fill_(torch.nan)
    reset: Any = use.layer.reset_parameters
    reset()
    assert all(bool(p.isfinite().all()) for p in held), "reset_parameters left a parameter out"
    check_now(use, "parameters were drawn anew")


@mutation(trains)
def parameters_replaced(use: Use) -> None:
    use()
    for module, name in owners(use.layer):
        setattr(module, name, nn.Parameter(other(getattr(module, name))))
    check_now(use, "new parameters were assigned")


@mutation(lambda use: getattr(use.layer, "bias", None) is not None and "bias" in use.layer._parameters)
def the_bias_is_taken_away(use: Use) -> None:
    use()
    use.layer.register_parameter("bias", None)
    check_now(use, "without its bias")


@mutation(trains)
def requires_grad_toggled(use: Use) -> None:
    use()
    for expected in (False, True):
        use.layer.requires_grad_(expected)
        check_now(use, f"requires_grad = {expected}")
    for module, name in owners(use.layer)[::2]:
        getattr(module, name).requires_grad_(False)
    check_now(use, "some parameters are frozen")
    for t in use.arguments:
        t.requires_grad_(False)
    check_now(use, "arguments that want no gradient")


@mutation(trains)
def functional_call_with_others(use: Use) -> None:
    use()
    given = {name: nn.Parameter(other(p)) for name, p in use.layer.named_parameters()}
    y = use.given(given)
    with as_written():
        expected = use.given(given)
    same_gradients(y, expected, [*use.arguments, *given.values()], "functional_call")
    check_now(use, "after a functional_call")


@mutation(trains)
def an_inner_step_is_differentiated(use: Use) -> None:
    """MAML: parameters that are no leaves, whose graph is freed with them."""
    use()
    trained = {name: p for name, p in use.layer.named_parameters() if p.requires_grad}

    def adapted() -> tuple[Tensor, list[Any]]:
        gradients = torch.autograd.grad(use().square().mean(), list(trained.values()), create_graph=True,
                                        allow_unused=True)
        fast = {name: p if g is None else p - 0.1 * g
                for (name, p), g in zip(trained.items(), gradients, strict=True)}
        return use.given(fast), [weakref.ref(t) for t in fast.values() if not isinstance(t, nn.Parameter)]

    with sdpa_kernel(SDPBackend.MATH):  # torch's fused operators have no second derivative
        y, inner = adapted()
        with as_written():
            expected, _ = adapted()
        same_gradients(y, expected, use.variables, "after an inner step")
    del y, expected
    if any(ref() is not None for ref in inner):
        gc.collect()
    assert all(ref() is None for ref in inner), "something holds the parameters of an inner step"


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, t: Tensor) -> Tensor:
        return 1.5 * t


@mutation()
def a_layer_goes(use: Use) -> None:
    """What was remembered of its calls holds neither its numbers nor its structures."""
    use()
    twin = own_structures(use.copied()).mapped(lambda t: t.detach().clone())
    y = twin()
    if y.requires_grad:
        y.square().sum().backward()
    tensors = [*twin.layer.parameters(), *twin.layer.buffers(), *(t for s in twin.structures for t in tensors_in(s))]
    left = [weakref.ref(t) for t in tensors]
    del twin, y, tensors
    if any(ref() is not None for ref in left):
        gc.collect()
    alive = [tuple(t.shape) for ref in left if (t := ref()) is not None]
    assert not alive, f"tensors of shapes {alive} are still held"


@mutation(trains)
def parameters_parametrized(use: Use) -> None:
    use()
    twin = dataclasses.replace(use, layer=with_tensors(use.layer, {
        name: 1.5 * p.detach() for name, p in use.layer.named_parameters()}))
    for module, name in owners(use.layer):
        parametrize.register_parametrization(module, name, Scaled())
    check_now(use, "parametrized", twin)
    check_compiled_once(use, "parametrized")
    check_now(use, "parametrized, by gradients")


def check_compiled_once(use: Use, what: str) -> None:
    """A repeated call makes no plan and derives nothing anew."""
    use()
    plans = dict(planning._PLANS)
    use()
    assert plans == planning._PLANS, f"{what}: another plan for the same call"


@mutation(trains)
def parameters_normed(use: Use) -> None:
    """torch.nn.utils.weight_norm, which sets an attribute before each call."""
    held = [(module, name) for module, name in owners(use.layer) if getattr(module, name).dim() > 1]
    if not held:
        return
    use()
    names = {id(p): name for name, p in use.layer.named_parameters()}
    twin = dataclasses.replace(use, layer=with_tensors(use.layer, {
        names[id(getattr(m, n))]: 2 * getattr(m, n).detach() for m, n in held}))
    for module, name in held:
        weight_norm(module, name)
    with torch.no_grad():
        for name, p in use.layer.named_parameters():
            if name.endswith("_g"):
                p.mul_(2)
    check_now(use, "with weight_norm", twin)
    check_compiled_once(use, "with weight_norm")
