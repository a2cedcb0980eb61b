"""`PreparedCache`: what layers have prepared, as the cache of a transformers model; `generate` makes and carries it."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers import cache_utils as library

from structconv.errors import ConfigError
from structconv.nn.cache import Cache
from structconv.nn.conv import Conv

__all__ = ["PreparedCache", "PreparedGenerationMixin", "PreparedLayer"]

#: The argument of a model that holds the cache in this version of transformers.
_NAME = ("cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else
         "past_key_values")


class PreparedLayer(library.CacheLayerMixin):
    """The entry of one layer: a `structconv` `Cache`, or nothing yet."""

    is_croppable = True
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.cache: Cache | None = None

    def step(self, layer: Conv, x: Tensor, structure: Any = None) -> Tensor:
        """The outputs of x (B, m, P), the entries after those that are prepared, which are prepared too."""
        call = {} if structure is None else {"structure": structure}
        if self.cache is None:
            self.cache, self.is_initialized = layer.prepare(x), True
            y: Tensor = layer(self.cache, **call)
            return y
        return cast(Tensor, layer.step(self.cache, x, **call))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: a layer prepares its entries itself."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Raise: keys and values are made by `step`."""
        raise ConfigError("PreparedCache", "a layer of structconv must be called by cache.step(number, layer, x)",
                          "update(keys, values)")

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.cache, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples of the batch."""
        self.reorder_cache(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample of the batch."""
        if self.cache is not None:
            x = self.cache.x
            self.cache.reorder(torch.arange(x.shape[0], device=x.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last entries, as many as the number without its sign, as in transformers."""
        if self.cache is not None and tokens_to_remove:
            self.cache.truncate(self.cache.length - abs(tokens_to_remove))

    def __repr__(self) -> str:
        return f"PreparedLayer({self.cache!r})"


class PreparedCache(library.Cache):
    """The cache of a transformers model made of our layers: `generate`, beams and assisted decoding carry it along.

    In the model's `forward` each layer is called by `cache.step(number, layer, x)`, which prepares x at first and
    appends to what is prepared later; `Cache` says what is held. A layer must be causal, and its mask of padding, if
    there is one, is given in each call: `structure=Padding(mask)` for all entries so far.

    Args:
        layers: how many layers there are.

    Example:

        >>> from structconv import Causal, Conv, DotProduct
        >>> from structconv.compat.transformers import PreparedCache
        >>> layer = Conv(DotProduct(2, 4).scaled().masked(keep=Causal()).softmax(), 8, 8)
        >>> cache, x = PreparedCache(1), torch.randn(1, 6, 8)
        >>> first, last = cache.step(0, layer, x[:, :5]), cache.step(0, layer, x[:, 5:])
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[PreparedLayer() for _ in range(layers)])

    def step(self, number: int, layer: Conv, x: Tensor, structure: Any = None) -> Tensor:
        """The outputs of a layer at the entries x (B, m, P) that come after those before, (B, m, Q)."""
        return cast(PreparedLayer, self.layers[number]).step(layer, x, structure)


class PreparedGenerationMixin(GenerationMixin):
    """`generate` with a `PreparedCache`, for a `PreTrainedModel` made of our layers.

    The number of layers is `config.num_hidden_layers`. The model's `forward` takes the cache as `cache`, before
    transformers 5.24 as `past_key_values`, and returns it as `past_key_values`.

    Example:

        >>> from structconv import Causal, Conv, DotProduct
        >>> from structconv.compat.transformers import PreparedGenerationMixin
        >>> from transformers import PretrainedConfig, PreTrainedModel
        >>> from transformers.modeling_outputs import CausalLMOutputWithPast
        >>> class Model(PreTrainedModel, PreparedGenerationMixin):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.embedding, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)
        ...         self.attention = Conv(DotProduct(2, 4).scaled().masked(keep=Causal()).softmax(), 8, 8)
        ...     def forward(self, input_ids, cache=None, **options):
        ...         x = self.embedding(input_ids)
        ...         y = self.attention(x) if cache is None else cache.step(0, self.attention, x)
        ...         return CausalLMOutputWithPast(logits=self.head(y), past_key_values=cache)
        >>> model = Model(PretrainedConfig(num_hidden_layers=1, vocab_size=9))
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape
        torch.Size([1, 5])
    """

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any],
                                      *args: Any, **options: Any) -> None:
        if model_kwargs.get(_NAME) is None and generation_config.use_cache is not False:
            layers: int = self.config.num_hidden_layers
            model_kwargs[_NAME] = PreparedCache(layers)
