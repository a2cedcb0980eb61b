"""`Conv`: the one layer, y = sum_k A_k^T x Theta_k + b, whatever the structure and whether it is known or learnt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structconv import ops
from structconv.bases.base import Basis
from structconv.bases.scores import computed
from structconv.errors import ConfigError, StructureError
from structconv.kernels.weights import weights_of
from structconv.mechanisms.expression import Mechanism, Setting
from structconv.nn.attended import Seen, keep_attention
from structconv.nn.recall import Calls, bias_of, keep, recalled
from structconv.nn.relative import RelativeValue
from structconv.planning import Plan
from structconv.shapes import check_alike, check_entries, check_positive
from structconv.structures.graph import Graph
from structconv.theta import HeadBlocksTheta, Theta
from structconv.weights import Full, Weight, WeightList


class Conv(nn.Module):
    """y_n = sum_k sum_m A_kmn x_m Theta_k + b (Andreoli 2019, eq. 1 with 7).

    The mechanism makes the basis A (K, M, N) of each call: from the structure alone (convolution), or from x and z
    (attention). The weight yields Theta (K, P, Q), whole or in factors. The layer gives the channel counts to both.

    Args:
        mechanism: any mechanism or expression of mechanisms; the layer binds its own copy.
        in_channels: P. out_channels: Q.
        weight: how Theta is parametrised, `Full()` if absent; a list gives one to each part of a `|`.
        bias: whether b (Q) is added.
        other_channels: P' of z where it differs from P.
        relative_value: a vector for each relative position, added to the values (Shaw et al. 2018, eq. 3).
        path, max_bytes: what the planner is held to; see `ops.conv`.

    Shapes: x (..., M, P), z (..., N, P') or none for z = x, y (..., N, Q). A layer takes float64, float32 or bfloat16.
    A new layer keeps the variance of x where each A_k has columns of unit norm; `calibrate` does so for any basis.

    Raises:
        ShapeError: channels, entries, dtype or device of x or z do not fit.
        StructureError: the mechanism needs a structure that was not given.
        ConfigError: a weight that does not fit the mechanism.
    """

    def __init__(self, mechanism: Mechanism, in_channels: int, out_channels: int, *,
                 weight: Weight | Sequence[Weight] | None = None, bias: bool = True,
                 other_channels: int | None = None, relative_value: RelativeValue | None = None,
                 path: str | None = None, max_bytes: int | None = None) -> None:
        super().__init__()
        if not isinstance(mechanism, Mechanism):
            raise ConfigError("Conv", "mechanism must be a Mechanism", repr(mechanism),
                              "For a basis that is a value, use structconv.conv(x, basis, theta).")
        self.in_channels = check_positive("Conv", "in_channels", in_channels)
        self.out_channels = check_positive("Conv", "out_channels", out_channels)
        self.other_channels = in_channels if other_channels is None else other_channels
        sizes = [part.size for part in mechanism.parts()]
        self.weight = _weight(weight).bound(sizes, in_channels, out_channels)
        self.mechanism = mechanism.bound(in_channels, self.weight().head_channels, other_channels)
        self.relative_value = None if relative_value is None else relative_value.bound(self.weight())
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.path, self.max_bytes = path, max_bytes
        self._calls = Calls()

    def forward(self, x: Tensor, z: Tensor | None = None, structure: Any = None, *,
                return_weights: bool = False) -> Any:
        """Compute y, and with `return_weights` the pair (y, A).

        A comes as (..., K, E) in the order of the input edges where the basis is a list of edges (a graph, a window),
        else as (..., K, M, N); after the dropout, where there is one.
        """
        if not return_weights:
            return self.computed(x, z, structure, bias_of(self))
        basis, y = self._computed(x, z, structure, bias_of(self))
        return y, weights_of(computed(basis), x.dtype)

    def computed(self, x: Tensor, z: Tensor | None, structure: Any, bias: Tensor | None) -> Tensor:
        """y with another bias than the layer's own, and without its hooks."""
        call = recalled(self, x, structure, z)
        if call is None:
            return self._computed(x, z, structure, bias)[1]
        return call.run(x, bias) if z is None else call.run(x, bias, z)

    def basis(self, x: Tensor, z: Tensor | None = None, structure: Any = None) -> Basis:
        """The basis that the layer would apply."""
        return self._basis(x, z, structure).basis

    def plan(self, x: Tensor, z: Tensor | None = None, structure: Any = None) -> Plan:
        """In which order and by which kernel the layer would compute; `print` it."""
        seen = self._basis(x, z, structure)
        return ops.plan(seen.x, seen.basis, seen.theta, path=self.path, max_bytes=self.max_bytes)

    @torch.no_grad()
    def calibrate(self, x: Tensor, z: Tensor | None = None, structure: Any = None) -> Conv:
        """Scale Theta so that the output's variance equals that of x, for this x and structure: one forward pass.

        The bias is left out. A weight without numbers (`Eye`) cannot be scaled, and stays.
        """
        bias, self.bias = self.bias, None
        try:
            variance = self(x, z, structure).var()
        finally:
            self.bias = bias
        if variance > 0:
            self.weight.scale_(float((x.var() / variance).sqrt()))
        return self

    def _computed(self, x: Tensor, z: Tensor | None, structure: Any,
                  bias: Tensor | None) -> tuple[Basis, Tensor]:
        """The basis, and y; what the next call of this kind can use is kept."""
        seen = self._basis(x, z, structure, deferred=self.relative_value is None)
        basis, theta, projected = seen.basis, seen.theta, seen.projected
        blocks = projected is not None and isinstance(theta, HeadBlocksTheta)
        if self.relative_value is not None or (projected is not None and not blocks):
            y = self._by_heads(seen.x, basis, theta, projected)
            return basis, y if bias is None else y + bias
        plan = None
        if projected is not None:
            by_head = None if bias is None else bias.view(theta.size, theta.head_channels)
            y = theta.join(ops.apply(basis, projected[0], by_head))
        else:
            plan = ops.plan(seen.x, basis, theta, path=self.path, max_bytes=self.max_bytes)
            if _defers(structure, theta) and not plan.rule.projects:
                basis = computed(basis)
                seen = seen._replace(basis=basis)
                plan = ops.plan(seen.x, basis, theta, path=self.path, max_bytes=self.max_bytes)
            y = plan.biased(seen.x, basis, theta, bias)
        if not torch.compiler.is_compiling():
            if plan is not None and z is None:
                keep(self, x, structure, basis, theta, plan)
            keep_attention(self, x, z, structure, seen, plan)
        return basis, y

    def _basis(self, x: Tensor, z: Tensor | None, structure: Any, deferred: bool = False) -> Seen:
        """The basis and what it was made of."""
        self._check(x, z, structure)
        theta, masked = self.weight(), None
        kept = self.mechanism.kept_inputs(Setting(x, x if z is None else z, structure))
        if kept is not None:
            if kept.shape[-1] != x.shape[-2]:
                raise StructureError("Conv", f"masks must have length M={x.shape[-2]}", kept.shape[-1])
            masked = partial(zeroed, kept.unsqueeze(-1))
            x, z = masked(x, z)
        deferred = deferred and _defers(structure, theta)
        setting = Setting(x, x if z is None else z, structure, deferred=deferred)
        if not self.mechanism.sees_projection:
            return Seen(self.mechanism.build(setting), x, theta, None, masked)
        source = theta.heads(x)
        projected = (source, source if z is None else theta.heads(z))
        basis = self.mechanism.build(Setting(setting.x, setting.z, structure, projected))
        return Seen(basis, x, theta, projected, masked)

    def _by_heads(self, x: Tensor, basis: Basis, theta: Theta, projected: tuple[Tensor, Tensor] | None) -> Tensor:
        """The heads' outputs one by one, for layers that look at a head before or after the structure is applied."""
        source = theta.heads(x) if projected is None else projected[0]
        if self.relative_value is None and theta.sums_heads:
            return ops.synthesis(basis, source)
        value = self.relative_value
        return theta.join(ops.apply(basis, source) if value is None else value.added(basis, source))

    def _check(self, x: Tensor, z: Tensor | None, structure: Any) -> None:
        check_entries("Conv", x, entries=self.mechanism.input_entries(structure), channels=self.in_channels)
        if z is not None and not isinstance(z, Tensor):
            raise ConfigError("Conv", "z must be a tensor", type(z).__name__,
                              "A structure goes by keyword: layer(x, structure=graph).")
        if z is not None:
            check_entries("Conv", z, channels=self.other_channels, name="z", letters="NP")
            check_alike("Conv", x, z, other_name="z")
        parameter = next(iter(self.weight._parameters.values()), None)
        parameter = next(self.parameters(), None) if parameter is None else parameter
        if parameter is not None:
            check_alike("Conv", x, parameter, other_name="the layer's parameters")

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


def _defers(structure: Any, theta: Theta) -> bool:
    """Whether a kernel may be there that makes projections for scores together with those by Theta."""
    return isinstance(structure, Graph) and not theta.sums_heads


def zeroed(kept: Tensor, x: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """x without the entries that no output sees, and z, or x for it: what no output sees is still an output itself,
    unless it is not finite. kept (..., M, 1)."""
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    if z is None:
        z = torch.where(kept | x.isfinite().all(-1, keepdim=True), x, zero)
    return torch.where(kept, x, zero), z


def _weight(weight: Weight | Sequence[Weight] | None) -> Weight:
    if weight is None:
        return Full()
    return weight if isinstance(weight, Weight) else WeightList(weight)
