"""Run PyTorch Geometric's own unit tests on our layers: `python tools/pyg_tests.py --tests DIR`.

DIR is the folder `test` of PyTorch Geometric's repository at the tag of the installed version. It is no part of this
repository. Our layers take the place of theirs in one of two ways:

- `--by import` replaces the names that a test imports from `torch_geometric.nn`: an option that we refuse fails.
- `--by patch` calls `structconv.compat.pyg.patch()`. This also runs tests of models, tools, functions and loaders.

`--by nothing` runs PyTorch Geometric's own layers, to tell failures of the installation from ours. With `--full` the
tests run their parts for TorchScript and others that take long, too.

The exit status is 1 if a test fails that has no explanation in `EXPLANATIONS`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

#: Tests of the layers that `structconv.compat.pyg` has.
LAYERS = (*(f"nn/conv/test_{name}.py" for name in (
    "agnn_conv", "appnp", "arma_conv", "cheb_conv", "cluster_gcn_conv", "fa_conv", "feast_conv", "gat_conv",
    "gatv2_conv", "gcn_conv", "gin_conv", "gmm_conv", "graph_conv", "hetero_conv", "hgt_conv", "mixhop_conv", "nn_conv",
    "rgcn_conv", "sage_conv", "sg_conv", "ssg_conv", "static_graph", "tag_conv", "transformer_conv")),
    *(f"nn/norm/test_{name}.py" for name in (
        "diff_group_norm", "graph_norm", "graph_size_norm", "instance_norm", "layer_norm", "mean_subtraction_norm",
        "msg_norm", "pair_norm")),
    "nn/aggr/test_basic.py", "nn/aggr/test_multi.py", "nn/dense/test_linear.py",
    "nn/models/test_jumping_knowledge.py", "nn/pool/test_glob.py")
#: Tests of what uses these layers, and of functions and loaders that a patch takes over.
PROGRAMS = ("nn/aggr/test_attention.py", "nn/aggr/test_fused.py", "nn/aggr/test_scaler.py", "nn/aggr/test_set2set.py",
            "nn/models/test_basic_gnn.py", "nn/norm/test_batch_norm.py", "nn/pool/test_sag_pool.py",
            "nn/pool/test_topk_pool.py",
            "nn/test_model_summary.py", "nn/test_sequential.py", "nn/test_to_hetero_transformer.py",
            "nn/test_to_hetero_with_bases_transformer.py", "explain/algorithm/test_gnn_explainer.py",
            "explain/algorithm/test_attention_explainer.py", "explain/algorithm/test_captum.py",
            "explain/algorithm/test_captum_explainer.py", "explain/algorithm/test_graphmask_explainer.py",
            "explain/algorithm/test_pg_explainer.py",
            "loader/test_neighbor_loader.py", "loader/test_link_neighbor_loader.py", "loader/test_hgt_loader.py",
            "loader/test_cluster.py", "loader/test_graph_saint.py", "utils/test_scatter.py", "utils/test_softmax.py",
            "utils/test_spmm.py", "utils/test_trim_to_layer.py")

#: Why a test fails: a part of the test's name or of its error's text, and the reason. The first that fits is printed.
EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("_cached_", "It reads the private cache of `cached=True`. Our layers keep none: they notice a changed graph."),
    ("test_arma_conv.py::test_arma_conv", "It expects a CSC matrix to fail. Ours takes it."),
    ("test_load_lazy_linear", "It reads the private hook of a lazy layer. Ours has none."),
    ("test_basic.py::test_validate", "It expects other words in the error of a group beyond `dim_size`."),
    ("test_basic_gnn.py::test_batch", "It expects other words in the error of a batch beyond `batch_size`."),
    ("hooks do nothing", "It registers a hook of messages. None are formed."),
    ("test_spmm_layout", "It expects PyTorch Geometric's warning that a COO or CSC matrix is converted to CSR. Ours "
     "reads each layout, with the same numbers."),
    ("test_softmax_dim", "It expects `ptr` with another `dim` than 0 to fail without torch-scatter. Ours computes it."),
    ("test_summary_with_leaf_module", "It expects a row for the aggregation of each layer. Ours has no such module."),
    ("test_packaging", "torch.package needs `extern('structconv.**')`, which the test says of torch_geometric only."),
    ("compiled by torch.compile or torch.export", "`torch.jit.script` takes PyTorch Geometric's layers only; a layer "
     "becomes theirs under a patch."),
    ("test_sequential_jit", "It fails by nothing, too: `Sequential.forward` of this version takes *args."),
    ("Proxy object cannot be iterated", "It fails by nothing, too: torch.fx cannot trace the *args of `Sequential`."),
    ("value of type Optional[Tensor] to bool", "It fails by nothing, too: TorchScript does not take this version's "
     "GATConv and GATv2Conv."),
    ("torch_geometric.nn.conv.gat_conv.GATConv", "It fails by nothing, too, after its GATConv could not be scripted."),
    ("_use_segment_matmul_heuristic_output", "PyTorch Geometric's RGCNConv can be scripted only after a call of its "
     "own; that of the test is ours."),
)
#: Parts of names of tests that fail only with `--full`, and the reason.
OF_FULL = {
    ("test_cheb_conv.py::test_cheb_conv", "test_graph_conv.py::test_graph_conv", "test_nn_conv.py::test_nn_conv",
     "test_transformer_conv.py::test_transformer_conv"):
    "torch.jit.script makes the layer PyTorch Geometric's, whose float32 sums round otherwise than ours before.",
}


class Tally:
    """Count the outcomes of tests by file; a plugin of pytest.

    Args:
        tests: the folder that names of files are relative to.
    """

    def __init__(self, tests: Path) -> None:
        self.tests = tests
        self.outcomes: dict[str, Counter[str]] = {}
        #: The error of each test that failed.
        self.failures: dict[str, str] = {}

    def _count(self, report: Any, outcome: str) -> None:
        path, *rest = report.nodeid.split("::")
        file = Path(self.root, path).resolve().relative_to(self.tests).as_posix()
        self.outcomes.setdefault(file, Counter())[outcome] += 1
        if outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failures["::".join([file, *rest])] = str(report.longrepr if crash is None else crash.message)

    def pytest_configure(self, config: Any) -> None:
        self.root = config.rootpath

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._count(report, "failed")

    def pytest_runtest_setup(self, item: Any) -> None:
        import torch

        torch.manual_seed(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.skipped:
            self._count(report, "failed" if report.failed else "skipped")
        elif report.when == "call":
            self._count(report, "passed")


def replace_imports() -> None:
    """Give `torch_geometric.nn` our layers, for modules that import them from now on."""
    pyg = importlib.import_module("structconv.compat.pyg")
    modules = [importlib.import_module(f"torch_geometric.nn{part}") for part in (
        "", ".aggr", ".conv", ".dense", ".models", ".norm", ".pool")]
    for name in pyg.__all__:
        for module in modules:
            if name in vars(module):
                setattr(module, name, getattr(pyg, name))


def explanation(test: str, error: str) -> str | None:
    """The reason why a test fails, if it is known."""
    more = [(part, reason) for parts, reason in OF_FULL.items() for part in parts if os.environ["FULL_TEST"] == "1"]
    return next((reason for part, reason in (*EXPLANATIONS, *more) if part in test or part in error), None)


def report(tally: Tally) -> str:
    """The outcomes by file, their share, and each failure with its explanation."""
    lines, total = [], Counter[str]()
    for file, counts in sorted(tally.outcomes.items()):
        total += counts
        lines.append(f"{file:55}" + "".join(f"{counts[kind]:6} {kind}" for kind in ("passed", "failed", "skipped")))
    ran = total["passed"] + total["failed"]
    lines.append(f"{total['passed']} of {ran} passed ({100 * total['passed'] / max(ran, 1):.1f} %), "
                 f"{total['skipped']} skipped")
    for test, error in tally.failures.items():
        first = error.strip().splitlines()[0][:200] if error.strip() else "no message"
        lines.append(f"FAILED {test}\n  {first}\n  {explanation(test, error) or 'NOT EXPLAINED'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, metavar="DIR")
    parser.add_argument("--by", choices=("import", "patch", "nothing"), default="import")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("files", nargs="*", help="relative to DIR; by default those of our layers")
    options = parser.parse_args(arguments)
    os.environ["FULL_TEST"] = str(int(options.full))
    tests = options.tests.resolve()
    files = options.files or (LAYERS if options.by == "import" else LAYERS + PROGRAMS)
    if options.by == "import":
        replace_imports()
    elif options.by == "patch":
        importlib.import_module("structconv.compat.pyg").patch()
    tally = Tally(tests)
    pytest.main(["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--import-mode", "importlib",
                 "--rootdir", str(tests), "-c", os.devnull, "-W", "ignore", "--tb", "line",
                 *(str(tests / file) for file in files)], plugins=[tally])
    print(report(tally))
    return int(any(explanation(test, error) is None for test, error in tally.failures.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
