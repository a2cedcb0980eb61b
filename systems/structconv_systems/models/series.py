"""Forecasts of series with missing values: recurrent, with attention or period-aware attention (Cinar et al. 2018)."""

from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import Additive, ConfigError, Mechanism, RelativeBias
from structconv.nn import Conv, Linear
from structconv.shapes import check_choice, check_divides
from structconv.weights import EyeBlocks
from structconv_systems.models.forecasts import Forecast

__all__ = ["ATTENTION", "Forecaster", "History", "LastValue", "scores"]

ATTENTION = ("none", "content", "period")


class History(NamedTuple):
    """The observed readings before a forecast.

    Args:
        filled: (B, T), with each missing reading replaced by the last one before it, or 0.
        observed: (B, T) booleans.
        gap: (B, T), steps since the last observed reading: 0 for observed ones.

    Example:

        >>> from structconv_systems.models.series import History
        >>> history = History.of(torch.tensor([[3.0, 0.0, 5.0]]), torch.tensor([[True, False, True]]))
        >>> history.filled.tolist(), history.gap.tolist()
        ([[3.0, 3.0, 5.0]], [[0, 1, 0]])
    """

    filled: Tensor
    observed: Tensor
    gap: Tensor

    @classmethod
    def of(cls, values: Tensor, observed: Tensor) -> Self:
        """Build the history of readings (B, T); readings that are not observed may be any number."""
        times = torch.arange(values.shape[-1], device=values.device)
        last = torch.where(observed, times, -1).cummax(-1).values
        filled = values.gather(-1, last.clamp(min=0)).masked_fill(last < 0, 0.0)
        return cls(filled, observed, times - last)


class LastValue(Forecast):
    """The last observed reading, at all of `horizon` steps to come (persistence).

    Example:

        >>> from structconv_systems.models.series import LastValue
        >>> LastValue(2)(torch.tensor([[3.0, 5.0, 0.0]]), torch.tensor([[True, True, False]])).tolist()
        [[5.0, 5.0]]
    """

    def forward(self, values: Tensor, observed: Tensor) -> Tensor:
        """Readings and which are observed, (B, T) -> (B, horizon)."""
        return History.of(values, observed).filled[:, -1:].expand(-1, self.horizon)


