"""Recurrent cells whose gates are structured convolutions: ConvLSTM over a grid, DCRNN over a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv.errors import ConfigError, ShapeError, text_of
from structconv.mechanisms.expression import Mechanism
from structconv.nn.composite import Composite
from structconv.nn.conv import ERRORS, Conv
from structconv.nn.layer import Device, recorded
from structconv.planning.precision import autocast_dtype, cast
from structconv.shapes import check_alike, check_choice, check_entries, check_positive, check_tensor
from structconv.structures.batching import AnyStructure
from structconv.weights import Weight

__all__ = ["ConvGRUCell", "ConvLSTMCell"]

Weights = Weight | Sequence[Weight] | None
_BY_KEYWORD = "A structure goes by keyword: cell(x, structure=graph)."


class ConvGRUCell(Composite):
    """A gated recurrent unit whose products with weights are structured convolutions g of [x, h].

    r, u = sigmoid(g([x, h])), c = tanh(g'([x, r h])), h' = u h + (1 - u) c, with one convolution for r and u
    (Cho et al. 2014; DCRNN with g over both random walks: Li et al. 2018, eq. 3). With reset="after" the candidate is
    c = tanh(g_x(x) + r g_h(h)), as in torch.nn.GRUCell, by one convolution of x and one of h.

    Args:
        mechanism: what relates the entries, from M inputs to as many outputs.
        in_channels: P of x. hidden_channels: H of h.
        weight: the weight of each convolution, as in `Conv`.
        bias: if True, each convolution adds a bias.
        reset: "before" or "after".

    x (..., M, P), h (..., M, H) or none for zeros -> h' (..., M, H). On images use `to_entries`.

    Example:

        >>> from structconv import ConvGRUCell, Grid, Powers
        >>> cell = ConvGRUCell(Powers(2, walk="forward") | Powers(2, walk="backward"), 2, 8)  # DCRNN's cell
        >>> cell(torch.randn(9, 2), structure=Grid((3, 3)).graph()).shape
        torch.Size([9, 8])
    """

    fixed = frozenset(("in_channels", "hidden_channels", "reset"))

    def __init__(self, mechanism: Mechanism, in_channels: int, hidden_channels: int, *, weight: Weights = None,
                 bias: bool = True, reset: str = "before", device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_choice("ConvGRUCell", "reset", reset, ("before", "after"))
        self.in_channels = check_positive("ConvGRUCell", "in_channels", in_channels)
        self.hidden_channels = hidden = check_positive("ConvGRUCell", "hidden_channels", hidden_channels)
        self.reset = reset
        conv = partial(Conv, mechanism, weight=weight, bias=bias, device=device, dtype=dtype)
        if reset == "before":
            both = in_channels + hidden
            self.gates, self.candidate = conv(both, 2 * hidden), conv(both, hidden)
        else:
            self.of_input, self.of_hidden = conv(in_channels, 3 * hidden), conv(hidden, 3 * hidden)

    def forward(self, x: Tensor, h: Tensor | None = None, structure: AnyStructure = None) -> Tensor:
        """h'."""
        if type(x) is Proxy:
            return recorded(self, x, h, structure)
        try:
            return self._next(x, h, structure)
        except ERRORS:
            _explain(self, x, h=h)
            raise

    def _next(self, x: Tensor, h: Tensor | None, structure: Any) -> Tensor:
        h = _state("ConvGRUCell", "h", h, x, self.hidden_channels)
        if self.reset == "before":
            r, u = _as_many("ConvGRUCell", self.gates(torch.cat([x, h], -1), structure=structure), x).sigmoid().chunk(
                2, -1)
            c = self.candidate(torch.cat([x, r * h], -1), structure=structure).tanh()
        else:
            (r_x, u_x, c_x), (r_h, u_h, c_h) = (_as_many("ConvGRUCell", y, x).chunk(3, -1) for y in (
                self.of_input(x, structure=structure), self.of_hidden(h, structure=structure)))
            r, u = (r_x + r_h).sigmoid(), (u_x + u_h).sigmoid()
            c = (c_x + r * c_h).tanh()
        return u * h + (1 - u) * c

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.hidden_channels}, reset={self.reset!r}"


