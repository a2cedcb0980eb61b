"""Linear layers of unknown width, of types of nodes, and as the Theta of a call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.operator import apply, is_few, sum_heads
from structconv.errors import ShapeError
from structconv.kernels.sparse_product import sorted_matrix
from structconv.nn.layer import refuse_script
from structconv.primitives.native.layer import convolve_linear, gather_sums
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import linear
from structconv.shapes import check_choice
from structconv.weights import Eye, Full
from structconv.weights.base import plus

__all__ = ["Linear", "LinearByType", "draw", "glorot", "is_plain", "is_product", "parameter_key",
           "project", "project_together"]


class Linear(nn.Linear):
    """x W^T + b with P = -1 for the channels of the first x. Parameters `weight` (Q, P) and `bias` (Q).

    Args:
        in_channels, out_channels: P and Q.
        bias: add b.
        weight_initializer: "glorot", or "uniform", "kaiming_uniform" or None, which draw as torch's linear layer.
        bias_initializer: "zeros", or None, which draws as torch's linear layer.

    Example:

        >>> from structconv.compat.pyg import Linear
        >>> layer = Linear(-1, 4)                                # its input channels are those of the first x
        >>> layer(torch.randn(3, 8)).shape, tuple(layer.weight.shape)
        (torch.Size([3, 4]), (4, 8))
    """

    __prepare_scriptable__ = refuse_script

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True,
                 weight_initializer: str | None = None, bias_initializer: str | None = None) -> None:
        nn.Module.__init__(self)
        check_choice("Linear", "weight_initializer", weight_initializer, (None, "glorot", "uniform", "kaiming_uniform"))
        check_choice("Linear", "bias_initializer", bias_initializer, (None, "zeros"))
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight_initializer, self.bias_initializer = weight_initializer, bias_initializer
        self.in_features, self.out_features = in_channels, out_channels  # by which torch's tools know a linear layer
        self.weight: Any = (nn.Parameter(torch.empty(out_channels, in_channels)) if in_channels > 0
                            else UninitializedParameter())
        self.bias: Any = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.reset_parameters()

    @property
    def is_lazy(self) -> bool:
        """True if the number of input channels is not known yet."""
        return self.in_channels <= 0

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters again, at the first x if P is unknown."""
        if self.is_lazy:
            return
        rows, columns = self.weight.shape
        bound = math.sqrt(6 / (rows + columns)) if self.weight_initializer == "glorot" else 1 / math.sqrt(columns)
        self.weight.uniform_(-bound, bound)
        if self.bias is not None and self.bias_initializer == "zeros":
            self.bias.zero_()
        elif self.bias is not None:
            bound = 1 / math.sqrt(columns)
            self.bias.uniform_(-bound, bound)

    def materialize(self, in_channels: int) -> None:
        """Create the weight for this number of input channels, unless it exists."""
        if self.is_lazy:
            self.in_channels = self.in_features = in_channels
            self.weight.materialize((self.out_channels, in_channels))
            self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """(..., P) -> (..., Q); a sparse matrix (M, P) too."""
        if self.in_channels <= 0:
            self.materialize(input.shape[-1])
        if input.layout is not torch.strided:
            y = torch.sparse.mm(input, self.weight.mT)
            return y if self.bias is None else y + self.bias
        if input.shape[-1] != self.in_channels:
            raise ShapeError("Linear", f"x must have shape (..., M, P={self.in_channels})", tuple(input.shape))
        own = self._parameters  # read in fewer steps than attributes, which take their place where they are changed
        weight: Any = own["weight"] if "weight" in own else self.weight  # noqa: SIM401 - a step
        return linear(input, weight, own["bias"] if "bias" in own else self.bias)  # noqa: SIM401

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, UninitializedParameter):
            self.in_channels = self.in_features = -1
            self.weight = UninitializedParameter(  # type: ignore[call-arg]
                device=self.weight.device, dtype=self.weight.dtype)
        elif self.is_lazy and isinstance(weight, Tensor):
            self.materialize(weight.shape[-1])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars or self.is_lazy)

    def __repr__(self) -> str:
        return f"Linear({self.in_channels}, {self.out_channels}, bias={self.bias is not None})"


