"""No call of an operator ends the process: see `raw_calls`."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("native", "seed"), [("1", "0"), ("1", "1"), ("0", "2")])
def test_wrong_calls_end_in_exceptions(native, seed, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_NATIVE", native)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "-m", "tests.primitives.raw_calls", seed, "40"],
                          capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.returncode}: {''.join(done.stderr.splitlines(keepends=True)[-30:])}"
    assert "wrong" not in done.stdout, done.stdout
