"""`Samples`: the sizes of samples that are concatenated along the entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from structconv.arguments import plain
from structconv.derived import derived
from structconv.errors import StructureError
from structconv.primitives.layout import checked_batch
from structconv.primitives.sorting import numbered_by_count
from structconv.shapes import broadcast
from structconv.structures import enumeration
from structconv.structures.exchange import MAKERS
from structconv.structures.graph import Graph, check_edge_values
from structconv.structures.masks import Device, Support, Transposed, joined_by_and, listed
from structconv.structures.values import structure

__all__ = ["Samples"]


@structure(init=False)
class Samples(Support):
    """Samples concatenated along the entries; each sample gets the result of a call of its own.

    A pair (m, n) exists if input m and output n belong to the same sample; positions start at 0 in each sample. x (sum
    M_b, P) holds the inputs of all samples, one sample after the other. A `batch` of graphs or grids has its own
    samples.

    Args:
        sizes: the number of entries of each sample, a sequence of integers or an integer tensor (B,).
        outputs: the number of outputs of each sample, if it differs from the number of inputs.

    Raises:
        StructureError: there is no sample, a size is negative or not an integer, or `sizes` and `outputs` differ in
            length.

    ::

        Samples([5, 2, 7]), Samples([5, 2], outputs=[3, 3])

    Example:

        >>> from structconv import MultiheadAttention, Samples
        >>> sentences, attention = [torch.randn(2, 8), torch.randn(5, 8)], MultiheadAttention(8, 2)
        >>> together = attention(torch.cat(sentences), structure=Samples([2, 5]))
        >>> torch.allclose(together[:2], attention(sentences[0]), atol=1e-5)
        True
    """

    ENTRY_COUNTS = ("input_count", "output_count", "longest", "pair_count")

    #: The first input, and the first output, of each sample, then the number of all: (B + 1,), int64, in main memory.
    input_starts: Tensor
    output_starts: Tensor
    input_count: int
    output_count: int
    #: The entries of the longest sample, and the pairs of all.
    longest: int
    pair_count: int
    #: True if inputs and outputs are the same entries; True if all samples have equal sizes.
    square: bool
    uniform: bool

    def __init__(self, sizes: Sequence[int] | Tensor | None = None,
                 outputs: Sequence[int] | Tensor | None = None, **fields: Any) -> None:
        if not fields:
            own = _checked("sizes", sizes)
            others = own if outputs is None else _checked("outputs", outputs)
            fields = _fields(own, others)
            object.__setattr__(self, "_sizes", (tuple(own), tuple(others)))
        for name, field in fields.items():  # given by what rebuilds the value: `replace`, compilers, exporters
            object.__setattr__(self, name, field)

    def __getattr__(self, name: str) -> Any:
        """Compute a number that `samples_from` left for later."""
        if name not in _OF_SIZES or "input_starts" not in self.__dict__:
            raise AttributeError(name)
        sizes = self.input_starts.diff().tolist()
        result = _numbers(sizes, sizes)
        self.__dict__.update(result)
        return result[name]

    @property
    def samples(self) -> Samples:
        """The samples themselves, so that `Samples` reads like a batch."""
        return self

    @property
    def num_samples(self) -> int:
        """B."""
        return self.input_starts.shape[0] - 1

    @property
    def num_inputs(self) -> int:
        return self.input_count

    @property
    def num_outputs(self) -> int:
        return self.output_count

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return M and N of each sample. A compiled program reads them as constants and is recompiled for others."""
        if torch.compiler.is_compiling() and "_sizes" in self.__dict__:
            inputs, outputs = self.__dict__["_sizes"]
            return list(inputs), list(outputs)
        return derived(self, "sizes", lambda: (self.input_starts.diff().tolist(), self.output_starts.diff().tolist()))

    def members(self, device: Device = None) -> tuple[Tensor, Tensor]:
        """Return the sample of each input, (M,), and of each output, (N,), as a readout needs them."""
        return derived(self, ("members", str(device)), lambda: self._of_both(_members, device))

    def positions(self, device: Device = None) -> tuple[Tensor, Tensor]:
        """Return the position in its sample of each input, (M,), and of each output, (N,)."""
        return derived(self, ("positions", str(device)), lambda: self._of_both(_positions, device))

    def leading_to(self, outputs: Samples) -> Samples:
        """Return samples with these inputs, and with the entries of `outputs` as outputs."""
        return derived((self.input_starts, outputs.input_starts), "leading to",
                       lambda: Samples(self.sizes()[0], outputs.sizes()[0]))

    def _of_both(self, of: Callable[..., Tensor], device: Device) -> tuple[Tensor, Tensor]:
        inputs = of(self.input_starts, self.input_count, device)
        return inputs, inputs if self.square else of(self.output_starts, self.output_count, device)

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        inputs, outputs = self.members(m.device)
        return inputs[m] == outputs[n]

    def restricted(self, to: Any) -> list[Support] | None:
        return [] if to.same(self) else None

    def edges(self, num_inputs: int, num_outputs: int, device: Device = None) -> Graph:
        sizes = self.input_starts.diff().to(device)
        sample = self.members(device)[1]
        pairs = enumeration.ranges(self.input_starts.to(device)[sample], sizes[sample], 1, self.pair_count)
        return listed(pairs, num_inputs, num_outputs)

    def edge_bound(self, num_inputs: int, num_outputs: int) -> int:
        return self.pair_count

    listed = True

    def transpose(self) -> Support:
        return self.turned() if self.square or isinstance(self.input_starts, Tensor) else Transposed(self)

    def turned(self) -> Samples:
        """Return the samples with inputs and outputs exchanged."""
        return self if self.square else derived(self, "turned", lambda: Samples(*reversed(self.sizes())))

    def of_outputs(self) -> Samples:
        """Return the samples whose inputs and outputs are these outputs."""
        return self if self.square else derived(self, "of outputs", lambda: Samples(self.sizes()[1]))

    def to(self, device: Device) -> Samples:
        """Return the samples unchanged: sizes stay in main memory."""
        return self

    def __repr__(self) -> str:
        if not isinstance(self.input_starts, Tensor):
            return "Samples(...)"
        outputs = "" if self.square else f", N={self.output_count}"
        return f"Samples(B={self.num_samples}, M={self.input_count}{outputs})"


