"""show: a basis as a picture, in a file and in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structconv.commands.options import Options, add_options, find, no_more, read_options
from structconv.commands.output import print_json
from structconv.errors import ConfigError

__all__ = ["add"]

if TYPE_CHECKING:
    from structconv.bases.base import Basis

_MOST_IN_TERMINAL = 4
_MOST_NUMBERS = 2 ** 27


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "draw the matrices of a basis: input entries down, output entries across"
    parser = verbs.add_parser("show", help="draw the matrices of a basis", description=text, parents=[shared],
                              allow_abbrev=False, epilog="Names: see structconv list.")
    parser.add_argument("name", metavar="BASIS", help="for example shift")
    add_options(parser)
    parser.add_argument("--out", metavar="FILE.png", help="also draw all matrices into a PNG")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("show", rest)
    options = read_options(args)
    if args.out and Path(args.out).suffix.lower() != ".png":
        raise ConfigError("structconv show", "--out must name a .png", args.out)
    if args.out and not Path(args.out).parent.is_dir():
        raise ConfigError("structconv show", "--out must be in a folder that there is", args.out)
    basis = _basis(args.name, options)
    _check_size(basis)
    dense_KMN = basis.dense().detach()
    if args.out:
        from structconv.files import write_atomically
        from structconv.pictures import basis_png

        write_atomically(Path(args.out), basis_png(dense_KMN, _titles(args.name, options),
                                                    panel_inches=4.0 if len(dense_KMN) == 1 else 2.0))
    if args.json:
        print_json({"basis": args.name, "shape": list(dense_KMN.shape), "nonzeros": int(dense_KMN.count_nonzero()),
                    "repr": repr(basis), "file": args.out})
        return 0
    from structconv.pictures import matrix_text

    print(basis)
    for k, matrix_MN in enumerate(dense_KMN[:_MOST_IN_TERMINAL]):
        print(f"A_{k + 1}, {matrix_MN.shape[0]} inputs down, {matrix_MN.shape[1]} outputs across:")
        print(matrix_text(matrix_MN))
    if len(dense_KMN) > _MOST_IN_TERMINAL:
        print(f"... and {len(dense_KMN) - _MOST_IN_TERMINAL} more; --out FILE.png draws them")
    return 0


def _basis(name: str, options: Options) -> Basis:
    """Return the basis of the named mechanism on the structure, with random content if it reads any."""
    import torch

    named = find(name)
    structure = options.structure(named.on_graph)
    channels = 8 * options.heads
    torch.manual_seed(0)
    mechanism = named.build(options).bound(channels, channels)
    return mechanism.basis(torch.randn(options.entries, channels), structure=structure)


def _check_size(basis: Basis) -> None:
    """Raise `ConfigError` where the matrices would not fit in memory."""
    numbers = basis.size * basis.num_inputs * basis.num_outputs
    if numbers > _MOST_NUMBERS:
        raise ConfigError("structconv show", f"a basis must have at most {_MOST_NUMBERS:,} numbers to be drawn",
                          f"{numbers:,} in {basis!r}", "Take a smaller --grid.")


def _titles(name: str, options: Options) -> list[str]:
    sizes = "x".join(map(str, options.grid))
    if name != "shift":
        return []
    return [f"grid {sizes}, shift {','.join(map(str, offset))}" for offset in options.offsets]
