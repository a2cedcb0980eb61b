"""Content-based mechanisms: scores of pairs (m, n) from x (..., M, P) and z (..., N, P').

The `forward` of each returns one value of `bases/scores.py`. Scale, mask, softmax, ... are written in the algebra:
`DotProduct(heads=8, dim=64).scaled().masked(keep=Causal()).softmax()`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from structconv import torch_compat as private
from structconv.arguments import checked
from structconv.bases import scores as values
from structconv.bases.base import Basis
from structconv.bases.entrywise import Mapped, Masked
from structconv.bases.tree import Function, Projected, Rotated, Shared, Term, tensor
from structconv.errors import ConfigError, ShapeError, text_of
from structconv.mechanisms.expression import Channels, Inputs, Mechanism
from structconv.mechanisms.rotary import Rotary
from structconv.primitives.products import expand_heads, linear, split_heads
from structconv.shapes import check_choice, check_divides, check_natural, check_positive, shape_or_type
from structconv.structures.output_positions import at_positions
from structconv.structures.supports import Window
from structconv.structures.values import FrozenValue, structure
from structconv.written import written

__all__ = ["Additive", "BiAffine", "Channelwise", "Concatenation", "DotProduct", "EmbeddedGaussian", "Gaussian",
           "General", "Pair", "Projection", "Score", "Uniform"]

#: Modules without options, and the function that each computes.
_FUNCTIONS: dict[type, Callable[[Tensor], Tensor]] = {nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid,
                                                      nn.ReLU: torch.relu}


@lru_cache(maxsize=64)
def leaky_relu(slope: float) -> Callable[[Tensor], Tensor]:
    """The leaky ReLU of a slope, as a function that has its key."""
    function = partial(F.leaky_relu, negative_slope=slope)
    function.__dict__["static_key"] = "leaky_relu", slope  # see `key_of`
    return function


def as_function(activation: Any) -> Any:
    """The function that a module computes, if it is in the table, else the module as a `Function`; other functions
    unchanged."""
    if not isinstance(activation, nn.Module):
        return activation
    if torch.compiler.is_compiling() or not private.all_plain(activation):
        return Function(activation)
    if type(activation) in (nn.LeakyReLU, nn.Identity):
        return leaky_relu(getattr(activation, "negative_slope", 1.0))
    function = _FUNCTIONS.get(type(activation))
    return Function(activation) if function is None else function


class Projection(nn.Linear):
    """x W^T (+ b): (..., M, P) -> (..., M, K D), the heads side by side. Uniform(+-1/sqrt(P)), as torch's linear layer.

    Any module of the same shapes may take its place, a quantized linear layer or one with an update of low rank.

    Example:

        >>> from structconv.mechanisms import Projection
        >>> Projection(8, heads=2, dim=4)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(self, channels: int, heads: int, dim: int, bias: bool = False) -> None:
        check_natural("Projection", "channels", channels)
        check_natural("Projection", "dim", dim)
        super().__init__(channels, check_positive("Projection", "heads", heads) * dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def by_heads(projection: nn.Module, x: Tensor, heads: int) -> Tensor | Projected:
    """x through a projection, head by head (..., K, M, D): a lazy `Projected` if the projection only multiplies and
    adds, else the tensor."""
    own: Any = projection._parameters
    if (type(projection) is not Projection or not private.all_plain(projection) or torch.compiler.is_compiling()
            or "weight" not in own or "bias" not in own):
        return heads_of(projection, x, heads)
    return Projected(x, own["weight"], own["bias"], heads)


def heads_of(projection: nn.Module, x: Tensor, heads: int) -> Tensor:
    """x through a projection, head by head: (..., M, P) -> (..., K, M, D)."""
    y: Tensor = projection(x)
    return split_heads(y, heads, y.shape[-1] // heads)


def drawn(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """Uniform with variance 1 / fan_in, so that a term of unit-variance channels has unit variance."""
    bound = (3.0 / fan_in) ** 0.5
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Score(Mechanism):
    """A content-based mechanism of `heads` heads.

    Example:

        >>> from structconv import Conv, Dense
        >>> from structconv.mechanisms import Score
        >>> class Closeness(Score):
        ...     def forward(self, inputs):                           # (..., K, M, N)
        ...         return Dense(-torch.cdist(inputs.x, inputs.z)[..., None, :, :])
        >>> Conv(Closeness().softmax(), 8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    _role = "attention"
    has_scores = True
    reads: Collection[str] = ("content",)

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.heads = check_positive(type(self).__name__, "heads", heads)

    @property
    def size(self) -> int:
        return self.heads

    def _reads_projected(self, on: str) -> None:
        """Take the option `on`: the scores are of "entries", or of entries "projected" by Theta."""
        check_choice(type(self).__name__, "on", on, ("entries", "projected"))
        self._on = on
        if on == "projected":
            self.reads = (*self.reads, "projected")


class DotProduct(Score):
    """a_kmn = <W^q_k z_n, W^k_k x_m>; without arguments <z_n, x_m> (Luong et al. 2015, "dot").

    Args:
        heads: K. dim: D, channels of a head; P / heads where only `heads` is given.
        shared_by: the number of consecutive heads that share a key (grouped queries); divides `heads`.
        bias: if True, the projections have a bias.
        rotary: a `Rotary`, which rotates queries and keys by their positions.
        feature: a map of each query and key, channels last, before the product; a positive one with `normalize("sum")`
            is linear attention (Katharopoulos et al. 2020), which the planner computes in O(M + N).
        on: "entries"; or "projected": <Theta_k^T z_n, Theta_k^T x_m>, without projections of its own.

    Example:

        >>> from structconv import Conv, DotProduct
        >>> layer = Conv(DotProduct(heads=2, dim=8).scaled().softmax(), 16, 16)
        >>> layer(torch.randn(9, 16), z=torch.randn(3, 16)).shape      # queries from z
        torch.Size([3, 16])
    """

    batching = "pairs"
    reads = ("content", "positions")

    def __init__(self, heads: int | None = None, dim: int | None = None, *, shared_by: int = 1, bias: bool = False,
                 rotary: Rotary | None = None, feature: Callable[[Tensor], Tensor] | None = None,
                 on: str = "entries") -> None:
        super().__init__(1 if heads is None else heads)
        self._reads_projected(on)
        if self._on == "projected" and (dim is not None or shared_by != 1 or bias):
            raise ConfigError("DotProduct(on='projected')", "dim, shared_by and bias must be left out, for there is no "
                              "projection but Theta_k", f"dim={dim}, shared_by={shared_by}, bias={bias}")
        self.projects = self._on == "entries" and (heads is not None or dim is not None)
        self.dim = None if dim is None else check_positive("DotProduct", "dim", dim)
        for name, function in (("rotary", rotary), ("feature", feature)):
            if function is not None and not callable(function):
                raise ConfigError("DotProduct", f"{name} must be a function of tensors", repr(function))
        self.shared_by, self.bias, self.rotary, self.feature = shared_by, bias, rotary, feature
        self.key_heads = check_divides("DotProduct", "shared_by", shared_by, "heads", self.heads)
        if rotary is not None:
            self.batching = "offsets" if feature is None else "apart"

    def bind(self, channels: Channels) -> None:
        if not self.projects:
            if channels.inputs != channels.others and self._on == "entries":
                raise ConfigError("DotProduct()", "x and z must have the same number of channels",
                                  f"{channels.inputs} and {channels.others}", "Give dim=, so that both are projected.")
            return
        if self.dim is None:
            if channels.inputs % self.heads:
                raise ConfigError("DotProduct", f"heads must divide the P={channels.inputs} channels of x where dim is "
                                  "not given", f"heads={self.heads}", "Give dim=, the channels of a head.")
            self.dim = channels.inputs // self.heads
        self.query = Projection(channels.others, self.heads, self.dim, self.bias)
        self.key = Projection(channels.inputs, self.key_heads, self.dim, self.bias)

    def extra_repr(self) -> str:
        only = self.heads == 1 and (not self.projects or self.dim is not None)
        return written(self, {"heads": None if only else self.heads})

    def queries(self, z: Tensor, positions: Tensor | None = None) -> Tensor:
        """(..., N, P') at these positions, or at 0, 1, ... -> (..., K, N, D)."""
        if self._on == "projected":
            raise ConfigError("RelativeKey", "the DotProduct beside it must have queries of its own",
                              "on='projected'", "Give RelativeKey another DotProduct.")
        return self._mapped(heads_of(self.query, z, self.heads) if self.projects else z.unsqueeze(-3), positions)

    def keys(self, x: Tensor, start: int = 0) -> Tensor:
        """Map inputs (..., M, P), the first at position `start`, to keys (..., K, M, D)."""
        key = heads_of(self.key, x, self.key_heads) if self.projects else x.unsqueeze(-3)
        key = self._mapped(key, torch.arange(start, start + x.shape[-2], device=x.device) if start else None)
        return key.repeat_interleave(self.shared_by, -3) if self.shared_by > 1 else key

    def _mapped(self, query: Tensor, positions: Tensor | None) -> Tensor:
        """Queries or keys at these positions, rotated and through the feature map."""
        query = query if self.rotary is None else self.rotary(query, positions)
        if self.feature is None:
            return query
        features = self.feature(query)
        if not isinstance(features, Tensor) or features.shape[:-1] != query.shape[:-1]:
            raise ShapeError("DotProduct", "feature must change no size but the last of its argument, "
                             f"{text_of(query.shape)}", shape_or_type(features))
        return features

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("stored_keys",) if self.projects else ()

    def stored_keys(self, x: Tensor, start: int = 0) -> Tensor | Projected | Rotated | Shared:
        """`keys` as a cache stores them: each once that several heads share, and lazy without a feature map."""
        positions = None if self.rotary is None else torch.arange(start, start + x.shape[-2], device=x.device)
        key: Any = self._lazy(self.key, x, self.key_heads, positions)
        return key if self.shared_by == 1 else Shared(key, self.shared_by)

    def _lazy(self, projection: nn.Module, x: Tensor, heads: int, positions: Tensor | None
              ) -> Tensor | Projected | Rotated:
        """Queries or keys at these positions; a lazy product if they are only projected and rotated."""
        product = by_heads(projection, x, heads)
        if type(product) is not Projected or self.feature is not None:
            return self._mapped(tensor(product), positions)
        if self.rotary is None:
            return product
        plain = type(self.rotary) is Rotary and private.all_plain(self.rotary)
        at = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        return self.rotary.rotated(product, at) if plain and at.dim() == 1 else self.rotary(tensor(product), positions)

    def query_positions(self, inputs: Inputs) -> Tensor | None:
        """The positions of the queries, if they rotate the queries and are not 0, 1, ..."""
        if self.rotary is None or inputs.output_positions is None:
            return None
        return inputs.positions_of_outputs() + inputs.start

    def forward(self, inputs: Inputs) -> Basis:
        if self.projects and inputs.cache is not None:
            query: Any = self._lazy(self.query, inputs.z, self.heads, self.query_positions(inputs))
            return values.Bilinear(query, inputs.of_x(self.stored_keys, unread=True))
        if self.projects and self.rotary is self.feature is None and self.shared_by == 1:
            own = self._modules
            return values.Bilinear(cast(Tensor, by_heads(own.get("query") or self.query, inputs.z, self.heads)),
                                   cast(Tensor, by_heads(own.get("key") or self.key, inputs.x, self.heads)))
        positions = self.query_positions(inputs)
        if self._on == "projected":
            key, query = _projected("DotProduct", inputs)
            start = torch.arange(key.shape[-2], device=key.device) + inputs.start if inputs.start else None
            return values.Bilinear(self._mapped(query, positions), self._mapped(key, start))
        return values.Bilinear(self.queries(inputs.z, positions), self.keys(inputs.x))


class General(Score):
    """a_kmn = z_n^T W_k x_m (Luong et al. 2015, "general").

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import General
        >>> layer = Conv(General(heads=2).softmax(), 4, 4)
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"
    sources = ("keys",)

    def bind(self, channels: Channels) -> None:
        self.key = Projection(channels.inputs, self.heads, channels.others)

    def keys(self, x: Tensor, start: int = 0) -> Any:
        """(..., M, P) -> (..., K, M, P')."""
        return by_heads(self.key, x, self.heads)

    def forward(self, inputs: Inputs) -> Basis:
        return values.Bilinear(inputs.z.unsqueeze(-3), inputs.of_x(self.keys))


class BiAffine(Score):
    """a_kmn = x_m^T W_k z_n + u_k^T x_m + v_k^T z_n + c_k, any of the four parts absent (Andreoli 2019, eq. 11).

    Args:
        heads: K.
        bilinear, source, target, constant: which parts are there.
        rank: D of the factorized form W_k = U_k V_k^T (eq. 12); full where absent.
        on: "entries" scores x and z; "projected" scores x Theta_k and z Theta_k (section 3.2: GAT), with parameters
            of the output's channels.

    Example:

        >>> from structconv import BiAffine, Conv
        >>> layer = Conv(BiAffine(heads=2).softmax(), 4, 4)
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"

    def __init__(self, heads: int = 1, *, bilinear: bool = True, source: bool = True, target: bool = True,
                 constant: bool = False, rank: int | None = None, on: str = "entries") -> None:
        super().__init__(heads)
        if not (bilinear or source or target or constant):
            raise ConfigError("BiAffine", "at least one part must be there", "none")
        self.bilinear, self.source, self.target, self.constant = bilinear, source, target, constant
        self.rank = None if rank is None else check_positive("BiAffine", "rank", rank)
        self._reads_projected(on)

    def bind(self, channels: Channels) -> None:
        outputs = channels.outputs
        p, q = (outputs, outputs) if self._on == "projected" else (channels.inputs, channels.others)
        if self.bilinear and self.rank is None:
            self.weight = drawn((self.heads, p, q), p * q)
        elif self.bilinear and self.rank is not None:
            self.weight_source = drawn((self.heads, p, self.rank), p)
            self.weight_target = drawn((self.heads, q, self.rank), q)
        self.vector_source = drawn((self.heads, p), p) if self.source else None
        self.vector_target = drawn((self.heads, q), q) if self.target else None
        self.offset = nn.Parameter(torch.zeros(self.heads)) if self.constant else None

    def keys(self, x: Tensor, start: int = 0) -> Tensor:
        """x W_k, or x U_k of the factorized form: (..., M, P) -> (..., K, M, D)."""
        return expand_heads(x, self.weight if self.rank is None else self.weight_source)

    def terms(self, x: Tensor, start: int = 0) -> Tensor | Term:
        """u_k^T x of x (..., M, P): (..., K, M)."""
        return _term(x.unsqueeze(-3), self.vector_source, self.heads)

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        if self._on == "projected":
            return ()
        return *(("keys",) if self.bilinear else ()), *(("terms",) if self._affine else ())

    def forward(self, inputs: Inputs) -> Basis:
        if self._on == "projected":
            x, z = _projected("BiAffine", inputs) if inputs.projected is None else inputs.projected
            source, target = self._parameters.get("vector_source"), self._parameters.get("vector_target")
            if not self.bilinear and source is not None and target is not None and self.offset is None:
                return values.Affine(cast(Tensor, Term(x, source)), cast(Tensor, Term(z, target)))
            keys, terms = (lambda: self._keys_of_heads(x)), (lambda: _term(x, self.vector_source, self.heads))
        else:
            z, keys, terms = inputs.z.unsqueeze(-3), partial(inputs.of_x, self.keys), partial(inputs.of_x, self.terms)
        affine = values.Affine(cast(Tensor, terms()), cast(Tensor, self._terms(z))) if self._affine else None
        if not self.bilinear:
            return cast(Basis, affine)
        product = values.Bilinear(self._queries(z), keys())
        return product if affine is None else product + affine

    _affine = property(lambda self: self.source or self.target or self.constant)

    def _keys_of_heads(self, x: Tensor) -> Tensor:
        return x @ (self.weight if self.rank is None else self.weight_source)

    def _queries(self, z: Tensor) -> Tensor:
        """z (..., K or 1, N, P') itself, or z V_k of the factorized form."""
        if self.rank is None:
            return z
        return z @ self.weight_target if z.shape[-3] > 1 else expand_heads(z.squeeze(-3), self.weight_target)

    def _terms(self, z: Tensor) -> Tensor | Term:
        """v_k^T z + c_k."""
        target = _term(z, self.vector_target, self.heads)
        return target if self.offset is None else tensor(target) + self.offset.unsqueeze(-1)


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

    Example:

        >>> from structconv import Additive, Conv
        >>> layer = Conv(Additive(dim=8, heads=2).softmax(), 4, 4)
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"

    def __init__(self, dim: int | None = None, heads: int = 1, *, activation: Callable[[Tensor], Tensor] = torch.tanh,
                 on: str = "entries") -> None:
        super().__init__(heads)
        self._reads_projected(on)
        if (dim is None) != (on == "projected"):
            raise ConfigError("Additive", "dim must be given with on='entries', and only there",
                              f"{dim} with on={on!r}")
        self.dim = None if dim is None else check_positive("Additive", "dim", dim)
        self.activation = activation

    def bind(self, channels: Channels) -> None:
        dim = channels.outputs if self.dim is None else self.dim
        self.target = Projection(channels.others, self.heads, dim, bias=True)
        if self._on == "entries":
            self.source = Projection(channels.inputs, self.heads, dim)
        self.vector = drawn((self.heads, dim), dim)

    def keys(self, x: Tensor, start: int = 0) -> Any:
        """U_k x of x (..., M, P): (..., K, M, D)."""
        return by_heads(self.source, x, self.heads)

    @property
    def sources(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self._on == "projected" else ("keys",)

    def forward(self, inputs: Inputs) -> Basis:
        source = _projected("Additive", inputs)[0] if self._on == "projected" else inputs.of_x(self.keys)
        target = cast(Tensor, by_heads(self.target, inputs.z, self.heads))
        return values.Additive(source, target, self.vector, as_function(self.activation))


class Concatenation(Score):
    """a_kmn = w_k^T [theta(x_m), phi(z_n)], theta and phi linear to `dim` channels (Wang et al. 2018, eq. 5).

    The paper's ReLU is written `Concatenation(dim).relu()`. The score is a sum of two terms, one for each entry.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Concatenation
        >>> layer = Conv(Concatenation(dim=8, heads=2).softmax(), 4, 4)
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"
    sources = ("terms",)

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__(heads)
        self.dim = check_positive("Concatenation", "dim", dim)

    def bind(self, channels: Channels) -> None:
        self.theta = Projection(channels.inputs, self.heads, self.dim, bias=True)
        self.phi = Projection(channels.others, self.heads, self.dim, bias=True)
        self.vector = drawn((self.heads, 2 * self.dim), 2 * self.dim)

    def terms(self, x: Tensor, start: int = 0) -> Term:
        """Map x (..., M, P) to the term of each input, (..., K, M)."""
        return Term(heads_of(self.theta, x, self.heads), self.vector[:, :self.dim])

    def forward(self, inputs: Inputs) -> Basis:
        target = Term(heads_of(self.phi, inputs.z, self.heads), self.vector[:, self.dim:])
        return values.Affine(inputs.of_x(self.terms), cast(Tensor, target))


class Channelwise(Score):
    """a_kmn = x_mk: a head for each channel, whose score is the channel itself.

    With `weight=EyeBlocks()`, which gives head k the channel k, `Channelwise(P).masked(keep=STRUCTURE)` aggregates the
    neighbors channel by channel: `.normalize("hard")` takes their **maximum** (Hamilton et al. 2017, eq. 3), and
    `* beta` before `.softmax()` the softmax aggregation whose limit that is (Li et al. 2020, eq. 3). A maximum is
    linear in no matrix shared by channels, so K is P: E P numbers are held along E edges. Of equal largest neighbors
    the first in the list has the gradient; an output without neighbors is zero.

    Args:
        channels: P, which is K.

    Raises:
        ConfigError: if x has other channels.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Channelwise
        >>> from structconv.weights import EyeBlocks
        >>> layer = Conv(Channelwise(4).softmax(), 4, 4, weight=EyeBlocks())
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"

    def __init__(self, channels: int) -> None:
        super().__init__(check_positive("Channelwise", "channels", channels))
        self.channels = channels

    def bind(self, channels: Channels) -> None:
        if channels.inputs != self.heads:
            raise ConfigError("Channelwise", f"channels must be those of x, P={channels.inputs}", self.heads)

    def forward(self, inputs: Inputs) -> Basis:
        x = inputs.x
        return values.Affine(x.mT, x.new_zeros(()).expand(*x.shape[:-2], self.heads, inputs.num_outputs))


class Gaussian(DotProduct):
    """a_mn = exp(<z_n, x_m>) (Wang et al. 2018, eq. 2); `.normalize("sum")` makes it a softmax, computed as one.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Gaussian
        >>> Conv(Gaussian().normalize("sum"), 4, 8)(torch.randn(9, 4)).shape
        torch.Size([9, 8])
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, inputs: Inputs) -> Basis:
        return Mapped(super().forward(inputs), torch.exp)


class EmbeddedGaussian(Gaussian):
    """a_mn = exp(<phi(z_n), theta(x_m)>) in `dim` channels (Wang et al. 2018, eq. 3).

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import EmbeddedGaussian
        >>> Conv(EmbeddedGaussian(8).normalize("sum"), 4, 8)(torch.randn(9, 4)).shape
        torch.Size([9, 8])
    """

    def __init__(self, dim: int, heads: int | None = 1) -> None:
        DotProduct.__init__(self, heads, dim)


class Pair(Score):
    """a_kmn = module([x_m, z_n])_k for any module (..., P + P') -> (..., K); by default an MLP of one hidden layer.

    Args:
        module: acts only on the last axis. heads: K. hidden: channels of the default MLP, and how many numbers at a
            time one pair needs, by which blocks are sized.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Pair
        >>> network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> Conv(Pair(network, heads=2).softmax(), 4, 4)(torch.randn(9, 4)).shape
        torch.Size([9, 4])
    """

    batching = "pairs"

    def __init__(self, module: nn.Module | None = None, heads: int = 1, *, hidden: int = 32) -> None:
        super().__init__(heads)
        self.module, self.default_module = module, module is None
        self.hidden = check_positive("Pair", "hidden", hidden)

    def extra_repr(self) -> str:
        return written(self, {"module": None if self.default_module else self.module})

    def bind(self, channels: Channels) -> None:
        if self.module is None:
            self.module = nn.Sequential(nn.Linear(channels.inputs + channels.others, self.hidden), nn.Tanh(),
                                        nn.Linear(self.hidden, self.heads))

    def forward(self, inputs: Inputs) -> Basis:
        assert self.module is not None
        width = self.hidden + inputs.x.shape[-1] + inputs.z.shape[-1]
        function, parameters = OfPair(Function(self.module, parameters=())), tuple(self.module.parameters())
        return values.PairFunction(function, parameters, inputs.x, inputs.z, self.heads, width)


@structure(init=True)
class OfPair(FrozenValue):
    """A module of (x_m, z_n) side by side, as a function of its parameters and both."""

    function: Function

    def __call__(self, parameters: tuple[Tensor, ...], source: Tensor, target: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(source.shape[:-1], target.shape[:-1])
        pair = torch.cat([source.expand(*lead, -1), target.expand(*lead, -1)], -1)
        module: Any = self.function.module
        names = [name for name, _ in module.named_parameters()]
        scores: Tensor = functional_call(module, dict(zip(names, parameters, strict=True)), (pair,))
        return scores


class Uniform(Score):
    """a_mn = 1, within `window` entries of n where it is given; `.normalize("sum")` makes it average pooling.

    Example:

        >>> from structconv import Uniform
        >>> Uniform(window=1).normalize("sum").basis(torch.zeros(3, 1)).dense()[0]
        tensor([[0.5000, 0.3333, 0.0000],
                [0.5000, 0.3333, 0.5000],
                [0.0000, 0.3333, 0.5000]])
    """

    reads = ("positions",)
    batching = "offsets"

    def __init__(self, window: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.support = None if window is None else Window(window)  # type: ignore[arg-type]
        self.window = None if self.support is None else self.support.radius

    def forward(self, inputs: Inputs) -> Basis:
        output_positions, window = inputs.output_positions, self.support
        sizes = inputs.num_inputs, inputs.num_outputs
        uniform = values.Uniform(inputs.x.new_ones(()), *sizes)
        window = window if output_positions is None else at_positions(window, output_positions, *sizes)
        return uniform if window is None else Masked(uniform, window)


def _projected(owner: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """x Theta and z Theta, head by head."""
    if inputs.projected is None:
        raise ConfigError(f"{owner}(on='projected')", "a layer must provide x Theta", "none", "Use it inside Conv.")
    return inputs.projected


def _term(entries: Tensor, vector: Tensor | None, heads: int) -> Tensor | Term:
    """<vector_k, entries_km>, (..., K or 1, M, C) -> (..., K, M); zeros without a vector."""
    if vector is None:
        return entries.new_zeros(()).expand(*entries.shape[:-3], heads, entries.shape[-2])
    return Term(entries, vector)
