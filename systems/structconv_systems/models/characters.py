"""A language model of characters: a causal Transformer with rotary positions, or with others as baselines."""

import torch
from torch import Tensor, nn

from structconv import Causal, DotProduct, Rotary, Window
from structconv.shapes import check_choice, check_divides, check_positive
from structconv_systems.models.blocks import Block, Stack, StackDecoding, Tokens, attention

__all__ = ["CharacterModel"]


class CharacterModel(nn.Module):
    """P(y_n | y_<n) = softmax(E h_n), h of causal blocks that normalize first (Radford et al. 2019).

    Attention is y_n = sum_k sum_(m <= n) A_kmn x_m V_k O_k, A = softmax_m(<R_n W^q_k x_n, R_m W^k_k x_m> / sqrt(D)),
    with the rotation R_n by the position n (Su et al. 2021, eq. 16). It depends on offsets alone, so that texts of any
    length are valid; offsets beyond those of training reduce accuracy, and a `window` masks them.

    Args:
        vocabulary: V. channels: C. layers: blocks. heads: K; D = C / K, even. hidden: channels of the networks.
        dropout: see `Block`. recompute: see `Stack`.
        window: number of characters that each reads, itself included; default: all before it. No parameter depends on
            it.
        positions: "rotary", or "sinusoidal" or "learned" ones added to the embeddings.
        length: greatest length of a text, for learned positions.

    Characters are integers below V, without padding. O(N^2) pairs for each head and block.

    Raises:
        ConfigError: the heads do not divide the channels, D is odd, there are no layers, or the window is below 1.

    Example:

        >>> from structconv_systems.models.characters import CharacterModel
        >>> model = CharacterModel(30, channels=8, layers=1, heads=2, hidden=16).eval()
        >>> model(torch.randint(0, 30, (2, 12))).shape     # logits of the character that follows each
        torch.Size([2, 12, 30])
    """

    def __init__(self, vocabulary: int, *, channels: int = 192, layers: int = 6, heads: int = 6, hidden: int = 768,
                 dropout: float = 0.1, recompute: bool = False, window: int | None = None, positions: str = "rotary",
                 length: int = 512) -> None:
        super().__init__()
        check_positive("CharacterModel", "layers", layers)
        check_choice("CharacterModel", "positions", positions, ("rotary", "sinusoidal", "learned"))
        dim = check_divides("CharacterModel", "heads", heads, "channels", channels)
        scores = DotProduct(heads, dim, rotary=Rotary(layout="half") if positions == "rotary" else None).scaled()
        mask = Causal() if window is None else Window(check_positive("CharacterModel", "window", window) - 1) & Causal()
        causal = scores.masked(keep=mask).softmax()
        self.tokens = Tokens(vocabulary, channels, positions="none" if positions == "rotary" else positions,
                             dropout=dropout, length=length)
        self.stack = Stack([Block(attention(causal, channels, dim), None, hidden=hidden, dropout=dropout, norm="pre")
                            for _ in range(layers)], recompute=recompute)

    def forward(self, tokens: Tensor) -> Tensor:
        """Characters (B, N) -> the logits (B, N, V) of those that follow each."""
        table = self.tokens.table(tokens.shape[-1])
        p = None if table is None else table[:tokens.shape[-1]]
        return self.tokens.logits(self.stack(self.tokens(tokens, p)))

    @torch.no_grad()
    def begin(self, batch: int) -> StackDecoding:
        """Return the decoding of `batch` texts from their beginning; the model must be in evaluation mode."""
        weight = self.tokens.embedding.weight
        caches = self.stack.prepare(weight.new_empty(batch, 0, weight.shape[-1]))
        return StackDecoding(self.tokens, self.stack, caches, self.tokens.logits, batch)