class _ByPosition(Support):
    """A support over the entries of a batch, by their positions in their samples."""

    layout: Samples

    @property
    def num_inputs(self) -> int:
        return self.layout.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.layout.num_outputs


@structure()
class Within(_ByPosition):
    """The pairs whose positions in their samples are in `support`: for masks that depend on positions."""

    support: Support
    layout: Samples

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        inputs, outputs = self.layout.positions(m.device)
        return self.support._contains(inputs[m], outputs[n])

    def restricted(self, to: Any) -> list[Support] | None:
        return [self.support] if to.same(self.layout) else None

    def __repr__(self) -> str:
        return f"{self.support!r} within {self.layout!r}"


@structure()
class EachWithin(_ByPosition):
    """The pairs of each sample that are in that sample's own support, by their positions in the sample."""

    supports: tuple[Support | None, ...]
    layout: Samples

    @property
    def samples(self) -> Samples:
        return self.layout

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(*(() if support is None else support.batch_shape for support in self.supports))

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        (of_m, of_n), (inputs, outputs) = self.layout.members(m.device), self.layout.positions(m.device)
        result = torch.zeros((), dtype=torch.bool, device=m.device)
        for number, (support, rows, columns) in enumerate(zip(self.supports, *self.layout.sizes(), strict=True)):
            inside = (of_m[m] == number) & (of_n[n] == number)
            if support is not None and min(rows, columns) > 0:
                inside = inside & support._contains(inputs[m].clamp(max=rows - 1), outputs[n].clamp(max=columns - 1))
            result = result | inside
        return result

    def restricted(self, to: Any) -> list[Support] | None:
        if to.number is None or not to.same(self.layout):
            return None
        own = self.supports[to.number]
        return [] if own is None else [own]


def same_samples(one: Samples, other: Samples) -> bool:
    """Return True if the sizes are equal; a traced program compares only the sums."""
    if one is other:
        return True
    if torch.compiler.is_compiling():
        return (one.input_count, one.output_count) == (other.input_count, other.output_count)
    return one.sizes() == other.sizes()


def _checked(name: str, sizes: Any) -> list[int]:
    numbers = sizes.tolist() if isinstance(sizes, Tensor | np.ndarray) else plain(sizes)
    numbers = list(numbers) if isinstance(numbers, list | tuple) else None
    whole = isinstance(numbers, list) and numbers and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in numbers)
    if not whole or sum(numbers) >= 2**62:  # type: ignore[arg-type]
        raise StructureError("Samples", f"{name} must be a number of entries, an integer >= 0, for each sample",
                             repr(sizes), "For example Samples([5, 2, 7]).")
    return [int(size) for size in cast("list[int]", numbers)]


def _fields(inputs: list[int], outputs: list[int]) -> dict[str, Any]:
    if len(inputs) != len(outputs):
        raise StructureError("Samples", f"outputs must have a number for each of the {len(inputs)} samples",
                             len(outputs))
    starts = _starts(inputs)
    return {"input_starts": starts, "output_starts": starts if inputs == outputs else _starts(outputs),
            "input_count": sum(inputs), "output_count": sum(outputs), "square": inputs == outputs,
            **_numbers(inputs, outputs)}


#: The names of the values that `_numbers` returns.
_OF_SIZES = ("longest", "pair_count", "uniform")


def _numbers(inputs: list[int], outputs: list[int]) -> dict[str, Any]:
    return {"longest": max(*inputs, *outputs), "pair_count": sum(m * n for m, n in zip(inputs, outputs, strict=True)),
            "uniform": len({*inputs}) == len({*outputs}) == 1}


def _starts(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int64, device="cpu").cumsum(0)


def _members(starts: Tensor, count: int, device: Device) -> Tensor:
    return numbered_by_count(starts.diff().to(device), count)


def _positions(starts: Tensor, count: int, device: Device) -> Tensor:
    return torch.arange(count, device=device) - starts.to(device)[_members(starts, count, device)]


