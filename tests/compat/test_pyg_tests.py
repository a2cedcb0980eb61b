"""`tools/pyg_tests.py` on a small folder of tests: it counts them, and explains what it can."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
TOOL = Path(__file__).parents[2] / "tools" / "pyg_tests.py"
TESTS = """
import pytest
from torch_geometric.nn import GCNConv

def test_ours(): assert GCNConv.__module__ == "structconv.compat.pyg.convolutions"
def test_private(): GCNConv(2, 2)._cached_edge_index
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.mark.parametrize("more, status", [("", 0), ("\ndef test_wrong(): assert 1 == 2\n", 1)])
def test_outcomes_are_counted_and_failures_explained(tmp_path, more, status):
    (tmp_path / "test_one.py").write_text(TESTS + more)
    done = subprocess.run([sys.executable, str(TOOL), "--tests", str(tmp_path), "test_one.py"], check=False, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == status
    assert f"1 of {2 + status} passed" in done.stdout and "1 skipped" in done.stdout
    assert "test_private\n" in done.stdout and "private cache" in done.stdout
    assert ("NOT EXPLAINED" in done.stdout) is bool(status)
