"""The machine's roofline, measured in the run that it is compared with: copies, gathers of rows, matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

__all__ = ["Work", "copy_rate", "gather_rate", "gathers", "product_rate", "products", "summary"]

_SECONDS = 0.08
_BAG = 32


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least work of any implementation of a case.

    Args:
        rows, row_bytes, table_rows: rows read at random places, their size, and how many there are to choose from.
        copied: bytes that are streamed, read or written.
        flops: of matrix products.
    """

    rows: float = 0.0
    row_bytes: int = 256
    table_rows: int = 1 << 17
    copied: float = 0.0
    flops: float = 0.0

    def seconds(self) -> float:
        """The sum of the three at the machine's measured rates: they share its cores and its memory."""
        gathered = self.rows * self.row_bytes / gather_rate(self.row_bytes, self.table_rows) if self.rows else 0.0
        copied = self.copied / copy_rate() if self.copied else 0.0
        return gathered + copied + (self.flops / product_rate() if self.flops else 0.0)


def products(flops: float, both: float = 3.0) -> dict[str, Work]:
    """The least work, by phase, of products: `flops` forward, and `both` times as many with the backward."""
    return {"forward": Work(flops=flops), "both": Work(flops=both * flops)}


def gathers(rows: float, nodes: int, channels: int, parameters: int) -> dict[str, Work]:
    """The least work, by phase, of gathering `rows` rows of nodes and of a product with parameters at each node. The
    backward adds as many rows and twice the products."""
    def work(times: int, products: int) -> Work:
        return Work(rows=times * rows, row_bytes=4 * channels, table_rows=nodes,
                    flops=2.0 * products * nodes * parameters)

    return {"forward": work(1, 1), "both": work(2, 3)}


@cache
def copy_rate() -> float:
    """Bytes per second, read plus written, of a copy between tensors of 128 MiB."""
    source = torch.ones(1 << 25)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


@cache
def gather_rate(row_bytes: int, table_rows: int) -> float:
    """Bytes per second of float32 rows read at random from a table: the faster of torch's copies and sums of rows.

    `embedding_bag` sums bags of 32 rows with prefetching, hence mostly reads; `index_select` also writes each row, and
    only what it reads is counted.
    """
    table = torch.ones(max(table_rows, _BAG), max(row_bytes // 4, 1))
    count = max((1 << 26) // row_bytes // _BAG, 1) * _BAG
    index = torch.randint(0, table.shape[0], (count,), generator=torch.Generator().manual_seed(0))
    out = table.new_empty(count, table.shape[1])
    bags = index.view(-1, _BAG)
    seconds = min(_best(lambda: torch.index_select(table, 0, index, out=out)),
                  _best(lambda: F.embedding_bag(bags, table, mode="sum")))
    return count * table.shape[1] * 4 / seconds


@cache
def product_rate() -> float:
    """Flops per second of float32 matrix products, the faster of `mm` and a 1x1 convolution of the same sizes."""
    size = 1024
    a, out = torch.ones(size, size), torch.empty(size, size)
    image = torch.ones(1, size, 32, 32).to(memory_format=torch.channels_last)
    kernel = a.view(size, size, 1, 1).to(memory_format=torch.channels_last)
    seconds = min(_best(lambda: torch.mm(a, a, out=out)), _best(lambda: F.conv2d(image, kernel)))
    return 2 * size**3 / seconds


def summary() -> dict[str, float | int]:
    """The rates in units that people read; a gather of 256-byte rows from 64 MiB."""
    return {"copy_gbs": round(copy_rate() / 1e9, 1), "gather_gbs": round(gather_rate(256, 1 << 18) / 1e9, 1),
            "gflops": round(product_rate() / 1e9, 1), "threads": torch.get_num_threads()}


def _best(work: Callable[[], object]) -> float:
    """The shortest of the runs that fit into a fixed time, at least three after one that warms up."""
    with torch.no_grad():
        work()
        best, runs, end = float("inf"), 0, time.perf_counter() + _SECONDS
        while runs < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            best, runs = min(best, time.perf_counter() - start), runs + 1
    return best
