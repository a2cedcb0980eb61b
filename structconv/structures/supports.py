"""The supports: sets of pairs (m, n) by order, block, padding, graph or table.

Windows are in `windows.py`, the base class and the combinations `&`, `|`, `~` in `masks.py`; all are names of this
module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.errors import StructureError, text_of
from structconv.shapes import NO_TENSORS
from structconv.structures import enumeration
from structconv.structures.graph import Graph, check_size
from structconv.structures.masks import Device, Support, listed
from structconv.structures.values import structure
from structconv.structures.windows import Window

__all__ = ["Blocks", "Causal", "DenseMask", "EdgeSupport", "Global", "Padding", "Support", "Window"]


@structure()
class Causal(Support):
    """m <= n: an output reads itself and the entries before it.

    Aligned at the first entry also where M differs from N, as `is_causal` of torch's scaled dot product attention.

    Example:

        >>> from structconv import Causal, Conv, DotProduct
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Causal()).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([1, 2, 3])
    """

    may_mask_inputs = False

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return m <= n

    def restricted(self, to: Any) -> list[Support] | None:
        return [self] if to.aligned else None


@structure()
class Blocks(Support):
    """m and n in the same block of `size` consecutive entries: m // size == n // size. Lists O(N size) edges.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.structures import Blocks
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Blocks(2)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(5, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([2, 2, 2, 2, 1])
    """

    size: int

    def __post_init__(self) -> None:
        if check_size("Blocks", "size", self.size) == 0:
            raise StructureError("Blocks", "size must be a positive integer", repr(self.size))

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return m // self.size == n // self.size

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        return listed(enumeration.block_pairs(num_inputs, num_outputs, self.size, device), num_inputs, num_outputs)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        return num_outputs * enumeration.at_most(self.size, num_inputs)

    listed = True

    def transpose(self) -> Blocks:
        return self


@structure()
class Global(Support):
    """The pairs whose input or output is a global entry: `Window(256) | Global(1)` is Longformer's attention.

    Args:
        entries: how many of the first entries are global, or which ones, by their numbers. Numbers beyond the
            entries are not counted.

    Raises:
        StructureError: a number that is no integer >= 0, or comes twice.

    Lists G (M + N) - G^2 edges for G global entries. (Beltagy et al. 2020, section 3.1.)

    Example:

        >>> from structconv import Conv, DotProduct, Window
        >>> from structconv.structures import Global
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Window(1) | Global(1)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(5, 8)).dense()[0].count_nonzero(0)     # inputs of each output
        tensor([5, 3, 4, 4, 3])
    """

    entries: int | tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = self.entries if isinstance(self.entries, list | tuple) else (self.entries,)
        for number in numbers:
            check_size("Global", "entries", number)
        known = [number for number in numbers if type(number) is int]  # a tracer has stand-ins
        if len(set(known)) < len(known):
            raise StructureError("Global", "entries must be distinct numbers", self.entries)
        if isinstance(self.entries, list):
            object.__setattr__(self, "entries", tuple(self.entries))

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        if not isinstance(self.entries, tuple):
            return (m < self.entries) | (n < self.entries)
        numbers = torch.tensor(self.entries, dtype=torch.int64, device=m.device)
        return torch.isin(m, numbers) | torch.isin(n, numbers)

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        inputs, outputs = self._among(num_inputs, device), self._among(num_outputs, device)
        return listed(enumeration.cross_pairs(inputs, outputs, num_inputs, num_outputs), num_inputs, num_outputs)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        inputs, outputs = self._count(num_inputs), self._count(num_outputs)
        return outputs * num_inputs + inputs * (num_outputs - outputs)

    listed = True

    def transpose(self) -> Global:
        return self

    def _count(self, size: int) -> int:
        """Return the number of global entries among `size` entries."""
        if not isinstance(self.entries, tuple):
            return min(self.entries, size)
        return sum(number < size for number in self.entries)

    def _among(self, size: int, device: Device) -> Tensor:
        """The global entries below `size`, in ascending order."""
        if not isinstance(self.entries, tuple):
            return torch.arange(min(self.entries, size), device=device)
        return torch.tensor(sorted(number for number in self.entries if number < size), dtype=torch.int64,
                            device=device)


@structure()
class Padding(Support):
    """The inputs that exist: `keep` (..., M) is true where input m is an entry and false where it is padding.

    Leading dimensions are the batch's.

    Example:

        >>> from structconv import Conv, DotProduct, Padding
        >>> keep = torch.tensor([True, True, False])
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Padding(keep)).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0, 2].tolist()          # input 2 is padding
        [0.0, 0.0, 0.0]
    """

    keep: Tensor

    def __post_init__(self) -> None:
        _check_mask("Padding", self.keep, 1, "(..., M)")

    @property
    def num_inputs(self) -> int:
        return self.keep.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.keep.shape[:-1])

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.keep[..., m]

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        if self.num_inputs != num_inputs:
            raise StructureError(owner, f"a mask of inputs must have shape (..., M={num_inputs})",
                                 tuple(self.keep.shape), "A table of pairs (..., M, N) goes as DenseMask(table).")

    def visible_inputs(self) -> Tensor:
        return self.keep

    def restricted(self, to: Any) -> list[Support]:
        return [Padding(to.of_inputs(self.keep, -1, 1))]


@structure()
class DenseMask(Support):
    """Any pairs at all, by a table: `keep` (..., M, N). The one support that holds M N booleans.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> from structconv.structures import DenseMask
        >>> layer = Conv(DotProduct(dim=4).masked(keep=DenseMask(torch.eye(3, dtype=torch.bool))).softmax(), 8, 8)
        >>> layer.basis(torch.randn(3, 8)).dense()[0].tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    keep: Tensor

    def __post_init__(self) -> None:
        _check_mask("DenseMask", self.keep, 2, "(..., M, N)")

    @property
    def num_inputs(self) -> int:
        return self.keep.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.keep.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.keep.shape[:-2])

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        return self.keep[..., m, n]

    def check(self, owner: str, num_inputs: int, num_outputs: int | None) -> None:
        *_, inputs, outputs = self.keep.shape
        if inputs != num_inputs or (num_outputs is not None and num_outputs != outputs):
            raise StructureError(owner, f"a mask of pairs must have shape (..., M={num_inputs}, N={num_outputs})",
                                 tuple(self.keep.shape), "A mask of the inputs of a batch, (..., M), goes as "
                                 "Padding(keep)." if outputs == num_inputs else "")

    def visible_inputs(self) -> Tensor:
        return self.keep.any(-1)

    def restricted(self, to: Any) -> list[Support] | None:
        if to.number is None:
            return None
        return [DenseMask(to.of_outputs(to.of_inputs(self.keep, -2, 2), -1, 2))]

    def transpose(self) -> DenseMask:
        return DenseMask(self.keep.mT)


