"""Make the virtual environment of this repository: `python3 tools/bootstrap.py`, or any target of the Makefile.

Needs Python 3.11 or later with pip, and the standard library only. The system's packages are never touched, so this
works where pip is externally managed (PEP 668). It installs both distributions, `structconv` and `structconv-systems`,
as editable ones. Running it again repairs and completes what is there.

The environment is made by the first of these that works:

1. `python -m venv --without-pip`, the newest pip being installed into it by the pip outside: it resolves the packages
   in a third of the time of the pip of Python 3.11;
2. `python -m venv`;
3. virtualenv, installed into the private folder `.bootstrap`.

torch comes first, as `constraints.txt` pins it. Without an NVIDIA GPU its CPU build is taken where pip can find one,
in its configured places or on PyTorch's own index; else the size of the CUDA build is said before the download. The
native core is compiled with its headers while pip installs the rest. No module is compiled to bytecode before a
program imports it.

`--oldest` installs the oldest versions of the library's dependencies, and of transformers, that `pyproject.toml`
admits, instead of those of `constraints.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = f"{ROOT / 'systems'}[molecules]"
OLDEST = (3, 11)
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP_OPTIONS = ("--disable-pip-version-check", "--no-input")
BUILD = ("hatchling>=1.27", "editables")  # what builds both distributions
NATIVE = ROOT / "structconv" / "primitives" / "native" / "build.py"


def main() -> int:
    """Make the environment, install torch, install both distributions; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of this repository.")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where (default: .venv)")
    parser.add_argument("--extras", default="all", help="extras of pyproject.toml, comma-separated (default: all)")
    parser.add_argument("--oldest", action="store_true", help="the oldest dependencies that pyproject.toml admits")
    args = parser.parse_args()
    try:
        python = environment(find_python(), ROOT / args.venv)
        constraints = oldest(ROOT / args.venv / "constraints.txt") if args.oldest else CONSTRAINTS
        install_torch(python, constraints)
        install(python, constraints, ["--quiet", *BUILD])
        say(f"installing structconv[{args.extras}] and structconv-systems into {args.venv}")
        # The build hook waits for it; where it fails, the hook says why.
        with subprocess.Popen([python, "-P", NATIVE], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            install(python, constraints, ["--quiet", "--no-build-isolation", "--editable", f"{ROOT}[{args.extras}]",
                                          "--editable", SYSTEMS])
    except Failure as failure:
        print(f"bootstrap: {failure}", file=sys.stderr)
        return 1
    say(f"{args.venv} is ready")
    return 0


class Failure(Exception):
    """What went wrong and what to do about it, in words for whoever runs this."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"bootstrap: {text}", flush=True)


def run(command: Sequence[object], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with its output captured; a missing program is exit code 127."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **env})
    except OSError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


def find_python() -> str:
    """This interpreter if it is recent enough, else the newest on PATH that is."""
    names = [sys.executable, *(f"python3.{minor}" for minor in range(14, OLDEST[1] - 1, -1))]
    for name in names:
        if run([name, "-c", f"import sys; sys.exit(sys.version_info < {OLDEST})"]).returncode == 0:
            return name
    raise Failure(f"Python {OLDEST[0]}.{OLDEST[1]} or later is needed, and {sys.executable} is "
                  f"{sys.version.split()[0]}. Install one, or name one: make PYTHON=/path/to/python3 venv")


def environment(python: str, venv: Path) -> Path:
    """The interpreter of a virtual environment with a working pip, which is made if it is not there."""
    inside = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if has_pip(inside):
        return inside
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
        raise Failure(f"{venv} exists and is no virtual environment. Move it away, or choose another by --venv.")
    ways: tuple[Callable[[str, Path, Path], list[str]], ...] = (by_outer_pip, by_venv, by_virtualenv)
    complaints = []
    for way in ways:
        shutil.rmtree(venv, ignore_errors=True)
        complaints += way(python, venv, inside)
        if has_pip(inside):
            say(f"made {venv.name} {(way.__doc__ or '').rstrip('.')}")
            return inside
    shutil.rmtree(venv, ignore_errors=True)
    advice = "Is pip installed (Debian: apt install python3-pip), and is a package index reachable?"
    raise Failure("\n".join([f"no virtual environment could be made. {advice}", *complaints]))


def has_pip(python: Path) -> bool:
    """Whether an interpreter exists, is recent enough and has pip."""
    check = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    return python.exists() and run([python, "-c", check]).returncode == 0


def by_venv(python: str, venv: Path, inside: Path) -> list[str]:
    """with venv."""
    return complaints_of(run([python, "-m", "venv", venv]))


def by_outer_pip(python: str, venv: Path, inside: Path) -> list[str]:
    """with venv and the pip outside."""
    result = run([python, "-m", "venv", "--without-pip", venv])
    if result.returncode:
        return complaints_of(result)
    complaints = []
    for pip in outer_pips(python):
        done = run([*pip, *PIP_OPTIONS, "--python", inside, "install", "pip"])
        if done.returncode == 0:
            return []
        complaints += complaints_of(done)
    return complaints


def by_virtualenv(python: str, venv: Path, inside: Path) -> list[str]:
    """with a private virtualenv."""
    private = ROOT / ".bootstrap"
    complaints = []
    try:
        for pip in outer_pips(python):
            done = run([*pip, *PIP_OPTIONS, "install", "--target", private, "--upgrade", "virtualenv"])
            if done.returncode == 0:
                return complaints_of(run([python, "-m", "virtualenv", venv], PYTHONPATH=str(private)))
            complaints += complaints_of(done)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return complaints


def outer_pips(python: str) -> Iterator[list[str]]:
    """The pips outside the environment, the interpreter's own first."""
    yield [python, "-m", "pip"]
    yield from ([name] for name in ("pip3", "pip") if shutil.which(name))


def complaints_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """A failed command and the last line it printed; nothing if it succeeded."""
    if done.returncode == 0:
        return []
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"exit code {done.returncode}"]
    return [f"  {' '.join(map(str, done.args))}: {said[-1]}"]


