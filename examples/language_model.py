"""A small causal language model of our layers that is a transformers model: `python examples/language_model.py`.

`save_pretrained`, `from_pretrained`, `Trainer`, PEFT and `generate` work, because parameters are named as usual and
`PreparedGenerationMixin` carries what the attention has prepared from step to step. Needs transformers 5.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from structconv import Causal, Conv, DotProduct, LowRank, Padding, Rotary
from structconv.compat.transformers import PreparedCache, PreparedGenerationMixin
from structconv.mechanisms import STRUCTURE_IF_GIVEN


class LanguageModelConfig(PretrainedConfig):
    """Sizes of the model."""

    model_type = "structconv-language-model"

    def __init__(self, vocab_size: int = 64, hidden_size: int = 32, num_hidden_layers: int = 2,
                 num_attention_heads: int = 4, **options: Any) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**options)


class Block(nn.Module):
    """Causal attention with rotary positions, then two linear layers, each beside the identity."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        channels, heads = config.hidden_size, config.num_attention_heads
        dim = channels // heads
        scores = DotProduct(heads, dim, rotary=Rotary()).scaled()
        mask = scores.masked(keep=Causal()).masked(keep=STRUCTURE_IF_GIVEN)
        self.attention = Conv(mask.softmax(), channels, channels, weight=LowRank(dim), bias=False)
        self.network = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))

    def forward(self, x: Tensor, padding: Padding | None, cache: PreparedCache | None, number: int) -> Tensor:
        h = self.norms[0](x)
        x = x + (self.attention(h, padding) if cache is None else cache.step(number, self.attention, h, padding))
        return x + self.network(self.norms[1](x))


class LanguageModel(PreTrainedModel, PreparedGenerationMixin):
    """Token embeddings, blocks, and a linear layer that shares the embeddings' numbers."""

    config_class = LanguageModelConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "tokens.weight"}

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                cache: PreparedCache | None = None, past_key_values: PreparedCache | None = None,
                **options: Any) -> CausalLMOutputWithPast:
        """Logits (B, M, V) of each next token, and the loss if there are labels."""
        cache = past_key_values if cache is None else cache
        padded = attention_mask is not None and not bool(attention_mask.all())
        padding = Padding(attention_mask.bool()) if padded else None
        x = self.tokens(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x, padding, cache, number)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


def main() -> None:
    """Learn to count, then go on counting."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocab_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        words = (torch.arange(12) + torch.randint(16, (32, 1))) % 16
        loss = model(words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
    print(model.eval().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False, pad_token_id=0))


if __name__ == "__main__":
    main()
