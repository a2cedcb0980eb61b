"""Takes private names of torch away and uses layers as before: the numbers stay. Run in a process of its own.

    python -m tests.private_names PATH[,PATH...]...

Each argument is tried in a copy of the process that has imported torch, and nothing of the package.
What goes away is what `structconv.torch_compat` finds when it is imported; torch itself keeps its own.
"""

import contextlib
import functools
import os
import sys
import traceback
from unittest import mock

import torch

LAYERS = ("gat", "mha")
#: Changes that depend on what a private name tells: modes, transforms, hooks, recomputation.
CHANGES = ("first_used_without_gradients", "grad_modes_in_turn", "first_used_under_grad", "first_used_under_vmap",
           "first_used_under_fake_tensors", "recomputed_on_the_first_call", "functional_call_with_others",
           "autocast_on_and_off", "forward_hooks", "global_hooks")
TRANSFORMS = ("first_used_under_grad", "first_used_under_vmap")


def without(paths):
    """What lets `_found` miss these."""
    inner, gone = functools.reduce, [path.split(".")[1:] for path in paths]

    def reduce(function, sequence, *initial):
        if list(sequence) in gone:
            raise AttributeError(".".join(sequence))
        return inner(function, sequence, *initial)

    return reduce


def native_numbers():
    """Layers in float32, against themselves in float64, gradients included."""
    from structconv import nn
    from structconv.primitives.native import core
    from structconv.structures import Graph

    assert core() is not None or os.environ.get("STRUCTCONV_NATIVE") == "0"
    graph = Graph(torch.randint(40, (2, 300)), num_nodes=40)
    for layer in (nn.GCNConv(16, 16), nn.GATConv(16, 8, 2), nn.GATv2Conv(16, 8, 2), nn.ChebConv(16, 16, 3)):
        results = []
        for dtype in (torch.float32, torch.float64):
            x = torch.linspace(-1, 1, 640).view(40, 16).to(dtype).requires_grad_()
            y = layer.to(dtype)(x, graph)
            grads = torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()], create_graph=True)
            again = torch.autograd.grad(grads[0].square().sum(), x)
            results.append([y, *grads, *again])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def steps_over_what_was_prepared():
    """One output after another, against all at once."""
    from structconv import nn
    from structconv.mechanisms import Additive

    layer = nn.Conv(Additive(8).softmax(), 6, 4, other_channels=5)
    x, z = torch.randn(2, 30, 6, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    cache = layer.prepare(x)
    steps = torch.cat([layer(cache, z=z[:, t:t + 1]) for t in range(3)], 1)
    actual, expected = (torch.autograd.grad(y.sin().sum(), [x, z, *layer.parameters()]) for y in (steps, layer(x, z=z)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def forward_derivatives():
    """Those of differences, or an error: never another number."""
    from tests.support.layers import LAYERS as MAKE
    from tests.support.mutations import MUTATIONS

    for name in LAYERS:
        try:
            MUTATIONS["forward_derivatives"].check(MAKE[name]())
        except (NotImplementedError, RuntimeError):
            continue


def changes(private):
    """Changes of every kind; functional transforms may be refused by torch where a name of theirs is gone."""
    from tests.support.layers import LAYERS as MAKE
    from tests.support.mutations import MUTATIONS

    for name in LAYERS:
        for change in CHANGES:
            if not MUTATIONS[change].concerns(use := MAKE[name]()):
                continue
            refused = () if private.follows_transforms else RuntimeError if change in TRANSFORMS else ()
            with contextlib.suppress(refused):
                MUTATIONS[change].check(use)


def attempt(paths):
    """All of the above without these names."""
    with mock.patch.object(functools, "reduce", without(paths)):
        from structconv import torch_compat as private

    for path in paths:
        found, fallback = private.NAMES[path]
        assert found is fallback, path
    torch.manual_seed(0)
    native_numbers()
    steps_over_what_was_prepared()
    changes(private)
    forward_derivatives()


def main():
    torch.set_num_threads(1)
    failed = [paths for paths in sys.argv[1:] if not passes(paths.split(","))]
    sys.exit(f"other numbers without {' or '.join(failed)}" if failed else 0)


def passes(paths):
    """Whether a copy of this process succeeds without these names."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(paths)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
