"""ConvLSTM (Shi et al. 2015): an encoder reads a video, a forecaster continues it; and the LSTM without a grid."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from structconv import Cuboid, Grid
from structconv.nn import ConvLSTMCell, Linear
from structconv.shapes import check_divides, check_positive

__all__ = ["ConvLSTM", "MeanFrame", "width_without_grid"]

State = tuple[Tensor, Tensor]


class ConvLSTM(nn.Module):
    """x_n = W_o [h_n of all layers], (h_n, c_n) = cells(x_(n-1), h_(n-1), c_(n-1)), after cells have read the frames
    (Shi et al. 2015, figure 3 and eq. 3).

    An entry is a patch of a frame, its pixels the channels; a cell is an LSTM whose product is y = sum_k A_k^T x
    Theta_k over the shifts A_k of the grid of patches. With a patch of a whole frame the grid has one entry, and it is
    the LSTM without convolution (FC-LSTM). The forecaster has its own cells, which start from the encoder's last
    states; it reads the last frame, then its own.

    Args:
        size: rows and columns of a frame. ahead: number of forecast frames. patch: rows and columns of a patch, a
            divisor of size. kernel: size of the convolutions. hidden: H, channels of a state. layers: layers of both
            halves.

    Calling it: frames (..., T, size, size) in [0, 1] -> logits (..., ahead, size, size) of their pixels, in T + ahead
    sequential steps.

    Unlike the paper: peephole weights are equal in all places, and the forecaster reads its own output.

    Example:

        >>> from structconv_systems.models.convlstm import ConvLSTM
        >>> model = ConvLSTM(size=16, ahead=3, patch=4, hidden=4, layers=1).eval()
        >>> model(torch.rand(2, 5, 16, 16)).shape          # logits of three frames after five
        torch.Size([2, 3, 16, 16])
    """

    def __init__(self, *, size: int, ahead: int, patch: int = 4, kernel: int = 3, hidden: int = 48,
                 layers: int = 2) -> None:
        super().__init__()
        self.patch, self.ahead = patch, check_positive("ConvLSTM", "ahead", ahead)
        side, pixels = check_divides("ConvLSTM", "patch", patch, "size", size), patch * patch
        self.grid = Grid((side, side))
        shifts = Cuboid((kernel, kernel), padding="zeros")
        sizes = [pixels, *[hidden] * (check_positive("ConvLSTM", "layers", layers) - 1)]
        self.encoder, self.forecaster = (nn.ModuleList(ConvLSTMCell(shifts, channels, hidden, peephole=True)
                                                       for channels in sizes) for _ in range(2))
        self.readout = Linear(layers * hidden, pixels)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.patches(frames)
        states = self._next(self.encoder, x[..., 0, :, :], [None] * len(self.encoder))
        for entry in x.unbind(-3)[1:]:
            states = self._next(self.encoder, entry, states)
        entry, outputs = x[..., -1, :, :], []
        for _ in range(self.ahead):
            states = self._next(self.forecaster, entry, states)
            outputs.append(self.readout(torch.cat([h for h, _ in states], -1)))
            entry = outputs[-1].sigmoid()
        return self.frames(torch.stack(outputs, -3))

    def patches(self, frames: Tensor) -> Tensor:
        """Frames (..., size, size) -> entries (..., M, patch^2)."""
        rows, columns = self.grid.shape
        cut = frames.unflatten(-1, (columns, self.patch)).unflatten(-3, (rows, self.patch))
        return cut.transpose(-3, -2).flatten(-2).flatten(-3, -2)

    def frames(self, patches: Tensor) -> Tensor:
        """The inverse of `patches`."""
        cut = patches.unflatten(-2, self.grid.shape).unflatten(-1, (self.patch, self.patch))
        return cut.transpose(-3, -2).flatten(-2).flatten(-3, -2)

    def _next(self, cells: nn.ModuleList, x: Tensor, states: Sequence[State | None]) -> list[State]:
        """Return the states of all layers after an input."""
        after: list[State] = []
        for cell, state in zip(cells, states, strict=True):
            after.append(cell(x, state, self.grid))
            x = after[-1][0]
        return after


class MeanFrame(nn.Module):
    """The mean of frames (..., size, size) as a forecast, whatever the input; called like `ConvLSTM`.

    Example:

        >>> from structconv_systems.models.convlstm import MeanFrame
        >>> frames = torch.rand(2, 5, 16, 16)
        >>> MeanFrame(frames, ahead=3)(frames).shape
        torch.Size([2, 3, 16, 16])
    """

    def __init__(self, frames: Tensor, ahead: int) -> None:
        super().__init__()
        self.ahead = check_positive("MeanFrame", "ahead", ahead)
        self.register_buffer("logits", frames.flatten(0, -3).mean(0).logit(1e-4))

    def forward(self, frames: Tensor) -> Tensor:
        return self.get_buffer("logits").expand(*frames.shape[:-3], self.ahead, -1, -1)


def width_without_grid(size: int, patch: int, kernel: int, hidden: int, layers: int) -> int:
    """Return H of the LSTM `ConvLSTM(patch=size, kernel=1)` whose number of parameters is nearest to this one's."""
    aim = _parameters(patch * patch, kernel * kernel, hidden, layers)
    return min(range(1, size * size), key=lambda width: abs(_parameters(size * size, 1, width, layers) - aim))


def _parameters(pixels: int, shifts: int, hidden: int, layers: int) -> int:
    """Return the number of parameters of a ConvLSTM."""
    sizes = [pixels, *[hidden] * (layers - 1)]
    cells = sum(4 * hidden * (shifts * (channels + hidden) + 1) + 3 * hidden for channels in sizes)
    return 2 * cells + (layers * hidden + 1) * pixels
