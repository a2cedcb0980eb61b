"""list: the bases that show and plan know, and what plug-ins list."""

from __future__ import annotations

import argparse
from typing import Any

from structconv.commands.options import NAMED, no_more
from structconv.commands.output import print_json
from structconv.commands.plugins import listed
from structconv.commands.table import print_table

__all__ = ["add"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "list bases by name, and recipes if structconv-systems is installed"
    parser = verbs.add_parser("list", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("list", rest)
    groups = {**listed(), "basis": {f"show {name}": named.summary for name, named in NAMED.items()}}
    if args.json:
        for kind, named in groups.items():
            for command, summary in named.items():
                print_json({"kind": kind, "name": command.partition(" ")[2], "command": f"structconv {command}",
                            "summary": summary})
        return 0
    rows = [(f"structconv {command}", summary) for named in groups.values() for command, summary in named.items()]
    print_table(("command", "what"), rows, texts=2)
    print("Each basis also goes with structconv plan.")
    return 0
