"""`structconv.compat.torch` against torch, and Hugging Face models on "structconv" against "sdpa"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import FORWARD, PHASES, Case, Comparison, Entrant, Size, entrant, leaf
from structconv.compat import torch as compat

__all__ = ["CASES"]

#: Batch, length, channels, heads.
_SEQUENCES = {"small": (2, 16, 32, 4), "medium": (8, 64, 128, 8), "large": (8, 256, 256, 8)}
#: Batch, channels, side of a square, channels after. Lines have as many entries, and cubes about as many.
_IMAGES = {"small": (2, 8, 16, 8), "medium": (8, 32, 32, 64), "large": (8, 64, 56, 64)}
#: Channels, layers, batch, length.
_MODELS = {"small": (64, 2, 1, 16), "medium": (256, 4, 4, 128)}
Run = Callable[[nn.Module, Tensor], Tensor]


def _layers(name: str, args: tuple[Any, ...], options: dict[str, Any], shape: tuple[int, ...], run: Run, _: Size
            ) -> Comparison:
    """Our layer and torch's, with the same parameters, in evaluation mode, for which torch has fused layers."""
    result: list[Entrant] = []
    state: dict[str, Tensor] | None = None
    for who, module in (("ours", compat), ("torch", nn)):
        layer, x = _made(module, name, args, options).eval(), leaf(*shape)
        if state is not None:
            layer.load_state_dict(state)
        state = layer.state_dict()
        result.append(Entrant(name=who, run=partial(run, layer, x), inputs=(x,), parameters=tuple(layer.parameters())))
    return Comparison(ours=result[0], peers=(result[1],), size=f"{name}{args} on {shape}")


def _made(module: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> nn.Module:
    """A layer of a module; of an encoder and a decoder, two layers."""
    if name in ("TransformerEncoder", "TransformerDecoder"):
        args, options = (_made(module, f"{name}Layer", args, options), 2), {}
    layer: nn.Module = getattr(module, name)(*args, **options)
    return layer


def _products(shape: tuple[int, ...], options: dict[str, Any], _: Size) -> Comparison:
    """Scaled dot-product attention of queries, keys and values (B, H, L, E)."""
    result: list[Entrant] = []
    for who, module in (("ours", compat), ("torch", nn.functional)):
        inputs = tuple(leaf(*shape, seed=seed) for seed in range(3))
        run = partial(module.scaled_dot_product_attention, *inputs, **options)
        result.append(Entrant(name=who, run=run, inputs=inputs))
    return Comparison(ours=result[0], peers=(result[1],), size=f"queries, keys and values {shape}")


def _called(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def _decoded(memory: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x, memory)
    return y


def _attended(weights: bool, padding: Tensor | None, layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x, x, x, key_padding_mask=padding, need_weights=weights)[0]
    return y


def _model(config: dict[str, Any], family: str, batch: int, length: int, generated: int, _: Size) -> Comparison:
    """A model with equal parameters in both implementations, which generates `generated` greedy tokens."""
    import transformers

    from structconv.compat.transformers import register

    register()
    words = torch.randint(3, config["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))
    result: list[Entrant] = []
    for who, implementation in (("ours", "structconv"), ("transformers sdpa", "sdpa")):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))
        model.set_attn_implementation(implementation)
        if generated:
            run = partial(model.generate, words, max_new_tokens=generated, do_sample=False, pad_token_id=0,
                          eos_token_id=None)
            result.append(entrant(who, model, run, phases=(FORWARD,)))
        else:
            result.append(entrant(who, model, partial(_logits, model, words), phases=PHASES))
    layers = f"{family}, {config['num_hidden_layers']} layers of {config['hidden_size']}"
    tokens = f", {generated} tokens generated" if generated else ""
    return Comparison(ours=result[0], peers=(result[1],), size=f"{layers}, B={batch}, N={length}{tokens}")


def _logits(model: nn.Module, words: Tensor) -> Tensor:
    y: Tensor = model(words, use_cache=False).logits
    return y


def _cases() -> list[Case]:
    result = []

    def add(name: str, size: str, build: Callable[[Size], Comparison]) -> None:
        result.append(Case(suite="compat", name=f"{name}-{size}", build=build, headline=size == "medium", group=size))

    for size, (batch, length, channels, heads) in _SEQUENCES.items():
        shape, options = (batch, length, channels), {"batch_first": True}
        padding = (torch.arange(length) >= length - length // 4).expand(batch, -1)
        for name, weights, absent in (("mha", False, None), ("mha-weights", True, None),
                                      ("mha-padded", False, padding), ("mha-padded-weights", True, padding)):
            add(name, size, partial(_layers, "MultiheadAttention", (channels, heads), options, shape,
                                    partial(_attended, weights, absent)))
        for name, causal in (("sdpa", False), ("sdpa-causal", True)):
            add(name, size, partial(_products, (batch, heads, length, channels // heads), {"is_causal": causal}))
        decoded = partial(_decoded, leaf(*shape, seed=1).detach())
        smooth = {**options, "dropout": 0.0, "activation": "gelu"}  # at 0, rounding decides the derivative of ReLU
        for name, kind, counts, run in (
                ("encoder-layer", "EncoderLayer", (), _called), ("encoder", "Encoder", (), _called),
                ("decoder-layer", "DecoderLayer", (), decoded), ("decoder", "Decoder", (), decoded),
                ("transformer", "", (2, 2), decoded)):
            add(name, size, partial(_layers, f"Transformer{kind}", (channels, heads, *counts, 4 * channels), smooth,
                                    shape, run))
    for size, (batch, channels, side, after) in _IMAGES.items():
        for axes in (1, 2, 3):
            shape = batch, channels, *[round(side ** (2 / axes))] * axes
            for name, kind, args in (("conv", "Conv", (channels, after, 3, 1, 1)), ("avg-pool", "AvgPool", (2,)),
                                     ("conv-transpose", "ConvTranspose", (channels, after, 3, 2, 1))):
                add(f"{name}{axes}d", size, partial(_layers, f"{kind}{axes}d", args, {}, shape, _called))
    for size, (channels, layers, batch, length) in _MODELS.items() if find_spec("transformers") else ():
        config = {"vocab_size": 500, "hidden_size": channels, "intermediate_size": 2 * channels,
                  "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2}
        add("llama", size, partial(_model, config, "Llama", batch, length, 0))
        add("llama-generate", size, partial(_model, config, "Llama", batch, 16, 64))
    if find_spec("transformers"):
        config = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                  "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 64}
        add("mistral-window-64", "large", partial(_model, config, "Mistral", 1, 2048, 0))
    return result


CASES = tuple(_cases())
