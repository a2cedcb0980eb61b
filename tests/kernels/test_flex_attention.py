"""FlexAttention: what it recognizes, and that it computes the same, gradients included.

Without a GPU torch evaluates Flex's functions as they are written; its own refusal of gradients on a CPU, where its
compiled kernels have none, is lifted here.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from structconv.kernels import dense_attention, flex_attention, window_attention
from structconv.kernels.flex_attention import FlexScores, Present
from structconv.mechanisms import ALiBi, BiAffine, DotProduct, RelativeBias, RelativeKey
from structconv.planning import decide
from structconv.structures import Blocks, Causal, DenseMask, EdgeSupport, Graph, Grid, Padding, Window
from tests.kernels.applied import applied, check_computes_the_same, expression, offered, planned, problem_of
from tests.support.drawn import drawn

KERNEL = "torch.flex"
N, P = 19, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DOT = DotProduct(heads=4).scaled()
BIASED = DOT + RelativeBias(3)
GENERATOR = torch.Generator().manual_seed(3)
KEEP = torch.rand(2, N, generator=GENERATOR) > 0.4
TABLE = torch.rand(N, N, generator=GENERATOR) > 0.5
FLEX = {
    "learned bias": BIASED.softmax(),
    "causal buckets": (DOT + RelativeBias(4, buckets="log_causal")).masked(keep=Causal()).softmax(),
    "alibi, padded": (ALiBi() + DOT).masked(keep=Padding(KEEP)).softmax(),
    "keys and bias": (DOT + RelativeKey(2) + 0.5 * RelativeBias(3, heads=4)).masked(keep=Causal()).softmax(),
    "window": BIASED.masked(keep=Window(2)).softmax(),
    "window of a grid, padded": BIASED.masked(keep=Window((3, 1), grid=Grid((N, 1)))).masked(
        keep=Padding(KEEP)).softmax(),
    "blocks or before": BIASED.masked(keep=Blocks(5) | Causal()).softmax(),
    "causal and padded": DOT.masked(keep=Causal()).masked(keep=Padding(KEEP)).softmax(),
    "tables": BIASED.masked(keep=DenseMask(TABLE)).masked(keep=DenseMask(KEEP.unsqueeze(-1) & TABLE)).softmax(),
    "nothing left": BIASED.masked(keep=Padding(torch.zeros(N, dtype=torch.bool))).softmax(),
    "softcap": DOT.softcap(2.0).softmax(),
    "bi-affine": BiAffine(heads=3).softmax(),
}
OTHERS = {
    "fused by torch": DOT.softmax(),
    "fused by torch, causal": DOT.masked(keep=Causal()).softmax(),
    "dropout": BIASED.softmax().dropout(0.4),
    "sum": DOT.relu().normalize("sum"),
    "over outputs": BIASED.softmax(over="outputs"),
    "unknown map": DOT.map(torch.sin).softmax(),
    "no product": RelativeBias(2, heads=2).softmax(),
    "edges": BIASED.masked(keep=EdgeSupport(Graph(torch.tensor([[0, 1], [1, 2]]), num_inputs=N,
                                                  num_outputs=N))).softmax(),
    "moving window": BIASED.masked(keep=Window(2, center=torch.arange(float(N)))).softmax(),
    "circular window": BIASED.masked(keep=Window(2, grid=Grid((N,), periodic=True))).softmax(),
}


@pytest.fixture(autouse=True)
def flex(monkeypatch):
    """Flex is offered here, for problems of any size, and differentiated."""
    monkeypatch.setattr(flex_attention, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr(flex_attention, "LEAST_PAIRS", 0)
    monkeypatch.setattr(flex_attention.triton, "working", lambda device: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "SIDE", 8)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *args, **kwargs: None)
    torch._dynamo.reset()  # on a CPU all problems are traced from one function, of which torch makes few programs
    monkeypatch.setattr(flex_attention, "_FIRST", {})
    monkeypatch.setattr(dense_attention, "HELD_RELATIVE", 0)
    monkeypatch.setattr(window_attention, "STORED", ())  # as on a GPU


def built(mechanism, dtype=torch.float32):
    x = torch.randn(2, N, P, dtype=dtype, device=DEVICE, requires_grad=True)
    return expression(mechanism.bound(P).to(DEVICE, dtype), x, channels=6)


def compare(name):
    check_computes_the_same(built(FLEX[name]), KERNEL, 1e-4)


@pytest.mark.parametrize("name", drawn(FLEX, 3))
def test_flex_computes_the_same(name):
    compare(name)


@pytest.mark.parametrize("name", drawn(["keys and bias", "window of a grid, padded"], 2))
def test_a_compiled_program_has_all_gradients(name, monkeypatch):
    """What is compiled for a GPU, traced with its gradients; the code for one is torch's part."""
    monkeypatch.setattr(flex_attention, "UNCOMPILED", ())
    monkeypatch.setattr(flex_attention, "_COMPILED", {})
    if DEVICE.type == "cpu":
        monkeypatch.setattr(flex_attention, "BACKEND", "aot_eager")
    compare(name)
    compare(name)
    assert len(flex_attention._COMPILED) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_what_flex_cannot_compute_is_left_alone(name):
    assert KERNEL not in offered(built(OTHERS[name])[2])


