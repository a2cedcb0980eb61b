"""`python -m benchmarks.scaling`: how time and memory of graph layers grow with edges, and how time falls with threads.

Each row is a process of its own, with a new power-law graph of 20 edges a node and int32 indices, whose memory is
limited (`--limit`): a layer that needs more fails with torch's error. Memory is the peak above what is held before the
call: edges, x, parameters and, for training, the gradient of x. The exponent is that of edges between two rows of one
layer: 1.0 means that time is proportional to them.

Threads beyond those of the machine are predicted (Gunther's law, without its term for coherence). Gathers of rows from
memory bound these layers, so the rate of gathers at 1 and at 2 threads, measured with torch's own operators, gives the
share of a thread's rate that is lost to each further one: rate(p) = p rate(1) / (1 + loss (p - 1)). A prediction, not a
measurement: it holds for cores that share memory as the two measured ones do.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory, rates
from structconv import Graph
from structconv.cli import Parser, execute, shared_options
from structconv.commands.output import print_json
from structconv.commands.table import print_table
from structconv.errors import ConfigError
from structconv.nn import GATConv, GCNConv
from structconv.shapes import check_positive
from structconv_systems.timing import clock

__all__ = ["main", "predicted", "random_graph"]

EDGES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
EDGES_PER_NODE, CHANNELS, HEADS = 20, 32, 4
LAYERS: dict[str, Callable[[], Any]] = {
    "gcn": lambda: GCNConv(CHANNELS, CHANNELS), "gat": lambda: GATConv(CHANNELS, CHANNELS // HEADS, HEADS)}
PHASES = ("inference", "training")
#: Threads of the prediction.
PREDICTED = (4, 8, 16, 32, 64)
_BLOCK, _GIB = 1 << 20, 1 << 30


def random_graph(edges: int) -> Graph:
    """A graph whose degrees fall as rank^-0.6, drawn block by block, so that drawing holds little beside the graph."""
    nodes = max(edges // EDGES_PER_NODE, 16)
    generator = torch.Generator().manual_seed(0)
    index = torch.empty(2, edges, dtype=torch.int32)
    names = torch.randperm(nodes, generator=generator, dtype=torch.int32)
    for start in range(0, edges, _BLOCK):
        block = index[:, start:start + _BLOCK]
        uniform = torch.rand(block.shape, generator=generator, dtype=torch.float64)
        block.copy_(names[(uniform.pow(2.5) * nodes).long()])  # the inverse of P(rank < r) = (r / nodes)^0.4
    return Graph(index, num_nodes=nodes)


def predicted(threads: int, gathers: dict[int, float]) -> float:
    """Return the speed at this number of threads over that at one, by the rates of gathers at 1 and 2 threads."""
    loss = max(2 * gathers[1] / gathers[2] - 1, 0.0)
    return threads / (1 + loss * (threads - 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict and print; returns the exit code."""
    return execute(_parser(), argv)


def _parser() -> Parser:
    made = Parser(prog="python -m benchmarks.scaling", description="growth of graph layers with edges and threads",
                  parents=[shared_options()], allow_abbrev=False)
    made.add_argument("--edges", type=int, nargs="+", default=list(EDGES), metavar="E")
    made.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    made.add_argument("--layer", nargs="+", choices=LAYERS, default=list(LAYERS))
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="timed calls of a row (default: 5)")
    made.add_argument("--limit", type=float, default=8.0, metavar="GIB", help="memory of a process (default: 8)")
    made.add_argument("--one", help=argparse.SUPPRESS)  # a row, in the process of its own
    made.set_defaults(run=_run)
    return made


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise ConfigError("scaling", "every argument must be known", " ".join(rest), "See --help.")
    if args.one is not None:
        print_json(_measure(**json.loads(args.one)))
        return 0
    for flag in ("edges", "threads"):
        for value in getattr(args, flag):
            check_positive("scaling", f"--{flag}", value)
    check_positive("scaling", "--repeats", args.repeats)
    rows: list[dict[str, Any]] = []
    for layer in args.layer:
        for phase in PHASES:
            for threads in args.threads:
                for edges in args.edges:
                    row = _in_process(layer=layer, phase=phase, threads=threads, edges=edges, repeats=args.repeats,
                                      limit=args.limit)
                    row["exponent"] = _exponent(rows, row)
                    rows.append(row)
                    if args.json:
                        print_json(row)
                    else:
                        print(f"{layer} {phase}, {threads} threads, {edges:,} edges: {_time(row)}", file=sys.stderr)
    gathers = _gathers()
    speeds = {threads: predicted(threads, gathers) for threads in PREDICTED}
    if args.json:
        print_json({"gathers_gbs": {str(threads): rate / 1e9 for threads, rate in gathers.items()},
                    "predicted_speed": {str(threads): speed for threads, speed in speeds.items()}})
    else:
        _print(rows, gathers, speeds)
    return int(any("error" in row for row in rows))


