"""No call of an operator ends the process: see `raw_calls`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from structconv.errors import ShapeError
from structconv.primitives.native import core
from tests.native import guarded
from tests.primitives.raw_calls import K, M, N, valid
from tests.support.drawn import EVERY

#: `make test-every` makes more of them.
ROUNDS = 60 if EVERY else 3


@pytest.mark.parametrize(("native", "seed"), [("1", "0"), ("0", "2")])
def test_wrong_calls_end_in_exceptions(native, seed, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_NATIVE", native)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "-m", "tests.primitives.raw_calls", seed, str(ROUNDS)],
                          capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {''.join(done.stderr.splitlines(keepends=True)[-30:])}"
    assert "wrong" not in done.stdout, done.stdout


def test_wrong_calls_of_native_operators_end_in_exceptions(tmp_path):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    guard = guarded.build(tmp_path)
    done = subprocess.run([sys.executable, "-m", "tests.primitives.raw_native", "0", str(4 * ROUNDS)],
                          capture_output=True, text=True, check=False, timeout=300,
                          env=None if guard is None else guarded.environment(guard))
    assert done.returncode == 0, f"{done.returncode}: {''.join(done.stderr.splitlines(keepends=True)[-30:])}"
    assert "wrong" not in done.stdout, done.stdout
    assert guard is None or "guarded tensors" in done.stdout


def test_a_guard_ends_a_process_that_reads_beside_a_tensor(tmp_path):
    guard = guarded.build(tmp_path)
    if guard is None:
        pytest.skip("no C compiler, or not Linux")
    code = ("import ctypes, os, torch\nfrom tests.native import guarded\nguarded.enable()\n"
            "tensors = [torch.zeros(5) for _ in range(2)]\n"  # one begins after a page, the other ends before one
            "for beside in (0, -4, 20):\n"
            "    child = os.fork()\n"
            "    for t in () if child else tensors: ctypes.c_float.from_address(t.data_ptr() + beside).value\n"
            "    if not child: os._exit(0)\n"
            "    print(os.waitpid(child, 0)[1])")
    done = subprocess.run([sys.executable, "-c", code], env=guarded.environment(guard), check=True, text=True,
                          capture_output=True)
    assert [os.WTERMSIG(int(status)) for status in done.stdout.split()] == [0, signal.SIGSEGV, signal.SIGSEGV]


@pytest.mark.parametrize("factor", [torch.ones(1, K, 4), torch.ones(M, K, 4, dtype=torch.float64), torch.ones(N, K, 4)])
def test_a_factor_that_does_not_fit_is_refused(factor):
    q, k, x, vector, *options = valid(torch.float32)["dense_additive_attention"]
    with pytest.raises(ShapeError, match="factor must have the shape"):
        torch.ops.structconv.dense_additive_attention(q, k, x, vector, *options[:3], factor, *options[4:])


def test_degrees_without_end_are_refused():
    *arguments, _, _, chebyshev = valid(torch.float32)["polynomial_analysis"]
    with pytest.raises(ShapeError, match="degrees must be at most"):
        torch.ops.structconv.polynomial_analysis(*arguments, 1 << 40, 1 << 40, chebyshev)
