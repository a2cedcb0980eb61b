"""Programs that torch compiles whole: layers with masks of every kind, and layers on batches of samples."""

from __future__ import annotations

import pytest
import torch

from structconv.mechanisms import DotProduct, RelativeBias
from structconv.nn import Conv, MultiheadAttention
from structconv.structures import Blocks, Causal, DenseMask, EdgeSupport, Global, Grid, Padding, Samples, Window
from structconv.testing import library
from structconv.testing.batches import larger, side_by_side, takes_samples
from structconv.testing.layers import use, uses
from structconv.testing.programs import check_compiled

M, P, Q = library.M, library.P, library.Q
DOT = DotProduct(heads=2, dim=3).scaled()
KEPT, OF_EACH = torch.arange(M) < 4, torch.arange(M) < torch.tensor([[4], [5]])
MASKS = {
    "causal_window": lambda: Causal() & Window(3), "causal_padding": lambda: Causal() & Padding(KEPT),
    "window_padding_of_each": lambda: Window(1) & Padding(OF_EACH), "blocks_padding": lambda: Blocks(2) & Padding(KEPT),
    "edges_causal": lambda: EdgeSupport(library.random_graph()) & Causal(),
    "global_padding_of_each": lambda: (Window(1) | Global(1)) & Padding(OF_EACH),
    "table_window": lambda: DenseMask(torch.eye(M) > -1) & Window(2), "not_window": lambda: Causal() & ~Window(1),
    "turned": lambda: (Causal() & Window(2)).transpose(), "on_a_grid": lambda: Window((3,), grid=Grid(M)) & Causal(),
    "three": lambda: Causal() & Window(2) & Padding(KEPT)}
PLACES = {
    "kept": lambda mask: use(Conv(DOT.masked(keep=mask).softmax(), P, Q), library.random(2, M, P)),
    "dropped": lambda mask: use(Conv(DOT.masked(drop=mask).softmax(), P, Q), library.random(2, M, P)),
    "second": lambda mask: use(Conv((DOT + RelativeBias(2)).masked(keep=Window(4)).masked(keep=mask).softmax(), P, Q),
                               library.random(2, M, P)),
    "of_the_call": lambda mask: use(MultiheadAttention(P, 2), library.random(2, M, P), keep=mask)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_compile_whole(mask, place):
    check_compiled(PLACES[place](MASKS[mask]()))
