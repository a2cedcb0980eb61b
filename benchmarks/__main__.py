"""`python -m benchmarks`: our layers against every peer that is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suites import SUITES
from structconv.cli import Parser, execute, shared_options
from structconv.commands.output import print_json
from structconv.errors import ConfigError

__all__ = ["main", "parser"]

_PAGES = ("off", "on", "both")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit code."""
    return execute(parser(), argv)


def parser() -> Parser:
    """The parser of the options."""
    text = "time the layers against other libraries, after checking that all give the same numbers"
    result = Parser(prog="python -m benchmarks", description=text, parents=[shared_options()], allow_abbrev=False,
                    epilog="Peers are used where they are installed: make bench installs torch-geometric. "
                           "The exit code is 1 where one of them disagrees.")
    result.add_argument("--quick", action="store_true", help="headline cases, small: about a minute")
    result.add_argument("--suite", action="append", default=[], choices=SUITES, help="may be repeated (default: all)")
    result.add_argument("--case", action="append", default=[], metavar="GLOB",
                        help="names of cases, for example 'gat-*'; may be repeated (default: all)")
    result.add_argument("--repeats", type=int, metavar="N", help="samples of each (default: 9; 5 with --quick)")
    result.add_argument("--seconds", type=float, metavar="S",
                        help="about how long a phase of a case may be sampled (default: 60; 1 with --quick)")
    result.add_argument("--threads", type=int, metavar="N", help="of torch (default: as torch has it)")
    result.add_argument("--huge-pages", choices=_PAGES, help="whether torch puts tensors on transparent huge pages, "
                        "in a process of its own (default: both; off with --quick)")
    result.add_argument("--keep-memory", action="store_true",
                        help="keep freed memory of large results for later results, by structconv.keep_memory()")
    result.add_argument("--plot", metavar="FILE", help="run the swept cases from 10^3 to 10^7 edges, 10^5 with "
                                                       "--quick, and draw their ratios")
    result.add_argument("--sweep", action="store_true", help="the sizes of --plot without the picture")
    result.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    result.set_defaults(run=_run)
    return result


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise ConfigError("benchmarks", "every argument must be known", " ".join(rest),
                          "See python -m benchmarks --help.")
    from benchmarks.plot import check
    from benchmarks.runner import Settings
    from benchmarks.session import Session, execute
    from structconv.shapes import check_positive

    if args.list:
        return _list(args)
    for flag in ("repeats", "threads"):
        if getattr(args, flag) is not None:
            check_positive("benchmarks", f"--{flag}", getattr(args, flag))
    picture = check(args.plot) if args.plot else Path() if args.sweep else None
    pages = args.huge_pages or ("off" if args.quick else "both")
    settings = Settings(quick=args.quick, repeats=args.repeats, seconds=args.seconds)
    return execute(Session(suites=tuple(args.suite), patterns=tuple(args.case) or ("*",), settings=settings,
                           threads=args.threads, plot=picture, pages=pages, as_json=args.json,
                           keep_memory=args.keep_memory))


def _list(args: argparse.Namespace) -> int:
    from benchmarks.suites import cases

    for suite in args.suite or SUITES:
        for case in cases(suite):
            if args.json:
                print_json({"suite": suite, "case": case.name, "headline": case.headline, "swept": case.swept})
            else:
                print(f"{suite}/{case.name}" + (" (headline)" if case.headline else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