class LinearByType(nn.Module):
    """A linear layer for each type of nodes."""

    def __init__(self, in_channels: dict[str, int], out_channels: int) -> None:
        super().__init__()
        self.types = list(in_channels)
        self.lins = nn.ModuleDict({parameter_key(name): Linear(width, out_channels)
                                   for name, width in in_channels.items()})
        self.reset_parameters()  # once more, as PyTorch Geometric does, for the same numbers from the same seed

    def reset_parameters(self) -> None:
        """Draw all parameters again."""
        draw(self.lins)

    def forward(self, x_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, x in x_dict.items():
            lin = self.lins[parameter_key(name)] if name in self.types else None
            if isinstance(lin, Linear) and lin.is_lazy:
                lin.materialize(x.shape[-1])
                lin.reset_parameters()  # once more, as there
        return {name: self.lins[parameter_key(name)](x_dict[name]) for name in self.types if name in x_dict}


def parameter_key(name: str) -> str:
    """The name of a type as a parameter, as PyTorch Geometric writes it."""
    reserved = hasattr(nn.ModuleDict, name) or hasattr(nn.ParameterDict, name)
    return (f"<{name}>" if reserved else name).replace(".", "#")


def project(x: Tensor, basis: Basis, lin: Any, bias: Tensor | None = None, root: Any = None,
            x_root: Tensor | None = None) -> Tensor:
    """lin(A^T x) + root(x_root) + bias; without `lin` A^T x.

    One node of autograd if a kernel reads the edges and the linear layers are plain. Else Theta is the weight of `lin`,
    and the planner chooses the order. `lin` itself is called if it is wrapped or replaced, or if it has as many outputs
    as inputs or more and no other bias is given: the sums come first then, and torch's linear layer costs the fewest
    calls.
    """
    weighed = basis if (type(basis) is Sparse and type(basis.values) is Tensor and basis.size == 1 and x.dim() == 2
                        and is_few(basis.graph, 1, x.shape[1])) else None
    if weighed is None and (y := _as_one_node(x, basis, lin, bias, root, x_root)) is not None:
        return y
    if (lin is not None and weighed is None and is_plain(lin)
            and (lin.bias is None if bias is not None else lin.in_channels > lin.out_channels)):
        lin.materialize(x.shape[-1])
        theta = Full._over({"theta": lin.weight.mT.unsqueeze(0)})
        y = apply(x, basis, theta, lin.bias if bias is None else bias)
    else:
        y = (apply(x, basis, Eye._over({"size": 1, "channels": x.shape[-1]})) if weighed is None
             else sum_heads(x, weighed))
        y = y if lin is None else lin(y)
        y = plus(y, bias)
    return y if root is None else y + root(x_root)


def _as_one_node(x: Tensor, basis: Basis, lin: Any, bias: Tensor | None, root: Any, x_root: Tensor | None
                 ) -> Tensor | None:
    """`project` by a kernel; `None` if none applies, or if sizes do not fit: the general path raises the error."""
    if type(basis) is not Sparse or x.dim() != 2 or private.any_autocast():
        return None
    weight: Any = None
    own, other = None, None if x_root is x or root is None else x_root
    if lin is not None:
        if not is_plain(lin) or (lin.bias is not None and bias is not None):
            return None
        lin.materialize(x.shape[-1])
        weight, bias = lin.weight, lin.bias if bias is None else bias
        if x.shape[-1] != weight.shape[-1]:
            return None
    if root is not None:
        if lin is None or not is_plain(root) or root.bias is not None:
            return None
        own, rows = root.weight, x if other is None else other
        root.materialize(rows.shape[-1])
        if tuple(rows.shape) != (basis.num_outputs, own.shape[-1]) or own.shape[0] != weight.shape[0]:
            return None
    edges = sorted_matrix(basis.graph, basis.values) if is_direct(x, weight, own, other, bias) else None
    if edges is None:
        return None
    adjacency, check = edges

    def sums(x: Tensor) -> Tensor:
        check()
        return apply(x, basis, Eye._over({"size": 1, "channels": x.shape[-1]}))

    def composed(x: Tensor, weight: Tensor, own: Tensor | None, other: Tensor | None, bias: Tensor | None) -> Tensor:
        y = linear(sums(x), weight, bias)
        return y if own is None else y + linear(x if other is None else other, own)

    if weight is None:
        return plus(gather_sums(adjacency, sums, x), bias)
    return convolve_linear(adjacency, composed, x, weight, own, other, bias, weight.shape[1] <= weight.shape[0])


def project_together(x: Tensor, *lins: Any) -> tuple[Tensor, ...]:
    """lin(x) of each layer, by one product where all are plain: with few rows, one product costs less than several."""
    if x.layout is torch.strided and all(map(is_plain, lins)):
        for lin in lins:
            lin.materialize(x.shape[-1])
        weights, biases = [lin.weight for lin in lins], [lin.bias for lin in lins]
        alike = len({(bias is None, lin.in_channels == x.shape[-1]) for bias, lin in zip(biases, lins, strict=True)})
        if alike == 1:
            y = linear(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))
            return y.split([lin.out_channels for lin in lins], -1)
    return tuple([lin(x) for lin in lins])


def is_plain(lin: nn.Module) -> bool:
    """Return True if a call only multiplies and adds, without hooks, and in one dtype: not under autocast."""
    return type(lin) is Linear and private.all_plain(lin) and not private.any_autocast()


def is_product(lin: Any) -> bool:
    """Return True if a call only multiplies: a bias may have been added to a layer that is built without one."""
    return is_plain(lin) and lin.bias is None


@torch.no_grad()
def glorot(parameter: Tensor) -> None:
    """Draw a parameter (..., P, Q) by the rule of Glorot and Bengio (2010), if its shape is known."""
    if not isinstance(parameter, UninitializedParameter):
        bound = math.sqrt(6 / sum(parameter.shape[-2:]))
        parameter.uniform_(-bound, bound)


def draw(module: nn.Module) -> None:
    """Reset a module, or its children where it cannot."""
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    else:
        for child in module.children():
            draw(child)
