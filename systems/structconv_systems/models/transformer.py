"""The Transformer of Vaswani et al. 2017: an encoder-decoder of attention, whose mechanisms can be exchanged."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from structconv import Causal, ConfigError, Padding, Samples, ShapeError
from structconv.analysis.layers import layer_bases
from structconv.derived import is_plain
from structconv.mechanisms import STRUCTURE_IF_GIVEN, DotProduct, Mechanism
from structconv.nn import Conv, Linear
from structconv.shapes import check_divides, check_positive
from structconv_systems.models.blocks import Block, Stack, StackDecoding, Tokens, attention
from structconv_systems.models.sentences import Sentences

__all__ = ["Transformer"]

#: The attention of all layers, or the number of a layer -> its own: a mechanism, or a layer with a weight of its own.
Attention = Mechanism | Callable[[int], Mechanism | Conv]


class Transformer(nn.Module):
    """P(y_n | y_<n, x) = softmax(E h_n), h of a stack that attends to y_<n and to the encoded x (section 3).

    Every attention is y_n = sum_k sum_m A_kmn x_m V_k O_k with A = softmax_m(<W^q_k z_n, W^k_k x_m> / sqrt(D)), causal
    in the decoder: `Conv` with a `LowRank` weight over `DotProduct(heads, D).scaled().softmax()`.

    Args:
        vocabulary: V of the source, and of the target unless `target_vocabulary` is given.
        channels: C. layers: number of blocks of the encoder, and of the decoder. heads: K of each attention; D = C / K.
        hidden: channels of the networks within blocks. dropout, norm, recompute: see `Block` and `Stack`.
        positions, length: added to the embeddings; see `Tokens`.
        tied: if True, the output's weights are the embeddings of the target, and a common vocabulary has common
            embeddings (section 3.4).
        encoder_mechanism, decoder_mechanism, source_mechanism: replace the self-attention of the encoder, of the
            decoder, and its attention to the source: a mechanism, whose heads have D channels each, or a function of
            the layer's number that returns one or a layer C -> C. Those of a decoder need `.masked(keep=Causal())`,
            those to the source `.masked(keep=STRUCTURE_IF_GIVEN)`.
        packed: concatenate sentences without padding, which is faster; sizes then depend on the tokens. Otherwise, and
            always under `torch.export` and `torch.compile`, sentences are padded, and mechanisms of the encoder need
            `.masked(keep=STRUCTURE_IF_GIVEN)`. You may set the attribute `packed` at any time: weights and logits are
            the same.

    Tokens are integers, padded with 0 at the end. O(M^2 + N M + N^2) pairs for each head, block and sentence, and O((M
    + N) C (C + hidden)) flops of products.

    Vaswani et al. (2017), section 3 (512 channels, 6 layers, 8 heads, hidden 2048).

    Raises:
        ConfigError: the heads do not divide the channels, there are no layers, the norm or the positions are unknown,
            or the decoder is not causal.
        ShapeError: in the call, the numbers of sources and targets differ, or a sentence is longer than `length` with
            learned positions.

    Example:

        >>> from structconv_systems.models.transformer import Transformer
        >>> model = Transformer(20, channels=8, hidden=16, layers=1, heads=2).eval()
        >>> source, target = torch.tensor([[5, 6, 2], [7, 2, 0]]), torch.tensor([[1, 8, 9, 5], [1, 9, 0, 0]])
        >>> model(source, target).shape                    # logits of the word that follows each
        torch.Size([2, 4, 20])
    """

    def __init__(self, vocabulary: int, *, target_vocabulary: int | None = None, channels: int = 256, layers: int = 3,
                 heads: int = 4, hidden: int = 1024, dropout: float = 0.1, norm: str = "pre",
                 positions: str = "sinusoidal", length: int = 512, tied: bool = True,
                 encoder_mechanism: Attention | None = None, decoder_mechanism: Attention | None = None,
                 source_mechanism: Attention | None = None, recompute: bool = False, packed: bool = True) -> None:
        super().__init__()
        check_positive("Transformer", "layers", layers)
        dim = check_divides("Transformer", "heads", heads, "channels", channels)
        own = DotProduct(heads, dim).scaled()
        seeing, causal = own.masked(keep=STRUCTURE_IF_GIVEN).softmax(), own.masked(keep=Causal()).softmax()
        vocabularies = [vocabulary if target_vocabulary is None else target_vocabulary]
        if target_vocabulary is not None or not tied:
            vocabularies.insert(0, vocabulary)

        def attention_layer(chosen: Attention, layer: int) -> Conv:
            return attention(chosen if isinstance(chosen, Mechanism) else chosen(layer), channels, dim)

        def stack(chosen: Attention, to_source: Attention | None) -> Stack:
            return Stack([Block(attention_layer(chosen, layer),
                                None if to_source is None else attention_layer(to_source, layer),
                                hidden=hidden, dropout=dropout, norm=norm) for layer in range(layers)],
                         recompute=recompute)

        self.packed = packed
        self.tokens = nn.ModuleList(Tokens(size, channels, positions=positions, length=length, dropout=dropout)
                                    for size in vocabularies)
        self.encoder = stack(encoder_mechanism or seeing, None)
        self.decoder = stack(decoder_mechanism or causal, source_mechanism or seeing)
        if decoder_mechanism is not None:
            for block in self.decoder.blocks:
                _check_causal(cast(Block, block).attention)
        self.output = None if tied else Linear(channels, vocabularies[-1], bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Tokens (B, M) and (B, N), which begins with the token before the first -> logits (B, N, V) of the next ones,
        zero for padding."""
        if source.shape[0] != target.shape[0]:
            raise ShapeError("Transformer", f"target must be (B={source.shape[0]}, N), as many as there are sources",
                             tuple(target.shape))
        sources, targets = (Sentences.of(tokens, packed=self.packed) for tokens in (source, target))
        h = self.decoder(_embedded(self.tokens[-1], targets), targets.causal, self.encode(sources),
                         sources.mask_for(targets))
        return self._logits(targets.padded(h))

    def encode(self, source: Sentences) -> Tensor:
        """Return the entries of the source, (T, C), or padded (B, M, C)."""
        return cast(Tensor, self.encoder(_embedded(self.tokens[0], source), source.structure))

    @torch.no_grad()
    def begin(self, source: Tensor) -> StackDecoding:
        """Return the decoding of sources (B, M), with prepared keys and values; the model must be in evaluation mode.
        """
        sources = Sentences.of(source, packed=self.packed)
        entries = sources.padded(self.encode(sources))
        pairs = None if bool(sources.keep.all()) else Padding(sources.keep)
        caches = self.decoder.prepare(entries[:, :0], entries, pairs)
        return StackDecoding(cast(Tokens, self.tokens[-1]), self.decoder, caches, self._logits, len(source))

    @torch.no_grad()
    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the attention of each target word over the source words in the last block, the mean over heads: (N, M)
        for a pair (M) and (N). The target begins with 1: row i belongs to the word after target[i]."""
        bases = layer_bases(self, source.unsqueeze(0), target.unsqueeze(0))
        [last] = bases[f"decoder.blocks.{len(self.decoder.blocks) - 1}.source"]
        return last.dense().reshape(-1, len(source), len(target)).mean(0).mT

    def _logits(self, h: Tensor) -> Tensor:
        return cast(Tensor, cast(Tokens, self.tokens[-1]).logits(h) if self.output is None else self.output(h))


def _embedded(tokens: Any, sentences: Sentences) -> Tensor:
    return cast(Tensor, tokens(sentences.tokens, sentences.placed(tokens.table(sentences.keep.shape[-1]))))


@torch.no_grad()
def _check_causal(layer: Conv) -> None:
    """Raise `ConfigError` if outputs read later inputs."""
    x, training = torch.ones(3, cast(int, layer.in_channels)), layer.training
    if not is_plain(x):
        return
    weights = layer.eval().mechanism.basis(x, structure=Samples([3])).dense()
    layer.train(training)
    if bool((weights.tril(-1) != 0).any()):
        raise ConfigError("Transformer", "decoder_mechanism must be causal", repr(layer.mechanism),
                          "Write it as scores.masked(keep=Causal()).softmax().")
