"""`Adjacency`: the edges of a graph as a layer reads them, built in one native pass and not by operators of tensors.

For kernels that run whole layers: they read the edges in the order of the slots, with degrees, normalization and
self-loops in their values, and compute nothing that the layer does not use. The edges by source are made from those by
target when a gradient first asks for them, so a later change of the edges does not reach a gradient under way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.derived import cached, derived
from structconv.primitives.native import dispatch
from structconv.primitives.native.indices import LIMIT
from structconv.primitives.native.loader import Core

__all__ = ["Adjacency", "adjacency_of", "build_adjacency", "unchanged"]

_NORMALIZATIONS = {None: 0, "row": 1, "sym": 2}  # see Normalization in src/api.h
_INTEGERS = frozenset((torch.int32, torch.int64))


class Adjacency:
    """Edges between M inputs, `columns`, and N outputs, `rows`, with their values: by target, and when a gradient asks
    for them by source. Kernels check the seal of a layout, and not its indices.
    """

    __slots__ = ("__weakref__", "_by_source", "_core", "by_target", "columns", "rows")

    def __init__(self, core: Core, by_target: Tensor, rows: int, columns: int) -> None:
        self.by_target, self.rows, self.columns = by_target, rows, columns
        self._core = core
        self._by_source: Tensor | None = None

    def sides(self) -> tuple[Tensor, Tensor]:
        """Return the edges by target and by source. O(E) once."""
        by_source = self._by_source
        if by_source is None:
            by_source = self._by_source = self._core.transpose(self.by_target)
        return self.by_target, by_source


def build_adjacency(kernels: Core, index: Tensor, inputs: int, outputs: int, loops: bool = False, square: bool = True,
                    normalize: str | None = None, weights: Tensor | None = None, numbered: bool = False
                    ) -> Adjacency | None:
    """The edges (2, E) on the CPU; `None` where no kernel can read them, or one is out of range, of which nobody has
    read more than its number.

    Args:
        loops: append a loop at each entry, after all edges.
        square: whether the inputs are the outputs, so that both have the same degrees.
        normalize: "sym", "row" or None; see `mechanisms.Adjacency`.
        weights: (E,) or with loops (E + N), float32, or none for ones.
        numbered: whether the layout says which edge each slot belongs to; with weights it does.

    O(E + M + N).
    """
    if index.dtype not in _INTEGERS or max(inputs, outputs, index.shape[1] + outputs) >= LIMIT:
        return None
    weights = None if weights is None else weights.contiguous()  # a column of attributes is not
    tensor, bad = kernels.adjacency(index, inputs, outputs, loops, square, _NORMALIZATIONS[normalize], weights,
                                    numbered)
    return None if bad >= 0 else Adjacency(kernels, tensor, outputs, inputs)


def adjacency_of(index: Tensor, inputs: int, outputs: int, *, loops: bool = False, square: bool = True,
                 normalize: str | None = None, weights: Tensor | None = None, numbered: bool = False
                 ) -> Adjacency | None:
    """`build_adjacency`, remembered for as long as edges and weights stay; `None` where no kernel can read them."""
    kernels = dispatch.Loaded.core if dispatch.Loaded.asked else dispatch.kernels()
    if kernels is None or not index.is_cpu:
        return None
    key = "adjacency", inputs, outputs, loops, square, normalize, weights is None, numbered
    build = partial(build_adjacency, kernels, index, inputs, outputs, loops, square, normalize, weights, numbered)
    return cached(index, key, build) if weights is None else derived((index, weights), key, build)


def unchanged(index: Tensor, function: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
    """The function, which raises `RuntimeError` if the edges are changed from now on; without one, a check."""
    version = None if index.is_inference() else index._version

    def checked(*arguments: Any) -> Any:
        if private.version(index) != version:
            raise RuntimeError("edge_index was changed in place after the layer was called, and a derivative of its "
                               "gradient needs the edges as they were: change a copy")
        return function(*arguments)

    return checked
