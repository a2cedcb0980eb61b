"""Kernels called by name, and what those of attention are held to: the expression that they stand for, pair by pair.

Problems and plans are made anew, so that what a test changes in the package counts. A basis is applied to
r (..., K or 1, M, C).
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from structconv import kernels as _kernels  # noqa: F401 - registers them
from structconv.bases.pairwise import weights_at
from structconv.bases.tree import materialized
from structconv.mechanisms.expression import Inputs
from structconv.planning import Call, Problem, Sizes, decide, registered
from structconv.planning.kernel import matching
from structconv.structures import Graph
from structconv.weights.whole import ByHead, as_weight
from tests.support.derivatives import same

#: The expression as it is written.
PRIMITIVES = "value, apply, output"


def numbers(*shape):
    """The same numbers for the same shape, in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def call_of(basis, r):
    """The call by which `ops.apply` applies a basis to r."""
    return Call(r.select(-3, 0), basis, ByHead.of(basis.size, r.shape[-1]), None, r)


def convolution_of(x, basis, theta):
    """The call by which `ops.conv` computes eq. 8."""
    return Call(x, basis, as_weight(theta))


def problem_of(call):
    """What a plan of the call is made for, were no gradient wanted."""
    spec = call.spec()
    batch = math.prod(torch.broadcast_shapes(call.x.shape[:-2], spec.batch_shape))
    sizes = Sizes(batch, call.x.dtype.itemsize)
    return Problem(spec, call.theta, call.x, sizes, projected=call.projected is not None)


def kernel_of(name):
    """The kernel of this name."""
    return next(kernel for kernel in registered() if kernel.name == name)


def match_of(name, call):
    """What the kernel of this name recognizes in a call; `None` if it is not for it."""
    kernel, problem = kernel_of(name), problem_of(call)
    return kernel.match(problem) if isinstance(problem.basis, kernel.types) else None


def computed(name, call, path):
    """What the kernel of this name makes of a call in this order, whether or not the planner would take it."""
    return kernel_of(name).compile(match_of(name, call), problem_of(call), path)(call)


def application_of(name, call):
    """How the kernel of this name applies the basis of a call."""
    return kernel_of(name).application(match_of(name, call), problem_of(call))


def offered(call):
    """The kernels that the planner weighs for a call."""
    return {kernel.name for kernel, _, _ in matching(problem_of(call))}


def planned(call, kernel):
    """The plan for a call, which takes this kernel."""
    plan = decide(problem_of(call))
    assert plan.kernel == kernel, f"not {kernel}:\n{plan}"
    return plan


def applied(basis, r, kernel):
    """A_k^T r_k by this kernel, which the planner takes."""
    call = call_of(basis, r)
    return planned(call, kernel).run(call)


def expression(mechanism, x, *, channels, structure=None):
    """A bound mechanism called: its basis, what it learns from, r, and the call by its leaves."""
    inputs = Inputs(x, x, structure)
    tree = mechanism.evaluate(inputs)
    basis = materialized(tree)
    r = torch.randn(*x.shape[:-2], basis.size, x.shape[-2], channels, dtype=x.dtype, device=x.device,
                    requires_grad=True)
    call = call_of(basis, r)._replace(basis=tree)
    return basis, [r, x, *mechanism.parameters()], call


def on_a_graph(mechanism, lead=(), dtype=torch.float64):
    """`expression` over a graph with duplicate edges, self-loops and isolated nodes."""
    edges = torch.randint(0, 25, (2, 200))
    edges[:, 1] = edges[:, 0]
    graph = Graph(edges, num_nodes=30, edge_attr=torch.randn(200, 3))
    x = torch.randn(*lead, 30, 16, dtype=dtype, requires_grad=True)
    return expression(mechanism.bound(16).to(dtype), x, channels=8, structure=graph)


def check_computes_the_same(built, kernel, tolerance):
    """What is applied, and the weights themselves: values and gradients, by the basis and by the mechanism's leaves."""
    basis, leaves, call = built
    expected = basis.apply(call.projected)
    for each in (call_of(basis, call.projected), call):
        plan = planned(each, kernel)
        same(plan.run(each), expected, leaves, tolerance, tolerance)
        same(plan.weights(each), weights_at(basis, expected.dtype), leaves, tolerance, tolerance)


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that any operation returned, within the products of groups too."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out
