"""Attention layers: multi-head attention with torch's weights, and the non-local block."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from structconv.bases.algebra import Sizes, as_support
from structconv.bases.base import Basis
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.masks import STRUCTURE_IF_GIVEN
from structconv.mechanisms.scores import Concatenation, DotProduct, EmbeddedGaussian, Gaussian
from structconv.nn.cache import Cache
from structconv.nn.conv import ERRORS, CallNames, Conv
from structconv.nn.inputs import check_inputs, is_nested, unpacked
from structconv.nn.layer import Device, Layer, kind, recorded, take
from structconv.planning import Plan
from structconv.shapes import check_choice, check_divides
from structconv.structures.graph import Graph
from structconv.structures.supports import EdgeSupport, Padding, Support
from structconv.structures.values import altered
from structconv.weights import LowRank, Weight
from structconv.weights.factored import Projections

__all__ = ["MultiheadAttention", "NonLocalBlock"]


class MultiheadAttention(Conv):
    """y_n = sum_k sum_m softmax_m(<W^q_k z_n, W^k_k x_m> / sqrt(D)) x_m V_k O_k + b (Vaswani et al. 2017, sec. 3.2).

    `layer(query)` is self-attention, `layer(query, key_value)` is torch's `layer(query, key_value, key_value)`: one
    tensor gives keys and values. In the formula the query is z and key_value is x. The output has an entry for each
    entry of the query.

    Args:
        embed_dim: P' of the query and Q of y, split among the heads.
        num_heads: K; D = embed_dim / num_heads.
        dropout: on the weights, when training.
        bias: on queries, keys, values and output. The bias of the values is added once to each output, which is what
            attention to it amounts to where the weights sum to one.
        kdim: P of key_value; embed_dim where absent.
        num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads queries (grouped queries,
            Ainslie et al. 2023); num_heads where absent.

    query (..., N, P'), key_value (..., M, P) -> (..., N, Q), batch first. O(M N Q) flops, O(N Q) memory beside the
    arguments.

    Raises:
        ConfigError: heads that do not divide. ShapeError: channels that do not fit.

    Equals `Conv(DotProduct(heads, D).scaled().softmax(), P, P, weight=LowRank(D))` with biases.

    Example:

        >>> from structconv import Causal, MultiheadAttention
        >>> attention, x = MultiheadAttention(16, 4), torch.randn(2, 10, 16)
        >>> attention(x, keep=Causal()).shape
        torch.Size([2, 10, 16])
        >>> attention(torch.randn(2, 3, 16), x).shape                # query, then key and value
        torch.Size([2, 3, 16])
    """

    call_names = CallNames("MultiheadAttention", "key_value", "query", "layer(query, key_value)",
                           "layer(query, structure=graph)")
    fixed = Conv.fixed | {"embed_dim", "num_heads", "head_dim", "kdim", "dropout", "shared_by"}

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True,
                 kdim: int | None = None, num_kv_heads: int | None = None, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        dim = check_divides("MultiheadAttention", "num_heads", num_heads, "embed_dim", embed_dim)
        shared_by = 1 if num_kv_heads is None else check_divides("MultiheadAttention", "num_kv_heads", num_kv_heads,
                                                                 "num_heads", num_heads)
        scores = DotProduct(num_heads, dim, shared_by=shared_by, bias=bias)
        attention = scores.scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax()
        super().__init__(attention.dropout(dropout) if dropout else attention, embed_dim if kdim is None else kdim,
                         embed_dim, weight=LowRank(dim, shared_by), bias=bias, other_channels=embed_dim,
                         device=device, dtype=dtype)
        self.embed_dim, self.num_heads, self.head_dim, self.kdim = embed_dim, num_heads, dim, self.in_channels
        self.dropout, self.shared_by = dropout, shared_by
        values = torch.zeros(num_heads // shared_by, dim, device=device, dtype=dtype)
        self.value_bias = nn.Parameter(values) if bias else None

    def forward(self, query: Tensor | Cache, key_value: Tensor | Cache | None = None,  # type: ignore[override]
                *others: Any, keep: Any = None, drop: Any = None, structure: Graph | Support | None = None,
                positions: int | Tensor | None = None, return_weights: bool = False) -> Any:
        """y, or (y, weights (..., K, M, N); (..., K, E) where the pairs are listed).

        Args:
            query: the queries come from it, (..., N, P').
            key_value: the keys and values come from it, (..., M, P), or from a `Cache` of it by `prepare`; without it
                the query attends to itself. `layer(prepared)` is the self-attention of all prepared entries.
            keep, drop: the pairs (m, n) that exist, or that do not: a `Support` such as `Causal()`, a `Graph`, or
                booleans (..., M) of the keys, as `Padding`; a table of pairs goes as `DenseMask(table_MN)`.
            structure: a `Graph`, a `Support`, or a batch, outside which no pair exists, beside the mask.
            positions: where the queries stand among the keys; see `Conv.forward`.
            return_weights: give the weights too.
        """
        if type(query) is Proxy:
            return recorded(self, query, key_value, *others, keep=keep, drop=drop, structure=structure,
                            positions=positions, return_weights=return_weights)
        if others:
            raise ConfigError("MultiheadAttention", "the arguments must be query and key_value",
                              f"{2 + len(others)} arguments",
                              "torch's layer(query, key, value) is layer(query, key_value): one tensor gives both.")
        plain = key_value is None and type(query) is Tensor and self.in_channels == self.other_channels
        x, z = (query, None) if plain else self._inputs(query, key_value)
        if type(x) is not Tensor and is_nested(x, z):
            return self._nested(x, z, structure, keep=keep, drop=drop, return_weights=return_weights)
        try:
            pairs = None if keep is drop is structure is None else self._pairs(x, z, keep, drop, structure)
            return super().forward(x, pairs, z=z, positions=positions, return_weights=return_weights)
        except ShapeError:
            if type(x) is Tensor:
                check_inputs(self, x, z, None, 0)  # by the names of its own arguments
            raise

    computes = forward

    def plan(self, query: Tensor | Cache, key_value: Tensor | Cache | None = None, *,  # type: ignore[override]
             keep: Any = None, drop: Any = None, structure: Graph | Support | None = None,
             positions: int | Tensor | None = None) -> Plan:
        """The plan that computes such a call; `print` it."""
        x, z, pairs = self._with_pairs(query, key_value, keep, drop, structure)
        return super().plan(x, pairs, z=z, positions=positions)

    def basis(self, query: Tensor | Cache, key_value: Tensor | Cache | None = None, *,  # type: ignore[override]
              keep: Any = None, drop: Any = None, structure: Graph | Support | None = None,
              positions: int | Tensor | None = None) -> Basis:
        """The basis that such a call would apply."""
        x, z, pairs = self._with_pairs(query, key_value, keep, drop, structure)
        return super().basis(x, pairs, z=z, positions=positions)

    def prepare(self, key_value: Tensor, structure: Any = None) -> Cache:
        """Make the keys and values of key_value (..., M, P), for calls `layer(query, prepared)` that equal
        `layer(query, key_value)`, and for `step`; see `Conv.prepare`."""
        return super().prepare(key_value, structure)

    def step(self, cache: Cache, x: Tensor, *, query: Tensor | None = None,
             **options: Any) -> Any:
        """Append entries x (..., m, P) to the prepared keys and values, and compute the outputs that stand there: those
        of `query`, or of x."""
        return super().step(cache, x, z=query, **options)

    def calibrate(self, query: Tensor, key_value: Tensor | None = None, *, keep: Any = None,  # type: ignore[override]
                  drop: Any = None, structure: Graph | Support | None = None) -> MultiheadAttention:
        """Scale Theta so that the output's variance equals that of the keys and values; see `Conv.calibrate`."""
        x, z, pairs = self._with_pairs(query, key_value, keep, drop, structure)
        super().calibrate(cast(Tensor, x), pairs, z=z)
        return self

    def _inputs(self, query: Any, key_value: Any) -> tuple[Any, Any]:
        """x and z of a call: the entries attended to, and those that attend, if they are others."""
        if key_value is not None:
            if type(query) is Cache:
                raise ConfigError("MultiheadAttention", "query must be a tensor", repr(query),
                                  "Say layer(query, prepared).")
            return key_value, query
        if self.in_channels != self.other_channels and type(query) is not Cache:
            expected = f"key_value must be given, with shape (..., M, P={self.in_channels})"
            raise ShapeError("MultiheadAttention", expected, "none",
                             f"A query has P'={self.other_channels} channels and cannot stand for it.")
        return query, None

    def _with_pairs(self, query: Any, key_value: Any, keep: Any, drop: Any, structure: Any) -> tuple[Any, Any, Any]:
        """x, z and the pairs that exist; of nested tensors their entries."""
        x, z = self._inputs(query, key_value)
        if is_nested(x, z):
            x, z, structure = unpacked(self, x, z, structure)
        return x, z, self._pairs(x, z, keep, drop, structure)

    def _arguments(self, x: Any, z: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((x,) if z is None else (z, x)), {}

    def _names(self, z: Any) -> CallNames:
        return self.call_names._replace(x="query") if z is None else self.call_names

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, like those of a new layer."""
        super().reset_parameters()
        if self.value_bias is not None:
            self.value_bias.zero_()

    def _added(self, theta: Weight, bias: Tensor | None) -> tuple[Weight, Tensor | None]:
        """Theta, and b plus the term that the values' bias adds to each output; if the output projection is called as a
        module, Theta adds the values' bias before this call."""
        own = self._parameters
        values: Tensor | None = own["value_bias"] if "value_bias" in own else self.value_bias  # noqa: SIM401 - lazy
        if values is None:
            return theta, bias
        values = values if self.shared_by == 1 else values.repeat_interleave(self.shared_by, 0)
        if isinstance(theta, Projections):
            return altered(theta, value_bias=values.flatten()), bias
        if not isinstance(theta, LowRank):
            return theta, theta.join(values.unsqueeze(-2), bias).squeeze(-2)
        flat, output = values.flatten(), theta.output.flatten(0, 1)
        return theta, flat @ output if bias is None else torch.addmv(bias, output.mT, flat)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> Self:
        """Convert torch's layer: weights are copied, frozen parameters stay frozen; always batch first.

        Raises:
            ConfigError: keys and values from different channels, an extra key, or an attended zero.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise ConfigError(cls.__name__, "module must be a torch.nn.MultiheadAttention", kind(module))
        for unsupported in ("bias_k", "bias_v", "add_zero_attn"):
            if isinstance(getattr(module, unsupported), Tensor) or getattr(module, unsupported) is True:
                raise ConfigError(cls.__name__, f"module must be without {unsupported}", "one that has it")
        if module.kdim != module.vdim:
            raise ConfigError(cls.__name__, "kdim and vdim must be equal, because one tensor gives keys and values",
                              f"{module.kdim} and {module.vdim}")
        layer = cls(module.embed_dim, module.num_heads, dropout=module.dropout, bias=module.in_proj_bias is not None,
                    kdim=module.kdim)
        layer.to(module.out_proj.weight)
        layer._copy(module)
        return layer.train(module.training)

    def _copy(self, module: nn.MultiheadAttention) -> None:
        projections = ((module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
                       if module.in_proj_weight is None else module.in_proj_weight.chunk(3))
        query, key, value = cast("tuple[Tensor, Tensor, Tensor]", projections)
        dot = cast(DotProduct, self.attention)
        theta, output, bias = cast(Any, self.weight), module.out_proj.weight, module.in_proj_bias
        take(dot.query.weight, query, query)
        take(dot.key.weight, key, key)
        take(theta.value.weight, value, value)
        take(theta.output.weight, output, output)
        if self.value_bias is not None:
            query_bias, key_bias, value_bias = bias.chunk(3)
            take(dot.query.bias, query_bias, bias)
            take(dot.key.bias, key_bias, bias)
            take(self.value_bias, value_bias.view_as(self.value_bias), bias)
            take(self.bias, module.out_proj.bias, module.out_proj.bias)

    def _pairs(self, x: Any, z: Tensor | None, keep: Any, drop: Any, structure: Any) -> Graph | Support | None:
        """The pairs that exist by the mask and by the structure, `None` for all."""
        x = x.x if type(x) is Cache else x
        if structure is not None and not isinstance(structure, Graph | Support):
            samples = getattr(structure, "samples", None)
            if samples is None:
                raise ConfigError("MultiheadAttention", "structure must be a Graph, a Support or a batch",
                                  type(structure).__name__)
            structure = samples
        if keep is None and drop is None:
            return structure
        try:
            sizes = Sizes(x.shape[-2], (x if z is None else z).shape[-2])
        except ERRORS:
            check_inputs(self, x, z, None, 0)
            raise
        keep, drop = (Padding(mask) if isinstance(mask, Tensor) else mask for mask in (keep, drop))
        mask = as_support(sizes, keep, drop)
        if structure is None:
            return mask
        return mask & (EdgeSupport(structure) if isinstance(structure, Graph) else structure)


class NonLocalBlock(Layer):
    """y_n = x_n + (sum_m f(x_m, x_n) x_m V) O / C(x), on images (Wang et al. 2018, eq. 1 and 6).

    f is one of the paper's four functions, C the sum of f over m for the two Gaussian ones and the number of entries
    for the others: "embedded_gaussian" (a softmax over dot products), "gaussian", "dot_product" (never builds the
    (M, M) matrix), "concatenation" (a ReLU of w^T [theta(x_m), phi(x_n)]).

    Args:
        channels: of the image. inner: of theta, phi and V; half of the channels where absent.
        function: f.
        zero_init: begin with O = 0, so that a new block is the identity (section 3.3).

    Images (B, C, *S) with `axes` axes S -> the same shape.

    Equals, with "embedded_gaussian", x + `Conv(DotProduct(1, inner).softmax(), C, C, weight=LowRank(inner))` of x.

    Example:

        >>> from structconv.nn import NonLocalBlock
        >>> NonLocalBlock(8, function="dot_product")(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    fixed = frozenset(("zero_init",))
    FUNCTIONS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")

    def __init__(self, channels: int, inner: int | None = None, function: str = "embedded_gaussian", *,
                 axes: int = 2, bias: bool = True, zero_init: bool = True, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_choice("NonLocalBlock", "function", function, self.FUNCTIONS)
        inner = max(channels // 2, 1) if inner is None else inner
        mechanism: Mechanism
        if function == "embedded_gaussian":
            mechanism = EmbeddedGaussian(inner).normalize("sum")
        elif function == "gaussian":
            mechanism = Gaussian().normalize("sum")
        elif function == "dot_product":
            mechanism = DotProduct(dim=inner).normalize("count")
        else:
            mechanism = Concatenation(inner).relu().normalize("count")
        self.axes, self.zero_init = axes, zero_init
        self.conv = Conv(mechanism, channels, channels, weight=LowRank(inner), bias=bias, device=device, dtype=dtype)
        self._begin()

    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, like those of a new layer."""
        self.conv.reset_parameters()
        self._begin()

    def _begin(self) -> None:
        if self.zero_init:
            nn.init.zeros_(cast(Any, self.conv.weight).output.weight)

    def forward(self, image: Tensor) -> Tensor:
        """(..., C, *S) -> (..., C, *S)."""
        y: Tensor = self.conv(image, axes=self.axes)
        return image + y

    def plan(self, image: Tensor) -> Plan:
        """The plan that computes the term beside the image; `print` it."""
        return self.conv.plan(image, axes=self.axes)

    def basis(self, image: Tensor) -> Basis:
        """The basis of the term beside the image."""
        return self.conv.basis(image, axes=self.axes)
