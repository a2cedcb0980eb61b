"""bench: our layers against every peer that is installed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from structconv.bench.suites import SUITES
from structconv.commands.options import no_more
from structconv.report.output import print_json

__all__ = ["add"]

_PAGES = ("off", "on", "both")


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "time the layers against other libraries, after checking that all give the same numbers"
    parser = verbs.add_parser("bench", help=text, description=text, parents=[shared], allow_abbrev=False,
                              epilog="Peers are used where they are installed: pip install 'structconv[bench]'. "
                                     "The exit code is 1 where one of them disagrees.")
    parser.add_argument("--quick", action="store_true", help="headline cases, small: about a minute")
    parser.add_argument("--suite", action="append", default=[], choices=SUITES, help="may be repeated (default: all)")
    parser.add_argument("--case", action="append", default=[], metavar="GLOB",
                        help="names of cases, for example 'gat-*'; may be repeated (default: all)")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples of each (default: 9; 5 with --quick)")
    parser.add_argument("--seconds", type=float, metavar="S",
                        help="about how long a phase of a case may be sampled (default: 60; 1 with --quick)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: as torch has it)")
    parser.add_argument("--huge-pages", choices=_PAGES, help="whether torch puts tensors on transparent huge pages, "
                        "in a process of its own (default: both; off with --quick)")
    parser.add_argument("--keep-memory", action="store_true",
                        help="keep freed memory of large results for later results, by structconv.keep_memory()")
    parser.add_argument("--plot", metavar="FILE", help="run the swept cases from 10^3 to 10^7 edges, 10^5 with "
                                                       "--quick, and draw their ratios")
    parser.add_argument("--sweep", action="store_true", help="the sizes of --plot without the picture")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("bench", rest)
    from structconv.bench.plot import check
    from structconv.bench.runner import Settings
    from structconv.bench.session import Session, execute
    from structconv.shapes import check_positive

    if args.list:
        return _list(args)
    for flag in ("repeats", "threads"):
        if getattr(args, flag) is not None:
            check_positive("structconv bench", f"--{flag}", getattr(args, flag))
    picture = check(args.plot) if args.plot else Path() if args.sweep else None
    pages = args.huge_pages or ("off" if args.quick else "both")
    settings = Settings(quick=args.quick, repeats=args.repeats, seconds=args.seconds)
    return execute(Session(suites=tuple(args.suite), patterns=tuple(args.case) or ("*",), settings=settings,
                           threads=args.threads, plot=picture, pages=pages, as_json=args.json,
                           keep_memory=args.keep_memory))


def _list(args: argparse.Namespace) -> int:
    from structconv.bench.suites import cases

    for suite in args.suite or SUITES:
        for case in cases(suite):
            if args.json:
                print_json({"suite": suite, "case": case.name, "headline": case.headline, "swept": case.swept})
            else:
                print(f"{suite}/{case.name}" + (" (headline)" if case.headline else ""))
    return 0