class Forecaster(nn.Module):
    """y_n = last + s d_n, d_n = W_o [s_n; c_n], s_n = GRU(s_(n-1), [d_(n-1); c_n]), c_n from the states h_m of a GRU.

    An entry m holds `patch` consecutive readings, so that the encoder makes T / patch steps and the decoder horizon /
    patch. It reads them standardized, missing ones as the last before them, and which are observed.

    - "none": c_n is the last h_m, a fixed summary (Cho et al. 2014).
    - "content": c_n = sum_m softmax_m(v^T tanh(W s_(n-1) + U h_m)) h_m (Bahdanau et al. 2015).
    - "period": c_kn = sum_m softmax_m(v^T tanh(W s_(n-1) + U h_m) + pi_k[m - n]) h_km, where h_k is the k-th block of
      channels and pi_k a learned number for each distance m - n to the outputs after the inputs, so that readings a
      period ago can get a weight of their own. h_m is scaled by exp(-mu g_m), mu > 0 learned and g_m the steps since
      the last observed reading. All else is equal.

    Args:
        history: T. horizon: number of forecast readings. patch: divides both. hidden: H, channels of the states.
        attention: see above. heads: K, a divisor of H: the number of blocks of channels with their own pi.
        align: D of the scores; default: H / 2. dropout: probability of dropout on [s_n; c_n].
        mean, deviation: constants that standardize the readings.

    Calling it: readings and which are observed, (B, T) -> (B, horizon), in the unit of the readings, in O((T + horizon)
    / patch) sequential steps; one of the decoder costs O(B D T / patch) besides its products.

    After Cinar et al. (2017, 2018): pi^(1) has a scalar for each distance, as one head, pi^(2) a vector, as K = H;
    exp(-mu g) weighs padded values. Unlike them: pi is added to the score, and so multiplies weights, where theirs
    multiplies h_m inside of the tanh; GRUs; patches; the forecast is the change since the last value.

    Raises:
        ConfigError: options contradict each other.

    Example:

        >>> from structconv_systems.models.series import Forecaster
        >>> model = Forecaster(history=12, horizon=4, hidden=8, heads=2).eval()
        >>> values, observed = torch.randn(2, 12), torch.ones(2, 12, dtype=torch.bool)
        >>> model(values, observed).shape
        torch.Size([2, 4])
    """

    def __init__(self, *, history: int, horizon: int, attention: str = "period", patch: int = 1, hidden: int = 64,
                 heads: int = 4, align: int | None = None, dropout: float = 0.0, mean: float = 0.0,
                 deviation: float = 1.0) -> None:
        super().__init__()
        check_choice("Forecaster", "attention", attention, ATTENTION)
        self.history, self.horizon, self.patch, self.attention = history, horizon, patch, attention
        entries = check_divides("Forecaster", "patch", patch, "history", history)
        self.steps = check_divides("Forecaster", "patch", patch, "horizon", horizon)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))
        self.encoder = nn.GRU(2 * patch, hidden, batch_first=True)
        self.first, self.decoder = Linear(hidden, hidden), nn.GRUCell(patch + hidden, hidden)
        self.readout, self.dropout = Linear(2 * hidden, patch), nn.Dropout(dropout)
        if attention != "none":
            weights = scores(attention, align or max(hidden // 2, 1), entries + self.steps, heads).softmax()
            self.context = Conv(weights, hidden, hidden, weight=EyeBlocks(), bias=False)
        if attention == "period":
            self.fade = nn.Parameter(torch.tensor(-4.0))

    def forward(self, values: Tensor, observed: Tensor) -> Tensor:
        return self._run(values, observed)[0]

    def weights(self, values: Tensor, observed: Tensor) -> Tensor:
        """Return the attention weights of each decoder step over the entries, (B, K, horizon / patch, T / patch).

        Raises:
            ConfigError: the model has no attention.
        """
        if self.attention == "none":
            raise ConfigError("weights", "the model must have attention", "Forecaster(attention='none')")
        return self._run(values, observed, True)[1]

    def _run(self, values: Tensor, observed: Tensor, look: bool = False) -> tuple[Tensor, Any]:
        history = History.of(values, observed)
        states = self.encoded(history)
        state = self.first(states[:, -1]).tanh()
        states = self.faded(states, history) if self.attention == "period" else states
        cache: Any = self.context.prepare(states) if self.attention != "none" else None
        changes, weights = [values.new_zeros(values.shape[0], self.patch)], []
        for place in range(states.shape[1], states.shape[1] + self.steps):
            query = state.unsqueeze(1)
            if look:
                weights.append(self.context.basis(cache, z=query, positions=place).dense())
            context = states[:, -1] if cache is None else self.context(cache, z=query, positions=place).squeeze(1)
            state = self.decoder(torch.cat([changes[-1], context], -1), state)
            changes.append(self.readout(self.dropout(torch.cat([state, context], -1))))
        y = history.filled[:, -1:] + cast(Tensor, self.deviation) * torch.cat(changes[1:], -1)
        return y, torch.cat(weights, -1).mT if look else None

    def encoded(self, history: History) -> Tensor:
        """Return h_m of the entries, (B, T / patch, H)."""
        standard = (history.filled - cast(Tensor, self.mean)) / cast(Tensor, self.deviation)
        rows = [part.unflatten(-1, (-1, self.patch)) for part in (standard, history.observed.to(standard))]
        states: Tensor = self.encoder(torch.cat(rows, -1))[0]
        return states

    def faded(self, states: Tensor, history: History) -> Tensor:
        """exp(-mu g_m) h_m, g_m being the gap at the end of an entry."""
        gaps = history.gap.unflatten(-1, (-1, self.patch))[..., -1:]
        return states * torch.exp(-F.softplus(self.fade) * gaps)


def scores(attention: str, dim: int, reach: int, heads: int) -> Mechanism:
    """Return v^T tanh(W s + U h_m), by "period" plus a learned number for each distance up to `reach` and head."""
    content = Additive(dim)
    return content if attention == "content" else content + RelativeBias(reach, heads)