def oldest(constraints: Path) -> Path:
    """Write constraints that allow the oldest series of transformers and each of the library's dependencies only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tools = project["optional-dependencies"]["tools"]
    floors = [*project["dependencies"], *(tool for tool in tools if tool.startswith("transformers>="))]
    constraints.write_text("".join(f"{floor.replace('>=', '==')}.*\n" for floor in floors), encoding="utf-8")
    return constraints


def install(python: Path, constraints: Path, arguments: Sequence[str]) -> None:
    """`pip install` under the constraints, its output shown."""
    command = [str(python), "-m", "pip", *PIP_OPTIONS, "install", "--no-compile", "-c", str(constraints), *arguments]
    if subprocess.run(command, check=False).returncode:
        raise Failure(f"pip could not install {arguments[-1]}; its message is above.")


def install_torch(python: Path, constraints: Path) -> None:
    """torch: its CPU build where there is no GPU and one can be found, else what pip takes, its size said before."""
    wheels = resolve(python, constraints)
    if wheels == {}:
        return
    index: list[str] = []
    if wheels and is_cuda(wheels) and not has_gpu():
        say("no NVIDIA GPU here: looking for the CPU build of torch")
        # CPU_INDEX may be out of reach: one short try.
        smaller = resolve(python, constraints, "--index-url", CPU_INDEX, "--timeout", "5", "--retries", "0")
        if smaller and not is_cuda(smaller):
            wheels, index = smaller, ["--index-url", CPU_INDEX]
    if wheels and is_cuda(wheels):
        say(f"torch comes with CUDA: {len(wheels)} packages, {download_size(wheels.values())} to download")
    say(f"installing torch{' (CPU build)' if wheels and not is_cuda(wheels) else ''}")
    install(python, constraints, [*index, "torch"])


def resolve(python: Path, constraints: Path, *options: str) -> dict[str, str] | None:
    """What pip would install for torch, {name: address}; None where pip cannot say (too old, or offline)."""
    done = run([python, "-m", "pip", *PIP_OPTIONS, "install", "--dry-run", "--quiet", "--report", "-",
                "-c", constraints, *options, "torch"])
    if done.returncode:
        return None
    report = json.loads(done.stdout)
    return {item["metadata"]["name"]: item["download_info"]["url"] for item in report["install"]}


def is_cuda(wheels: dict[str, str]) -> bool:
    """Whether packages of NVIDIA's come along."""
    return any(name.startswith("nvidia") for name in wheels)


def has_gpu() -> bool:
    """Whether an NVIDIA driver is there."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def download_size(addresses: Iterable[str]) -> str:
    """The sum of the files' sizes, asked of their server; "several GB" if it does not say."""
    total = 0
    for address in addresses:
        try:
            request = urllib.request.Request(address, method="HEAD")
            with urllib.request.urlopen(request, timeout=5) as answer:
                total += int(answer.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            return "several GB"
    return f"{total / 1e9:.1f} GB"


if __name__ == "__main__":
    sys.exit(main())
