"""Kill a training at random moments, resume it each time, and hold its weights against those of one left alone.

    python tools/kills.py transformer --data DIR [--kills 20] [--seed 0] [key=value ...]
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

COMMAND = [sys.executable, "-m", "structconv"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        start = ["train", args.recipe, "--data", args.data, "--preset", args.preset, *options, "--out"]
        began = time.monotonic()
        subprocess.run([*COMMAND, *start, str(alone)], check=True, capture_output=True)
        kills = killed_until_done([*start, str(killed)], killed, args.kills, time.monotonic() - began, args.seed)
        finals = sorted(path.relative_to(alone) for path in alone.rglob("final/weights.safetensors"))
        equal = [same(alone / path, killed / path) for path in finals]
        print(f"{kills} kills, {len(finals)} trainings, {sum(equal)} with equal weights, bit for bit")
        return 0 if finals and all(equal) and kills == args.kills else 1


def killed_until_done(start: list[str], run: Path, kills: int, seconds: float, seed: int) -> int:
    """Start, and resume after each kill, which comes within about as long as a share of the whole; how many came."""
    draw, command, done = random.Random(seed), start, 0
    while True:
        process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=draw.uniform(1, 6 + seconds / kills) if done < kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            done += 1
        else:
            if code:
                raise SystemExit(f"{' '.join(command)} ended with {code}")
            return done
        command = ["resume", str(run)] if (run / "config.json").is_file() else start


def same(one: Path, other: Path) -> bool:
    """Whether two files of weights hold the same bits."""
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(bool((first[key] == second[key]).all()) for key in first)


if __name__ == "__main__":
    sys.exit(main())
