"""torch's layers of the same names, computed by structconv: change the import, keep everything else.

Each class extends torch's own, so that constructors, defaults, initialization, `repr` and `state_dict` are torch's, and
`isinstance` holds. Only the computation differs. Arguments that structconv does not compute are refused with a
`ConfigError`. Other names of `torch.nn` are found here too, unchanged.

    import structconv.compat.torch as nn  # instead of torch.nn
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from structconv.arguments import suggesting
from structconv.bases.entrywise import Normalized
from structconv.bases.shift import Shift
from structconv.compat.attending import Mask, attend, attend_plainly
from structconv.errors import ConfigError, ShapeError, StructconvError, text_of
from structconv.kernels.small_attention import composed_attention, is_small
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.grids import Cuboid, Pool
from structconv.nn.conv import call_of
from structconv.nn.direct import direct_of, dtypes_of_torch, is_plain, must_be_planned
from structconv.nn.grids import theta_of_kernel
from structconv.nn.images import to_entries, to_image
from structconv.nn.layer import recorded, refuse_script
from structconv.planning import kernel as register
from structconv.planning.plan import plan_for
from structconv.planning.tuning import Autotuning
from structconv.primitives.fused_attention import is_readable
from structconv.primitives.images import FEW_SUMMED, FEWEST_SUMMED, few_means, is_few, window_means
from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.layer import attend_entries
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import linear
from structconv.shapes import check_tensor
from structconv.structures.grid import Grid
from structconv.torch_compat import (
    all_plain,
    any_autocast,
    conv_forward,
    encoder_attention,
    encoder_linear,
    tracing,
    weight_and_bias,
)
from structconv.weights import Eye, Full, Grouped, Weight

__all__ = ["AvgPool1d", "AvgPool2d", "AvgPool3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
           "ConvTranspose3d", "MultiheadAttention", "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
           "TransformerEncoder", "TransformerEncoderLayer", "scaled_dot_product_attention"]

TransformerDecoder = nn.TransformerDecoder
#: Channels above which, with fewer entries than channels, copies of a weight's gradient take most of the time.
_LARGE = 256


def __getattr__(name: str) -> Any:
    """Return torch's own of a name that we do not compute, such as `Linear`."""
    if not name.startswith("_") and hasattr(nn, name):
        return getattr(nn, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Layer:
    """Base of the layers: an unknown argument is an error that names the nearest, and `torch.fx` records calls."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if issubclass(cls, nn.Module):
            cls.__init__ = suggesting(cls.__init__)  # type: ignore[method-assign]
            if cls.forward.__module__.startswith("torch.nn"):
                cls.forward = _recordable(cls.forward)

    def __getstate__(self: Any) -> dict[str, Any]:
        """The state of the layer, without the mechanism that it builds again from its options."""
        state = dict(self.__dict__)
        state.pop("_mechanism", None)
        return state

    def __prepare_scriptable__(self: Any) -> NoReturn:
        """Raise an error, where `torch.jit.script` asks for what it compiles."""
        refuse_script(self, "Or script torch's layers: structconv.compat.to_torch(model).")


def _is_plain_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer that nothing wraps, replaces or watches, as LoRA does for example."""
    return type(layer) in (nn.Linear, NonDynamicallyQuantizableLinear) and all_plain(layer)


def _recordable(forward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own forward pass of a layer, except where `torch.fx` traces it."""
    @_named_as(forward)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        if args and type(args[0]) is Proxy:
            return recorded(self, *args, **options)
        return forward(self, *args, **options)

    called.__doc__ = "The arguments and results of torch's."
    return called


# -- attention ----------------------------------------------------------------------------------------------------

def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False) -> Tensor:
    """Compute softmax(scale query key^T + attn_mask) value: `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query, key, value: (..., H, L, E), (..., H, S, E), (..., H, S, Ev).
        attn_mask: broadcasts to (..., H, L, S). Booleans: True takes part. Numbers: added to the scores.
        dropout_p: applied to the weights, whenever it is not 0.
        is_causal: query l attends to keys s <= l, of those that attn_mask keeps.
        scale: 1 / sqrt(E) by default.
        enable_gqa: key and value may have fewer heads, of which each serves as many consecutive heads of the query.

    Returns:
        (..., H, L, Ev). A query without any key is zero, and so are its gradients.

    Raises:
        ConfigError: a mask of integers. ShapeError: sizes that do not fit.

    Example:

        >>> from structconv.compat.torch import scaled_dot_product_attention
        >>> q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-5)
        True
    """
    if type(query) is Proxy:
        arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        return cast(Tensor, query.tracer.create_proxy("call_function", scaled_dot_product_attention, arguments, {}))
    if type(query) is type(key) is Tensor and not dropout_p and query.dim() == key.dim() == 4 and (
            enable_gqa or query.shape[1] == key.shape[1]):
        plain = attend_plainly(query, key, value, attn_mask, is_causal, scale)
        if plain is not None:
            return plain
    for name, own in (("query", query), ("key", key), ("value", value)):
        check_tensor("scaled_dot_product_attention", name, own)
        if own.dim() < 2:
            raise ShapeError("scaled_dot_product_attention", f"{name} must have shape (..., H, L, E)", tuple(own.shape))
    heads = query.dim() > 2 and query.shape[-3] != 0
    if not enable_gqa and heads and key.shape[-3] != query.shape[-3] and 1 not in (key.shape[-3], query.shape[-3]):
        raise ShapeError("scaled_dot_product_attention", f"key must have the H={query.shape[-3]} heads of query",
                         tuple(key.shape), "Fewer heads of keys need enable_gqa=True.")
    if heads and query.shape[-3] == 1 != key.shape[-3]:
        query = query.expand(*query.shape[:-3], key.shape[-3], *query.shape[-2:])
    if not heads:  # then one, also of no sequences
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(-3)
    y, _ = attend(query, key, value, Mask.of(attn_mask, is_causal), scale=scale, dropout=dropout_p)
    return y if heads else y.squeeze(-3)


class MultiheadAttention(_Layer, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` as structured convolution, with equal arguments, parameters, masks and results.

    Masks are torch's: True of `key_padding_mask` and of `attn_mask` leaves a key out, and numbers are added.

    A query without any key gets out_proj of zero, with finite gradients; torch gives NaN if weights are asked for.
    Attention weights cost (N, H, L, S) memory: say `need_weights=False` where you do not read them.

    `is_causal=True` states that `attn_mask` is the causal mask. As in torch, the mask is then read only with
    `need_weights=True` or a `key_padding_mask`. With `add_bias_kv` or `add_zero_attn` it is always read, so that the
    appended keys take part for all queries; torch leaves them out where it does not read the mask.

    Raises:
        ConfigError: nested tensors, or is_causal without an attn_mask, for which torch raises an error, too.

    Example:

        >>> from structconv.compat.torch import MultiheadAttention
        >>> ours, theirs = (kind(8, 2, batch_first=True) for kind in (MultiheadAttention, torch.nn.MultiheadAttention))
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> y, expected = (layer(x, x, x, key_padding_mask=padding)[0] for layer in (ours, theirs))
        >>> torch.allclose(y, expected, atol=1e-5)
        True
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """(L, N, E), (S, N, kdim), (S, N, vdim) -> (L, N, E), and the weights (N, L, S) or `None`; see torch's."""
        if type(query) is Proxy:
            return cast(Any, recorded(self, query, key, value, key_padding_mask, need_weights, attn_mask,
                                      average_attn_weights, is_causal))
        if (query is key is value and (key_padding_mask is None or attn_mask is None)
                and not (need_weights and torch.is_grad_enabled())):  # whose gradients the one node does not have
            pair = self._directly(query, key_padding_mask, attn_mask, is_causal, need_weights, average_attn_weights)
            if pair is not None:
                return pair
        self._check(query, key, value, attn_mask, is_causal)
        batched, first = query.dim() == 3, 0 if self.batch_first and query.dim() == 3 else -3
        q, k, v = self._by_heads(query, key, value, first)
        longer = self.add_zero_attn or self.bias_k is not None  # by keys that a causal structure would exclude
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal and not need_weights and not longer)
        k, v, mask = self._lengthened(k, v, mask)
        y, weights = attend(q, k, v, mask, dropout=self.dropout if self.training else 0.0, weights=need_weights)
        y = y.transpose(-3, -2).flatten(-2) if first == 0 or not batched else y.permute(2, 0, 1, 3).flatten(-2)
        y = linear(y, self.out_proj.weight, self.out_proj.bias) if _is_plain_linear(self.out_proj) else self.out_proj(y)
        if weights is not None and average_attn_weights:
            weights = weights.mean(-3)
        return y, weights

    def _directly(self, x: Tensor, padding: Tensor | None, mask: Tensor | None, hint: bool, weights: bool, mean: bool
                  ) -> tuple[Tensor, Tensor | None] | None:
        """Attention of few entries to themselves, by the kernel that a plan would choose; `None` for other calls."""
        if is_compiling() or type(x) is not Tensor or x.is_nested or x.dim() != 3 or not self.batch_first:
            return None  # a traced program shall hold for any number of entries
        own, last, heads, shape = self._parameters, cast(nn.Module, self._modules["out_proj"]), self.num_heads, x.shape
        weight, bias = own.get("in_proj_weight"), own.get("in_proj_bias")
        if (weight is None or self.bias_k is not None or self.add_zero_attn or shape[2] != self.embed_dim
                or (self.training and self.dropout) or not is_small(shape[1], self.head_dim)
                or not is_plain(self, Normalized) or not _is_plain_linear(last)):
            return None
        if _LARGE < shape[2] > shape[0] * shape[1] and weight.requires_grad and torch.is_grad_enabled():
            return None  # its gradient would be copied from those of queries, keys and values
        output, after = last._parameters.get("weight"), last._parameters.get("bias")
        if output is None or not is_direct(x, weight, bias, output, after) or (core := kernels()) is None:
            return None
        causal = hint and not weights and mask is not None  # as torch, which then reads no mask
        table = None if causal else _table(shape, heads, padding, mask)
        if hint is not causal or (table is None and not causal and not padding is mask is None):
            return None
        query, key, value = weight.view(3, -1, weight.shape[1]).unbind()
        of_query, of_key, of_value = (None, None, None) if bias is None else bias.view(3, -1).unbind()
        of_value, scale = None if of_value is None else of_value.view(heads, -1), self.head_dim ** -0.5
        tensors = x, query, of_query, key, of_key, value, of_value, output, after, table
        if not weights:
            return attend_entries(None, composed_attention(heads, scale, causal), *tensors, None, heads, scale, causal,
                                  False), None
        weighted: tuple[Tensor, Tensor] = core.attend_entries_weighted(*tensors, heads, scale, causal, mean)
        return weighted

    def _check(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        owner = "MultiheadAttention"
        sizes = ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)
        one = query is key is value and self._qkv_same_embed_dim
        for name, own, channels in sizes[:1] if one else sizes:
            nested = isinstance(own, Tensor) and own.is_nested
            fits = isinstance(own, Tensor) and not nested and 1 < own.dim() < 4 and own.dim() == query.dim()
            if fits and own.shape[-1] == channels:
                continue
            if nested:
                raise ConfigError(owner, f"{name} must be a padded tensor", "a nested one", "Pad it by "
                                  "torch.nested.to_padded_tensor, or use structconv.MultiheadAttention.")
            check_tensor(owner, name, own)
            raise ShapeError(owner, f"{name} must have shape (L, {channels}), or a batch of these" +
                             ("" if name == "query" else ", with as many axes as query"), tuple(own.shape))
        if key is not value and key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(owner, f"value must have the entries of key, {text_of(key.shape[:-1])}",
                             tuple(value.shape[:-1]))
        if is_causal and attn_mask is None:
            raise ConfigError(owner, "attn_mask must be given with is_causal=True, which says what it is", "none")

    def _by_heads(self, query: Tensor, key: Tensor, value: Tensor, first: int) -> list[Tensor]:
        """query, key and value (L, E), (N, L, E) or (L, N, E) times their weights, (..., H, L, D).

        One tensor is multiplied once. They are views of the products.
        """
        tensors = query, key, value
        weights: Any = self.in_proj_weight
        biases: Any = self.in_proj_bias
        sizes = [1, 1, 1] if weights is None or key is not value else [1, 2] if query is not key else [3]
        if weights is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = self._split(weights, sizes)
        biases = (None, None, None) if biases is None else self._split(biases, sizes)
        axes = (1, 2, 0, 3) if query.dim() == 2 else (2, 0, 3, 1, 4) if first == 0 else (2, 1, 3, 0, 4)
        result: list[Tensor] = []
        for t, weight, bias, size in zip(tensors, weights, biases, sizes, strict=False):
            product = linear(t, weight, bias)
            parts = product.view(*product.shape[:-1], size, self.num_heads, self.head_dim).permute(axes)
            result.extend(parts.unbind())
        return result

    def _split(self, t: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        """Split the rows of queries, keys and values, `sizes` of them together."""
        return (t,) if len(sizes) == 1 else t.split_with_sizes([size * self.embed_dim for size in sizes])

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, attn_mask: Tensor | None, hint: bool) -> Mask:
        """The mask of a call, from torch's masks, in which True excludes a key."""
        mask, outputs, inputs = Mask(), q.shape[-2], k.shape[-2]
        if padding is not None:
            if padding.shape != (*q.shape[:-3], inputs):
                raise ShapeError("MultiheadAttention", f"key_padding_mask must have shape {(*q.shape[:-3], inputs)}",
                                 tuple(padding.shape))
            mask = mask.joined(*Mask.of(_kept(padding)[..., None, None, :])[:2])
        elif hint:
            return Mask.of(None, causal=True)
        if attn_mask is not None:
            each = math.prod(q.shape[:-2])
            if tuple(attn_mask.shape) not in ((outputs, inputs), (each, outputs, inputs)):
                raise ShapeError("MultiheadAttention", f"attn_mask must have shape {(outputs, inputs)} or "
                                 f"{(each, outputs, inputs)}", tuple(attn_mask.shape))
            own = _kept(attn_mask)
            mask = mask.joined(*Mask.of(own if own.dim() == 2 else own.view(*q.shape[:-2], outputs, inputs))[:2])
        return mask

    def _lengthened(self, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Mask]:
        """Append the keys and values of `add_bias_kv` and `add_zero_attn`, which all queries read."""
        rows = [] if self.bias_k is None else [(self.bias_k, self.bias_v)]
        for row in rows + [(None, None)] * self.add_zero_attn:
            shape = (*k.shape[:-2], 1, k.shape[-1])
            k, v = (torch.cat([t, t.new_zeros(shape) if own is None else
                               own.view(self.num_heads, 1, self.head_dim).expand(shape)], -2)
                    for t, own in zip((k, v), row, strict=True))
            keep, bias = (None if t is None else F.pad(t, (0, 1), value=fill)
                          for t, fill in ((mask.keep, True), (mask.bias, 0.0)))
            mask = Mask(keep, bias, mask.support)
        return k, v, mask


def _table(shape: torch.Size, heads: int, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A mask of torch's, or a padding, as a kernel reads it for x (B, N, E); `None` if no kernel can."""
    table, expected = (padding, shape[:2]) if mask is None else (mask, (shape[1], shape[1]))
    if type(table) is not Tensor or table.shape != expected or table.requires_grad or table.layout is not torch.strided:
        return None
    table = _kept(table)
    table = table[:, None, None] if mask is None else table
    return table if is_readable(table, (shape[0], heads, shape[1]), shape[1]) else None


def _kept(mask: Tensor) -> Tensor:
    """Negate a boolean mask, from True for excluded pairs to True for included ones; return other masks as they are."""
    return ~mask if mask.dtype == torch.bool else mask


def _named_as(original: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a method the signature of torch's."""
    return functools.wraps(original, assigned=("__doc__", "__name__", "__annotations__"))


#: Steps that an encoder layer may take itself, unless a program has replaced them.
_FORWARDS = nn.Dropout.forward, nn.LayerNorm.forward, nn.Linear.forward


def _normed(norm: Any, x: Tensor) -> Tensor:
    """The call of a norm that is its `forward`."""
    return torch.layer_norm(x, norm.normalized_shape, *weight_and_bias(norm), norm.eps)


def _multiplied(layer: Any, x: Tensor) -> Tensor:
    """The call of a linear layer that is its `forward`."""
    return F.linear(x, *weight_and_bias(layer))


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`, whose attention is `structconv.compat.torch.MultiheadAttention`.

    torch's fused inference, and its removal of padding by nested tensors, are not used.

    Example:

        >>> from structconv.compat.torch import TransformerEncoderLayer
        >>> ours, theirs = TransformerEncoderLayer(8, 2, 16).eval(), torch.nn.TransformerEncoderLayer(8, 2, 16).eval()
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(5, 2, 8)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """

    @_named_as(nn.TransformerEncoderLayer.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _share(self)

    def forward(self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
                is_causal: bool = False) -> Tensor:
        """(L, N, E) -> (L, N, E), or with N first; see torch's."""
        if type(src) is Proxy:
            return cast(Tensor, recorded(self, src, src_mask, src_key_padding_mask, is_causal))
        if src_mask is not None or src_key_padding_mask is not None or is_causal or is_compiling():
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        dropouts = self.dropout, self.dropout1, self.dropout2
        norm1, norm2, linear1, linear2, first = self.norm1, self.norm2, self.linear1, self.linear2, self.norm_first
        if (any(type(one) is not nn.Dropout or (one.training and one.p) for one in dropouts)
                or not type(norm1) is type(norm2) is nn.LayerNorm or not type(linear1) is type(linear2) is nn.Linear
                or not all_plain(*dropouts, norm1, norm2, linear1, linear2)
                or (nn.Dropout.forward, nn.LayerNorm.forward, nn.Linear.forward) != _FORWARDS
                or type(self)._sa_block is not encoder_attention or type(self)._ff_block is not encoder_linear
                or "_sa_block" in self.__dict__ or "_ff_block" in self.__dict__):
            return super().forward(src)
        x = _normed(norm1, src) if first else src  # torch's steps, without dropout and checks of masks
        y = src + self.self_attn(x, x, x, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False)[0]
        y = y if first else _normed(norm1, y)
        y = y + _multiplied(linear2, self.activation(_multiplied(linear1, _normed(norm2, y) if first else y)))
        return y if first else _normed(norm2, y)


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer`, whose attentions are `structconv.compat.torch.MultiheadAttention`.

    Example:

        >>> from structconv.compat.torch import TransformerDecoderLayer
        >>> TransformerDecoderLayer(8, 2, 16)(torch.randn(5, 2, 8), torch.randn(7, 2, 8)).shape
        torch.Size([5, 2, 8])
    """

    @_named_as(nn.TransformerDecoderLayer.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _share(self)


class TransformerEncoder(_Layer, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` without nested tensors: `enable_nested_tensor` has no effect.

    Example:

        >>> from structconv.compat.torch import TransformerEncoder, TransformerEncoderLayer
        >>> encoder = TransformerEncoder(TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=2)
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> encoder(torch.randn(2, 5, 8), src_key_padding_mask=padding).shape
        torch.Size([2, 5, 8])
    """

    @_named_as(nn.TransformerEncoder.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        layer = args[0] if args else options.get("encoder_layer")
        if isinstance(layer, _Layer):
            take_fast_path(layer)  # for the values that torch would read
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor is True")
            super().__init__(*args, **options)
        for part in (layer, *self.modules()):
            if isinstance(part, _Layer):
                leave_fast_path(part)


class Transformer(_Layer, nn.Transformer):
    """`torch.nn.Transformer`, whose attentions are `structconv.compat.torch.MultiheadAttention`.

    A `custom_encoder` or `custom_decoder` stays as it is.

    Example:

        >>> from structconv.compat.torch import Transformer
        >>> model = Transformer(8, 2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, batch_first=True)
        >>> model(torch.randn(2, 7, 8), torch.randn(2, 5, 8), tgt_is_causal=False).shape
        torch.Size([2, 5, 8])
    """

    @_named_as(nn.Transformer.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        settings = inspect.signature(super().__init__).bind(*args, **options).arguments
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor is True")
            super().__init__(**settings)
        for part, custom in ((self.encoder, "custom_encoder"), (self.decoder, "custom_decoder")):
            if settings.get(custom) is None:
                _share(part)


def _share(module: nn.Module) -> None:
    """Give the parts of a module that are layers of torch our classes, which have the same attributes."""
    ours = {nn.MultiheadAttention: MultiheadAttention, nn.TransformerEncoder: TransformerEncoder,
            nn.TransformerEncoderLayer: TransformerEncoderLayer, nn.TransformerDecoderLayer: TransformerDecoderLayer}
    for part in module.modules():
        part.__class__ = ours.get(type(part), type(part))
        leave_fast_path(part)


#: Attributes by which torch chooses its fused inference, and their values without it.
_WITHOUT_FAST_PATH = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}


def leave_fast_path(module: Any) -> None:
    """Keep an encoder or its layer from torch's fused inference, which computes attention without calling it."""
    for attribute, value in _WITHOUT_FAST_PATH.items():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder) and attribute in module.__dict__:
            module.__dict__.setdefault(f"_torch_{attribute}", getattr(module, attribute))
            setattr(module, attribute, value)


def take_fast_path(module: Any) -> None:
    """Undo `leave_fast_path`."""
    for attribute in _WITHOUT_FAST_PATH:
        if f"_torch_{attribute}" in module.__dict__:
            setattr(module, attribute, module.__dict__.pop(f"_torch_{attribute}"))


# -- grids --------------------------------------------------------------------------------------------------------

def _mechanism(layer: nn.Module, kind: Callable[..., Mechanism], *options: Any) -> Mechanism:
    """The mechanism of these options; built again when they change, with the direct call."""
    if is_compiling():
        return cast(Mechanism, getattr(_TRACED, _traced(kind, *options)))
    built = layer.__dict__.get("_mechanism")
    if built is None or built[0] != options:
        try:
            mechanism = kind(*options).bound(1)
        except StructconvError as error:
            error.rename(type(layer).__name__)
            raise
        direct = direct_of(mechanism)
        built = layer.__dict__["_mechanism"] = options, mechanism, direct, dtypes_of_torch(direct)
    return cast(Mechanism, built[1])


def _is_left_to_torch(layer: Any, image: Any, weight: Tensor | None) -> bool:
    """Return True if a plan would take torch's own convolution."""
    if type(image) is not Tensor or weight is None:
        return False
    if is_compiling():  # its plan ends in torch's convolution, too, but takes 20 times as long to trace
        channels = weight.shape[0] if layer.transposed else weight.shape[1] * layer.groups
        fits = weight.dim() - image.dim() in (0, 1) and image.shape[1 - weight.dim()] == channels
        alike = image.dtype == weight.dtype or (  # autocast casts both
            torch.is_autocast_enabled(image.device.type) and torch.float64 not in (image.dtype, weight.dtype))
        return (fits and alike and weight.shape[2:] == layer.kernel_size and layer.padding_mode == "zeros"
                and image.dtype.is_floating_point and not (Autotuning.enabled or register.OF_USERS))
    built = layer.__dict__.get("_mechanism")
    if built is None:
        layer._mechanism_of()
        built = layer.__dict__["_mechanism"]
    return (weight.dim() - image.dim() in (0, 1) and image.dtype in built[3] and image.is_cpu
            and weight.shape[2:] == layer.kernel_size and layer.padding_mode == "zeros"
            and not is_few(image, weight, built[2].args[0].stride) and not must_be_planned(Shift))


#: The mechanisms of compiled layers, as attributes: a compiler reads modules from an object, and cannot build them.
_TRACED = SimpleNamespace()


def _traced(kind: Callable[..., Mechanism], *options: Any) -> str:
    """Build the mechanism of these options outside the trace, and return its name in `_TRACED`."""
    name = f"{kind.__name__}{options}"
    if not hasattr(_TRACED, name):
        setattr(_TRACED, name, kind(*options).bound(1))
    return name


setattr(_traced, "_dynamo_marked_constant", True)  # noqa: B010 - see torch_compat

def _directly(layer: nn.Module, image: Tensor, structure: Any = None) -> Tensor | None:
    """The result without a plan, `None` if the call needs one, by the mechanism that `_mechanism` has stored; see
    `structconv.nn.direct`."""
    if is_compiling():
        return None
    direct = layer.__dict__["_mechanism"][2]
    return None if direct is None or type(image) is not Tensor or image.is_nested else direct(layer, image, structure)


def _computed(layer: nn.Module, mechanism: Mechanism, theta: Weight, bias: Tensor | None, x: Tensor, **place: Any
              ) -> Tensor:
    """The plan's result for an image (..., P, *S) with `axes`, or for entries (..., M, P) of a `structure`; errors name
    the class of the layer."""
    try:
        call, sizes = call_of(mechanism, theta, bias, x, **place)
        return plan_for(call, image=sizes).run(call)
    except StructconvError as error:
        error.rename(type(layer).__name__)
        raise


def _check_image(layer: Any, image: Tensor, channels: int, axes: int) -> None:
    owner = type(layer).__name__
    check_tensor(owner, "input", image)
    if image.dim() not in (axes + 1, axes + 2) or image.shape[-1 - axes] != channels:
        raise ShapeError(owner, f"input must have shape (N, C={channels}, *S) with {axes} axes S, or without N",
                         tuple(image.shape))


def _laid_out(y: Tensor, image: Tensor) -> Tensor:
    """The result, contiguous if the image is, as torch's."""
    return y.contiguous() if image.is_contiguous() else y


def _is_recorded(image: Tensor) -> bool:
    """Return True within `torch.jit.trace`, whose programs take any sizes, and for tensors without numbers."""
    return (type(image) not in (Tensor, nn.Parameter) or tracing() is not None) and not is_compiling()


class _Conv(_Layer):
    """The forward pass of torch's convolutions."""

    _by_torch: Callable[..., Tensor]
    #: torch's method that a derived class, or an instance, may override.
    _own_forward: Callable[..., Tensor]

    def forward(self: Any, input: Tensor) -> Tensor:
        """(N, C, *S) or (C, *S) -> (N, C', *S') or (C', *S'); see torch's."""
        if getattr(type(self), "_conv_forward", None) is not self._own_forward or "_conv_forward" in self.__dict__:
            return cast(Tensor, super().forward(input))  # type: ignore[misc]
        parameters = self._parameters
        if _is_left_to_torch(self, input, weight := parameters.get("weight")):
            try:
                return self._by_torch(input, weight, parameters["bias"], self.stride, self.padding, self.dilation,
                                      self.groups)
            except (KeyError, RuntimeError):  # the general path below raises the error
                pass
        if type(input) is Proxy:
            return cast(Tensor, recorded(self, input))
        mechanism = self._mechanism_of()
        y = _directly(self, input)
        if y is not None:
            return y
        axes, weight = len(self.kernel_size), self.weight  # read once: a parametrization may change it at each reading
        _check_image(self, input, weight.shape[1] * self.groups, axes)
        theta = theta_of_kernel(weight, self.groups)
        return _laid_out(_computed(self, mechanism, theta, self.bias, input, axes=axes), input)

    def _mechanism_of(self: Any) -> Mechanism:
        padding = tuple(self.padding) if isinstance(self.padding, list) else self.padding
        return _mechanism(self, Cuboid, self.kernel_size, self.stride, self.dilation, padding, self.padding_mode)


class Conv1d(_Conv, nn.Conv1d):
    """`torch.nn.Conv1d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import Conv1d
        >>> ours, theirs = Conv1d(4, 8, 3, padding=1), torch.nn.Conv1d(4, 8, 3, padding=1)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 4, 6)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """

    _by_torch, _own_forward = staticmethod(F.conv1d), staticmethod(conv_forward[1])


class Conv2d(_Conv, nn.Conv2d):
    """`torch.nn.Conv2d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import Conv2d
        >>> Conv2d(4, 8, 3, padding=1)(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    _by_torch, _own_forward = staticmethod(F.conv2d), staticmethod(conv_forward[2])


class Conv3d(_Conv, nn.Conv3d):
    """`torch.nn.Conv3d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import Conv3d
        >>> Conv3d(4, 8, 3, padding=1)(torch.randn(2, 4, 6, 6, 6)).shape
        torch.Size([2, 8, 6, 6, 6])
    """

    _by_torch, _own_forward = staticmethod(F.conv3d), staticmethod(conv_forward[3])


class _ConvTranspose(_Layer):
    """The forward pass of torch's transposed convolutions."""

    _by_torch: Callable[..., Tensor]

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """(N, C, *S) or (C, *S) -> (N, C', *S') or (C', *S'); see torch's."""
        parameters = self._parameters
        if output_size is None and _is_left_to_torch(self, input, weight := parameters.get("weight")):
            try:
                return self._by_torch(input, weight, parameters["bias"], self.stride, self.padding, self.output_padding,
                                      self.groups, self.dilation)
            except (KeyError, RuntimeError):
                pass
        if type(input) is Proxy:
            return cast(Tensor, recorded(self, input, output_size))
        if _is_recorded(input):
            return cast(Tensor, cast(Any, super()).forward(input, output_size))
        axes, groups, weight = len(self.kernel_size), self.groups, self.weight  # read once, as above
        _check_image(self, input, weight.shape[0], axes)
        extra = self.output_padding if output_size is None else self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, axes, self.dilation)
        mechanism = self._mechanism_of()
        y = _directly(self, input, extra)
        if y is not None:
            return y
        appended = [more // step for more, step in zip(extra, self.stride, strict=True)]
        if any(appended):  # outputs beyond the last stride: they are those of zeros that follow the image
            input = F.pad(input, [size for zeros in reversed(appended) for size in (0, zeros)])
        entries, grid = to_entries(input, axes)
        finer = Grid(tuple((size - zeros - 1) * step - 2 * cut + spread * (width - 1) + more + 1
                           for size, zeros, step, cut, spread, width, more in
                           zip(grid.shape, appended, self.stride, self.padding, self.dilation, self.kernel_size, extra,
                               strict=True)))
        blocks_GPQK = weight.flatten(2).unflatten(0, (groups, -1))
        theta = (Full.of(blocks_GPQK.squeeze(0).permute(2, 0, 1)) if groups == 1 else
                 Grouped.of(blocks_GPQK.permute(3, 0, 1, 2)))
        y = _computed(self, mechanism, theta, self.bias, entries, structure=finer)
        return _laid_out(to_image(y, finer), input)

    def _mechanism_of(self: Any) -> Mechanism:
        return _mechanism(self, _transposed, self.kernel_size, self.stride, self.dilation, self.padding)


def _transposed(*options: Any) -> Mechanism:
    size, stride, dilation, padding = options
    return Cuboid(size, stride, dilation, padding, "zeros").transpose()


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import ConvTranspose1d
        >>> ours, theirs = ConvTranspose1d(4, 8, 3, stride=2), torch.nn.ConvTranspose1d(4, 8, 3, stride=2)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 4, 6)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """

    _by_torch = staticmethod(F.conv_transpose1d)


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import ConvTranspose2d
        >>> ConvTranspose2d(4, 8, 3, stride=2)(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 8, 13, 13])
    """

    _by_torch = staticmethod(F.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` as structured convolution: the same arguments, parameters and results.

    Example:

        >>> from structconv.compat.torch import ConvTranspose3d
        >>> ConvTranspose3d(4, 8, 3, stride=2)(torch.randn(2, 4, 6, 6, 6)).shape
        torch.Size([2, 8, 13, 13, 13])
    """

    _by_torch = staticmethod(F.conv_transpose3d)


def _lazy(kind: type) -> Any:
    """torch's lazy convolution, which becomes ours in its first call."""
    name = f"Lazy{kind.__name__}"
    theirs = getattr(nn, name)
    return type(name, (theirs, kind), {"cls_to_become": kind, "__module__": __name__, "__doc__": theirs.__doc__})


LazyConv1d, LazyConv2d, LazyConv3d = (_lazy(kind) for kind in (Conv1d, Conv2d, Conv3d))
LazyConvTranspose1d, LazyConvTranspose2d, LazyConvTranspose3d = (
    _lazy(kind) for kind in (ConvTranspose1d, ConvTranspose2d, ConvTranspose3d))


class _AvgPool(_Layer):
    """The forward pass of torch's average pooling."""

    axes: int
    _by_torch: Callable[..., Tensor]

    def forward(self: Any, input: Tensor) -> Tensor:
        """(N, C, *S) or (C, *S) -> (N, C, *S') or (C, *S'); see torch's."""
        compiled, planned = is_dynamo_compiling(), Autotuning.enabled or register.OF_USERS
        if type(input) is Tensor and not (compiled or planned):
            try:  # as a plan would compute it: the few numbers are those of `window_means`, read here in fewer steps
                numbers, size, stride, padding = input.numel(), self.kernel_size, self.stride, self.padding
                axes, divisor, ceil = self.axes, self.divisor_override, self.ceil_mode
                if numbers < FEW_SUMMED:
                    by_torch = (ceil or (numbers < FEWEST_SUMMED and axes > 1)
                                or (input.requires_grad and torch.is_grad_enabled()))
                    if not by_torch and divisor is None:
                        y = few_means(input, size, stride, padding, axes)
                        if y is not None:
                            return y
                    if by_torch or axes > 1:
                        return self._by_torch(input, size, stride, padding, ceil, self.count_include_pad, divisor)
                if (size == stride and input.dim() == axes + 2 and padding in (0, (0,))
                        and divisor is None and not (ceil or any_autocast())):
                    return window_means(input, size := _each(size, axes), size, (0,) * axes, True)
            except (IndexError, RuntimeError, TypeError, ValueError):  # the general path below raises the error
                pass
        if type(input) is Proxy:
            return cast(Tensor, recorded(self, input))
        owner, axes = type(self).__name__, self.axes
        check_tensor(owner, "input", input)
        if input.dim() not in (axes + 1, axes + 2):
            raise ShapeError(owner, f"input must have shape (N, C, *S) with {axes} axes S, or without N",
                             tuple(input.shape))
        divisor = self.divisor_override
        # torch computes or refuses these; a compiler would take long to trace the plan of the last
        if (self.ceil_mode or not input.is_floating_point() or input.layout is not torch.strided or divisor == 0
                or _is_recorded(input)
                or (compiled and not planned and (axes < 3 or input.dtype in (torch.float32, torch.float64)))):
            return cast(Tensor, cast(Any, super()).forward(input))
        mechanism = self._mechanism_of()
        y = _directly(self, input)
        if y is None:
            y = _laid_out(_computed(self, mechanism, Eye.of(1, input.shape[-1 - axes]), None, input, axes=axes),
                         input)
        return y if divisor is None else y * (math.prod(_each(self.kernel_size, axes)) / divisor)

    def _mechanism_of(self: Any) -> Mechanism:
        sizes = (_each(t, self.axes) for t in (self.kernel_size, self.stride, self.padding))
        all_count = self.count_include_pad or self.divisor_override is not None
        return _mechanism(self, _pooling, *sizes, all_count)


def _each(size: Any, axes: int) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, tuple | list) else (size,) * axes


def _pooling(size: Any, stride: Any, padding: Any, all_count: bool) -> Mechanism:
    pool = Pool(size, stride, padding)
    return pool if all_count or not any(padding) else pool.normalize("sum")


class AvgPool1d(_AvgPool, nn.AvgPool1d):
    """`torch.nn.AvgPool1d` as structured convolution; torch computes `ceil_mode=True`.

    Example:

        >>> from structconv.compat.torch import AvgPool1d
        >>> x = torch.randn(2, 4, 6)
        >>> torch.allclose(AvgPool1d(2)(x), torch.nn.AvgPool1d(2)(x), atol=1e-6)
        True
    """

    axes, divisor_override = 1, None

    @staticmethod
    def _by_torch(x: Tensor, size: Any, stride: Any, padding: Any, ceil: bool, all_count: bool, _: None) -> Tensor:
        return F.avg_pool1d(x, size[0], stride[0], padding[0], ceil, all_count)  # faster than tuples


class AvgPool2d(_AvgPool, nn.AvgPool2d):
    """`torch.nn.AvgPool2d` as structured convolution; torch computes `ceil_mode=True`.

    Example:

        >>> from structconv.compat.torch import AvgPool2d
        >>> x = torch.randn(2, 4, 6, 6)
        >>> torch.allclose(AvgPool2d(2)(x), torch.nn.AvgPool2d(2)(x), atol=1e-6)
        True
    """

    axes, _by_torch = 2, staticmethod(F.avg_pool2d)


class AvgPool3d(_AvgPool, nn.AvgPool3d):
    """`torch.nn.AvgPool3d` as structured convolution; torch computes `ceil_mode=True`.

    Example:

        >>> from structconv.compat.torch import AvgPool3d
        >>> x = torch.randn(2, 4, 6, 6, 6)
        >>> torch.allclose(AvgPool3d(2)(x), torch.nn.AvgPool3d(2)(x), atol=1e-6)
        True
    """

    axes, _by_torch = 3, staticmethod(F.avg_pool3d)
