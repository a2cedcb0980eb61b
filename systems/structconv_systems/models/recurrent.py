"""Recurrent encoders of padded sequences, by torch's GRU and LSTM, with zero states before a sequence."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Recurrent", "gated", "lstm_step", "shared_dropout"]


class Recurrent(nn.Module):
    """Layers of GRUs (Cho et al. 2014) or LSTMs (Hochreiter and Schmidhuber 1997), in one direction or in both.

    Each layer is torch's without biases, over inputs with one more channel, 1 at entries and 0 in padding, whose
    weights are the bias. A zero state thus stays zero in padding (tanh(0) = 0), so that a backward layer starts at the
    end of its sequence without packing, lengths on the host or a reversed copy. The GRU has torch's reset gate after
    the product, without the bias inside of it.

    Args:
        kind: `nn.GRU` or `nn.LSTM`. in_channels: C. hidden: H of each direction. layers, bidirectional: as torch's.
        dropout: probability of dropout on the inputs of all layers but the first, one mask for all steps of a sequence.

    Calling it: x (B, L, C), keep (B, L) booleans -> states (B, L, H or 2 H), zero in padding, and the last states of
    layers and directions (layers or 2 layers, B, H), of an LSTM the pair (h, c): after the last of the L entries,
    padding included, and for the backward direction at the first.

    Example:

        >>> from structconv_systems.models.recurrent import Recurrent
        >>> encoder = Recurrent(torch.nn.LSTM, 6, 8, bidirectional=True)
        >>> keep = torch.arange(5) < torch.tensor([[5], [3]])                  # entries of two sequences
        >>> states, _ = encoder(torch.randn(2, 5, 6), keep)
        >>> states.shape                                   # of both directions
        torch.Size([2, 5, 16])
    """

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], in_channels: int, hidden: int, *, layers: int = 1,
                 bidirectional: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.out_channels, self.dropout = hidden * (1 + bidirectional), dropout
        sizes = [in_channels, *[self.out_channels] * (layers - 1)]
        make = _LSTM if kind is nn.LSTM else kind
        self.layers = nn.ModuleList(make(size + 1, hidden, bias=False, batch_first=True, bidirectional=bidirectional)
                                    for size in sizes)

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        entries, last = keep.unsqueeze(-1).to(x.dtype), []
        for i, layer in enumerate(self.layers):
            x = shared_dropout(x, self.dropout, self.training and i > 0)
            x, state = layer(torch.cat([x * entries, entries], -1))
            last.append(state)
        if isinstance(last[0], Tensor):
            return x * entries, torch.cat(last)
        return x * entries, (torch.cat([h for h, _ in last]), torch.cat([c for _, c in last]))


class _LSTM(nn.LSTM):
    """torch's layer without biases; on a CPU it gets two zero vectors as biases, else torch builds zeros of the shapes
    of the weights in each call."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None  # type: ignore[override]
                ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        fits = x.dim() == 3 and x.shape[-1] == self.input_size and x.dtype is self.weight_ih_l0.dtype
        if not (fits and x.is_cpu and state is None):
            return super().forward(x, state)
        none = x.new_zeros(4 * self.hidden_size)
        start = x.new_zeros(1 + self.bidirectional, x.shape[0], self.hidden_size)
        weights = [t for own in self.all_weights for t in (*own, none, none)]
        y, h, c = torch.lstm(x, (start, start), weights, True, 1, 0.0, self.training, self.bidirectional, True)
        return y, (h, c)


def shared_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of x (B, L, C) with one mask for all entries of a sequence (Gal and Ghahramani 2016)."""
    return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), p) if training and p > 0 else x


def gated(inputs: Tensor, of_state: Tensor, state: Tensor) -> Tensor:
    """The next state u h + (1 - u) tanh(c + r c_h) of a GRU, r, u = sigmoid((r_x, u_x) + (r_h, u_h)), (..., H).

    inputs (r_x, u_x, c) and of_state (r_h, u_h, c_h), (..., 3 H), are what the inputs and h, the state, bring to the
    gates and to the candidate.
    """
    hidden = state.shape[-1]
    both, candidate = inputs.split((2 * hidden, hidden), -1)
    gates, own = of_state.split((2 * hidden, hidden), -1)
    reset, update = (both + gates).sigmoid().chunk(2, -1)
    return torch.lerp(torch.addcmul(candidate, reset, own).tanh(), state, update)


def lstm_step(lstm: nn.LSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states (layers, B, H) of a stack after one more entry x (B, C), as `lstm` does for a sequence of one.

    A step takes at most half the time of calling the module, which sets up its loop over time each time.
    """
    states = []
    for i, weights in enumerate(lstm.all_weights):
        x = F.dropout(x, lstm.dropout, lstm.training) if i else x
        states.append(torch.lstm_cell(x, (h[i], c[i]), *weights))
        x = states[-1][0]
    return torch.stack([own for own, _ in states]), torch.stack([own for _, own in states])
