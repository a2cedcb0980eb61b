"""When windows are computed by the kernel that needs no list of pairs, and what that choice is for.

The choice is by cost: the tests say nothing of where it turns, only that the least is taken, that it follows the
machine, and that a wide window is not listed.
"""

import pytest
import torch

from structconv import Causal, ConfigError, DotProduct, Eye, Grid, RelativeBias, StructureError, Window, ops, plan
from structconv.bases import Bilinear, GridLookup
from structconv.planning import Machine, decide
from structconv.planning import machine as machines
from structconv.structures import Blocks
from tests.kernels.applied import LargestTensor, applied, call_of, offered, problem_of

KERNEL, LISTED = "structconv.window_attention", "structconv.edge_attention"


def attention(window, length, heads=1):
    q = torch.randn(heads, length, 4)
    return Bilinear(q, q).masked(keep=window).softmax(over="inputs"), q


def make(window, length):
    return decide(problem_of(call_of(*attention(window, length))))


def test_no_pairs_are_listed(monkeypatch):
    basis, _ = attention(Window(60), 300, heads=3)
    theta, x = Eye.of(3, 6), torch.randn(300, 6)
    monkeypatch.setattr(Window, "edges", lambda *_: pytest.fail("pairs were listed"))
    monkeypatch.setattr(Window, "listing", lambda *_: pytest.fail("pairs were listed"))
    actual = plan(x, basis, theta)
    assert actual.kernel == KERNEL and "sdpa" not in str(actual) and "blocked" not in str(actual)
    assert ops.conv(x, basis, theta, plan=actual).shape == (300, 6)
    assert ops.apply(basis, torch.randn(3, 300, 5)).shape == (3, 300, 5)


def test_nothing_of_the_size_of_the_pairs_is_held():
    q = torch.randn(2, 512, 4, requires_grad=True)
    with LargestTensor() as largest:
        y = ops.apply(Bilinear(q, q).masked(keep=Window(100)).softmax(over="inputs"), q)
        y.sum().backward()
    assert q.numel() <= largest.elements <= 4 * q.numel()


@pytest.mark.parametrize("window", [Window(20, grid=Grid(70, periodic=True)), Window(20) & Blocks(30),
                                    Window(20, center=torch.arange(70.0)),
                                    Window((5, 7), grid=Grid((7, 10))) & Causal()])
def test_other_windows_stay_with_their_lists(window):
    basis, q = attention(window, 70)
    assert KERNEL not in offered(call_of(basis, q))
    applied(basis, q, LISTED)


WINDOWS = [(Window(radius), 1024) for radius in (1, 4, 16, 64, 256)]
WINDOWS += [(Window(radius) & Causal(), 1024) for radius in (2, 64)]
WINDOWS += [(Window(radius, grid=Grid((28, 28))), 784) for radius in (1, 3, 12)]
MACHINES = {"typical": machines.TYPICAL["cpu"], "slow to gather": Machine(150.0, 40.0, 0.5),
            "slow to multiply": Machine(2.0, 40.0, 15.0)}


def test_the_choice_follows_the_machine(monkeypatch):
    """A list gathers a row for each pair; the kernel computes pairs that do not count."""
    chosen = {}
    for name, machine in MACHINES.items():
        monkeypatch.setattr(machines, "_KNOWN", {"cpu": machine})
        chosen[name] = [make(window, length).kernel for window, length in WINDOWS]
    counts = {name: kernels.count(KERNEL) for name, kernels in chosen.items()}
    assert counts["slow to gather"] > counts["typical"] > counts["slow to multiply"]


@pytest.mark.parametrize("window_of", [Window, lambda radius: Window(radius) & Causal(),
                                       lambda radius: Window(radius, grid=Grid((32, 32)))],
                         ids=["sequence", "causal", "image"])
def test_the_wider_the_window_the_less_its_list(window_of):
    """A narrow window is listed; from some width on none is, and none wider."""
    unlisted = [make(window_of(radius), 1024).kernel == KERNEL for radius in (1, 2, 4, 8, 16, 31, 200)]
    assert unlisted == sorted(unlisted) and not unlisted[0] and unlisted[-1]


def test_with_a_bias_no_window_is_too_narrow():
    grid = Grid((7, 10))
    q, table = torch.randn(2, 70, 4), torch.randn(2, 3, 3)
    scores = Bilinear(q, q) + GridLookup(table, grid)
    basis = scores.masked(keep=Window((3, 3), grid=grid)).softmax(over="inputs")
    torch.testing.assert_close(applied(basis, q, KERNEL), basis.dense().mT @ q)
    other = scores.masked(keep=Window(3)).softmax(over="inputs")
    assert KERNEL not in offered(call_of(other, q))
    torch.testing.assert_close(ops.apply(other, q), other.dense().mT @ q)


def test_a_traced_program_lists_no_window():
    torch._dynamo.reset()

    def layer(q):
        basis = Bilinear(q, q).masked(keep=Window(2)).softmax(over="inputs")
        return ops.apply(basis, q)

    q = torch.randn(2, 40, 4)
    actual = []

    def backend(graph, inputs):
        actual.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=backend)(q), layer(q))
    assert any("window_attention" in name for name in actual)


@pytest.mark.parametrize(("structure", "given"), [(None, None), (Grid(6), None), (None, Grid(6))])
def test_a_bias_for_two_axes_needs_a_grid_with_two(structure, given):
    mechanism = (DotProduct(heads=2, dim=3) + RelativeBias((1, 2), grid=given)).softmax().bound(4)
    with pytest.raises(StructureError, match="RelativeBias"):
        mechanism.basis(torch.randn(6, 4), structure)
    with pytest.raises(ConfigError, match="buckets"):
        RelativeBias((1, 2), buckets="log")


@pytest.mark.parametrize(("table", "grid"), [((2, 3, 4), Grid((5, 6))), ((3, 3), Grid((5, 6))),
                                             ((2, 3, 3), Grid((5, 6), periodic=True))])
def test_a_table_must_have_the_offsets_of_its_grid(table, grid):
    with pytest.raises(StructureError, match="GridLookup"):
        GridLookup(torch.zeros(table), grid)
