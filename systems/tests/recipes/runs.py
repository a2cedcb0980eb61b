"""What tests of recipes share."""

from __future__ import annotations

import json
import shutil

from safetensors.torch import load_file

from structconv.cli import main


def evaluated(run, capsys, *words):
    """What `evaluate` says of a run, as an object."""
    assert main(["evaluate", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


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
