"""`Rotary`: rotate queries and keys by their positions, in the layout of language models' checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from structconv.arguments import checked
from structconv.bases.tree import Projected, Rotated
from structconv.errors import ConfigError
from structconv.primitives.rotation import rotate
from structconv.shapes import check_choice, check_finite
from structconv.written import written

__all__ = ["Rotary"]

#: The required and the optional arguments of each kind of scaling.
_NEEDS = {"default": (), "linear": ("factor",),
          "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
          "yarn": ("factor", "original_max_position_embeddings")}
_MAY = {"default": (), "linear": (), "llama3": (), "yarn": ("beta_fast", "beta_slow", "attention_factor")}


class Rotary(nn.Module):
    """Turns pairs of channels of the entry at place i by the angles i r_j, r_j = base^(-2j/d) (Su et al. 2021, eq. 34).

    Scores of turned queries and keys depend only on the offset of their positions.

    Args:
        base: 10000 in the paper; `rope_theta` of a checkpoint.
        layout: which channels are pairs: "interleaved", (2j, 2j + 1), as in the paper, or "half", (j, j + d/2), as in
            the checkpoints of Hugging Face.
        channels: d, of the first channels of a head, the others stay; all where absent.
        scaling: how a longer context than that of training is reached, a mapping as `rope_scaling` of a checkpoint:
            {"rope_type": "linear", "factor"} divides all r_j (Chen et al. 2023); "llama3" those of long waves (Dubey et
            al. 2024), "yarn" too, and multiplies queries and keys (Peng et al. 2023, section 3.4).

    Raises:
        ConfigError: a layout or a kind of scaling that is not known, numbers that it needs, an odd number of channels.

    Example:

        >>> from structconv import Conv, DotProduct, Rotary
        >>> rotary = DotProduct(2, 4, rotary=Rotary(layout="half")).scaled()
        >>> Conv(rotary.softmax(), 8, 8)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(self, base: float = 10000.0, layout: str = "interleaved", *, channels: int | None = None,
                 scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        check_choice("Rotary", "layout", layout, ("interleaved", "half"))
        self.base, self.layout, self.channels = check_finite("Rotary", "base", base, above=0), layout, channels
        self.scaling = None if scaling is None else _checked(dict(scaling))

    def forward(self, t: Tensor, positions: Tensor | None = None) -> Tensor:
        """(..., M, D) whose entries are at these positions, (M,) or (B, M) before an axis of heads -> (..., M, D)."""
        if positions is None:
            positions = torch.arange(t.shape[-2], device=t.device)
        positions = positions.unsqueeze(-2) if positions.dim() > 1 else positions
        return rotate(t, positions, *self._turn(t.shape[-1], t.device))

    def rotated(self, projected: Projected, positions: Tensor) -> Rotated:
        """A product at positions (M,), as a lazy product that is rotated too."""
        depth = projected.weight.shape[0] // projected.heads
        return Rotated(*projected, positions, *self._turn(depth, projected.x.device))

    def _turn(self, depth: int, device: torch.device) -> tuple[Tensor, float, bool]:
        """r_j for D channels, the factor of queries and keys, and True for the layout "half"."""
        turned = depth if self.channels is None else self.channels
        if turned % 2:
            raise ConfigError("Rotary", "the number of channels that are turned must be even", turned)
        if not 0 < turned <= depth:
            raise ConfigError("Rotary", f"channels must be at most D={depth}", turned)
        return *self._rates(turned, device), self.layout == "half"

    def _rates(self, turned: int, device: torch.device) -> tuple[Tensor, float]:
        """r_j, and the factor of queries and keys."""
        rate = self.base ** (-torch.arange(0, turned, 2, device=device, dtype=torch.float64) / turned)
        if self.scaling is None:
            return rate, 1.0
        kind, factor = self.scaling["rope_type"], self.scaling.get("factor", 1.0)
        if kind == "yarn":
            own = self.scaling.get("attention_factor")
            gain = (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0) if own is None else own
            share = 1 - _ramp(*self._turns(turned), turned // 2, device)
        else:
            gain, share = 1.0, self._short(rate) if kind == "llama3" else torch.zeros_like(rate)
        return rate * (share + (1 - share) / factor), gain

    def _short(self, rate: Tensor) -> Tensor:
        """1 for waves that are short compared with the context of training, 0 for long ones; linear between."""
        assert self.scaling is not None
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        turns = self.scaling["original_max_position_embeddings"] * rate / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)

    def _turns(self, turned: int) -> tuple[int, int]:
        """The j of waves that turn `beta_fast`, and `beta_slow`, times in the context of training."""
        assert self.scaling is not None
        length = self.scaling["original_max_position_embeddings"]
        fast, slow = (turned * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.base))
                      for turns in (self.scaling.get("beta_fast", 32), self.scaling.get("beta_slow", 1)))
        return max(math.floor(fast), 0), min(math.ceil(slow), turned - 1)

    def extra_repr(self) -> str:
        return written(self)


def _ramp(low: float, high: float, count: int, device: torch.device) -> Tensor:
    """0 up to `low`, 1 from `high` on."""
    high = high + 0.001 if low == high else high
    return ((torch.arange(count, device=device, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def _checked(scaling: dict[str, Any]) -> dict[str, Any]:
    """The mapping with its kind as "rope_type"."""
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    if kind not in _NEEDS:
        raise ConfigError("Rotary", f"scaling must have a rope_type among {', '.join(_NEEDS)}", repr(kind),
                          "Others change the angles with the length of the text, so that no key could be kept.")
    missing = [name for name in _NEEDS[kind] if name not in scaling]
    unknown = sorted(scaling.keys() - {*_NEEDS[kind], *_MAY[kind]})
    if missing or unknown:
        raise ConfigError("Rotary", f"scaling of rope_type {kind!r} must have {', '.join(_NEEDS[kind]) or 'nothing'}",
                          ", ".join(scaling) or "nothing")
    return {"rope_type": kind, **scaling}
