"""The bi-affine dependency parser of Dozat and Manning (2017)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.mechanisms import Additive, BiAffine, Cuboid
from structconv.nn import Conv, Linear
from structconv.shapes import check_choice
from structconv_systems.models.recurrent import Recurrent, shared_dropout
from structconv_systems.models.tokens import PAD
from structconv_systems.models.trees import best_trees

__all__ = ["Parser"]

#: The head of padding, which the loss ignores.
NONE = -100


class Parser(nn.Module):
    """Scores of heads and of relations: h^T W d + u^T h, and for each relation k h^T W_k d + u_k^T h + v_k^T d + c_k.

    h and d are outputs of perceptrons on the states of a head and of a word, with separate perceptrons for heads and
    relations. The states come from a stack of bidirectional LSTMs over [word, tag], with a learned vector for the root
    before the first word. Both scores are bases of the mechanism `BiAffine`, with K = 1 and K = number of relations,
    from M = N + 1 heads to N words; there is no Theta.

    Args:
        words, tags, relations: sizes of the vocabularies, with 0 for padding. `tags=None` reads no tags.
        characters: size of the alphabet; a max-pooled convolution of width 3 over its letters is then added to a word.
        embed: channels of words, of tags, and of letters' features. hidden: channels of each direction of the LSTMs.
        arc, label: channels of the perceptrons for heads and for relations.
        scores: of heads, "biaffine" or "additive", v^T tanh(W d + U h) (Kiperwasser and Goldberg 2016), a baseline.
        dropout: probability of dropout of whole words and tags, with rescaling, and of all later layers, by sentence.

    Calling it: words, tags (B, N) integers, padded with 0 at the end, and letters (B, N, L) with `characters` -> scores
    of heads (B, M, N), -inf for padding, and of relations (B, relations, M, N). Head 0 is the root and head m the m-th
    word, as in CoNLL-U. O(B M N (arc + relations label)) flops besides the LSTMs.

    Dozat and Manning (2017), sections 2.1 and 2.2, table 1 (3 layers of 400, perceptrons of 500 and 100, dropout 0.33).
    Unlike them: no pretrained vectors; letters; no dropout between the steps of an LSTM; no orthogonal initialization.

    Example:

        >>> from structconv_systems.models.parser import Parser
        >>> model = Parser(20, 5, 3, embed=8, hidden=8, layers=1, arc=8, label=4).eval()
        >>> words, tags = torch.tensor([[4, 7, 9]]), torch.tensor([[1, 2, 1]])
        >>> heads, relations = model(words, tags)
        >>> heads.shape, relations.shape                   # M = 4: the root and three words
        (torch.Size([1, 4, 3]), torch.Size([1, 3, 4, 3]))
    """

    def __init__(self, words: int, tags: int | None, relations: int, *, characters: int | None = None,
                 embed: int = 100, hidden: int = 400, layers: int = 3, arc: int = 500, label: int = 100,
                 dropout: float = 0.33, scores: str = "biaffine") -> None:
        super().__init__()
        check_choice("Parser", "scores", scores, ("biaffine", "additive"))
        self.sizes, self.dropout = (arc, arc, label, label), dropout
        self.words = nn.Embedding(words, embed, PAD)
        self.tags = None if tags is None else nn.Embedding(tags, embed, PAD)
        self.letters = None if characters is None else Letters(characters, embed)
        channels = embed * (1 + (tags is not None) + (characters is not None))
        self.root = nn.Parameter(0.1 * torch.randn(channels))
        self.encoder = Recurrent(nn.LSTM, channels, hidden, layers=layers, bidirectional=True, dropout=dropout)
        self.perceptrons = Linear(2 * hidden, sum(self.sizes))
        self.arcs = (BiAffine(target=False) if scores == "biaffine" else Additive(arc)).bound(arc)
        self.labels = BiAffine(relations, constant=True).bound(label)

    def forward(self, words: Tensor, tags: Tensor, letters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        exist = F.pad(words != PAD, (1, 0), value=True)
        embedded = [self.words(words), *([] if self.tags is None else [self.tags(tags)]),
                    *([] if self.letters is None else [self.letters(letters)])]
        x = dropped_parts(embedded, self.dropout, self.training)
        states, _ = self.encoder(torch.cat([self.root.expand(x.shape[0], 1, -1), x], 1), exist)
        states = self.perceptrons(shared_dropout(states, self.dropout, self.training))
        features = shared_dropout(F.leaky_relu(states, 0.1), self.dropout, self.training)
        head, word, head_of, word_of = features.split(self.sizes, -1)
        arcs = self.arcs.basis(head, z=word[:, 1:]).dense().squeeze(1)
        labels = self.labels.basis(head_of, z=word_of[:, 1:]).dense()
        return arcs.masked_fill(~exist.unsqueeze(-1), -torch.inf), labels

    def loss(self, words: Tensor, tags: Tensor, heads: Tensor, relations: Tensor, letters: Tensor | None = None
             ) -> Tensor:
        """The mean over words of -log p(head) - log p(relation | head), of heads and relations (B, N)."""
        arcs, labels = self(words, tags, letters)
        heads = heads.masked_fill(words == PAD, 0)
        of_heads = F.cross_entropy(arcs, heads.masked_fill(words == PAD, NONE), ignore_index=NONE)
        return of_heads + F.cross_entropy(at_heads(labels, heads), relations, ignore_index=PAD)

    @torch.no_grad()
    def parse(self, words: Tensor, tags: Tensor, letters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the heads of each sentence's best tree (see `best_trees`) and their best relations: (B, N), 0 in
        padding."""
        arcs, labels = self(words, tags, letters)
        heads = best_trees(arcs, (words != PAD).sum(1)).to(words.device)
        relations = at_heads(labels, heads)[:, 1:].argmax(1) + 1
        return heads, relations.masked_fill(words == PAD, PAD)


class Letters(nn.Module):
    """A word by its letters: the greatest values of ReLU(A^T x Theta + b) over its places, A the shifts by -1, 0, 1.

    Letters (B, N, L) integers, filled up with 0 at the end -> (B, N, channels); zeros of a word without letters.
    """

    def __init__(self, characters: int, channels: int, *, embed: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, embed, PAD)
        self.conv = Conv(Cuboid(3, padding="zeros"), embed, channels)

    def forward(self, letters: Tensor) -> Tensor:
        missing = (letters == PAD).unsqueeze(-1)
        features = self.conv(self.characters(letters).masked_fill(missing, 0))
        return F.relu(features.masked_fill(missing, -torch.inf).max(-2).values)  # stores positions, amax the table


def dropped_parts(parts: list[Tensor], p: float, training: bool) -> Tensor:
    """Concatenate parts (B, N, C) of a word; in training drop each with probability p and scale the others of the word.
    """
    x = torch.stack(parts, 2)
    if training and p > 0:
        left = (torch.rand(x.shape[:3], device=x.device) >= p).to(x.dtype).unsqueeze(-1)
        x = x * (left * len(parts) / left.sum(2, keepdim=True).clamp(min=1))
    return x.flatten(2)


def at_heads(labels: Tensor, heads: Tensor) -> Tensor:
    """Select the scores of relations (B, K, M, N) at heads (B, N): (B, K, N)."""
    index = heads[:, None, None].expand(-1, labels.shape[1], 1, -1)
    return labels.gather(2, index).squeeze(2)
