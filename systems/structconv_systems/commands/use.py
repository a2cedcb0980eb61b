"""translate, sample: use what a run has trained, from the shell."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from structconv.commands.options import no_more
from structconv.commands.output import print_json
from structconv.errors import ConfigError, DataError
from structconv.files import write_atomically
from structconv_systems.recipes.register import recipe_of
from structconv_systems.train.progress import progress_for
from structconv_systems.train.run import Run

__all__ = ["add"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the two verbs."""
    text = "translate lines of text with a trained run"
    parser = verbs.add_parser("translate", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("file", metavar="FILE", nargs="?",
                        help="plain or gzipped text; - is standard input (default: -)")
    parser.add_argument("--beam", type=int, metavar="N", default=None, help="beam size (default: that of the run)")
    parser.add_argument("--alignment", metavar="PNG", default=None, help="draw the attention of the first line")
    parser.set_defaults(run=_translate)
    text = "generate text with a trained run"
    parser = verbs.add_parser("sample", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.add_argument("folder", metavar="RUN", help="the run's folder")
    parser.add_argument("--prompt", default="", help="beginning of the text")
    parser.add_argument("--length", type=int, metavar="N", default=500, help="number of characters (default: 500)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="below 1 likely characters gain, above 1 unlikely ones (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", default=None, help="sample from the K most likely characters")
    parser.add_argument("--top-p", type=float, metavar="P", default=None,
                        help="sample from the most likely characters whose probabilities sum to P")
    parser.add_argument("--seed", type=int, default=0, help="random seed, below 2^63 (default: 0)")
    parser.set_defaults(run=_sample)


def _translate(args: argparse.Namespace, rest: list[str]) -> int:
    if args.file is None and rest and not rest[0].startswith("-"):
        args.file, *rest = rest
    no_more("translate", rest)
    picture = _picture(args.alignment)
    translator = _trained(args.folder, "translate", beam=args.beam)
    for lines in _lines(args.file):
        for line, translation in zip(lines, translator.translate(lines), strict=True):
            print_json({"source": line, "translation": translation}) if args.json else print(translation, flush=True)
            if picture and line.strip():
                write_atomically(picture, translator.alignment(line, translation))
                picture = None
    return 0


def _picture(name: str | None) -> Path | None:
    """Return the file of the picture; `ConfigError` before decoding if it cannot be written."""
    if name is not None and (Path(name).suffix.lower() != ".png" or not Path(name).parent.is_dir()):
        raise ConfigError("structconv translate", "--alignment must be a .png in a folder that is there", repr(name))
    return None if name is None else Path(name)


def _sample(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("sample", rest)
    if not 0 <= args.seed < 1 << 63:
        raise ConfigError("structconv sample", "--seed must be from 0 to 2^63 - 1", args.seed)
    text = _trained(args.folder, "sample").write(
        args.prompt, args.length, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    print_json({"text": text}) if args.json else print(text)
    return 0


def _trained(folder: str, verb: str, **options: Any) -> Any:
    """Return the translator or writer of a run, if its recipe has the verb."""
    run = Run.open(folder)
    entry, recipe = recipe_of(run)
    if entry.use != verb:
        raise ConfigError(f"structconv {verb}", f"the run must be of a recipe that can {verb}", entry.recipe.name)
    with progress_for() as progress:
        progress.phase("loading torch and the weights")
        use = entry.runner().use
        assert use is not None, "an entry with a use has a runner with one"
        return use(recipe, run, progress, **options)


def _lines(file: str | None) -> Iterable[list[str]]:
    """Yield the lines of a file in blocks; those of standard input one by one, as they come."""
    if file in (None, "-"):
        return _spoken()
    from structconv_systems.data.text import read_lines

    lines = read_lines(file)
    return (lines[first:first + 32] for first in range(0, len(lines), 32))


def _spoken() -> Iterable[list[str]]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError("standard input", "UTF-8", error, line=number) from None
        yield [text.rstrip("\r\n")]
