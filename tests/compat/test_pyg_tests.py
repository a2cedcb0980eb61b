"""`tools/pyg_tests.py` on a small folder of tests: it counts them, and explains what it can."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.layers import EVERY

pytest.importorskip("torch_geometric")
TOOL = Path(__file__).parents[2] / "tools" / "pyg_tests.py"
TESTS = """
import pytest
from torch_geometric.nn import GCNConv

def test_ours(): assert GCNConv.__module__ == "structconv.compat.pyg.convolutions"
def test_private(): GCNConv(2, 2)._cached_edge_index
@pytest.mark.skip
def test_skipped(): pass
def test_wrong(): assert 1 == 2
"""


@pytest.mark.skipif(not EVERY, reason="runs with STRUCTCONV_EVERY_TEST=1 (make test-every)")
def test_outcomes_are_counted_and_failures_explained(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    done = subprocess.run([sys.executable, str(TOOL), "--tests", str(tmp_path), "test_one.py"], check=False, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 1
    assert "1 of 3 passed" in done.stdout and "1 skipped" in done.stdout
    assert "test_private\n" in done.stdout and "private cache" in done.stdout
    assert "NOT EXPLAINED" in done.stdout
