"""Steps of decoding through `attend`: without a plan they give what any call gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from structconv.compat import attending


def exactly(query: Tensor, key: Tensor, value: Tensor, scale: float, keep: Tensor | None = None) -> Tensor:
    """The formula, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = scale * query @ key.mT
    weights = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    return (weights.softmax(-1).nan_to_num() @ value).float()


@torch.no_grad()
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_need_no_plan(dtype: torch.dtype, heads: int, groups: int, masked: bool, monkeypatch: Any) -> None:
    calls: list[int] = []
    original = attending.apply
    monkeypatch.setattr(attending, "apply", lambda *args: calls.append(1) or original(*args))
    query, tolerance = torch.randn(2, heads, 1, 8).to(dtype), 2e-2 if dtype is torch.bfloat16 else 1e-4
    for inputs in (1, 90, 97, 700):
        key, value = (torch.randn(2, groups, inputs, 8).to(dtype) for _ in range(2))
        keep = torch.rand(2, 1, 1, inputs) < 0.7 if masked else None
        if keep is not None:
            keep[..., 0] = True
        y, _ = attending.attend(query, key, value, None if keep is None else attending.Mask(keep), scale=0.4)
        torch.testing.assert_close(y.float(), exactly(query, key, value, 0.4, keep), rtol=tolerance, atol=tolerance)
        assert not calls
        if keep is not None:
            keep[0] = False  # a query that sees nothing
            y, _ = attending.attend(query, key, value, attending.Mask(keep), scale=0.4)
            torch.testing.assert_close(y.float(), exactly(query, key, value, 0.4, keep), rtol=tolerance, atol=tolerance)
            calls.clear()
    for options in ({"softcap": 2.0}, {"weights": True}, {"dropout": 0.5}):
        attending.attend(query, key, value, None, **options)
    with torch.enable_grad():
        attending.attend(query.requires_grad_(), key, value)[0].sum().backward()
    assert query.grad is not None


@torch.no_grad()
def test_a_step_over_numbers_that_are_not_finite_leaks_nothing() -> None:
    query, key, value = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
    keep = (torch.arange(9) < 6).view(1, 1, 1, 9)
    expected = exactly(query, key, value, 0.5, keep)
    key[..., 7, :], value[..., 8, :] = torch.nan, torch.inf
    for _ in range(2):
        torch.testing.assert_close(attending.attend(query, key, value, attending.Mask(keep), scale=0.5)[0], expected,
                                   rtol=1e-4, atol=1e-5)