@structure()
class EdgeSupport(Support):
    """The pairs joined by an edge of `graph`; its weights are not read.

    The list is the graph itself, in its edge order. Duplicate edges stay in the list, each a pair of its own with its
    own weight, whereas `contains` says only that the pair exists.

    Example:

        >>> from structconv import Graph
        >>> from structconv.structures import EdgeSupport
        >>> support = EdgeSupport(Graph(torch.tensor([[0], [1]]), num_nodes=2))
        >>> support.contains(torch.tensor([[0], [1]]), torch.tensor([0, 1]))
        tensor([[False,  True],
                [False, False]])
    """

    graph: Graph

    @property
    def samples(self) -> Any:
        return self.graph.samples

    @property
    def num_inputs(self) -> int:
        return self.graph.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.graph.num_outputs

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        keys = derived(self.graph.edge_index, ("pair keys", self.graph.num_outputs), lambda: _pair_keys(self.graph))
        sought = m.long() * self.graph.num_outputs + n.long()
        keys = keys.to(sought.device)
        return keys[torch.searchsorted(keys, sought)] == sought

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        self.check("EdgeSupport", num_inputs, num_outputs)
        return self.graph if _same_device(self.graph.edge_index.device, device) else self.graph.to(device)

    def listing(self, num_inputs: int, num_outputs: int, device: Device = None) -> tuple[Graph | None, bool]:
        return self.edges(num_inputs, num_outputs, device), True

    listed = True

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        return self.graph.num_edges

    def transpose(self) -> EdgeSupport:
        return EdgeSupport(self.graph.reversed())


Support._of_graph = EdgeSupport


def _pair_keys(graph: Graph) -> Tensor:
    """The sorted keys m N + n of the edges, then one that is above all keys, so that a search always finds a place."""
    keys = graph.source.long() * graph.num_outputs + graph.target.long()
    above = keys.new_full((1,), torch.iinfo(torch.int64).max)
    return torch.cat([keys.sort().values, above])


def _same_device(own: torch.device, other: Device) -> bool:
    if other is None:
        return True
    other = torch.device(other)
    return own.type == other.type and other.index in (None, own.index)


def _check_mask(owner: str, keep: Any, dims: int, pattern: str) -> None:
    if keep is None or isinstance(keep, (tuple, *NO_TENSORS)):
        raise StructureError(owner, f"keep must be a boolean tensor {pattern}", type(keep).__name__)
    if isinstance(keep, Tensor) and (keep.dtype != torch.bool or keep.dim() < dims):
        raise StructureError(owner, f"keep must be a boolean tensor {pattern}", f"{keep.dtype} {text_of(keep.shape)}",
                             "True keeps a pair.")
