"""What tests of recipes share."""

from __future__ import annotations

import shutil

from safetensors.torch import load_file

from structconv.cli import main


def check_resumed_to_the_same_weights(run, cut):
    """As after a kill: in a copy of the run the checkpoints behind one are gone."""
    shutil.copytree(run, cut)
    for final in sorted((cut / "checkpoints").rglob("final")):
        shutil.rmtree(final)
    assert main(["resume", str(cut)]) == 0
    for final in (run / "checkpoints").rglob("final"):
        own, again = (load_file(place / "weights.safetensors")
                      for place in (final, cut / "checkpoints" / final.relative_to(run / "checkpoints")))
        assert all((own[key] == again[key]).all() for key in own | again)