class ConvLSTMCell(Composite):
    """A long short-term memory cell whose products with weights are structured convolutions.

    i, f, g, o = one convolution of [x, h]; c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c'), in
    torch's order of gates. Over `Cuboid` it is ConvLSTM (Shi et al. 2015, eq. 3).

    Args:
        mechanism: what relates the entries, from M inputs to as many outputs.
        in_channels: P of x. hidden_channels: H of h and c.
        weight: of the convolution, as in `Conv`.
        bias: of the convolution.
        peephole: add w_i c and w_f c to the gates i and f, w_o c' to o, with a weight a channel; or M, for one at
            each of M positions and channels, as Shi's.

    x (..., M, P), state (h, c) of (..., M, H) each, or none for zeros -> (h', c'). On images use `to_entries`.

    Example:

        >>> from structconv import ConvLSTMCell, Cuboid, Grid
        >>> cell, frames = ConvLSTMCell(Cuboid((3, 3)), 1, 8), torch.randn(4, 2, 64, 1)      # 4 steps of 2 images
        >>> state = None
        >>> for frame in frames:
        ...     state = cell(frame, state, structure=Grid((8, 8)))
        >>> state[0].shape
        torch.Size([2, 64, 8])
    """

    fixed = frozenset(("in_channels", "hidden_channels"))

    def __init__(self, mechanism: Mechanism, in_channels: int, hidden_channels: int, *, weight: Weights = None,
                 bias: bool = True, peephole: bool | int = False, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_channels = check_positive("ConvLSTMCell", "in_channels", in_channels)
        self.hidden_channels = hidden = check_positive("ConvLSTMCell", "hidden_channels", hidden_channels)
        self.gates = Conv(mechanism, in_channels + hidden, 4 * hidden, weight=weight, bias=bias, device=device,
                          dtype=dtype)
        if not isinstance(peephole, bool):
            check_positive("ConvLSTMCell", "peephole", peephole)
        shape = (3, hidden) if peephole is True else (3, int(peephole), hidden)
        self.peephole = None if peephole is False else nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as those of a new layer."""
        super().reset_parameters()
        if self.peephole is not None:
            nn.init.zeros_(self.peephole)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None,
                structure: AnyStructure = None) -> tuple[Tensor, Tensor]:
        """(h', c')."""
        if type(x) is Proxy:
            return recorded(self, x, state, structure)
        h, c = (None, None) if state is None else _pair(state)
        try:
            return self._next(x, h, c, structure)
        except ERRORS:
            _explain(self, x, h=h, c=c)
            raise

    def _next(self, x: Tensor, h: Tensor | None, c: Tensor | None, structure: Any) -> tuple[Tensor, Tensor]:
        h, c = (_state("ConvLSTMCell", name, own, x, self.hidden_channels) for name, own in (("h", h), ("c", c)))
        if self.peephole is not None and self.peephole.dim() == 3 and (
                self.peephole.shape[1] != x.shape[-2] or getattr(structure, "samples", None) is not None):
            raise ShapeError("ConvLSTMCell", f"x must have the M={self.peephole.shape[1]} entries of peephole",
                             tuple(x.shape))
        gates = _as_many("ConvLSTMCell", self.gates(torch.cat([x, h], -1), structure=structure), x)
        i, f, g, o = gates.chunk(4, -1)
        peephole: Tensor | None = cast(self.peephole, autocast_dtype(x))
        if peephole is not None:
            i, f = i + peephole[0] * c, f + peephole[1] * c
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        if peephole is not None:
            o = o + peephole[2] * c
        return o.sigmoid() * c.tanh(), c

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.hidden_channels}"


def _pair(state: Any) -> tuple[Tensor, Tensor]:
    """h and c of a state."""
    if not isinstance(state, tuple | list | Tensor) or len(state) != 2:
        raise ConfigError("ConvLSTMCell", "state must be a pair (h, c)", type(state).__name__)
    return state[0], state[1]


def _explain(cell: ConvGRUCell | ConvLSTMCell, x: Tensor, **states: Tensor | None) -> None:
    """Raise the error of a call that failed."""
    owner = type(cell).__name__
    check_tensor(owner, "x", x)
    check_entries(owner, x, channels=cell.in_channels)
    for name, state in states.items():
        if state is not None:
            check_tensor(owner, name, state)
            check_alike(owner, x, state, other_name=name)


def _as_many(owner: str, gates: Tensor, x: Tensor) -> Tensor:
    """The gates; an error unless there is one for each entry of the state."""
    if gates.shape[:-1] != x.shape[:-1]:
        raise ShapeError(owner, "its mechanism must lead from M entries to as many",
                         f"{gates.shape[-2]} outputs of M={x.shape[-2]}",
                         "A state has the entries of x: take a mechanism without stride, and pool before or after.")
    return gates


def _state(owner: str, name: str, state: Tensor | None, x: Tensor, channels: int) -> Tensor:
    """The given state, or zeros for each entry of x."""
    if not isinstance(x, Tensor):
        raise ConfigError(owner, "x must be a tensor", type(x).__name__, _BY_KEYWORD)
    shape = (*x.shape[:-1], channels)
    if state is None:
        return x.new_zeros(shape)
    if not isinstance(state, Tensor):
        raise ConfigError(owner, f"{name} must be a tensor", type(state).__name__, _BY_KEYWORD)
    if state.shape != shape:
        raise ShapeError(owner, f"{name} must have shape {text_of(shape)}", tuple(state.shape))
    return state
