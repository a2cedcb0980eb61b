"""`register`: the attention and the masks of transformers' interfaces, by the one operator."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.compat.attending import CAUSAL, Mask, attend, attend_plainly, table_of
from structconv.errors import ConfigError, class_remedy
from structconv.structures.supports import Causal, Support, Window

__all__ = ["NAME", "Registration", "StructureMask", "attention", "mask", "register"]

#: The name of the implementation in transformers.
NAME = "structconv"
#: The module of transformers whose `_active_collector`, a variable of the context, is what hooks collect.
_CAPTURING = "transformers.utils.output_capturing"


class Registration:
    """The result of `register`.

    Example:

        >>> from structconv.compat.transformers import register
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> register().check(LlamaForCausalLM(config))             # modules that stay as they are: none
        []
    """

    def check(self, model: nn.Module) -> list[str]:
        """Return the names of the attention modules of a model that do not use the interface: they stay as they are.

        A module counts as attention if "Attention" is in the name of its class, unless its only matrix is square, as of
        a gate or an output projection. It uses the interface if its forward pass, or that of a module within it or
        around it, calls `ALL_ATTENTION_FUNCTIONS`.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError("check", "model must be a torch.nn.Module", repr(model), class_remedy(model))
        routed = self.routed(model)
        others = [name for name, module in model.named_modules()
                  if "Attention" in type(module).__name__ and not _is_projection(module)
                  and not any(_encloses(name, inner) or _encloses(inner, name) for inner in routed)]
        return [name for name in others if not any(_encloses(name, inner) and name != inner for inner in others)]

    def routed(self, model: nn.Module) -> list[str]:
        """Return the names of the modules whose forward pass calls the interface."""
        return [name for name, module in model.named_modules() if _routes(type(module))]

    def __repr__(self) -> str:
        return f'model.set_attn_implementation("{NAME}")'


