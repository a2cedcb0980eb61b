"""ConvLSTM: it learns, goes with what moves, is exported, and is an LSTM where a patch is the whole frame."""

import pytest
import torch
from torch import nn

from structconv_systems.models.convlstm import ConvLSTM, MeanFrame, width_without_grid

SIZE, SEEN, AHEAD = 8, 3, 2


def make(seed=0, **options):
    torch.manual_seed(seed)
    return ConvLSTM(**{"size": SIZE, "ahead": AHEAD, "patch": 2, "hidden": 8, **options})


def drawn(count=3, seed=0):
    """A video of noise, seen and to come."""
    frames = torch.rand(count, SEEN + AHEAD, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).round()
    return frames[:, :SEEN], frames[:, SEEN:]


def test_a_patch_is_an_entry():
    model, frames = make(), torch.arange(2.0 * 5 * SIZE**2).view(2, 5, SIZE, SIZE)
    patches = model.patches(frames)
    assert patches.shape == (2, 5, 16, 4) and torch.equal(model.frames(patches), frames)
    assert patches[0, 0, 5].tolist() == frames[0, 0, 2:4, 2:4].flatten().tolist()


def test_what_moves_by_a_patch_is_forecast_a_patch_further():
    """Where the zeros around a frame are not seen: two steps of 3 x 3 reach two patches far."""
    model, frames = make(size=40, layers=1, ahead=1), torch.zeros(1, 1, 40, 40)
    frames[..., 18:22, 18:22] = torch.rand(4, 4)
    actual, moved = (model(video) for video in (frames, frames.roll((2, -2), (-2, -1))))
    torch.testing.assert_close(moved[..., 6:-6, 6:-6], actual.roll((2, -2), (-2, -1))[..., 6:-6, 6:-6])


def test_a_whole_frame_as_a_patch_is_an_lstm():
    """Step by step torch's LSTM cell, peephole weights being zero at first."""
    model, (seen, _) = make(patch=SIZE, kernel=1, layers=1), drawn()
    cells = []
    for (cell,) in (model.encoder, model.forecaster):
        own = nn.LSTMCell(SIZE**2, 8)
        weight = cell.gates.weight().dense()[0].T
        with torch.no_grad():
            own.weight_ih.copy_(weight[:, :SIZE**2])
            own.weight_hh.copy_(weight[:, SIZE**2:])
            own.bias_ih.copy_(cell.gates.bias)
            own.bias_hh.zero_()
        cells.append(own)
    h = c = torch.zeros(3, 8)
    for frame in seen.flatten(2).unbind(1):
        h, c = cells[0](frame, (h, c))
    said = [seen[:, -1].flatten(1)]
    for _ in range(AHEAD):
        h, c = cells[1](said[-1], (h, c))
        said.append(model.readout(h).sigmoid())
    torch.testing.assert_close(model(seen).sigmoid().flatten(2), torch.stack(said[1:], 1))


@pytest.mark.parametrize(("patch", "kernel", "hidden", "layers"), [(4, 3, 24, 1), (2, 5, 8, 2)])
def test_without_a_grid_it_has_as_many_parameters(patch, kernel, hidden, layers):
    width = width_without_grid(16, patch, kernel, hidden, layers)
    aim, below, actual, above = (
        sum(parameter.numel() for parameter in make(size=16, **options, layers=layers).parameters()) for options in
        ({"patch": patch, "kernel": kernel, "hidden": hidden},
         *({"patch": 16, "kernel": 1, "hidden": max(width + by, 1)} for by in (-1, 0, 1))))
    assert abs(actual - aim) <= min(abs(below - aim), abs(above - aim)) and abs(actual - aim) < 0.1 * aim


def test_the_mean_frame_is_said_whatever_was_seen():
    frames, _ = drawn()
    logits = MeanFrame(frames, AHEAD)(frames)
    assert logits.shape == (3, AHEAD, SIZE, SIZE) and logits.isfinite().all()
    inner = frames.mean((0, 1)).clamp(1e-4, 1 - 1e-4)
    torch.testing.assert_close(logits.sigmoid()[0, 0], inner, rtol=1e-4, atol=1e-6)
