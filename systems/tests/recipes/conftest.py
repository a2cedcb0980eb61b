"""Pictures of tiny runs are drawn coarsely; `systems/tests/test_pictures.py` draws them as users see them."""

from collections.abc import Iterator

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from structconv_systems import pictures


@pytest.fixture(scope="session", autouse=True)
def coarse_pictures() -> Iterator[None]:
    """A search for the layout of panels takes a third of such a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        patch.setattr(pictures, "_DPI", 50)
        yield
