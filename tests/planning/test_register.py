"""The register of kernels: precedence by name, checked for circles and for names that there are not."""

import pytest
import torch

from structconv import ConfigError, Eye, Full, ops
from structconv.bases.dense import Identity
from structconv.planning import Cost, Kernel, register, registered
from structconv.planning.kernel import ordered
from tests.support.registered import own_register


@pytest.fixture(autouse=True)
def own():
    """What a test registers is gone after it."""
    with own_register():
        yield


class AsItIs(Kernel):
    """x itself, for one identity and an `Eye`."""

    name, types, orders = "as it is", (Identity,), ("channels_first",)
    price = Cost()

    def match(self, problem):
        return True if isinstance(problem.theta, Eye) and problem.basis.size == 1 else None

    def cost(self, match, problem, path):
        return self.price

    def compile(self, match, problem, path):
        return lambda call: call.x if call.bias is None else call.x + call.bias


def named(kind, *before, price=AsItIs.price):
    """A kernel of that name."""
    return type("Named", (AsItIs,), {"name": kind, "before": before, "price": price})()


def test_a_new_kernel_is_one_class_and_one_line():
    """It competes with the others by its cost, also for plans that were made before."""
    x = torch.randn(3, 2)
    before = ops.plan(x, Identity(3), Eye.of(1, 2))
    assert register(AsItIs()) in registered()
    made = ops.plan(x, Identity(3), Eye.of(1, 2))
    assert before.kernel != "as it is" and made.kernel == "as it is"
    assert ops.conv(x, Identity(3), Eye.of(1, 2)) is x
    assert ops.plan(x, Identity(3), Full.of(torch.zeros(1, 2, 2))).kernel != "as it is"


def test_a_kernel_takes_the_place_of_its_namesake():
    first, second = register(named("mine")), register(named("mine", price=Cost(flops=1e15)))
    assert second in registered() and first not in registered()
    assert ops.plan(torch.randn(3, 2), Identity(3), Eye.of(1, 2)).kernel != "mine"


def test_precedence_beats_cost():
    x, dear = torch.randn(3, 2), Cost(flops=1e15)
    register(named("dear", price=dear))
    made = ops.plan(x, Identity(3), Eye.of(1, 2))
    assert made.kernel == "one product" and "dear" in str(made)
    register(named("dear", "one product", "primitives", price=dear))
    made = ops.plan(x, Identity(3), Eye.of(1, 2), path="channels_first")
    assert made.kernel == "dear" and "one product" not in str(made)
    assert ops.plan(x, Identity(3), Full.of(torch.zeros(1, 2, 2))).kernel == "one product"


def test_precedence_is_a_matter_of_each_path():
    """On a path that the kernel does not have, those behind it are weighed."""
    register(named("first", "primitives", "one product"))
    actual = ops.plan(torch.randn(3, 2), Identity(3), Eye.of(1, 2)).candidates
    assert {c.kernel for c in actual if c.path == "channels_first"} == {"first"}
    assert {c.kernel for c in actual if c.path == "structure_first"} == {"analysis, contract"}


def test_whatever_order_they_are_registered_in():
    chain = {name: named(name, *before) for name, before in (("c", ()), ("a", ("b",)), ("b", ("c",)))}
    assert [kernel.name for kernel in ordered(chain)] == ["a", "b", "c"]
    names = [kernel.name for kernel in registered()]
    for kernel in registered():
        assert all(names.index(kernel.name) < names.index(other) for other in kernel.before)


@pytest.mark.parametrize(("links", "circle"), [
    ({"a": "a"}, "aa"), ({"a": "b", "b": "a"}, "aba"), ({"z": "a", "a": "b", "b": "c", "c": "ay", "y": ""}, "abca")])
def test_a_circle_of_precedences_is_named(links, circle):
    kernels = {name: named(name, *before) for name, before in links.items()}
    turned = [circle[i:-1] + circle[:i] + circle[i] for i in range(len(circle) - 1)]  # it may start anywhere
    with pytest.raises(ConfigError, match="precedences of kernels must not form a circle") as error:
        ordered(kernels)
    assert any(f"got {' before '.join(each)}." in str(error.value) for each in turned)


def test_what_is_refused_leaves_the_register_as_it_was():
    there = registered()
    with pytest.raises(ConfigError, match=r"mine must come before kernels among .*torch\.conv.*; got up, torch\.cnv"):
        register(named("mine", "torch.conv", "up", "torch.cnv"))
    register(named("mine", "one product"))
    with pytest.raises(ConfigError, match="circle"):
        register(type("One", (AsItIs,), {"name": "one product", "before": ("mine",)})())
    assert [kernel for kernel in registered() if kernel.name != "mine"] == sorted(there, key=registered().index)
    made = ops.plan(torch.randn(3, 2), Identity(3), Eye.of(1, 2))
    assert made.kernel == "mine"
