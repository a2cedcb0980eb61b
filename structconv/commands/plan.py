"""plan: show how a layer is computed at given sizes, at what cost, and the rejected paths."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from structconv.commands.options import add_options, find, no_more, read_options
from structconv.commands.output import print_json

__all__ = ["add"]

if TYPE_CHECKING:
    from structconv.planning.plan import Candidate


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "print the path that a layer would take, its cost, and the paths rejected"
    parser = verbs.add_parser("plan", help=text, description=text, parents=[shared], allow_abbrev=False,
                              epilog="Names: see structconv list.")
    parser.add_argument("name", metavar="BASIS", help="for example cuboid")
    add_options(parser)
    parser.add_argument("--batch", type=int, default=1, help="B (default: 1)")
    parser.add_argument("--in-channels", type=int, default=32, help="P (default: 32)")
    parser.add_argument("--out-channels", type=int, default=32, help="Q (default: 32)")
    parser.add_argument("--training", action="store_true", help="count the backward pass, too")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("plan", rest)
    import torch

    from structconv.nn import Conv
    from structconv.shapes import check_positive

    options, named = read_options(args), find(args.name)
    batch = check_positive("structconv plan", "--batch", args.batch)
    structure = options.structure(named.on_graph)
    layer = Conv(named.build(options), args.in_channels, args.out_channels)
    x = torch.randn(batch, options.entries, args.in_channels, requires_grad=args.training)
    with torch.set_grad_enabled(args.training):
        plan = layer.plan(x, structure=structure)
    if args.json:
        print_json({"basis": args.name, "problem": plan.problem, "reason": plan.reason,
                    "candidates": [_described(candidate) for candidate in plan.candidates]})
    else:
        print(plan)
    return 0


def _described(candidate: Candidate) -> dict[str, Any]:
    cost = candidate.cost
    return {"path": candidate.path, "kernel": candidate.kernel, "flops": cost.flops,
            "bytes": cost.bytes + cost.gathered, "peak_bytes": cost.peak_bytes, "seconds": candidate.seconds,
            "measured": candidate.measured, "rejected": candidate.rejected}
