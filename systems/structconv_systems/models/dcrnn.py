"""The diffusion convolutional recurrent network (Li et al. 2018): an encoder-decoder of GRUs over a graph."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from structconv import Graph, Mechanism, Powers
from structconv.nn import ConvGRUCell, Linear
from structconv.shapes import check_positive
from structconv_systems.models.forecasts import Forecast

__all__ = ["DCRNN", "Persistence", "diffusion", "sampled_share", "width_without_graph"]


def diffusion(order: int) -> Mechanism:
    """Walks of at most `order` steps along the edges and against them, and the one of no step: K = 2 order + 1.

    Example:

        >>> from structconv_systems.models.dcrnn import diffusion
        >>> diffusion(2).size                              # one step and two, in both directions, and none
        5
    """
    walks: Mechanism = Powers(order, walk="forward")
    return walks | Powers(order, walk="backward", first=1) if order else walks


class DCRNN(nn.Module):
    """y_n = W_o h_n, h_n = cells(y_(n-1), h_(n-1)), after cells have read the readings (Li et al. 2018, figure 2).

    A cell is a GRU whose products are y = sum_k A_k^T x Theta_k over the powers of both random walks (eq. 2 and 3; the
    authors' code transposes the walks). The encoder reads standardized readings and the covariates of each time. The
    decoder starts from zero and the encoder's last states and reads its last prediction or, in training, observed
    values (scheduled sampling: Bengio et al. 2015). All cells have a bias.

    Args:
        mechanism: relates the sensors, for example `diffusion`; `Identity()` for a network without a graph.
        horizon: number of forecast readings. hidden: H, channels of a state. layers: layers of cells in both halves.
        known: E, further channels of the encoder's input.
        mean, deviation: constants that standardize the readings.

    Calling it: readings (..., T, M), a graph, known (..., T, M, E) -> (..., horizon, M), in the unit of the readings,
    in T + horizon sequential steps. With `target` (..., horizon, M) the decoder reads in step n > 1 the target with
    probability `share`, else its own prediction.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.dcrnn import DCRNN, diffusion
        >>> graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3, edge_weight=torch.tensor([0.5, 1.0, 0.2]))
        >>> model = DCRNN(diffusion(2), horizon=4, hidden=8).eval()
        >>> model(torch.randn(2, 12, 3), graph).shape   # of 12 readings of 3 sensors
        torch.Size([2, 4, 3])
    """

    def __init__(self, mechanism: Mechanism, *, horizon: int, hidden: int = 64, layers: int = 2, known: int = 0,
                 mean: float = 0.0, deviation: float = 1.0) -> None:
        super().__init__()
        self.horizon = check_positive("DCRNN", "horizon", horizon)
        above = [hidden] * (check_positive("DCRNN", "layers", layers) - 1)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))
        self.encoder, self.decoder = (nn.ModuleList(ConvGRUCell(mechanism, size, hidden) for size in (first, *above))
                                      for first in (1 + known, 1))
        self.readout = Linear(hidden, 1)

    def forward(self, readings: Tensor, graph: Graph | None = None, known: Tensor | None = None, *,
                target: Tensor | None = None, share: float = 0.0) -> Tensor:
        x = self._standard(readings).unsqueeze(-1)
        states: list[Tensor | None] = [None] * len(self.encoder)
        for entry in (x if known is None else torch.cat([x, known], -1)).unbind(-3):
            _, states = _next(self.encoder, entry, states, graph)
        truth = [] if target is None else self._standard(target).unsqueeze(-1).unbind(-3)
        reading, outputs = torch.zeros_like(x[..., 0, :, :]), []
        for step in range(self.horizon):
            h, states = _next(self.decoder, reading, states, graph)
            outputs.append(self.readout(h))
            reading = truth[step] if truth and torch.rand(()) < share else outputs[-1]
        return torch.cat(outputs, -1).mT * cast(Tensor, self.deviation) + cast(Tensor, self.mean)

    def _standard(self, readings: Tensor) -> Tensor:
        return (readings - cast(Tensor, self.mean)) / cast(Tensor, self.deviation)


class Persistence(Forecast):
    """The last reading, at all of `horizon` steps to come; called as `DCRNN` is.

    Example:

        >>> from structconv_systems.models.dcrnn import Persistence
        >>> Persistence(horizon=2)(torch.tensor([[1.0], [2.0], [3.0]])).tolist()
        [[3.0], [3.0]]
    """

    def forward(self, readings: Tensor, graph: Graph | None = None, known: Tensor | None = None) -> Tensor:
        return readings[..., -1:, :].expand(*readings.shape[:-2], self.horizon, -1)


def sampled_share(step: int, tau: float) -> float:
    """tau / (tau + exp(step / tau)): the share of observed inputs of the decoder in a training step (Bengio et al.
    2015, section 2.4)."""
    return tau / (tau + math.exp(min(step / tau, 500.0)))


def width_without_graph(hidden: int, layers: int, known: int, order: int) -> int:
    """Return H of `DCRNN(Identity())` whose number of parameters is nearest to `DCRNN(diffusion(order))` with `hidden`.
    """
    size = 2 * order + 1
    aim = _parameters(size, hidden, layers, known)
    return min(range(hidden, size * hidden + 1), key=lambda width: abs(_parameters(1, width, layers, known) - aim))


def _parameters(size: int, hidden: int, layers: int, known: int) -> int:
    """Return the number of parameters of a DCRNN over a basis of this size."""
    inputs = [1 + known, 1, *[hidden] * (2 * layers - 2)]
    return sum(3 * hidden * (size * (channels + hidden) + 1) for channels in inputs) + hidden + 1


def _next(cells: nn.ModuleList, x: Tensor, states: Sequence[Tensor | None],
          graph: Graph | None) -> tuple[Tensor, list[Tensor | None]]:
    """Return the last state, and the states of all layers, after an input."""
    after: list[Tensor | None] = []
    for cell, state in zip(cells, states, strict=True):
        x = cell(x, state, graph)
        after.append(x)
    return x, after
