"""The command `structconv`: verbs, exit codes and one-line errors; torch is imported by the verb that needs it.

Exit codes: 0 done, 2 bad usage or configuration, 3 bad data, 4 training diverged, 75 interrupted with the state saved,
130 ended by Ctrl-C, 141 the reader of the output has closed it, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from structconv import __version__
from structconv.commands import bench, doctor, listing, plan, plugins, show
from structconv.commands.output import print_json
from structconv.commands.stop import Stop
from structconv.errors import ConfigError, DataError, ShapeError, StructconvError, StructureError

__all__ = ["Parser", "execute", "main", "shared_options"]

_EXIT_AT_ONCE, _CLOSED_PIPE = 130, 141  # 128 and the number of SIGINT or SIGPIPE, as shells have it
_CODES = {ConfigError: 2, ShapeError: 2, DataError: 3, StructureError: 2}  # a DataError is a StructureError
_DESCRIPTION = "Convolution and attention as one operator: y = sum_k A_k^T x Theta_k."


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and an object for programs where the words have ``--json``."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "--json" in self._words:
            print_json({"error": message, "exit_code": 2})
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    return execute(_parser(), argv)


def execute(parser: Parser, argv: Sequence[str] | None) -> int:
    """Run the function `run` that a parser with the options `--json` and `--debug` sets; returns its exit code."""
    try:
        args, rest = parser.parse_known_args(argv)
    except SystemExit as leave:
        return int(leave.code or 0)
    try:
        code = int(args.run(args, rest))
        sys.stdout.flush()
        return code
    except Stop as stopped:
        return _fail(parser.prog, args, str(stopped), stopped.exit_code, **stopped.details)
    except KeyboardInterrupt:
        return _fail(parser.prog, args, "interrupted", _EXIT_AT_ONCE)
    except BrokenPipeError:  # the interpreter writes the rest of the output when it ends: to nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except Exception as error:
        if args.debug:
            raise
        named = str(error) if isinstance(error, StructconvError) else f"{type(error).__name__}: {error}"
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)
        return _fail(parser.prog, args, named, code)


def shared_options() -> argparse.ArgumentParser:
    """The options of every verb, as a parent of its parser."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--json", action="store_true", help="print JSON; the last line is the result")
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return shared


def _parser() -> Parser:
    parser = Parser(prog="structconv", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"structconv {__version__}")
    shared = shared_options()
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for group in (listing, show, plan, doctor, bench, plugins):
        group.add(verbs, shared)
    return parser


def _fail(prog: str, args: argparse.Namespace, message: str, code: int, **more: Any) -> int:
    if args.json:
        print_json({"error": message, "exit_code": code, **more})
    line = " ".join(message.split())
    print(line if line.startswith((f"{prog}: ", f"{prog} ")) else f"{prog}: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
