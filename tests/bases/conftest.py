"""The laws that every basis obeys, as one fixture."""

from __future__ import annotations

import pytest

from structconv.testing import CHECKS, Specimen


@pytest.fixture
def laws():
    """Check a basis, whose graph may have repeated edges; raises where a law fails."""
    def check(basis, *traits):
        specimen = Specimen("basis", lambda: basis, frozenset(traits))
        for name in ("reference", "adjoint", "entries"):
            CHECKS[name](specimen)

    return check
