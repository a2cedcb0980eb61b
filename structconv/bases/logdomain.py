"""Terms added to scores in the log domain: numbers, and -inf for absent pairs (Andreoli 2019, Definition 4).

Adding -inf to a score removes its pair from every later sum of exponentials, like a mask. So a table of -inf and 0 is a
mask, a table of other numbers is a term, and a table with both is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.structures.graph import Graph
from structconv.structures.supports import DenseMask, Support

__all__ = ["check_masks_scores", "mask_and_table", "with_heads"]


def mask_and_table(kind: str, added: Any) -> tuple[Any, Tensor | None]:
    """The mask, and the finite table (..., K or 1, M, N), that something added to scores stands for: a `Support`, a
    `Graph` or a floating tensor, whose pairs at -inf are a mask of all heads and no parameters. `kind` says in errors
    what else could be added."""
    if isinstance(added, Support | Graph):
        return added, None
    if not isinstance(added, Tensor) or not added.is_floating_point():
        got = f"a tensor of {added.dtype}" if isinstance(added, Tensor) else type(added).__name__
        raise ConfigError("a + b", f"both operands must be {kind}", got, "A floating tensor (M, N) or (..., K, M, N), "
                          "a Support and a Graph may be added too; a boolean mask goes as a.masked(keep=mask).")
    if added.dim() < 2:
        raise ShapeError("a + b", "a tensor that is added must have shape (M, N) or (..., K or 1, M, N)",
                         tuple(added.shape))
    return _split(with_heads(added), isinstance(added, torch.nn.Parameter))


def check_masks_scores(first: Any, mask: Any) -> None:
    """Raise `ConfigError` where a mask is added to a matrix."""
    if mask is not None and not first.has_scores:
        raise ConfigError("a + b", "a mask in the log domain must be added to scores", repr(first),
                          "Of a matrix leave pairs out by a.masked(keep=mask).")


def with_heads(table: Tensor) -> Tensor:
    """A table (M, N) as (1, M, N), others as they are; of a parameter a parameter."""
    if table.dim() != 2:
        return table
    if isinstance(table, torch.nn.Parameter):
        return torch.nn.Parameter(table.detach().unsqueeze(0), requires_grad=table.requires_grad)
    return table.unsqueeze(0)


def _split(table: Tensor, trained: bool) -> tuple[Any, Tensor | None]:
    exists = table.detach() != -torch.inf
    if exists.all():
        return None, table
    if trained:
        raise ConfigError("a + b", "a parameter that is added must be finite", "-inf",
                          "Leave the pairs out by a.masked(keep=mask).")
    if (exists != exists[..., :1, :, :]).any():
        raise ConfigError("a + b", "-inf must be at the same pairs for all heads, which share a mask",
                          "others for some", "Mask heads apart and join them by |.")
    mask = exists[..., 0, :, :]
    left = table.masked_fill(~exists, 0)
    return DenseMask(mask), left if left.any() or left.requires_grad else None
