"""Training steps of Transformers against torch's own module and plain torch, and decoding with and without a cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import FORWARD, Case, Comparison, Entrant, Size
from benchmarks.suites.graph_peers import copied
from benchmarks.suites.sequence_peers import embedding, step, tokens_of
from structconv.mechanisms import DotProduct
from structconv.mechanisms.encodings import sinusoidal
from structconv.nn import cross_entropy
from structconv_systems.models.characters import CharacterModel
from structconv_systems.models.decoding import greedy
from structconv_systems.models.transformer import Transformer

__all__ = ["CASES"]


class _Transformer(nn.Module):
    """torch's, with sinusoidal positions and one embedding for source, target and output."""

    def __init__(self, ours: Any, heads: int) -> None:
        super().__init__()
        block: Any = ours.encoder.blocks[0]
        channels, hidden, layers = block.attention.in_channels, block.network[0].out_features, len(ours.encoder.blocks)
        self.layers = nn.Transformer(channels, heads, layers, layers, hidden, 0.0, batch_first=True, norm_first=True)
        self.embedding = embedding(ours.tokens[0].embedding)
        self.register_buffer("positions", sinusoidal(torch.arange(512), channels))
        for stack, own in ((self.layers.encoder, ours.encoder), (self.layers.decoder, ours.decoder)):
            for layer, part in zip(stack.layers, own.blocks, strict=True):
                _copied(layer, part)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        missing, mask = source == 0, nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        h = self.layers(self._embedded(source), self._embedded(target), tgt_mask=mask, src_key_padding_mask=missing,
                        memory_key_padding_mask=missing, tgt_is_causal=True)
        return F.linear(h, self.embedding.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens) * self.embedding.embedding_dim ** 0.5
        return x + self.positions[:tokens.shape[1]]  # type: ignore[index]


class _Characters(nn.Module):
    """Causal blocks in plain torch: one product for queries, keys and values, rotary positions, fused attention."""

    def __init__(self, ours: CharacterModel, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = embedding(ours.tokens.embedding)
        channels = self.embedding.embedding_dim
        self.blocks = nn.ModuleList()
        for own in ours.stack.blocks:
            hidden = own.network[0].out_features  # type: ignore[union-attr,index]
            layer = nn.TransformerEncoderLayer(channels, heads, hidden, 0.0, batch_first=True, norm_first=True)
            _copied(layer, own)
            self.blocks.append(layer)
        self.norm = nn.LayerNorm(channels)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens) * self.embedding.embedding_dim ** 0.5
        depth = x.shape[-1] // self.heads
        angle = torch.arange(x.shape[1]).unsqueeze(-1) * 10000.0 ** (-torch.arange(0, depth, 2) / depth)
        cos, sin = angle.cos(), angle.sin()
        for block in self.blocks:
            x = self._block(block, x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)

    def _block(self, block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention, h = block.self_attn, block.norm1(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in F.linear(h, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1))
        y = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x = x + attention.out_proj(y.transpose(1, 2).flatten(2))
        return x + block.linear2(torch.relu(block.linear1(block.norm2(x))))


def _turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _copied(layer: Any, own: Any) -> None:
    """Give torch's layer the numbers of our block."""
    attentions = [(layer.self_attn, own.attention)]
    if own.source is not None:
        attentions.append((layer.multihead_attn, own.source))
    for peer, ours in attentions:
        dot = next(part for part in ours.modules() if isinstance(part, DotProduct))
        rows = torch.cat([dot.query.weight, dot.key.weight, ours.weight.value.weight])
        copied(peer.in_proj_weight, rows, zeroed=peer.in_proj_bias)
        copied(peer.out_proj.weight, ours.weight.output.weight.detach(), zeroed=peer.out_proj.bias)
    for peer, ours in ((layer.linear1, own.network[0]), (layer.linear2, own.network[-1])):
        copied(peer.weight, ours.weight)
        copied(peer.bias, ours.bias)


def _translation(size: Size, batch: int, length: int, shortest: int, vocabulary: int = 8000, heads: int = 4
                 ) -> Comparison:
    """The defaults of our model, without dropout, on sentences of nearly one length, as batches by length have them."""
    batch, vocabulary = (4, 50) if size.quick else (batch, vocabulary)
    ours: Any = Transformer(vocabulary, heads=heads, dropout=0.0)
    peer = _Transformer(ours, heads)
    source, target = (tokens_of(batch, n, shortest, vocabulary, n) for n in (length, length + 1))
    tokens = source, target[:, :-1], target[:, 1:]
    return Comparison(ours=step("ours", ours, ours.tokens[0].embedding, *tokens, entropy=cross_entropy),
                      peers=(step("torch nn.Transformer", peer, peer.embedding, *tokens),),
                      size=f"B={batch}, {shortest} to {length} tokens, V={vocabulary}, 256 channels, 3 + 3 blocks")


def _characters(size: Size, heads: int = 6) -> Comparison:
    """The defaults of our model, without dropout."""
    (batch, length), vocabulary = (2, 32) if size.quick else (16, 256), 65
    ours = CharacterModel(vocabulary, heads=heads, dropout=0.0)
    peer = _Characters(ours, heads)
    tokens = tokens_of(batch, length + 1, length + 1, vocabulary, 0)
    return Comparison(ours=step("ours", ours, ours.tokens.embedding, tokens[:, :-1], tokens[:, 1:],
                                entropy=cross_entropy),
                      peers=(step("torch SDPA", peer, peer.embedding, tokens[:, :-1], tokens[:, 1:]),),
                      size=f"B={batch}, {length} characters, 192 channels, 6 blocks")


def _decoding(size: Size, batch: int, steps: int = 60) -> Comparison:
    """So many tokens of each source, greedily: with cached keys and values, and with a full pass for each."""
    steps, vocabulary = (5, 50) if size.quick else (steps, 8000)
    model = Transformer(vocabulary).eval()
    source = tokens_of(batch, 15, 15, vocabulary, 0)

    def cached() -> Tensor:
        return torch.tensor(greedy(model.begin(source), batch, begin=1, end=None, most=steps)).float()

    def uncached() -> Tensor:
        tokens = torch.ones(batch, 1, dtype=torch.int64)
        for _ in range(steps):
            tokens = torch.cat([tokens, model(source, tokens)[:, -1:].argmax(-1)], 1)
        return tokens[:, 1:].float()

    return Comparison(ours=Entrant(name="ours", run=cached, phases=(FORWARD,)),
                      peers=(Entrant(name="a full pass a token", run=uncached, phases=(FORWARD,)),),
                      size=f"B={batch}, {steps} tokens, V={vocabulary}, 256 channels, 3 + 3 blocks")


CASES = (
    Case(suite="models", name="transformer-step", build=partial(_translation, batch=64, length=15, shortest=13)),
    Case(suite="models", name="transformer-step-padded", build=partial(_translation, batch=64, length=15, shortest=5),
         headline=False),
    Case(suite="models", name="transformer-step-long", build=partial(_translation, batch=16, length=30, shortest=28),
         headline=False),
    Case(suite="models", name="characters-step", build=_characters),
    Case(suite="models", name="transformer-decoding-60", build=partial(_decoding, batch=16)),
)