def register() -> Registration:
    """Add "structconv" to the attention functions and to the mask functions of transformers.

    Raises:
        ConfigError: transformers is not installed, or has no such interfaces (before 5.0).

    Example:

        >>> from structconv.compat.transformers import register
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> register()
        model.set_attn_implementation("structconv")
        >>> model = LlamaForCausalLM(config).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> before = model(ids).logits
        >>> model.set_attn_implementation("structconv")
        >>> torch.allclose(model(ids).logits, before, atol=1e-5)
        True
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ConfigError("register", "transformers 5.21 or later must be installed", str(error),
                          "pip install 'transformers>=5.21'.") from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    return Registration()


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
              dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
              position_bias: Tensor | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
              **options: Any) -> tuple[Tensor, Tensor | None]:
    """The attention function: query (B, K, N, D), key and value (B, K', M, D) -> (B, N, K, D), and the weights.

    Args:
        attention_mask: what `mask` returned, or a table (B, K or 1, N, M), True where a pair exists, or added to the
            scores. Without one a query of several entries is causal if the module is.
        position_bias: (B or 1, K, N, M), added to the scores. A query whose keys are all left out by a mask beside it
            attends to all keys alike, as by "eager" and "sdpa"; without a bias it is zero, as by "sdpa".
        softcap: see `softcap` of the algebra.
        s_aux: (K), the sinks.
        options: of these, `sinks` (B, K, N, 1) are sinks of each query. `indices` (B, N, T) or `block_indices`
            (B, G, N, T), for K / G consecutive heads, are the keys, or the blocks of keys, that an indexer of the
            model selects; negative ones select none. All others are ignored.
    """
    outputs, heads = query.shape[2], module._modules.get("structured_heads")
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    collected = None if collector is None else collector.get()
    need_weights = bool(options.get("output_attentions") or (
        collected and any("attentions" in name for name in collected)))
    if type(attention_mask) is StructureMask and attention_mask.support is CAUSAL:
        attention_mask, is_causal = None, True
    if is_causal is None and attention_mask is None and outputs > 1:
        is_causal = getattr(module, "is_causal", None)
        is_causal = _is_causal_by_default(cast(Any, type(module))) if is_causal is None else is_causal
    causal = outputs > 1 and attention_mask is None and bool(is_causal)
    s_aux = options.get("sinks") if s_aux is None else s_aux
    if options.get("indices") is not None or options.get("block_indices") is not None:
        attention_mask = _selected(module, query, key, attention_mask, options)
    if causal and key.shape[2] > outputs:  # aligned to the first key: the rest of a static cache is empty
        key, value = key[:, :, :outputs], value[:, :, :outputs]
        position_bias = None if position_bias is None else position_bias[..., :outputs]
        attention_mask = None if attention_mask is None else attention_mask[..., :outputs]
    if heads is position_bias is softcap is s_aux is None and not (dropout or need_weights):
        last = attend_plainly(query, key, value, attention_mask, causal, scaling)
        if last is not None:
            return last.transpose(1, 2).contiguous(), None
    known = attention_mask.support if isinstance(attention_mask, StructureMask) else attention_mask
    if heads is None and position_bias is not None and isinstance(known, Tensor) and known.dtype is torch.bool:
        position_bias, known = position_bias.masked_fill(~known, torch.finfo(position_bias.dtype).min), None
    mask = None if known is position_bias is None and not causal else Mask.of(known, causal).joined(bias=position_bias)
    compute: Any = attend if heads is None else heads
    y, weights = compute(query, key, value, mask, scale=scaling, dropout=dropout, softcap=softcap, sink=s_aux,
                         weights=need_weights)
    return y.transpose(1, 2).contiguous(), weights


def _selected(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The mask without the keys that the indexer of a model leaves out."""
    blocks, inputs = options.get("block_indices"), key.shape[2]
    size: Any = 1 if blocks is None else module.indexer.block_size  # type: ignore[union-attr]
    indices = options["indices"].unsqueeze(1) if blocks is None else blocks
    count = -(-inputs // size)
    keep = indices.new_zeros(*indices.shape[:-1], count + 1, dtype=torch.bool)  # the last column: what is negative
    keep = keep.scatter(-1, indices.long().masked_fill(indices < 0, count), True)[..., :count]
    keep = keep.repeat_interleave(size, -1)[..., :inputs] if size > 1 else keep
    keep = keep if keep.shape[1] == 1 else keep.repeat_interleave(query.shape[1] // keep.shape[1], 1)
    if mask is None:
        return keep
    return mask & keep if mask.dtype is torch.bool else torch.where(keep, mask, torch.finfo(mask.dtype).min)


class StructureMask(Tensor):
    """A structure in place of its booleans (B, 1, N, M), which are computed when something reads them.

    The attention function reads only `support`. Anything else that a model does to a mask (slices it, moves it, joins
    it with another) gives an ordinary tensor.

    Example:

        >>> from structconv.compat.transformers import StructureMask
        >>> from structconv.structures import Causal
        >>> mask = StructureMask.of(Causal(), (1, 1, 3, 3), "cpu")
        >>> mask.table()[0, 0].tolist()
        [[True, False, False], [True, True, False], [True, True, True]]
    """

    support: Support

    @classmethod
    def of(cls, support: Support, shape: tuple[int, ...], device: Any) -> StructureMask:
        """The mask of a structure."""
        mask = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        mask.support = support
        return mask

    def table(self) -> Tensor:
        """The booleans."""
        *_, outputs, inputs = self.shape
        return table_of(self.support, outputs, inputs, self.device).expand(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device, ... are those of the booleans
            result = super().__torch_function__(func, types, args, kwargs)
            if not isinstance(result, Tensor):
                return result
        name = getattr(func, "__name__", "")
        written = args[0] if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else None
        if isinstance(written, StructureMask):  # it would change the booleans that are computed for this call
            raise ConfigError("StructureMask", "a mask that is changed in place must be a table", name,
                              "Take its booleans first: mask = mask.clone().")
        return func(*_opened(args), **_opened(kwargs or {}))


def _opened(value: Any) -> Any:
    """Return the arguments with booleans in place of each `StructureMask`."""
    if isinstance(value, StructureMask):
        return value.table()
    if isinstance(value, dict):
        return {name: _opened(part) for name, part in value.items()}
    return type(value)(map(_opened, value)) if type(value) in (tuple, list) else value


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
         mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None, **options: Any
         ) -> Tensor | None:
    """The mask function: booleans (B, 1, N, M), or `None`, as that of "sdpa".

    `None` stands for a causal mask only if the models declare "sdpa": others do not say which modules are causal.
    A window that hides something, of whole sequences without padding, is a `StructureMask` of `Causal() & Window(...)`,
    or of a `Window`, of which only the pairs are computed. Models that compute attention without the interface get the
    numbers that they add to their scores, as that of "eager".
    """
    masks = _masking()
    function = masks.causal_mask_function if mask_function is None else mask_function
    config: Any = type(options.get("config"))
    reads, flagged = _declared(config)
    if not reads:
        return masks.eager_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                                kv_offset=kv_offset, mask_function=function, attention_mask=attention_mask, **options)
    whole = type(q_offset) is int and q_length == kv_length and (q_offset, kv_offset) == (0, 0)
    last = type(q_offset) is int and q_length == 1 and q_offset + 1 == kv_offset + kv_length
    skips = options.get("allow_is_causal_skip", True)
    options = options if flagged else {**options, "allow_is_causal_skip": False}
    if (whole or last) and not is_compiling() and (attention_mask is None or bool(attention_mask.all())):
        if function is masks.causal_mask_function:
            if skips and (flagged or last):
                return None  # the attention function attends to all, or to what is not later
            if skips:
                return StructureMask.of(CAUSAL, (batch_size, 1, q_length, kv_length), options.get("device", "cpu"))
        elif whole:
            causal, radius = _window(function)
            if radius is not None and radius < kv_length - 1:
                device = options.get("device", "cpu")
                return StructureMask.of(Causal() & Window(radius) if causal else Window(radius),
                                        (batch_size, 1, q_length, kv_length), device)
    table: Tensor | None = masks.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=function, attention_mask=attention_mask, **options)
    return table


def _window(function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return (causal, radius) of a mask function that is a window; `None` for any other function."""
    masks = _masking()
    parts: Any = _closure_value(function, masks.and_masks, "mask_functions") or ()
    for of_order, overlay, last in ((masks.causal_mask_function, masks.sliding_window_overlay, 1),
                                    (masks.bidirectional_mask_function, masks.sliding_window_bidirectional_overlay, 0)):
        size = _closure_value(parts[0], overlay, "sliding_window") if len(parts) == 2 and parts[1] is of_order else None
        if type(size) is int and size >= last:
            return bool(last), size - last
    return False, None


def _closure_value(function: Any, maker: Callable[..., Any], name: str) -> Any:
    """The variable that a function made by `maker` holds; `None` of any other function."""
    code = getattr(function, "__code__", None)
    if code is None or code not in maker.__code__.co_consts:
        return None
    return inspect.getclosurevars(function).nonlocals.get(name)


def _masking() -> Any:  # without `functools.cache`, of which `torch.compile` warns where it traces the function
    return sys.modules["transformers.masking_utils"]


def _is_projection(module: nn.Module) -> bool:
    """Return True for a module without parameters, or with one matrix, as many rows as columns: a gate or an output."""
    parameters = list(module.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    return not parameters or (len(matrices) == 1 and matrices[0].shape[0] == matrices[0].shape[1])


def _routes(kind: type) -> bool:
    """Return True if the forward pass of a class calls the interface."""
    return "ALL_ATTENTION_FUNCTIONS" in source_of(kind.forward)  # type: ignore[attr-defined]


#: Configuration -> how many classes extended `PreTrainedModel`, and what `_declared` returned then.
_DECLARED: dict[type, tuple[int, tuple[bool, bool]]] = {}


def _declared(config: type) -> tuple[bool, bool]:
    """Return whether all models of a configuration read the interface, and whether one declares to support "sdpa".

    Not those whose files contain attention modules that compute a softmax themselves. Of a file with modules of both
    kinds, or without a source, it is what the model declares to support. Models that declare "eager" only, and whose
    modules extend the mask before they call the interface (DeepSeek V4), extend numbers. It is found again after other
    models have been imported or defined: they may share the configuration.
    """
    base = _base()
    count, known = len(base.__subclasses__()), _DECLARED.get(config)
    if known is None or known[0] != count:
        models = _models(config)
        verdicts: dict[Any, bool] = {}
        for model in models:
            bases = [kind for kind in model.__mro__ if issubclass(kind, base) and kind is not base]
            named = all(hasattr(sys.modules.get(kind.__module__), kind.__name__) for kind in bases)
            key = (frozenset(kind.__module__ for kind in bases), named,
                   model._supports_sdpa, model._supports_attention_backend)
            if model not in _READS:
                verdicts[key] = _READS[model] = verdicts[key] if key in verdicts else _reads(*key)
        known = _DECLARED[config] = count, (all(_READS[model] for model in models),
                                            not models or any(model._supports_sdpa for model in models))
    return known[1]


@cache
def _base() -> Any:
    from transformers import PreTrainedModel

    return PreTrainedModel


#: Model -> what `_reads` says of it.
_READS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _reads(files: Collection[str], named: bool, sdpa: bool, backend: bool) -> bool:
    """Return True if the attention modules in files read the interface.

    Args:
        files: the names of the modules that define a model and the models it extends.
        named: those modules can be found, with these models: otherwise nothing is known of their attention.
        sdpa, backend: what the model declares to support.
    """
    kinds = [kind for file in files for name, kind in getattr(sys.modules.get(file), "__dict__", {}).items()
             if "Attention" in name and isinstance(kind, type) and issubclass(kind, nn.Module)]
    routed = [kind for kind in kinds if _routes(kind)]
    sources = [source_of(kind).lower() for kind in kinds if kind not in routed]
    others = not named or any(not source or "softmax" in source for source in sources)
    extended = any(" attention_mask = " in source_of(kind.forward) for kind in routed)
    return (sdpa or not extended) and (not others or ((sdpa or backend) and (bool(routed) or not sources)))


setattr(_declared, "_dynamo_marked_constant", True)  # noqa: B010 - see torch_compat


#: Class of attention modules -> what `_is_causal_by_default` returned.
_CAUSAL: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _is_causal_by_default(kind: type) -> bool:
    """Return False if the file that defines the first class of an attention module has no word "causal".

    "sdpa" takes each module without `is_causal` for causal, which encoders that support "eager" only do not expect.
    """
    if kind not in _CAUSAL:
        roots = [base for base in kind.__mro__ if "forward" in vars(base) and base is not nn.Module]
        text = source_of(sys.modules.get(roots[-1].__module__)) if roots else ""
        _CAUSAL[kind] = not text or "causal" in text.lower()
    return _CAUSAL[kind]


setattr(_is_causal_by_default, "_dynamo_marked_constant", True)  # noqa: B010 - see torch_compat


def _models(config: type) -> list[Any]:
    """The models of a configuration, or else of the nearest one that it extends."""
    models = [(model, getattr(model.config_class, "__args__", (model.config_class,)))  # the second: of a union
              for model in _subclasses(_base())]
    for base in config.__mro__:
        found = [model for model, configs in models if base in configs]
        if found:
            return found
    return []


def _subclasses(kind: Any) -> Iterator[Any]:
    for own in kind.__subclasses__():
        yield own
        yield from _subclasses(own)


def source_of(part: Any) -> str:
    """The source of a class or a function; empty if it has none."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return ""


def _encloses(outer: str, inner: str) -> bool:
    """Return True if the module of one name is that of the other, or contains it."""
    return outer == inner or outer == "" or inner.startswith(outer + ".")
