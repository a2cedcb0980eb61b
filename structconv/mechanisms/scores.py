"""Content-based mechanisms: scores of pairs (m, n) from x (..., M, P) and z (..., N, P').

Each makes one leaf of `bases/scores.py`. What is done to scores afterwards (scale, mask, softmax, ...) is written in
the algebra: `DotProduct(heads=8, dim=64).scaled().masked(keep=Causal()).softmax()`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import _has_any_global_hook

from structconv.bases import scores as values
from structconv.bases.base import Basis
from structconv.bases.pairwise import Mapped, Masked
from structconv.bases.positions import Lookup
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.encodings import Rotary
from structconv.mechanisms.expression import Channels, Mechanism, Setting
from structconv.primitives.products import linear, split_heads
from structconv.shapes import check_choice, check_divides, check_positive
from structconv.structures.supports import Window


class Linear(nn.Linear):
    """torch's linear layer, by the faster library."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Projection(nn.Module):
    """x W_k (+ b_k) for each head: (..., M, P) -> (..., K, M, D). Uniform(+-1/sqrt(P)), as torch's linear layer."""

    def __init__(self, channels: int, heads: int, dim: int, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.linear = Linear(channels, heads * dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return split_heads(self.linear(x), self.heads, self.dim)

    def ready(self) -> Callable[[Tensor], Tensor]:
        """The same by the parameters that it has now, of one that is `plain`; it holds while they stay."""
        weight, bias, heads, dim = self.linear.weight, self.linear.bias, self.heads, self.dim
        return lambda x: split_heads(linear(x, weight, bias), heads, dim)

    @property
    def plain(self) -> bool:
        """Whether a call does nothing but multiply with the weight and add the bias: nothing replaced, no hooks."""
        parts: tuple[nn.Module, ...] = (self, self.linear)
        return (tuple(map(type, parts)) == (Projection, Linear) and not _has_any_global_hook()
                and not any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
                            or part._backward_pre_hooks for part in parts))


class Score(Mechanism):
    """A content-based mechanism of `heads` heads."""

    has_scores = True

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.heads = check_positive(type(self).__name__, "heads", heads)

    @property
    def size(self) -> int:
        return self.heads

    def ready(self) -> Callable[[Setting], Basis]:
        """`build` with all looked up that no setting changes; it holds while modules and parameters are the same."""
        return self.build

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class DotProduct(Score):
    """a_kmn = <W^q_k z_n, W^k_k x_m>; without arguments <z_n, x_m> (Luong et al. 2015, "dot").

    Args:
        heads: K. dim: D, channels of a head; P // heads where only `heads` is given.
        shared_by: how many consecutive heads share a key (grouped queries); divides `heads`.
        bias: whether the projections have one.
        rotary: rotate queries and keys by their positions (`Rotary`), or not.
        feature: a map of queries and keys, channels last, before the product; a positive one with `normalize("sum")`
            is linear attention (Katharopoulos et al. 2020), which the planner computes in O(M + N).
    """

    def __init__(self, heads: int | None = None, dim: int | None = None, *, shared_by: int = 1, bias: bool = False,
                 rotary: Rotary | None = None, feature: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(1 if heads is None else heads)
        self.projects = heads is not None or dim is not None
        self.dim = None if dim is None else check_positive("DotProduct", "dim", dim)
        self.shared_by, self.bias, self.rotary, self.feature = shared_by, bias, rotary, feature
        self.key_heads = check_divides("DotProduct", "shared_by", shared_by, "heads", self.heads)

    def bind(self, channels: Channels) -> None:
        if not self.projects:
            if channels.inputs != channels.others:
                raise ConfigError("DotProduct()", "x and z must have the same number of channels",
                                  f"{channels.inputs} and {channels.others}", "Give dim=, so that both are projected.")
            return
        if self.dim is None:
            self.dim = max(1, channels.inputs // self.heads)
        self.query = Projection(channels.others, self.heads, self.dim, self.bias)
        self.key = Projection(channels.inputs, self.key_heads, self.dim, self.bias)

    def queries(self, z: Tensor) -> Tensor:
        """(..., N, P') -> (..., K, N, D)."""
        query = self.query(z) if self.projects else z.unsqueeze(-3)
        query = query if self.rotary is None else self.rotary(query)
        return query if self.feature is None else self.feature(query)

    def keys(self, x: Tensor) -> Tensor:
        """(..., M, P) -> (..., K, M, D)."""
        key = self.key(x) if self.projects else x.unsqueeze(-3)
        key = key if self.rotary is None else self.rotary(key)
        key = key if self.feature is None else self.feature(key)
        return key.repeat_interleave(self.shared_by, -3) if self.shared_by > 1 else key

    def build(self, setting: Setting) -> Basis:
        if setting.deferred and self.projects and self.rotary is self.feature is None and self.shared_by == 1:
            query, key = self.query, self.key
            if _plain(query, key):
                return values.ProjectedBilinear(setting.x, setting.z, query.linear.weight, key.linear.weight,
                                                query.linear.bias, key.linear.bias, self.heads)
        return values.Bilinear(self.queries(setting.z), self.keys(setting.x))

    def ready(self) -> Callable[[Setting], Basis]:
        plain = type(self) is DotProduct and self.projects and _plain(self.query, self.key)
        if not plain or self.rotary is not None or self.feature is not None or self.shared_by > 1:
            return self.build
        query, key = self.query.ready(), self.key.ready()
        numbers = (self.query.linear.weight, self.key.linear.weight, self.query.linear.bias, self.key.linear.bias)

        def build(setting: Setting) -> Basis:
            if setting.deferred:
                return values.ProjectedBilinear(setting.x, setting.z, *numbers, self.heads)
            return values.Bilinear(query(setting.z), key(setting.x))

        return build


class General(Score):
    """a_kmn = z_n^T W_k x_m (Luong et al. 2015, "general")."""

    def bind(self, channels: Channels) -> None:
        self.key = Projection(channels.inputs, self.heads, channels.others)

    def build(self, setting: Setting) -> Basis:
        return values.Bilinear(setting.z.unsqueeze(-3), self.key(setting.x))


class BiAffine(Score):
    """a_kmn = x_m^T W_k z_n + u_k^T x_m + v_k^T z_n + c_k, any of the four parts absent (Andreoli 2019, eq. 11).

    Args:
        heads: K.
        bilinear, source, target, constant: which parts are there.
        rank: D of the factorised form W_k = U_k V_k^T (eq. 12); full where absent.
        on: "entries" scores x and z; "projected" scores x Theta_k and z Theta_k (section 3.2: GAT), with parameters
            of the output's channels.
    """

    def __init__(self, heads: int = 1, *, bilinear: bool = True, source: bool = True, target: bool = True,
                 constant: bool = False, rank: int | None = None, on: str = "entries") -> None:
        super().__init__(heads)
        check_choice("BiAffine", "on", on, ("entries", "projected"))
        if not (bilinear or source or target or constant):
            raise ConfigError("BiAffine", "at least one part must be there", "none")
        self.bilinear, self.source, self.target, self.constant = bilinear, source, target, constant
        self.rank = None if rank is None else check_positive("BiAffine", "rank", rank)
        self.sees_projection = on == "projected"

    def bind(self, channels: Channels) -> None:
        outputs = channels.outputs
        p, q = (outputs, outputs) if self.sees_projection else (channels.inputs, channels.others)
        if self.bilinear and self.rank is None:
            self.weight = _parameter((self.heads, p, q), p * q)
        elif self.bilinear and self.rank is not None:
            self.weight_source = _parameter((self.heads, p, self.rank), p)
            self.weight_target = _parameter((self.heads, q, self.rank), q)
        self.vector_source = _parameter((self.heads, p), p) if self.source else None
        self.vector_target = _parameter((self.heads, q), q) if self.target else None
        self.offset = nn.Parameter(torch.zeros(self.heads)) if self.constant else None

    def ready(self) -> Callable[[Setting], Basis]:
        of_source, of_target = self.vector_source, self.vector_target
        if not self.sees_projection or self.bilinear or of_source is None or of_target is None or self.constant:
            return self.build
        return lambda setting: values.ProjectedAffine(*_projected("BiAffine", setting), of_source, of_target)

    def build(self, setting: Setting) -> Basis:
        x, z = (setting.x.unsqueeze(-3), setting.z.unsqueeze(-3))
        if self.sees_projection:
            x, z = _projected("BiAffine", setting)
        terms: list[Basis] = []
        if self.bilinear:
            terms.append(self._bilinear(x, z))
        if self.source or self.target or self.constant:
            terms.append(self._affine(x, z))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _bilinear(self, x: Tensor, z: Tensor) -> Basis:
        if self.rank is None:
            return values.Bilinear(z.expand(*z.shape[:-3], self.heads, *z.shape[-2:]), x @ self.weight)
        return values.Bilinear(z @ self.weight_target, x @ self.weight_source)

    def _affine(self, x: Tensor, z: Tensor) -> Basis:
        of_source, of_target = self.vector_source, self.vector_target
        if self.sees_projection and of_source is not None and of_target is not None and self.offset is None:
            return values.ProjectedAffine(x, z, of_source, of_target)
        source, target = _term(x, of_source, self.heads), _term(z, of_target, self.heads)
        return values.Affine(source, target if self.offset is None else target + self.offset.unsqueeze(-1))


class Additive(Score):
    """a_kmn = v_k^T activation(W_k z_n + U_k x_m), D channels (Bahdanau et al. 2015; GATv2: Brody et al. 2022, eq. 7).

    Never holds an (M, N, D) tensor. tanh, sigmoid, ReLU and leaky ReLU (`functools.partial` with a `negative_slope`)
    run in one operator with the softmax; with any other activation blocks of pairs are evaluated, and evaluated again
    in the backward pass.

    Args:
        dim: D; with on="projected" it is the output's channels, and is left out.
        heads: K.
        activation: maps each element.
        on: "entries": U_k is a parameter; "projected": U_k is the layer's Theta_k, as in GATv2, whose values are the
            projected sources.
    """

    def __init__(self, dim: int | None = None, heads: int = 1, *, activation: Callable[[Tensor], Tensor] = torch.tanh,
                 on: str = "entries") -> None:
        super().__init__(heads)
        check_choice("Additive", "on", on, ("entries", "projected"))
        self.sees_projection = on == "projected"
        if (dim is None) != self.sees_projection:
            raise ConfigError("Additive", "dim must be given with on='entries', and only there",
                              f"{dim} with on={on!r}")
        self.dim = None if dim is None else check_positive("Additive", "dim", dim)
        self.activation = activation

    def bind(self, channels: Channels) -> None:
        dim = channels.outputs if self.dim is None else self.dim
        self.target = Projection(channels.others, self.heads, dim, bias=True)
        if not self.sees_projection:
            self.source = Projection(channels.inputs, self.heads, dim)
        self.vector = _parameter((self.heads, dim), dim)

    def build(self, setting: Setting) -> Basis:
        source = _projected("Additive", setting)[0] if self.sees_projection else self.source(setting.x)
        return values.Additive(source, self.target(setting.z), self.vector, self.activation)

    def ready(self) -> Callable[[Setting], Basis]:
        if not _plain(self.target, *(() if self.sees_projection else (self.source,))):
            return self.build
        target, vector, activation = self.target.ready(), self.vector, self.activation
        if self.sees_projection:
            return lambda setting: values.Additive(_projected("Additive", setting)[0], target(setting.z), vector,
                                                   activation)
        source = self.source.ready()
        return lambda setting: values.Additive(source(setting.x), target(setting.z), vector, activation)


class Location(Score):
    """a_kmn = (W_k z_n)_m from z alone, for at most `length` inputs (Luong et al. 2015, "location")."""

    def __init__(self, length: int, heads: int = 1) -> None:
        super().__init__(heads)
        self.length = check_positive("Location", "length", length)

    def bind(self, channels: Channels) -> None:
        self.table = Projection(channels.others, self.heads, self.length)

    def build(self, setting: Setting) -> Basis:
        if not torch.compiler.is_compiling() and setting.num_inputs > self.length:
            raise ShapeError("Location", f"x must have at most length={self.length} entries", tuple(setting.x.shape))
        return Lookup(self.table(setting.z), "position", self.length, setting.num_inputs, setting.num_outputs)


class Concatenation(Score):
    """a_kmn = w_k^T [theta(x_m), phi(z_n)], theta and phi linear to `dim` channels (Wang et al. 2018, eq. 5).

    The paper's ReLU is written `Concatenation(dim).relu()`. The score is a sum of two terms, one for each entry.
    """

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__(heads)
        self.dim = check_positive("Concatenation", "dim", dim)

    def bind(self, channels: Channels) -> None:
        self.theta = Projection(channels.inputs, self.heads, self.dim, bias=True)
        self.phi = Projection(channels.others, self.heads, self.dim, bias=True)
        self.vector = _parameter((self.heads, 2 * self.dim), 2 * self.dim)

    def build(self, setting: Setting) -> Basis:
        source, target = self.vector.split(self.dim, -1)
        return values.Affine(_term(self.theta(setting.x), source, self.heads),
                             _term(self.phi(setting.z), target, self.heads))


class Gaussian(DotProduct):
    """a_mn = exp(<z_n, x_m>) (Wang et al. 2018, eq. 2); `.normalize("sum")` makes it a softmax, computed as one."""

    def __init__(self) -> None:
        super().__init__()

    def build(self, setting: Setting) -> Basis:
        return Mapped(super().build(setting), torch.exp)


class EmbeddedGaussian(DotProduct):
    """a_mn = exp(<phi(z_n), theta(x_m)>) in `dim` channels (Wang et al. 2018, eq. 3)."""

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__(heads, dim)

    def build(self, setting: Setting) -> Basis:
        return Mapped(super().build(setting), torch.exp)


class Pair(Score):
    """a_kmn = module([x_m, z_n])_k for any module (..., P + P') -> (..., K); by default an MLP of one hidden layer.

    Args:
        module: acts on the last axis alone. heads: K. hidden: channels of the default MLP, and how many numbers at a
            time one pair needs, by which blocks are sized.
    """

    def __init__(self, module: nn.Module | None = None, heads: int = 1, *, hidden: int = 32) -> None:
        super().__init__(heads)
        self.module = module
        self.hidden = check_positive("Pair", "hidden", hidden)

    def bind(self, channels: Channels) -> None:
        if self.module is None:
            self.module = nn.Sequential(nn.Linear(channels.inputs + channels.others, self.hidden), nn.Tanh(),
                                        nn.Linear(self.hidden, self.heads))

    def build(self, setting: Setting) -> Basis:
        assert self.module is not None
        module, names = self.module, [name for name, _ in self.module.named_parameters()]

        def score(parameters: tuple[Tensor, ...], source: Tensor, target: Tensor) -> Tensor:
            lead = torch.broadcast_shapes(source.shape[:-1], target.shape[:-1])
            pair = torch.cat([source.expand(*lead, -1), target.expand(*lead, -1)], -1)
            return functional_call(module, dict(zip(names, parameters, strict=True)), (pair,))

        width = self.hidden + setting.x.shape[-1] + setting.z.shape[-1]
        return values.PairFunction(score, tuple(self.module.parameters()), setting.x, setting.z, self.heads, width)


class Context(Score):
    """a_mn = <theta_n, x_m> for `queries` learnt outputs theta_n: N does not depend on z (context attention)."""

    def __init__(self, queries: int, heads: int = 1) -> None:
        super().__init__(heads)
        self.queries = check_positive("Context", "queries", queries)

    def bind(self, channels: Channels) -> None:
        self.query = _parameter((self.heads, self.queries, channels.inputs), channels.inputs)

    def build(self, setting: Setting) -> Basis:
        return values.Bilinear(self.query, setting.x.unsqueeze(-3))


class Uniform(Score):
    """a_mn = 1, within `window` entries of n where it is given; `.normalize("sum")` makes it average pooling."""

    def __init__(self, window: int | tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.window = None if window is None else Window(window)

    def build(self, setting: Setting) -> Basis:
        uniform = values.Uniform(setting.x.new_ones(()), setting.num_inputs, setting.num_outputs)
        return uniform if self.window is None else Masked(uniform, self.window)


def _plain(*parts: nn.Module) -> bool:
    """Whether all are projections that are `plain`."""
    return all(isinstance(part, Projection) and part.plain for part in parts)


def _projected(owner: str, setting: Setting) -> tuple[Tensor, Tensor]:
    """x Theta and z Theta, head by head."""
    if setting.projected is None:
        raise ConfigError(f"{owner}(on='projected')", "a layer must provide x Theta", "none", "Use it inside Conv.")
    return setting.projected


def _parameter(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """Uniform with variance 1 / fan_in, so that a term of unit-variance channels has unit variance."""
    bound = (3.0 / fan_in) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def _term(entries: Tensor, vector: Tensor | None, heads: int) -> Tensor:
    """<vector_k, entries_km>, (..., K or 1, M, C) -> (..., K, M); zeros without a vector."""
    if vector is None:
        return entries.new_zeros(()).expand(*entries.shape[:-3], heads, entries.shape[-2])
    return (entries @ vector.unsqueeze(-1)).squeeze(-1)
