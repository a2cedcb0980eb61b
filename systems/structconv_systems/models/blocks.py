"""Parts of Transformers: blocks around any attention, stacks of blocks, and embeddings of tokens."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from structconv import LowRank, Mechanism, ShapeError
from structconv.mechanisms.encodings import LearnedEncoding, sinusoidal
from structconv.nn import Cache, Conv, Linear, MultiheadAttention
from structconv.shapes import check_choice
from structconv.structures import Support

__all__ = ["Block", "DecoderCache", "Stack", "StackDecoding", "Tokens", "attention"]

#: Positions that are computed at a time in decoding.
ROOM = 64


def attention(mechanism: Mechanism | Conv, channels: int, dim: int) -> Conv:
    """Return the layer of a mechanism with `dim` channels for each head; a layer is returned unchanged.

    Example:

        >>> from structconv import DotProduct
        >>> from structconv_systems.models.blocks import attention
        >>> layer = attention(DotProduct(2, 4).scaled().softmax(), channels=8, dim=4)
        >>> layer(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """
    return mechanism if isinstance(mechanism, Conv) else Conv(mechanism, channels, channels, weight=LowRank(dim))


class DecoderCache(NamedTuple):
    """The cache of a block in decoding: of past entries, and of the source."""

    own: Cache
    source: Cache | None


def attend(layer: Conv, query: Tensor, key_value: Any, **options: Any) -> Tensor:
    """Attention of queries to keys and values, by `MultiheadAttention` or by a `Conv`."""
    if isinstance(layer, MultiheadAttention):
        return cast(Tensor, layer(query, key_value, **options))
    return cast(Tensor, layer(key_value, z=query, **options))


class Block(nn.Module):
    """x + dropout(f(norm x)), or norm(x + dropout(f(x))), for f in turn attention, attention to a source, a network.

    The network is W_2 relu(W_1 x + b_1) + b_2 (Vaswani et al. 2017, eq. 2).

    Args:
        attention: attention among the entries.
        source: attention to the entries of a source, or `None`.
        hidden: hidden channels of the network.
        dropout: probability of dropout on the terms added to x.
        norm: "pre" for the first form (Xiong et al. 2020), "post" for the second (Vaswani et al. 2017, section 3.1).

    Raises:
        ConfigError: the norm is unknown.

    Example:

        >>> from structconv import Causal, DotProduct
        >>> from structconv_systems.models.blocks import Block, attention
        >>> causal = attention(DotProduct(2, 4).scaled().masked(keep=Causal()).softmax(), channels=8, dim=4)
        >>> block = Block(causal, None, hidden=16, dropout=0.0, norm="pre")
        >>> block(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(self, attention: Conv, source: Conv | None, *, hidden: int, dropout: float, norm: str) -> None:
        super().__init__()
        check_choice("Block", "norm", norm, ("pre", "post"))
        channels = attention.out_channels
        self.attention, self.source, self.pre = attention, source, norm == "pre"
        widen, narrow = Linear(channels, hidden, activation="relu"), Linear(hidden, channels)
        self.network = nn.Sequential(OrderedDict({"0": widen, "2": narrow}))  # the keys of a ReLU between them
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2 if source is None else 3))
        self.dropout = nn.Dropout(dropout)
        for layer in (widen, narrow):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, structure: Support | None = None, source: Tensor | None = None,
                pairs: Support | None = None) -> Tensor:
        """Entries (..., N, C), and those of the source (..., M, C) with the pairs of both -> (..., N, C)."""
        return self._of(x, lambda h: self.attention(h, structure=structure),
                        lambda h: attend(cast(Conv, self.source), h, source, structure=pairs))

    def prepare(self, x: Tensor, source: Tensor | None = None, pairs: Support | None = None) -> DecoderCache:
        """Return the cache for steps after entries x (B, N, C), N >= 0."""
        own = self.attention.prepare(x)
        return DecoderCache(own, None if self.source is None or source is None else self.source.prepare(source, pairs))

    def step(self, cache: DecoderCache, x: Tensor) -> Tensor:
        """One entry more, (B, 1, C) -> (B, 1, C)."""
        return self._of(x, lambda h: self.attention.step(cache.own, h),
                        lambda h: attend(cast(Conv, self.source), h, cache.source))

    def _of(self, x: Tensor, attend: Callable[[Tensor], Tensor], look: Callable[[Tensor], Tensor]) -> Tensor:
        layers: list[Any] = [attend, self.network] if self.source is None else [attend, look, self.network]
        for norm, layer in zip(self.norms, layers, strict=True):
            x = x + self.dropout(layer(norm(x))) if self.pre else norm(x + self.dropout(layer(x)))
        return x