def samples_from(starts: Tensor) -> Samples:
    """Build samples from the first entry of each, then the total: (B + 1,) integers in main memory.

    Numbers derived from the sizes are computed at their first use.
    """
    numbers = starts.tolist()
    if starts.dtype is not torch.int64 or len(numbers) < 2 or numbers[0] or numbers != sorted(numbers):
        return Samples(starts.diff())
    return _rising(starts.clone(), numbers[-1])


def _rising(starts: Tensor, count: int) -> Samples:
    result = object.__new__(Samples)
    result.__dict__.update(input_starts=starts, output_starts=starts, input_count=count, output_count=count,
                           square=True)
    return result


def batch_from(kind: type, index: Any, starts: Any, nodes: int | None, edge_weight: Tensor | None,
               edge_attr: Tensor | None) -> Graph | None:
    """The `Graph` of a batch, whose samples begin at `starts`; `None` where one native pass cannot check all of it."""
    layout = checked_batch(index, starts) if kind is Graph else None
    if layout is None or nodes not in (None, layout[1]):
        return None
    graph, count = object.__new__(Graph), layout[1]
    graph.__dict__.update(edge_index=index, num_inputs=count, num_outputs=count, edge_weight=edge_weight,
                          edge_attr=edge_attr, samples=_rising(*layout))
    if edge_weight is not None or edge_attr is not None:
        check_edge_values(graph)
    return graph


MAKERS.update(samples=Samples, starts=samples_from, batch=batch_from)


#: The pieces of a batch's tensors, one for each sample: each tensor is split once, so that its gradient is joined once.
#: The key is the tensor's id, the axis, and True for outputs. The tensor is held so that its id is not reused.
Pieces = dict[tuple[int, int, bool], tuple[Tensor, tuple[Tensor, ...]]]


class Restriction:
    """The entries of one sample, or of several samples of equal sizes, which are stacked along a new leading dimension
    before `lead` others. `pieces` holds the tensors of the batch that are split already."""

    def __init__(self, samples: Samples, numbers: tuple[int, ...], lead: int, pieces: Pieces) -> None:
        self.samples, self.numbers, self._pieces = samples, numbers, pieces
        self.lead = lead if len(numbers) > 1 else None
        self.sizes = samples.sizes()
        self.inputs, self.outputs = (side[numbers[0]] for side in self.sizes)
        self._turned = False

    @property
    def number(self) -> int | None:
        """The number of the sample; `None` for several."""
        return self.numbers[0] if self.lead is None else None

    @property
    def aligned(self) -> bool:
        """True if the first input and output of each sample have equal numbers, so that m - n is unchanged."""
        return self.samples.square

    def turned(self) -> Restriction:
        """Return the restriction with inputs and outputs exchanged."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, inputs=self.outputs, outputs=self.inputs, _turned=not self._turned)
        return other

    def of_inputs(self, t: Any, axis: int, own: int) -> Any:
        """Return the rows of t that belong to these samples. `axis` is the axis of inputs; the last `own` axes of t are
        not leading dimensions."""
        return self._select(t, axis, own, self._turned)

    def of_outputs(self, t: Any, axis: int, own: int) -> Any:
        """Do the same along the axis of outputs."""
        return self._select(t, axis, own, not self._turned)

    def from_first_input(self, t: Any) -> Any:
        """Convert numbers of inputs, (..., n), into positions in the samples of these inputs."""
        return t - self.first()[0].to(device=t.device, dtype=t.dtype).unsqueeze(-1)

    def first(self) -> tuple[Any, Any]:
        """Return the number of the first input and of the first output: () of one sample, (G, 1, ..., 1) of several."""
        at: Any = self.numbers[0] if self.lead is None else torch.tensor(self.numbers).view(-1, *(1,) * self.lead)
        starts = self.samples.input_starts[at], self.samples.output_starts[at]
        return starts[::-1] if self._turned else starts

    @property
    def total_outputs(self) -> int:
        """The outputs of all samples."""
        return self.samples.num_inputs if self._turned else self.samples.num_outputs

    def same(self, samples: Any) -> bool:
        """Return True if `samples` are the samples of the batch."""
        return same_samples(samples.turned() if self._turned else samples, self.samples)

    def within(self, support: Support | None) -> bool:
        """Return True if no pair of the support joins two samples."""
        return any(isinstance(term, Samples) for term in joined_by_and(support))

    def _select(self, t: Tensor, axis: int, own: int, side: bool) -> Tensor:
        sizes, count = self.sizes[side], len(self.numbers)
        if self.lead is not None and count == len(sizes):
            stacked = t.unflatten(axis, (count, sizes[0])).movedim(axis - 1, 0)
        else:
            key = id(t), axis, side
            if key not in self._pieces:
                self._pieces[key] = t, t.split(sizes, axis)
            pieces = self._pieces[key][1]
            if self.lead is None:
                return pieces[self.numbers[0]]
            stacked = torch.stack([pieces[number] for number in self.numbers])
        return stacked[(slice(None), *(None,) * (self.lead - (t.dim() - own)))]
