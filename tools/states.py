"""Write the states of named layers that have none yet into tests/nn/saved: `python tools/states.py`.

What is there stays as it is, because it stands for the files of users.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.layers import LAYERS

FILE = Path(__file__).parents[1] / "tests" / "nn" / "saved" / "states.safetensors"


def main() -> None:
    """Add what is missing."""
    kept = load_file(FILE) if FILE.exists() else {}
    there = {key.partition("/")[0] for key in kept}
    for name, make in LAYERS.items():
        if name not in there:
            kept.update({f"{name}/{key}": t.clone() for key, t in make().layer.state_dict().items()})
    save_file(kept, FILE)


if __name__ == "__main__":
    main()
