"""`Weight`: Theta (K, P, Q) as a value, and `BoundWeight`: the module that holds its numbers.

A weight is first a configuration (`Separable(rank=2)`). `bound` makes a module with parameters for given sizes, and
calling that module yields the same kind of weight over them. `Full.of(theta)` is a weight over tensors of your own.

Numbers are drawn so that outputs have the variance of the inputs: for white x,

    Var(y_q) = Var(x) sum_k e_k sum_p Var(Theta_kpq),   e_k = mean_n sum_m A_kmn^2,

and factors are drawn so that the product of their variances makes the sum one. Factors whose sum runs over k only are
scaled by their actual sum, so that the variance does not depend on a draw of few numbers.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from structconv.arguments import check_constructor, is_own
from structconv.bases.tree import Shared
from structconv.errors import ConfigError, ShapeError
from structconv.primitives.products import contract_heads, expand_heads, linear
from structconv.shapes import check_positive, shape_or_type
from structconv.structures.values import FrozenValue, key_of, register_node
from structconv.written import written

__all__ = ["BoundWeight", "Device", "Energy", "Factor", "Weight", "draw", "draw_mixing", "energies_of", "plus",
           "repeat_head", "scale", "total_energy"]

Energy = float | Tensor | None
Device = torch.device | str | None


class Weight(FrozenValue, abc.ABC):
    """A weight of K matrices from P input to Q output channels; letters as in eq. 8.

    A kind of weight is one class, `class Separable(Weight, mix="KH", filters="HPQ")`. The constructor takes options.
    The letters name the axes of its tensors; from them follow the checks, the sizes K, P and Q, and the shapes of the
    parameters that `bound` makes. A class must define `dense`; the other methods may compute the same faster.

    Example:

        >>> import torch
        >>> from structconv import Full, conv
        >>> from structconv.bases import Identity
        >>> conv(torch.randn(5, 4), Identity(5), Full.of(torch.randn(1, 4, 8))).shape
        torch.Size([5, 8])
    """

    #: The fields of a weight: its tensors, and the numbers of a weight without tensors.
    FIELDS: ClassVar[tuple[str, ...]] = ()
    #: The axes of each tensor, by its name.
    LETTERS: ClassVar[Mapping[str, str]] = {}
    #: True if `join` sums the heads, so that the structure may be applied to their sum.
    sums_heads: ClassVar[bool] = True
    #: True if `expand` and `contract` copy their K heads, because products need another layout.
    rearranges_heads: ClassVar[bool] = False
    #: The number of factors in the chain of products that `expand` and `contract` compute.
    factors: ClassVar[int] = 1
    #: The orders of the products by which a plan may compute; all where there are none.
    orders: ClassVar[tuple[str, ...]] = ()
    #: The tensors that are the matrix (outputs, inputs) of a linear layer, with the letters of both: "GD, P".
    LINEAR: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **letters: str) -> None:
        """Make the class a dataclass, whose constructor takes options, and a pytree over its fields."""
        if letters:
            cls.LETTERS = letters
        for name in letters:
            if not is_own(cls) and hasattr(Weight, name):
                raise ConfigError(cls.__name__, "no tensor may have the name of an attribute of Weight", name,
                                  "Rename it.")
        check_constructor(cls)
        dataclasses.dataclass(eq=False, repr=False, init=False)(cls)
        fields = cls.FIELDS = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]

        def flatten(theta: Any) -> tuple[list[Any], Any]:
            attrs = theta.__dict__
            present = tuple([name for name in fields if name in attrs])
            options = tuple([(name, attrs[name]) for name in attrs if name not in present])
            return [attrs[name] for name in present], (present, options)

        def unflatten(parts: Iterable[Any], context: Any) -> Any:
            return cls._over({**dict(zip(context[0], parts, strict=True)), **dict(context[1])})

        register_node(cls, flatten, unflatten)

    @classmethod
    def _over(cls, attrs: Mapping[str, Any]) -> Self:
        """The value with these fields, which `plan_for` checks once for each plan."""
        theta = object.__new__(cls)
        theta.__dict__.update(attrs)
        return theta

    @property
    def static_key(self) -> Hashable:
        """The type, and of each tensor the shape, the dtype and whether it requires a gradient, which may change."""
        return type(self), *[(field.shape, field.dtype, field.requires_grad) if isinstance(field, Tensor)
                             else key_of(field) for field in self.__dict__.values()]

    #: The weight that holds the tensor (K, P, Q).
    _of_dense: ClassVar[Callable[[Tensor], Weight]]

    @property
    def is_value(self) -> bool:
        """True if the weight holds tensors, False if it is a configuration."""
        return all(name in self.__dict__ for name in self.FIELDS)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the numbers; none if Theta is fixed."""
        return tuple([field for field in self.__dict__.values() if isinstance(field, Tensor)])

    @property
    def requires_grad(self) -> bool:
        """True if one of the tensors requires a gradient."""
        return True in [tensor.requires_grad for tensor in self.tensors]

    @property
    def dtype(self) -> torch.dtype | None:
        """The numbers' dtype, which x must share; `None` if there are no numbers."""
        return next((t.dtype for t in self.tensors), None)

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; `None` for a configuration."""
        return next((t.device for t in self.tensors), None)

    @classmethod
    def of(cls, *fields: Any) -> Self:
        """The weight over tensors, in the order of its fields.

        Raises:
            ShapeError: if they do not fit together.
        """
        theta = cls._over(dict(zip(cls.FIELDS, fields, strict=True)))
        theta.check()
        return theta

    def bound(self, size: int | Sequence[int], in_channels: int, out_channels: int, *, dtype: torch.dtype | None = None,
              device: Device = None) -> BoundWeight:
        """Return a module with parameters for K, P and Q, drawn by `reset_parameters`.

        Args:
            size: K, or the K of each part of a basis `a | b`.
            in_channels: P.
            out_channels: Q.
            dtype, device: dtype and device of the parameters; default: torch's.

        Raises:
            ConfigError: a size is not positive, or the channels do not match the configuration.
        """
        sizes = (size,) if isinstance(size, int) else tuple(size)
        owner = type(self).__name__
        check_positive(owner, "size", sum(sizes))
        check_positive(owner, "in_channels", in_channels)
        check_positive(owner, "out_channels", out_channels)
        weight = self._module(sizes, in_channels, out_channels, dtype, device)
        if not is_own(type(self)):
            self._check_dense(weight().dense(), sum(sizes), in_channels, out_channels)
        weight.reset_parameters()
        return weight

    def _module(self, sizes: tuple[int, ...], in_channels: int, out_channels: int, dtype: torch.dtype | None,
                device: Device) -> BoundWeight:
        size = sum(sizes)
        extents = {"K": size, "P": in_channels, "Q": out_channels, **self._extents(size, in_channels, out_channels)}
        self._check_letters(extents)
        tensors = {name: Factor(axes, self.LINEAR[name], extents, dtype, device) if name in self.LINEAR else
                   torch.empty([extents[letter] for letter in axes], dtype=dtype, device=device)
                   for name, axes in self.LETTERS.items()}
        fixed = {name: {"size": size, "channels": in_channels}[name] for name in self.FIELDS if name not in tensors}
        if not is_own(type(self)):  # whose `dense` may read the options of the constructor
            fixed = {**self.__dict__, **fixed}
        return BoundWeight(self, size, in_channels, out_channels, tensors, fixed)

    def _check_letters(self, extents: Mapping[str, int]) -> None:
        """Raise `ConfigError` if a tensor has no letters, or a letter no size."""
        owner = type(self).__name__
        for name in self.FIELDS:
            if name not in self.LETTERS and not is_own(type(self)):
                raise ConfigError(owner, f"each tensor must have its axes in the class line, {name}='KPQ'",
                                  repr(dict(self.LETTERS)))
        unknown = sorted({letter for axes in self.LETTERS.values() for letter in axes} - set(extents))
        if unknown:
            raise ConfigError(owner, f"_extents must return the size of each letter other than K, P and Q, here "
                              f"{', '.join(unknown)}", repr(sorted(set(extents) - {'K', 'P', 'Q'})))

    def _check_dense(self, theta: Any, size: int, in_channels: int, out_channels: int) -> None:
        """Raise `ShapeError` unless `theta` is a tensor (K, P, Q)."""
        if not isinstance(theta, Tensor) or theta.shape != (size, in_channels, out_channels):
            raise ShapeError(type(self).__name__, f"dense must return a tensor (K={size}, P={in_channels}, "
                             f"Q={out_channels})", shape_or_type(theta))

    def _extents(self, size: int, in_channels: int, out_channels: int) -> dict[str, int]:
        """The sizes of all other letters, and of K, P and Q if they are not the arguments."""
        return {}

    def _of_modules(self, module: BoundWeight) -> Weight | None:
        """Theta that calls the linear layers of `module`; `None` if it only reads their matrices."""
        return None

    #: (weight over the parameters of a module, P) -> Theta; `None` if that weight is Theta.
    _derived: ClassVar[Callable[[Any, Any, int], Any] | None] = None

    def _scaled(self) -> str | None:
        """The name of the factor that scales Theta."""
        return next(iter(self.LETTERS), None)

    def _draw(self, theta: Self, energy: Energy, variance: float) -> None:
        """Draw the numbers so that Var(y) = `variance` Var(x); see `BoundWeight.reset_parameters`."""
        for tensor in theta.tensors:
            draw(tensor, 1.0)
        name, energies = self._scaled(), energies_of(energy, theta.size)
        if name is not None:
            with torch.no_grad():
                total = (energies.view(-1, 1, 1) * theta.dense().double().cpu().square()).sum((0, 1)).mean()
            scale(getattr(theta, name), float(variance / total) ** 0.5 if total > 0 else 1.0)

    def _extent(self, letter: str) -> int:
        for name, axes in self.LETTERS.items():
            if letter in axes:
                extent: int = getattr(self, name).shape[axes.index(letter)]
                return extent
        name = {"K": "size", "P": "in_channels", "Q": "out_channels"}.get(letter, letter)
        raise ConfigError(type(self).__name__, f"its tensors must have an axis {letter}, or the class a property "
                          f"{name}", repr(dict(self.LETTERS)), f"Define it: {name} = property(lambda self: ...).")

    @property
    def size(self) -> int:
        """K, the number of matrices."""
        return self._extent("K")

    @property
    def in_channels(self) -> int:
        """P."""
        return self._extent("P")

    @property
    def out_channels(self) -> int:
        """Q."""
        return self._extent("Q")

    def check(self) -> None:
        """Raise `ShapeError` unless each tensor has the dimensions that its letters name, equal letters of equal size.
        """
        sizes: dict[str, int] = {}
        for name, axes in self.LETTERS.items():
            tensor = getattr(self, name)
            if tensor.dim() != len(axes) or any(sizes.setdefault(letter, size) != size
                                                for letter, size in zip(axes, tensor.shape, strict=True)):
                expected = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
                raise ShapeError(type(self).__name__, f"{name} must have shape ({expected})", tuple(tensor.shape))

    @abc.abstractmethod
    def dense(self) -> Tensor:
        """The tensor itself, (K, P, Q)."""

    def expand(self, x: Tensor) -> Tensor:
        """x Theta_k for each k: (..., M, P) -> (..., K, M, Q)."""
        return expand_heads(x, self.dense())

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """sum_k r_k Theta_k + b: (..., K, N, P), (Q) or none -> (..., N, Q)."""
        return contract_heads(r, self.dense(), bias)

    @property
    def head_channels(self) -> int:
        """The channels of one head in the structure: D if Theta_k has two factors, else Q."""
        return self.out_channels

    def heads(self, x: Tensor) -> Tensor:
        """Compute the values of each head: (..., M, P) -> (..., K, M, head_channels)."""
        return self.expand(x)

    def stored_heads(self, x: Tensor) -> Tensor | Shared:
        """`heads` as a cache stores them: those once that several heads share."""
        return self.heads(x)

    def join(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        """The output from the results of the heads, and b: (..., K, N, head_channels), (Q) or none -> (..., N, Q)."""
        return plus(r.squeeze(-3) if r.shape[-3] == 1 else r.sum(-3), bias)

    def slice(self, start: int, stop: int) -> Weight:
        """The matrices start <= k < stop, in the same factors; of a class of the user's, whose `dense` may mix them, as
        they are."""
        if not is_own(type(self)):
            return type(self)._of_dense(self.dense()[start:stop])
        part = dict(self.__dict__)
        for name, axes in self.LETTERS.items():
            if axes[0] == "K":
                part[name] = part[name][start:stop]
        if "size" in self.FIELDS:
            part["size"] = stop - start
        return self._over(part)

    def expand_flops(self) -> int:
        """Flops of `expand` for one entry."""
        return 2 * self.size * self.in_channels * self.out_channels

    def contract_flops(self) -> int:
        """Flops of `contract` for one entry."""
        return 2 * self.size * self.in_channels * self.out_channels

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self.is_value:
            return f"{kind}(K={self.size}, P={self.in_channels}, Q={self.out_channels})"
        return f"{kind}({written(self)})"


class BoundWeight(nn.Module):
    """The parameters of a weight for K, P and Q; calling it yields the weight over them.

    Example:

        >>> from structconv import Full
        >>> module = Full().bound(1, 4, 8)
        >>> [name for name, _ in module.named_parameters()], module()
        (['theta'], Full(K=1, P=4, Q=8))
    """

    def __init__(self, kind: Weight, size: int, in_channels: int, out_channels: int,
                 tensors: Mapping[str, Tensor | Factor], fixed: Mapping[str, int]) -> None:
        super().__init__()
        self.kind, self.size, self.in_channels, self.out_channels = kind, size, in_channels, out_channels
        self._fixed: dict[str, Any] = dict(fixed)
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor) if isinstance(tensor, Tensor) else tensor)

    def forward(self, derived: bool = True) -> Weight:
        """Theta over this module's parameters, also those that parametrizations and pruning compute; if not `derived`,
        the weight over the parameters themselves."""
        kind, parameters, modules = self.kind, self._parameters, self._modules
        if modules and derived and (called := kind._of_modules(self)) is not None:
            return called
        theta = object.__new__(type(kind))
        attrs = theta.__dict__
        attrs.update(self._fixed)
        for name in kind.LETTERS:
            if name in parameters:
                attrs[name] = parameters[name]
            elif name in modules:
                attrs[name] = modules[name].tensor()  # type: ignore[union-attr, operator]
            else:  # a parametrization or pruning computes it
                attrs[name] = getattr(self, name)
        return theta if kind._derived is None or not derived else kind._derived(theta, self.in_channels)

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        """Draw the parameters so that Var(y) = `variance` Var(x).

        Args:
            energy: e_k = mean_n sum_m A_kmn^2, one for all k or one for each (K,), or the Gram matrix
                mean_n sum_m A_kmn A_k'mn (K, K), whose off-diagonal counts where matrices share a Theta. 1 if absent.
            variance: the ratio of the variances.
        """
        self.kind._draw(self.forward(derived=False), energy, variance)

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply Theta by a number, in place, on one of its factors."""
        factor_name = self.kind._scaled()
        if factor_name is not None:
            scale(getattr(self.forward(derived=False), factor_name), factor)

    def _get_name(self) -> str:
        return type(self.kind).__name__

    def extra_repr(self) -> str:
        sizes = f"K={self.size}, P={self.in_channels}, Q={self.out_channels}"
        return ", ".join(filter(None, [written(self.kind), sizes]))

    def __repr__(self) -> str:
        own = all(type(part) is Factor for part in self._modules.values())
        return f"{self._get_name()}({self.extra_repr()})" if own else super().__repr__()


