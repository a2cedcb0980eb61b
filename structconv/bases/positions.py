"""Terms of a score that depend on the positions m and n: relative tables, linear distance, Gaussian windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.pairs import Pairs
from structconv.bases.pairwise import Pairwise
from structconv.bases.scores import Score, Sized
from structconv.derived import Owner, derived, is_plain, latest
from structconv.errors import StructureError
from structconv.primitives.functions import sum_dtype
from structconv.structures.grid import Grid
from structconv.structures.samples import Restriction
from structconv.structures.values import altered

__all__ = ["ClippedShifts", "Distance", "GaussianBump", "GridLookup", "Lookup"]

#: The distance from which T5 puts all pairs into one bucket.
_FURTHEST = 128


def bucket(kind: str, clip: int, source: Tensor, target: Tensor) -> Tensor:
    """The table row of a pair (m, n), an int64 tensor.

    - "clip": min(max(m - n, -clip), clip) + clip, in [0, 2 clip] (Shaw et al. 2018, eq. for clip(x, k)).
    - "log": T5's bidirectional buckets: 2 clip of them, half for each sign; in each half the first half are exact
      distances and the rest grow logarithmically up to distance 128 (Raffel et al. 2020, section 2.1).
    - "log_causal": T5's decoder buckets: clip of them, for m <= n.
    - "position": m itself (Luong's location-based scores).
    """
    if kind == "position":
        return source.expand(torch.broadcast_shapes(source.shape, target.shape)).clamp(max=clip - 1)
    offset = source - target
    if kind == "clip":
        return offset.clamp(-clip, clip) + clip
    if kind == "log":
        return torch.where(offset > 0, clip, 0) + _log_bucket(offset.abs(), clip)
    return _log_bucket((-offset).clamp(min=0), clip)


def bucket_count(kind: str, clip: int) -> int:
    """Return the number of rows in the table of `bucket(kind, clip, ...)`."""
    return {"clip": 2 * clip + 1, "log": 2 * clip, "log_causal": clip, "position": clip}[kind]


def _log_bucket(distance: Tensor, count: int) -> Tensor:
    exact = max(count // 2, 1)
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(max(_FURTHEST / exact, 1.0 + 1e-6))
    return torch.where(distance < exact, distance, (exact + (growth * (count - exact)).long()).clamp(max=count - 1))


@value
class Lookup(Sized, Score):
    """a_kmn = table[..., k, n, bucket(m, n)], with table (..., K, N or 1, L): learned biases, Shaw's key side.

    Example:

        >>> from structconv.bases import Lookup
        >>> Lookup(torch.tensor([[[-1.0, 0.0, 1.0]]]), "clip", 1, 3, 3).dense()[0]      # K, 1, 2 clip + 1
        tensor([[ 0., -1., -1.],
                [ 1.,  0., -1.],
                [ 1.,  1.,  0.]])
    """

    table: Tensor
    kind: str
    clip: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.table.shape[-3]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.table.shape[:-3])

    def restricted(self, to: Restriction) -> Basis | None:
        if self.kind == "position" or not to.aligned:
            return None
        table = self.table if self.table.shape[-2] == 1 else to.of_outputs(self.table, -2, 3)
        return Lookup(table, self.kind, self.clip, to.inputs, to.outputs)

    def evaluate(self, pairs: Pairs) -> Tensor:
        return pairs.table(self.table, bucket(self.kind, self.clip, pairs.source_index(), pairs.target_index()))

    def by_outputs(self, inputs: int, outputs: int, dtype: torch.dtype, owner: Owner) -> Tensor:
        """All entries, (..., 1 or B, K, N, M); for `owner` see `index`."""
        *lead, size, row, count = self.table.shape
        if row != 1 or not is_plain(self.table):
            return _batched(altered(self, inputs=inputs, outputs=outputs).dense(dtype).mT)

        result = self.table.reshape(*lead, size, count).index_select(-1, self.index(inputs, outputs, owner))
        result = result.view(*(lead or (1,)), size, outputs, inputs)
        return result if result.dtype is dtype else result.to(dtype)

    def index(self, inputs: int, outputs: int, owner: Owner) -> Tensor:
        """The number in the table of each pair, (N M,); those of the last call are kept with `owner`."""
        def found() -> Tensor:
            source, target = (torch.arange(count, device=self.table.device) for count in (inputs, outputs))
            return bucket(self.kind, self.clip, source, target.unsqueeze(-1)).flatten()

        return latest(owner, "index", (inputs, outputs, self.table.device), found)


@value
class GridLookup(Score):
    """a_kmn = table[..., k, c_1, ..., c_L], with c_l = clip(offset of m from n on axis l of a grid, -R_l, R_l) + R_l.

    The relative position bias of Swin (Liu et al. 2021, eq. 4), whose table has 2 S_l - 1 numbers on an axis of S_l,
    and of neighborhood attention (Hassani et al. 2023, eq. 2), whose table has those of its window.

    Args:
        table: (..., K, 2 R_1 + 1, ..., 2 R_L + 1).
        grid: the grid of both inputs and outputs.

    Raises:
        StructureError: the grid is periodic, or an axis of the table has an even size.

    Example:

        >>> from structconv import Grid
        >>> from structconv.bases import GridLookup
        >>> table = torch.arange(3.0).reshape(1, 3)                 # K, 2 R + 1
        >>> GridLookup(table, Grid(3)).dense()[0]
        tensor([[1., 0., 0.],
                [2., 1., 0.],
                [2., 2., 1.]])
    """

    table: Tensor
    grid: Grid

    def __post_init__(self) -> None:
        shape, axes = tuple(self.table.shape), self.grid.ndim
        if self.grid.periodic or len(shape) <= axes or any(size % 2 == 0 for size in shape[-axes:]):
            raise StructureError("GridLookup", "table must be (..., K, 2 R + 1 for each axis) on a grid with borders",
                                 f"{shape} and {self.grid!r}")

    @property
    def size(self) -> int:
        return self.table.shape[-self.grid.ndim - 1]

    @property
    def num_inputs(self) -> int:
        return self.grid.num_entries

    @property
    def num_outputs(self) -> int:
        return self.grid.num_entries

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.table.shape[:-self.grid.ndim - 1])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The entries, (..., K, M, N), contiguous in M; where they are in the table is remembered with the grid."""
        entries, axes, device = self.grid.num_entries, self.grid.ndim, self.table.device

        def owner() -> Tensor:
            number = torch.arange(entries, device=device)
            return self._index(number, number.unsqueeze(-1)).flatten()

        index = derived(self.grid, ("offsets", *self.table.shape[-axes:], str(device)), owner)
        result = self.table.flatten(-axes).index_select(-1, index).unflatten(-1, (entries, entries)).mT
        return result if dtype is None else result.to(dtype)

    def by_outputs(self, inputs: int, outputs: int, dtype: torch.dtype, owner: Owner) -> Tensor:
        """The entries of all pairs, (..., 1 or B, K, N, M); where they are in the table is remembered with the grid."""
        return _batched(self.dense(dtype).mT)

    def evaluate(self, pairs: Pairs) -> Tensor:
        index = self._index(pairs.source_index(), pairs.target_index())
        return pairs.table(self.table.flatten(-self.grid.ndim).unsqueeze(-2), index)

    def _index(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the index of each pair in the flattened table."""
        index = torch.zeros((), dtype=torch.int64, device=source.device)
        counts = self.table.shape[-self.grid.ndim:]
        for stride, size, count in zip(self.grid.strides, self.grid.shape, counts, strict=True):
            stride, size, radius = max(stride, 1), max(size, 1), count // 2
            offset = source // stride % size - target // stride % size
            index = index * count + offset.clamp(-radius, radius) + radius
        return index


@value
class Distance(Sized, Score):
    """a_kmn = -slope_k |m - n| (ALiBi; Press et al. 2022).

    Example:

        >>> from structconv.bases import Distance
        >>> Distance(torch.tensor([1.0]), 3, 3).dense()[0]
        tensor([[-0., -1., -2.],
                [-1., -0., -1.],
                [-2., -1., -0.]])
    """

    slope: Tensor
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.slope.shape[0]

    def restricted(self, to: Restriction) -> Basis | None:
        return self._resized(to) if to.aligned else None

    def evaluate(self, pairs: Pairs) -> Tensor:
        distance = (pairs.source_index() - pairs.target_index()).abs().to(pairs.dtype)
        return -self.slope.to(pairs.dtype).view(-1, *(1,) * len(pairs.shape)) * distance

    def by_outputs(self, inputs: int, outputs: int, dtype: torch.dtype, owner: Owner) -> Tensor:
        """All entries, (1, K, N, M): those of the last call while the slopes stay. The last distances are kept with
        `owner`."""
        if not is_plain(self.slope):
            return _batched(altered(self, inputs=inputs, outputs=outputs).dense(dtype).mT)

        def distances() -> Tensor:
            source, target = (torch.arange(count, device=self.slope.device) for count in (inputs, outputs))
            return (source - target.unsqueeze(-1)).abs().neg().to(dtype)

        def entries() -> Tensor:
            known = latest(owner, "distances", (inputs, outputs, self.slope.device, dtype), distances)
            return self.slope.to(dtype).view(1, -1, 1, 1) * known

        return latest(self.slope, "held", (inputs, outputs, dtype), entries)


def _batched(entries: Tensor) -> Tensor:
    """(..., K, N, M) with a leading dimension at least."""
    return entries if entries.dim() > 3 else entries.unsqueeze(0)


@value
class GaussianBump(Pairwise):
    """a_mn = exp(-(m - center_n)^2 / (2 deviation^2)), center (..., N): Luong's local attention (2015, eq. 10).

    Distances are taken in float32 or wider, because 16-bit types do not distinguish positions beyond 256.

    Example:

        >>> from structconv.bases import GaussianBump
        >>> GaussianBump(torch.tensor([1.0]), 1.0, 3).dense()[0, :, 0]
        tensor([0.6065, 1.0000, 0.6065])
    """

    ENTRY_COUNTS = ("inputs",)

    center: Tensor
    deviation: float
    inputs: int
    size = 1

    @property
    def num_inputs(self) -> int:
        return self.inputs

    @property
    def num_outputs(self) -> int:
        return self.center.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.center.shape[:-1])

    def restricted(self, to: Restriction) -> GaussianBump:
        center = to.from_first_input(to.of_outputs(self.center, -1, 1))
        return GaussianBump(center, self.deviation, to.inputs)

    def evaluate(self, pairs: Pairs) -> Tensor:
        dtype = torch.promote_types(self.center.dtype, sum_dtype(pairs.dtype))
        distance = pairs.source_index().to(dtype) - pairs.target(self.center.to(dtype).unsqueeze(-2))
        return torch.exp(-distance.square() / (2 * self.deviation**2)).to(pairs.dtype)


@value
class ClippedShifts(Sized, Pairwise):
    """a_kmn = 1 where bucket(m, n) = k: the shifts by -clip..clip, the outermost two standing for all beyond.

    `attention.outer(ClippedShifts(...))` applied to ones is Shaw's value side (Shaw et al. 2018, eq. 3).

    Example:

        >>> from structconv.bases import ClippedShifts
        >>> ClippedShifts(torch.empty(0), 1, 3, 3).dense()[0]
        tensor([[0., 1., 1.],
                [0., 0., 1.],
                [0., 0., 0.]])
    """

    like: Tensor
    clip: int
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return bucket_count("clip", self.clip)

    def restricted(self, to: Restriction) -> Basis | None:
        return self._resized(to) if to.aligned else None

    def index(self, pairs: Pairs) -> Tensor:
        """The one k at which each pair's entry is 1."""
        return bucket("clip", self.clip, pairs.source_index(), pairs.target_index())

    def evaluate(self, pairs: Pairs) -> Tensor:
        index = self.index(pairs)
        k = torch.arange(self.size, device=index.device).view(-1, *(1,) * len(pairs.shape))
        return (index == k).to(pairs.dtype)
