"""The generic test suite: the laws of every basis and mechanism, for the package's own and for yours.

    import pytest
    from structconv.testing import Specimen, suite

    @pytest.mark.parametrize("check", [check for _, check in suite(Specimen("mine", lambda: MyBasis(5)))], ids=str)
    def test_my_basis(check):
        check()
"""

from __future__ import annotations

from structconv.testing.checks import by_definition
from structconv.testing.specimens import SPECIMENS, TRAITS, Setup, Specimen, add, specimen
from structconv.testing.suite import CHECKS, Check, suite

__all__ = ["CHECKS", "SPECIMENS", "TRAITS", "Check", "Setup", "Specimen", "add", "by_definition", "specimen", "suite"]
