"""`Csr`: pairs (row, column) grouped by row; `layouts` groups edges both ways, with their bounds checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.derived import cached, derived, is_plain
from structconv.errors import ShapeError, StructureError, text_of
from structconv.primitives.native.dispatch import Loaded, kernels
from structconv.primitives.native.indices import LIMIT, Csr, Sealed
from structconv.primitives.native.loader import Core, loaded
from structconv.primitives.operator import define
from structconv.primitives.sorting import search, stable_sort

__all__ = ["Csr", "check_bounds", "checked_batch", "compress", "copies", "first_loop", "first_wrong_edge", "layouts"]

_INTEGERS = (torch.int32, torch.int64)
#: Numbers of the header of a sealed layout, see native/src/operators.cpp.
_HEADER = 16


def layouts(edge_index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Csr, Csr]:
    """Edges m -> n grouped by target, N rows of inputs m, and by source, M rows of outputs n.

    Args:
        edge_index: (2, E), int32 or int64, of any strides; row 0 holds the inputs m, row 1 the outputs n.
        num_inputs, num_outputs: M and N.

    Returns:
        Two layouts in int32; where E, M or N is 2^31 - 1 or more, in int64. Edges of one row keep their order.

    Stable counting, natively on a CPU: O(E + M + N) and two passes a side. Elsewhere torch's sorts give the same
    numbers. One operator to `torch.compile` and `torch.export`, with shapes only from sizes.

    Raises:
        StructureError: if an index is out of range; the message names the edge.
        ShapeError: if `edge_index` is no such list.
    """
    if is_compiling() or not is_plain(edge_index):
        result = torch.ops.structconv.layouts(edge_index, num_inputs, num_outputs)
        return Csr(*result[:3]), Csr(*result[3:])
    if edge_index.dim() == 2 and max(edge_index.shape[1], num_inputs, num_outputs) >= LIMIT:
        _check_index(edge_index)
        check_bounds("layouts", "edge_index", "edge", edge_index, _sizes(num_inputs, num_outputs))
        source, target = edge_index.long()
        return compress(target, source, num_outputs), compress(source, target, num_inputs)
    return _built(edge_index, num_inputs, num_outputs)


def compress(rows: Tensor, cols: Tensor, num_rows: int) -> Csr:
    """Group the pairs (rows[e], cols[e]) by row.

    Args:
        rows, cols: (E,) integers of one dtype, 0 <= rows < num_rows.
        num_rows: how many rows there are, empty ones included.

    Returns:
        A layout in the dtype of the pairs, but for its order, which is int64.

    Stable: O(E log E) time and O(E) memory. Shapes depend only on E and `num_rows`, never on values, so that
    the sort can be traced by `torch.compile` and `torch.export`.
    """
    ordered, order = stable_sort(rows)
    starts = torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device)
    indptr = search(ordered, starts).to(rows.dtype)
    return Csr(indptr, cols[order], order)


def copies(each: tuple[Csr, Csr], sizes: tuple[int, int], count: int) -> tuple[Csr, Csr]:
    """`layouts` of `count` copies of a graph with M and N entries, side by side, in the dtype of `each`. O(count E)."""
    ahead, back = (_side_by_side(layout, columns, count) for layout, columns in zip(each, sizes, strict=True))
    return ahead, back


def _side_by_side(layout: Csr, columns: int, count: int) -> Csr:
    indptr, indices, order = layout
    number = torch.arange(count, dtype=indptr.dtype, device=indptr.device).unsqueeze(1)
    edges = indices.shape[0]
    ends = indptr[1:] + number * edges
    return Csr(torch.cat([indptr[:1], ends.flatten()]), (indices + number * columns).flatten(),
               (order + number.to(order.dtype) * edges).flatten())


def check_bounds(owner: str, name: str, item: str, index: Tensor, sizes: Sequence[tuple[str, int]]) -> None:
    """Raise `StructureError` where index[r, e] is not in [0, size of row r); names the first bad edge and its value.

    Args:
        index: (R, E) integers.
        item: what a column is, "edge" or "triple".
        sizes: for each row the name of its size and the size; nothing is checked where one is a tracer's stand-in.

    One pass, and one synchronization on a GPU.
    """
    if not index.shape[1] or any(type(size) is not int for _, size in sizes):
        return
    bad = _first_outside(index, [size for _, size in sizes])
    if bad >= 0:
        _refuse(owner, name, item, index, sizes, bad)


def first_wrong_edge(index: Tensor, num_inputs: int, num_outputs: int, samples: Any = None) -> int | None:
    """The first edge that is out of range or joins two of the samples, which have these sizes, or -1, in one native
    pass; `None` where nothing is loaded that could tell."""
    core = _loaded() if index.is_cpu and type(num_inputs) is type(num_outputs) is int else None
    if core is None:
        return None
    starts = None, None
    if samples is not None:
        own = getattr(samples, "num_inputs", None), getattr(samples, "num_outputs", None)
        if own != (num_inputs, num_outputs):
            return None
        starts = samples.input_starts, samples.output_starts
    if private.watched(profilers=False):
        return int(private.outside_modes(lambda: core.edges(index, num_inputs, num_outputs, *starts)))
    return int(core.edges(index, num_inputs, num_outputs, *starts))


def checked_batch(index: Any, starts: Any) -> tuple[Tensor, int] | None:
    """A copy of the first nodes of the graphs of a batch (B + 1,), and the number of all nodes, in one native pass over
    them and the edges (2, E); `None` where something is wrong, or nothing is loaded that could tell."""
    core = _loaded() if is_plain(index) and is_plain(starts) and index.is_cpu and starts.is_cpu else None
    if core is None or private.watched(profilers=False) or not index.layout is starts.layout is torch.strided:
        return None
    own, nodes = core.batch(index, starts)
    return None if nodes < 0 else (own, nodes)


def first_loop(index: Tensor) -> int | None:
    """The first edge from an entry to itself, or -1; `None` where nothing is loaded that could tell. Remembered."""
    core = _loaded() if index.is_cpu else None
    return None if core is None else cached(
        index, "first loop", lambda: int(_unseen(lambda: core.first_loop(index))))


def _loaded() -> Core | None:
    """The kernels if they have been loaded."""
    return Loaded.core if Loaded.asked else loaded()


# -- kernels ------------------------------------------------------------------------------------------------------

def _unseen(call: Callable[[], Any]) -> Any:
    """`call()` of a kernel on plain tensors, without the modes and transforms of the caller."""
    return private.outside_modes(call) if private.watched(profilers=False) else call()


def _sizes(num_inputs: int, num_outputs: int) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("num_inputs", num_inputs), ("num_outputs", num_outputs)


def _refuse(owner: str, name: str, item: str, index: Tensor, sizes: Sequence[tuple[str, int]], bad: int) -> NoReturn:
    for row, (size_name, size) in enumerate(sizes):
        value = int(index[row, bad])
        if not 0 <= value < size:
            raise StructureError(owner, f"{name} must be in [0, {size_name}={size}) in row {row}",
                                 f"{value} at {item} {bad}",
                                 "An index must not be negative." if value < 0 else f"Is {size_name} too small?")
    raise AssertionError(f"{item} {bad} is in range")


def _first_outside(index: Tensor, sizes: Sequence[int]) -> int:
    core = loaded() if index.is_cpu and index.dtype in _INTEGERS else None
    if core is not None:
        return int(_unseen(lambda: core.outside(index, list(sizes))))
    low, high = torch.stack(torch.aminmax(index, dim=1)).tolist()
    if min(low) >= 0 and all(top < size for top, size in zip(high, sizes, strict=True)):
        return -1
    row = next(r for r, size in enumerate(sizes) if low[r] < 0 or high[r] >= size)
    return int(((index[row] < 0) | (index[row] >= sizes[row])).nonzero()[0])


def _check_index(index: Tensor) -> None:
    if index.dim() != 2 or index.shape[0] != 2 or index.dtype not in _INTEGERS or index.layout is not torch.strided:
        raise ShapeError("layouts", "edge_index must have shape (2, E) and dtype int32 or int64",
                         f"{text_of(index.shape)} of {index.dtype}, {index.layout}")


def _check(index: Tensor, num_inputs: int, num_outputs: int) -> None:
    _check_index(index)
    for (name, size) in (*_sizes(num_inputs, num_outputs), ("E", index.shape[1])):
        if not 0 <= size < LIMIT:
            raise ShapeError("layouts", f"{name} must be in [0, 2^31 - 1)", size)


def _built(index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Csr, Csr]:
    _check(index, num_inputs, num_outputs)
    core, sizes = kernels() if index.is_cpu else None, _sizes(num_inputs, num_outputs)
    if core is None:
        check_bounds("layouts", "edge_index", "edge", index, sizes)
        source, target = index.to(torch.int32)
        ahead, back = compress(target, source, num_outputs), compress(source, target, num_inputs)
        return ahead._replace(order=ahead.order.int()), back._replace(order=back.order.int())
    by_target, by_source, bad = _unseen(lambda: core.layouts(index, num_inputs, num_outputs))
    if bad >= 0:
        _refuse("layouts", "edge_index", "edge", index, sizes, bad)
    return (_layout(by_target, num_outputs, num_inputs, index.shape[1]),
            _layout(by_source, num_inputs, num_outputs, index.shape[1]))


def _layout(sealed: Tensor, rows: int, columns: int, edges: int) -> Csr:
    """The three arrays of a sealed layout, which remember it."""
    layout = Csr(sealed.narrow(0, _HEADER, rows + 1), sealed.narrow(0, _HEADER + rows + 1, edges),
                 sealed.narrow(0, _HEADER + rows + 1 + edges, edges))
    derived(layout, "sealed", partial(Sealed, sealed, columns))
    return layout


def _kernel(index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Tensor, ...]:
    return tuple(t.clone() for layout in _built(index, num_inputs, num_outputs) for t in layout)


def _fake(index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Tensor, ...]:
    edges = index.shape[1]
    return tuple(index.new_empty((size,), dtype=torch.int32)
                 for rows in (num_outputs, num_inputs) for size in (rows + 1, edges, edges))


define("layouts", "Tensor edge_index, SymInt num_inputs, SymInt num_outputs", _kernel, _fake, _check,
       f"({', '.join(['Tensor'] * 6)})")