def _in_process(**row: Any) -> dict[str, Any]:
    """Measure a row in a process of its own; if it fails, the row has the last line of its error."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-m", "benchmarks.scaling", "--one", json.dumps(row)], cwd=root,
                          capture_output=True, text=True, check=False)
    if done.returncode:
        return {**row, "error": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _measure(layer: str, phase: str, threads: int, edges: int, repeats: int, limit: float) -> dict[str, Any]:
    """Time one layer on one graph: seconds of a call on a new `Graph` object, and its peak memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit * _GIB), int(limit * _GIB)))
    torch.set_num_threads(threads)
    graph, module = random_graph(edges), LAYERS[layer]()
    x = torch.randn(graph.num_nodes, CHANNELS, requires_grad=phase == "training")
    call = _training(module, x, graph) if x.requires_grad else _inference(module, x, graph)
    call()
    times = [clock(call) for _ in range(repeats)]
    held = memory.peak(call)
    return {"layer": layer, "phase": phase, "threads": threads, "edges": edges, "nodes": graph.num_nodes,
            "seconds": statistics.median(times), "least": min(times), "most": max(times),
            "ns_per_edge": 1e9 * statistics.median(times) / edges, "peak_gib": held / _GIB,
            "bytes_per_edge": held / edges}


def _inference(module: Any, x: Tensor, graph: Graph) -> Callable[[], Tensor]:
    @torch.inference_mode()
    def call() -> Tensor:
        result: Tensor = module(x, Graph(graph.edge_index, num_nodes=graph.num_nodes))
        return result

    return call


def _training(module: Any, x: Tensor, graph: Graph) -> Callable[[], None]:
    grad = torch.ones(graph.num_nodes, CHANNELS)

    def call() -> None:
        module(x, Graph(graph.edge_index, num_nodes=graph.num_nodes)).backward(grad)
        x.grad = None

    return call


def _exponent(rows: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Return log(time ratio) / log(edge ratio) of a row and the one before of the same kind, if there is one."""
    before = rows[-1] if rows else None
    alike = before is not None and all(before[key] == row[key] for key in ("layer", "phase", "threads"))
    if before is None or not alike or "error" in before or "error" in row or before["edges"] == row["edges"]:
        return None
    return math.log(row["seconds"] / before["seconds"]) / math.log(row["edges"] / before["edges"])


def _gathers() -> dict[int, float]:
    """Bytes per second of rows gathered from a table beyond the caches, at 1 and 2 threads: the best of rounds in turn.
    """
    before, result = torch.get_num_threads(), {1: 0.0, 2: 0.0}
    for _ in range(5):
        for threads in result:
            torch.set_num_threads(threads)
            rates.gather_rate.cache_clear()
            result[threads] = max(result[threads], rates.gather_rate(4 * CHANNELS, 1 << 22))
    torch.set_num_threads(before)
    return result


def _time(row: dict[str, Any]) -> str:
    return row["error"] if "error" in row else f"{row['seconds']:.4f} s, {row['peak_gib']:.2f} GiB"


def _print(rows: list[dict[str, Any]], gathers: dict[int, float], speeds: dict[int, float]) -> None:
    texts = []
    for row in rows:
        exponent = "-" if row["exponent"] is None else f"{row['exponent']:.2f}"
        figures = (row["error"], "-", "-", "-", "-") if "error" in row else (
            f"{row['seconds']:.4f}", f"{row['ns_per_edge']:.1f}", exponent, f"{row['peak_gib']:.3f}",
            f"{row['bytes_per_edge']:.0f}")
        texts.append((row["layer"], row["phase"], str(row["threads"]), f"{row['edges']:,}", *figures))
    print_table(("layer", "phase", "threads", "edges", "seconds", "ns/edge", "exponent", "GiB", "bytes/edge"), texts,
                texts=2)
    print(f"Gathers of rows: {gathers[1] / 1e9:.1f} GB/s with 1 thread, {gathers[2] / 1e9:.1f} GB/s with 2. Predicted "
          "speed over 1 thread: " + ", ".join(f"{n} threads {speed:.1f}" for n, speed in speeds.items()))


if __name__ == "__main__":
    sys.exit(main())