class Factor(nn.Linear):
    """A factor of Theta as a linear layer, whose matrix (outputs, inputs) is a tensor with an axis for heads.

    Tools that adapt, quantize or prune linear layers treat it like any other. The weight that has it draws its numbers.

    Args:
        axes: the letters of the tensor's axes.
        matrix: the letters of the outputs and of the inputs, for example "GD, P".
        extents: the size of each letter.

    Example:

        >>> from structconv import LowRank
        >>> LowRank(4).bound(2, 16, 8).value
        Factor(in_features=16, out_features=8, bias=False)
    """

    def __init__(self, axes: str, matrix: str, extents: Mapping[str, int], dtype: torch.dtype | None = None,
                 device: Device = None) -> None:
        outputs, inputs = matrix.split(", ")
        letters = outputs + inputs
        self.sizes, self.order = [extents[a] for a in letters], [letters.index(a) for a in axes]
        super().__init__(math.prod(self.sizes[len(outputs):]), math.prod(self.sizes[:len(outputs)]), bias=False,
                         dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def tensor(self) -> Tensor:
        """The matrix with the tensor's axes, a view."""
        weight = self._parameters.get("weight")
        return (self.weight if weight is None else weight).view(self.sizes).permute(self.order)

    def reset_parameters(self) -> None:
        """Nothing: `BoundWeight.reset_parameters` draws all factors together."""


def plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """y + b, or y without b."""
    return y if bias is None else y + bias


def repeat_head(x: Tensor, size: int) -> Tensor:
    """(..., M, C) -> (..., K, M, C), a view in which all heads are equal."""
    return x.unsqueeze(-3).expand(*x.shape[:-2], size, *x.shape[-2:])


def energies_of(energy: Energy, size: int) -> Tensor:
    """e_k for each k, float64 (K,)."""
    metric = torch.as_tensor(1.0 if energy is None else energy, dtype=torch.float64, device="cpu").detach()
    if metric.shape not in ((), (1,), (size,), (size, size)):
        raise ShapeError("reset_parameters", f"energy must be a number or have shape (K={size},) or (K, K)",
                         tuple(metric.shape))
    return metric.diagonal() if metric.dim() == 2 else metric.expand(size)


def total_energy(energy: Energy, size: int) -> float:
    """The sum of all e_k; 1 if every matrix is zero, so that no Theta gives the outputs a variance."""
    total = float(size) if energy is None else float(energies_of(energy, size).sum())
    return total if total > 0 else 1.0


@torch.no_grad()
def draw(parameter: Tensor, variance: float) -> None:
    """Uniform numbers of mean 0."""
    bound = (3 * variance) ** 0.5
    parameter.uniform_(-bound, bound)


@torch.no_grad()
def draw_mixing(parameter: Tensor, energies: Tensor, dims: tuple[int, ...]) -> None:
    """Uniform numbers (K, ...), scaled so that the sum of e_k parameter_k^2 over `dims` is one."""
    parameter.uniform_(-1, 1)
    weights = energies.to(parameter).view(-1, *(1,) * (parameter.dim() - 1))
    total = (weights * parameter.square()).sum(dims, keepdim=True)
    parameter.div_(torch.where(total > 0, total, torch.ones_like(total)).sqrt())


@torch.no_grad()
def scale(parameter: Tensor, factor: float | Tensor) -> None:
    """Multiply in place."""
    parameter.mul_(factor)
