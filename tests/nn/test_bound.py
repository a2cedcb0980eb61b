"""Steps bound to a plan: the second call, the changed option, the hook, the copy."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from structconv import Causal, ConfigError, DotProduct, MultiheadAttention, Window
from structconv.kernels.attention_step import AttentionStep
from structconv.planning.kernel import register
from structconv.primitives.native.loader import core
from tests.support.registered import own_register

pytestmark = pytest.mark.skipif(core() is None, reason="needs the native kernels")


class Steps:
    """A layer that has taken two steps, of which the second was bound, and what the next should give."""

    def __init__(self, layer=None, structure=None, **options):
        self.layer = MultiheadAttention(8, 2, **options).eval() if layer is None else layer
        self.x, self.structure = torch.randn(2, 9, 8), Causal() if structure is None else structure
        self.cache, self.at = self.layer.prepare(self.x[:, :3], self.structure), 3
        self.step(), self.step()

    def step(self, **options):
        self.at += 1
        return self.layer.step(self.cache, self.x[:, self.at - 1:self.at], **options)

    def expected(self, **options):
        return self.layer(self.x[:, :self.at], structure=self.structure, **options)[:, -1:]

    @property
    def bound(self):
        return self.cache._bound

    def check(self, **options):
        actual = self.step()
        torch.testing.assert_close(actual, self.expected(**options), rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def dot_of(layer):
    return next(part for part in layer.modules() if isinstance(part, DotProduct))


def test_the_steps_behind_the_first_are_bound(monkeypatch):
    steps, runs = Steps(), []
    assert steps.bound is not None
    monkeypatch.setattr(MultiheadAttention, "_call", lambda *args: runs.append(args))
    steps.step()
    assert not runs


@pytest.mark.parametrize("name", [
    "layer", "weight", "mechanism", "scores", "query", "key", "value", "output", "all modules"])
def test_a_hook_that_came_later_is_heeded(name):
    steps, seen = Steps(), []
    layer, dot = steps.layer, dot_of(steps.layer)
    register = {"all modules": nn.modules.module.register_module_forward_hook}.get(name) or {
        "layer": layer, "weight": layer.weight, "mechanism": layer.mechanism, "scores": dot, "query": dot.query,
        "key": dot.key, "value": layer.weight.value, "output": layer.weight.output}[name].register_forward_hook
    handle = register(lambda *given: seen.append(name) and None)
    try:
        steps.check()
    finally:
        handle.remove()
    assert seen


def test_a_forward_of_a_derived_class_or_of_the_object_is_run():
    class Doubled(MultiheadAttention):
        def forward(self, *args, **options):
            return 2 * super().forward(*args, **options)

    steps = Steps(Doubled(8, 2).eval())
    assert steps.bound is None
    steps.check()
    steps = Steps()
    before = steps.layer.forward
    steps.layer.forward = lambda *args, **options: 3 * before(*args, **options)
    steps.check()


def test_changed_parameters_and_autocast_are_refused():
    steps = Steps()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        steps.step()
    dot_of(steps.layer).query.weight.mul_(2)
    with pytest.raises(ConfigError, match="parameters"):
        steps.step()


def test_an_exchanged_module_is_called():
    steps = Steps()
    dot = dot_of(steps.layer)
    linear = nn.Linear(8, 8)
    dot.query = linear
    steps.check()
    dot.query.register_forward_hook(lambda module, given, actual: 2 * actual)
    steps.check()


def test_dropout_when_training_is_drawn():
    steps = Steps(dropout=0.5)
    steps.step()
    steps.layer.train()
    assert not torch.equal(steps.step(), steps.expected())


@pytest.mark.parametrize(("structure", "bound"), [
    (Causal() & Window(3), True), (Window(3), True), (Window(4) & Causal() & Window(2), True),
    (Window(2, dilation=2), False), (Causal() | Window(1), False)])
@pytest.mark.parametrize("first", [1, 6])
def test_steps_behind_a_mask_are_bound_where_it_can_hide_nothing_that_is_left(structure, bound, first):
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 9, 8)
    cache = layer.prepare(x[:, :first], structure)
    for t in range(first, 9):
        actual = layer.step(cache, x[:, t:t + 1])
        torch.testing.assert_close(actual, layer(x[:, :t + 1], structure=structure)[:, -1:], rtol=1e-4, atol=1e-5)
    assert (cache._bound is not None) is bound


def test_copies_beams_and_other_batches_go_on():
    steps = Steps()
    twin, before = steps.cache.copy(), steps.cache.heads().clone()
    for _ in range(2):
        steps.layer.step(twin, torch.randn(2, 1, 8))
    assert torch.equal(steps.cache.heads(), before)
    steps.check()
    steps.cache.truncate(4)
    steps.at = 4
    for index in (torch.tensor([1, 1]), torch.tensor([0, 1, 1])):
        steps.cache.reorder(index)
        steps.x = steps.x[index]
        steps.check()
        steps.check()


def test_gradients_are_asked_for_later():
    steps = Steps()
    with torch.enable_grad():
        token = steps.x[:, 5:6].clone().requires_grad_()
        y = steps.layer.step(steps.cache, token)
        x = torch.cat([steps.x[:, :5], token], 1)
        expected = torch.autograd.grad(steps.layer(x, structure=Causal())[:, -1].sum(), token)[0]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), token)[0], expected, rtol=1e-4, atol=1e-5)


def test_modes_see_what_is_computed():
    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    steps = Steps()
    with Seen() as seen:
        actual = steps.step()
    assert seen.count > 6
    torch.testing.assert_close(actual, steps.expected(), rtol=1e-4, atol=1e-5)


def test_a_kernel_registered_since_is_weighed():
    steps, asked = Steps(), []

    class Asked(AttentionStep):
        def match(self, problem):
            asked.append(problem)
            return super().match(problem)

    with own_register():
        register(Asked())
        steps.check()
    assert asked


def test_what_the_planner_is_held_to_may_change():
    steps = Steps()
    steps.layer.path = "between"
    steps.check()
    with pytest.raises(ConfigError, match=r"path must be one of 'between', .*got 'nowhere'"):
        steps.layer.path = "nowhere"
    assert steps.layer.path == "between"
    steps.layer.path = "operator_first"
    with pytest.raises(ConfigError, match=r"path must be one of .* for Normalized; got 'operator_first'"):
        steps.step()


def test_a_step_that_fails_leaves_nothing():
    steps = Steps()
    with pytest.raises(ConfigError):
        steps.step(keep=3)
    assert steps.cache.length == 5
    steps.at -= 1
    steps.check()
