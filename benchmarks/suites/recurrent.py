"""Training steps of recurrent models, RNNsearch and the bi-affine parser, against the same models in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.case import Case, Comparison, Size
from benchmarks.suites.graph_peers import copied, in_torch
from benchmarks.suites.sequence_peers import by_loss, embedding, step, tokens_of
from structconv.nn import cross_entropy
from structconv_systems.models.parser import Parser
from structconv_systems.models.recurrent import Recurrent
from structconv_systems.models.rnnsearch import RNNsearch

__all__ = ["CASES"]


class _RNNsearch(nn.Module):
    """Packed sentences, keys projected once, and a loop over the words of the target."""

    def __init__(self, ours: RNNsearch) -> None:
        super().__init__()
        context: Any = ours.context
        score, theta = context.mechanism.operands[0], context.weight.theta.squeeze(0).mT
        gates = ours.sizes[0]
        self.source, self.target = embedding(ours.source), embedding(ours.target)
        self.encoder = _unbiased(ours.encoder, nn.GRU)
        self.first, self.query, self.key = (in_torch(layer) for layer in (ours.first, score.target, score.source))
        self.vector = nn.Parameter(score.vector.detach().squeeze(0).clone())
        embed, hidden = self.target.embedding_dim, ours.first.out_features
        self.cell = nn.GRUCell(embed + theta.shape[1], hidden)
        copied(self.cell.weight_ih, torch.cat([ours.word.weight, theta], 1)[:gates])
        copied(self.cell.bias_ih, context.bias[:gates])
        copied(self.cell.weight_hh, ours.state.weight)
        copied(self.cell.bias_hh, ours.state.bias)
        self.pairs = nn.Linear(hidden + embed + theta.shape[1], ours.sizes[1])
        copied(self.pairs.weight, torch.cat([ours.pairs.weight, ours.word.weight[gates:], theta[gates:]], 1))
        copied(self.pairs.bias, ours.pairs.bias + context.bias[gates:])
        self.words = in_torch(ours.words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keep, words = source != 0, self.target(target)
        states, last = _packed(self.encoder, self.source(source), keep)
        state, keys, seen = self.first(last[1]).tanh(), self.key(states), []
        for word in words.unbind(1):
            scores = (keys + self.query(state).unsqueeze(1)).tanh() @ self.vector
            weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
            context = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
            state = self.cell(torch.cat([word, context], -1), state)
            seen.append(torch.cat([state, word, context], -1))
        logits: Tensor = self.words(self.pairs(torch.stack(seen, 1)).unflatten(-1, (-1, 2)).amax(-1))
        return logits


class _Parser(nn.Module):
    """Packed sentences; the scores of heads and relations by products and `einsum`."""

    def __init__(self, ours: Parser) -> None:
        super().__init__()
        letters: Any = ours.letters
        tags: Any = ours.tags
        self.words, self.tags, self.characters = map(embedding, (ours.words, tags, letters.characters))
        theta = letters.conv.weight.theta
        self.letters = nn.Conv1d(theta.shape[1], theta.shape[2], 3, padding=1)
        copied(self.letters.weight, theta.permute(2, 1, 0))
        self.letters.bias = _parameter(letters.conv.bias)
        self.root = _parameter(ours.root)
        self.encoder, self.perceptrons = _unbiased(ours.encoder, nn.LSTM), in_torch(ours.perceptrons)
        arcs: Any = ours.arcs
        labels: Any = ours.labels
        self.sizes, self.arc, self.arc_head = ours.sizes, _parameter(arcs.weight[0]), _parameter(arcs.vector_source[0])
        self.label, self.label_bias = _parameter(labels.weight), _parameter(labels.offset)
        self.label_head, self.label_word = _parameter(labels.vector_source), _parameter(labels.vector_target)

    def forward(self, words: Tensor, tags: Tensor, letters: Tensor) -> tuple[Tensor, Tensor]:
        exist = F.pad(words != 0, (1, 0), value=True)
        x = torch.cat([self.words(words), self.tags(tags), self._spelt(letters)], -1)
        states, _ = _packed(self.encoder, torch.cat([self.root.expand(x.shape[0], 1, -1), x], 1), exist)
        head, word, head_of, word_of = F.leaky_relu(self.perceptrons(states), 0.1).split(self.sizes, -1)
        word, word_of = word[:, 1:], word_of[:, 1:]
        arcs = (head @ self.arc) @ word.mT + (head @ self.arc_head).unsqueeze(-1)
        labels = (torch.einsum("bmp,kpq,bnq->bkmn", head_of, self.label, word_of)
                  + (head_of @ self.label_head.mT).mT.unsqueeze(-1) + (word_of @ self.label_word.mT).mT.unsqueeze(-2)
                  + self.label_bias[:, None, None])
        return arcs.masked_fill(~exist.unsqueeze(-1), -torch.inf), labels

    def loss(self, words: Tensor, tags: Tensor, heads: Tensor, relations: Tensor, letters: Tensor) -> Tensor:
        arcs, labels = self(words, tags, letters)
        chosen = labels.gather(2, heads[:, None, None].expand(-1, labels.shape[1], 1, -1)).squeeze(2)
        missing = heads.masked_fill(words == 0, -100)
        return F.cross_entropy(arcs, missing) + F.cross_entropy(chosen, relations, ignore_index=0)

    def _spelt(self, letters: Tensor) -> Tensor:
        exist = (letters != 0).unsqueeze(-1)
        made = self.letters((self.characters(letters) * exist).flatten(0, 1).mT).mT.unflatten(0, letters.shape[:2])
        return (F.relu(made) * exist).amax(-2)


def _parameter(own: Tensor) -> nn.Parameter:
    return nn.Parameter(own.detach().clone())


def _unbiased(own: Recurrent, kind: type[nn.GRU] | type[nn.LSTM]) -> nn.GRU | nn.LSTM:
    """torch's module with our numbers, whose biases are the weights of one more input."""
    first: Any = own.layers[0]
    layer = kind(first.input_size - 1, first.hidden_size, len(own.layers), batch_first=True, bidirectional=True)
    for number, part in enumerate(own.layers):
        for end in ("", "_reverse"):
            weight, place = getattr(part, f"weight_ih_l0{end}"), f"l{number}{end}"
            copied(getattr(layer, f"weight_ih_{place}"), weight[:, :-1], zeroed=getattr(layer, f"bias_hh_{place}"))
            copied(getattr(layer, f"bias_ih_{place}"), weight[:, -1])
            copied(getattr(layer, f"weight_hh_{place}"), getattr(part, f"weight_hh_l0{end}"))
    return layer


