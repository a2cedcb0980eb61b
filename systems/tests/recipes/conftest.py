"""Pictures of tiny runs are drawn coarsely; `systems/tests/test_pictures.py` draws them as users see them."""

import json
from collections.abc import Iterator

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from structconv.cli import main
from structconv_systems import pictures


@pytest.fixture
def refused(tmp_path, capsys):
    """A check that a training ends with the code, says why, and leaves no run."""
    def check(words, said, code=2):
        assert main([*words, "--out", str(tmp_path / "run")]) == code
        assert said in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    return check


@pytest.fixture
def tried(tmp_path, capsys, monkeypatch):
    """What `--dry-run` says of a training, which writes nothing."""
    def said(words):
        monkeypatch.chdir(tmp_path)
        assert main([*words, "--dry-run", "--json"]) == 0
        assert not list(tmp_path.iterdir())
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return said


@pytest.fixture(scope="session", autouse=True)
def coarse_pictures() -> Iterator[None]:
    """A search for the layout of panels takes a third of such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        patch.setattr(pictures, "_DPI", 50)
        yield
