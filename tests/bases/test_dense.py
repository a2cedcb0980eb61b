from __future__ import annotations

import pytest
import torch

from structconv.bases.dense import Dense, Identity
from structconv.errors import ConfigError, ShapeError

F64 = torch.float64


def test_errors_name_what_came():
    with pytest.raises(ShapeError, match=r"\(\.\.\., K, M, N\); got \(2, 3\)"):
        Dense(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match="floating"):
        Dense(torch.zeros(1, 2, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"float64 and torch\.float32"):
        Dense(torch.zeros(1, 2, 3)).analysis(torch.zeros(2, 1, dtype=F64))
    with pytest.raises(ShapeError, match="M=2"):
        Dense(torch.zeros(1, 2, 3)).analysis(torch.zeros(3, 1))
    with pytest.raises(ShapeError, match="K=2"):
        Dense(torch.zeros(2, 2, 3)).synthesis(torch.zeros(3, 2, 1))
    with pytest.raises(ConfigError, match="positive"):
        Identity(-1)
    with pytest.raises(ConfigError, match="size"):
        Identity(3, size=0)
