"""What tests of native kernels share."""

import pytest

from structconv.primitives.native import core, dispatch


@pytest.fixture(params=["native", "torch"])
def path(request, monkeypatch):
    """With the kernels, and with torch's operators in their place."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "usable", lambda x, edges: None)
    elif core() is None:
        pytest.skip("the native core cannot be built here")
    return request.param