def _packed(encoder: nn.GRU | nn.LSTM, x: Tensor, keep: Tensor) -> tuple[Tensor, Any]:
    packed = pack_padded_sequence(x, keep.sum(1), batch_first=True, enforce_sorted=False)
    states, last = encoder(packed)
    return pad_packed_sequence(states, batch_first=True)[0], last


def _search(size: Size, length: int = 15) -> Comparison:
    """The defaults of our model, without dropout, on sentences of nearly one length, as batches by length have them."""
    batch, vocabulary = (4, 50) if size.quick else (80, 5000)
    ours = RNNsearch(vocabulary, vocabulary)
    peer = _RNNsearch(ours)
    source, target = (tokens_of(batch, n, length - 2, vocabulary, n) for n in (length, length + 1))
    tokens = source, target[:, :-1], target[:, 1:]
    return Comparison(ours=step("ours", ours, ours.source, *tokens, entropy=cross_entropy),
                      peers=(step("plain torch", peer, peer.source, *tokens),),
                      size=f"B={batch}, {length - 2} to {length} tokens, V={vocabulary}, 256 channels")


def _parsing(size: Size, relations: int = 40) -> Comparison:
    """The sizes of our recipe, without dropout."""
    batch, length = (2, 6) if size.quick else (40, 24)
    words, tags = (tokens_of(batch, length, length - 2, count, count) for count in (8000, 18))
    exist = words != 0
    letters = tokens_of(batch * length, 12, 1, 80, 0).unflatten(0, (batch, length)) * exist.unsqueeze(-1)
    sizes, generator = exist.sum(1, keepdim=True), torch.Generator().manual_seed(0)
    heads = torch.randint(0, 1 << 20, words.shape, generator=generator) % (sizes + 1) * exist
    labels = torch.randint(1, relations, words.shape, generator=generator) * exist
    ours = Parser(8000, 18, relations, characters=80, hidden=200, layers=2, arc=300, label=100)
    peer = _Parser(ours)
    given = words, tags * exist, heads, labels, letters
    entrants = [by_loss(name, model, model.words, partial(model.loss, *given))
                for name, model in (("ours", ours), ("plain torch", peer))]
    return Comparison(ours=entrants[0], peers=(entrants[1],),
                      size=f"B={batch}, {length - 2} to {length} words, {relations} relations, LSTMs of 2 x 200")


CASES = (
    Case(suite="models", name="rnnsearch-step", build=_search),
    Case(suite="models", name="parser-step", build=_parsing),
)