@pytest.mark.parametrize(("name", "value"), [("LEAST_PAIRS", N * N + 1), ("DEVICES", ())])
def test_the_planner_offers_it_on_a_gpu_alone_and_for_what_is_large(name, value, monkeypatch):
    call = built(FLEX["learned bias"])[2]
    assert KERNEL in offered(call)
    monkeypatch.setattr(flex_attention, name, value)
    assert KERNEL not in offered(call)


@pytest.mark.parametrize("mask", [Causal(), Window(9), ~Window(3) & Causal(), Blocks(7) | Window(2)])
def test_blocks_are_those_that_torch_finds(mask):
    inputs, outputs = 37, 29
    actual = Present.of(mask).block_mask(inputs, outputs, DEVICE)
    expected = torch_flex.create_block_mask(lambda b, h, n, m: mask.contains(m, n), None, None, outputs, inputs,
                                            device=DEVICE, BLOCK_SIZE=flex_attention.SIDE)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert Present.of(mask).block_mask(inputs, outputs, DEVICE) is actual


def test_what_is_not_finite_stays_with_its_pairs(monkeypatch):
    monkeypatch.setattr(dense_attention, "kernels", lambda: None)  # it would take what is causal and padded
    basis, (r, *_), call = built(FLEX["causal and padded"])
    with torch.no_grad():
        r[0, :, 4], r[1, :, 2] = torch.nan, torch.inf
    plan = planned(call, KERNEL)
    with monkeypatch.context() as patch:
        patch.setattr(FlexScores, "_attend", None)  # padding may have left these out
        torch.testing.assert_close(plan.run(call), basis.apply(r), equal_nan=True, rtol=1e-4, atol=1e-4)
    basis, (r, *_), _ = built((DOT + RelativeBias(3)).masked(keep=Causal()).softmax())
    with torch.no_grad():
        r[0, :, 4] = torch.nan
    y = applied(basis, r, KERNEL)
    assert y[0, :, :4].isfinite().all() and y[0, :, 4:].isnan().all() and y[1].isfinite().all()


def test_deterministic_algorithms_and_wide_numbers_are_left_to_others(monkeypatch):
    basis, (r, *_), call = built(FLEX["learned bias"])
    plan = planned(call, KERNEL)
    monkeypatch.setattr(FlexScores, "_attend", None)  # is not asked
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        torch.testing.assert_close(plan.run(call), basis.apply(r), rtol=1e-4, atol=1e-4)
    basis, (r, *_), call = built(FLEX["learned bias"], torch.float64)
    torch.testing.assert_close(decide(problem_of(call)).run(call), basis.apply(r))