class Stack(nn.Module):
    """Blocks in sequence, with a norm after them if they normalize first.

    Args:
        recompute: store only the input of each block, and compute it again in the backward pass (Chen et al. 2016).

    Example:

        >>> from structconv import Causal, DotProduct
        >>> from structconv_systems.models.blocks import Block, Stack, attention
        >>> causal = attention(DotProduct(2, 4).scaled().masked(keep=Causal()).softmax(), channels=8, dim=4)
        >>> stack = Stack([Block(causal, None, hidden=16, dropout=0.0, norm="pre")])
        >>> x = torch.randn(1, 5, 8)
        >>> caches = stack.prepare(x[:, :0])               # of no entries
        >>> steps = [stack.step(caches, entry) for entry in x.split(1, 1)]
        >>> torch.allclose(torch.cat(steps, 1), stack(x), atol=1e-5)
        True
    """

    def __init__(self, blocks: list[Block], *, recompute: bool = False) -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(blocks), recompute
        channels = blocks[0].attention.out_channels
        self.norm = nn.LayerNorm(channels) if blocks[0].pre else nn.Identity()

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Run the blocks one after the other."""
        for block in self.blocks:
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(block, x, *others, use_reentrant=False) if again else block(x, *others)
        return cast(Tensor, self.norm(x))

    def prepare(self, x: Tensor, source: Tensor | None = None, pairs: Support | None = None) -> list[DecoderCache]:
        """Return the cache of each block."""
        return [cast(Block, block).prepare(x, source, pairs) for block in self.blocks]

    def step(self, caches: list[DecoderCache], x: Tensor) -> Tensor:
        """One entry more, (B, 1, C) -> (B, 1, C)."""
        for block, cache in zip(self.blocks, caches, strict=True):
            x = cast(Block, block).step(cache, x)
        return cast(Tensor, self.norm(x))


class Tokens(nn.Module):
    """dropout(sqrt(C) e_token + p_place) (Vaswani et al. 2017, sections 3.4, 3.5 and 5.4), and logits <e_v, h>.

    Args:
        vocabulary: V. channels: C.
        positions: p: "sinusoidal", "learned" for at most `length` positions, or "none".

    Raises:
        ConfigError: the kind of positions is unknown.
        ShapeError: there are more positions than learned ones.

    Example:

        >>> from structconv_systems.models.blocks import Tokens
        >>> tokens = Tokens(20, 8, positions="sinusoidal", dropout=0.0)
        >>> tokens(torch.tensor([5, 6, 2]), tokens.table(3)).shape
        torch.Size([3, 8])
    """

    def __init__(self, vocabulary: int, channels: int, *, positions: str, dropout: float, length: int = 512) -> None:
        super().__init__()
        check_choice("Tokens", "positions", positions, ("sinusoidal", "learned", "none"))
        self.embedding = nn.Embedding(vocabulary, channels)
        nn.init.normal_(self.embedding.weight, std=channels ** -0.5)
        self.learned = LearnedEncoding(length, channels) if positions == "learned" else None
        if self.learned is not None:
            nn.init.normal_(self.learned.embedding, std=channels ** -0.5)
        self.sinusoidal = positions == "sinusoidal"
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, p: Tensor | None) -> Tensor:
        """Embed tokens (..., N), with positions p (N, C) -> (..., N, C)."""
        x = self.embedding(tokens) * self.embedding.embedding_dim ** 0.5
        return cast(Tensor, self.dropout(x if p is None else x + p))

    def table(self, count: int, room: int = 0) -> Tensor | None:
        """Return p of the positions from 0 on, (L, C), L >= `count`, and of `room` more unless they are learned."""
        weight = self.embedding.weight
        if self.learned is not None:
            length = self.learned.embedding.shape[0]
            if not torch.compiler.is_compiling() and count > length:
                raise ShapeError("Tokens", f"sentences must have at most length={length} tokens", count,
                                 "Learn more positions: length=.")
            return self.learned.embedding
        if not self.sinusoidal:
            return None
        return sinusoidal(torch.arange(count + room, device=weight.device), weight.shape[-1]).to(weight.dtype)

    def logits(self, h: Tensor) -> Tensor:
        """(..., C) -> (..., V), by the embeddings of the tokens (Press and Wolf 2017)."""
        return F.linear(h, self.embedding.weight)


class StackDecoding:
    """The `Decoding` of a stack: keys and values of past tokens and of the source, for each block.

    Args:
        logits: (B, C) -> (B, V), from the output of the stack. batch: B samples, each with its own source.
    """

    def __init__(self, tokens: Tokens, stack: Stack, caches: list[DecoderCache], logits: Callable[[Tensor], Tensor],
                 batch: int) -> None:
        self._tokens, self._stack, self._caches, self._logits = tokens, stack, caches, logits
        self._place, self._table = 0, tokens.table(1, ROOM)
        self._sources = torch.arange(batch, device=caches[0].own.x.device)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """The newest tokens (B,) -> the logits (B, V) of the next ones."""
        place, self._place = self._place, self._place + 1
        if self._table is not None and place >= len(self._table):
            self._table = self._tokens.table(place + 1, place + ROOM)
        p = None if self._table is None else self._table[place:place + 1]
        x = self._tokens(tokens.unsqueeze(-1), p)
        return self._logits(self._stack.step(self._caches, x).squeeze(-2))

    @torch.no_grad()
    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b], (B',); caches of sources move only if these change."""
        sources = self._sources[samples]
        moved = not torch.equal(sources, self._sources)
        self._sources = sources
        for cache in self._caches:
            cache.own.reorder(samples)
            if moved and cache.source is not None:
                cache.source.reorder(samples)
