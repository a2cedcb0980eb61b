"""Training steps of sequence models against the same models in plain torch, the training loop, and decoding."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.case import FORWARD, Case, Comparison, Entrant, Size, copied, in_torch
from structconv.mechanisms.encodings import sinusoidal
from structconv.nn import cross_entropy
from structconv_systems.models.characters import CharacterModel
from structconv_systems.models.decoding import greedy
from structconv_systems.models.parser import Parser
from structconv_systems.models.recurrent import Recurrent
from structconv_systems.models.rnnsearch import RNNsearch
from structconv_systems.models.transformer import Transformer
from structconv_systems.train.batches import Windows
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.loop import fit
from structconv_systems.train.options import Trained
from structconv_systems.train.progress import Quiet
from structconv_systems.train.run import Run
from structconv_systems.train.study import jobs_of
from structconv_systems.train.task import BatchTask

__all__ = ["CASES"]

#: Of the training loop: letters of the alphabet, characters of a sample, samples of a batch.
_LETTERS, _LENGTH, _BATCH = 64, 128, 16


def _tokens_of(batch: int, length: int, shortest: int, vocabulary: int, seed: int) -> Tensor:
    """Sentences of `shortest` to `length` tokens, padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, vocabulary, (batch, length), generator=generator)
    sizes = torch.randint(shortest, length + 1, (batch, 1), generator=generator)
    sizes[0] = length
    return tokens.masked_fill(torch.arange(length) >= sizes, 0)


def _embedding(own: nn.Embedding) -> nn.Embedding:
    """One with the same numbers."""
    return nn.Embedding.from_pretrained(own.weight.detach().clone(), freeze=False, padding_idx=own.padding_idx)


def _step(name: str, model: nn.Module, held: nn.Embedding, *given: Tensor,
         entropy: Callable[..., Tensor] = F.cross_entropy) -> Entrant:
    """The loss of a model, whose gradient to `held` is compared; the last that is given is what it is to tell."""
    *others, expected = given

    def loss() -> Tensor:
        return entropy(model(*others).flatten(0, 1), expected.flatten(), ignore_index=0)

    return _by_loss(name, model, held, loss)


def _by_loss(name: str, model: nn.Module, held: nn.Embedding, loss: Callable[[], Tensor]) -> Entrant:
    """The timed work of a model with a loss of its own."""
    rest = tuple(own for own in model.eval().parameters() if own is not held.weight)
    return Entrant(name=name, run=loss, inputs=(held.weight,), parameters=rest)


class _Transformer(nn.Module):
    """torch's, with sinusoidal positions and one embedding for source, target and output."""

    def __init__(self, ours: Any, heads: int) -> None:
        super().__init__()
        block: Any = ours.encoder.blocks[0]
        channels, hidden, layers = block.attention.in_channels, block.network[0].out_features, len(ours.encoder.blocks)
        self.layers = nn.Transformer(channels, heads, layers, layers, hidden, 0.0, batch_first=True, norm_first=True)
        self.embedding = _embedding(ours.tokens[0].embedding)
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
        self.embedding = _embedding(ours.tokens.embedding)
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
        rows = torch.cat([ours.attention.query.weight, ours.attention.key.weight, ours.weight.value.weight])
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
    source, target = (_tokens_of(batch, n, shortest, vocabulary, n) for n in (length, length + 1))
    tokens = source, target[:, :-1], target[:, 1:]
    return Comparison(ours=_step("ours", ours, ours.tokens[0].embedding, *tokens, entropy=cross_entropy),
                      peers=(_step("torch nn.Transformer", peer, peer.embedding, *tokens),),
                      size=f"B={batch}, {shortest} to {length} tokens, V={vocabulary}, 256 channels, 3 + 3 blocks")


def _characters(size: Size, heads: int = 6) -> Comparison:
    """The defaults of our model, without dropout."""
    (batch, length), vocabulary = (2, 32) if size.quick else (16, 256), 65
    ours = CharacterModel(vocabulary, heads=heads, dropout=0.0)
    peer = _Characters(ours, heads)
    tokens = _tokens_of(batch, length + 1, length + 1, vocabulary, 0)
    return Comparison(ours=_step("ours", ours, ours.tokens.embedding, tokens[:, :-1], tokens[:, 1:],
                                entropy=cross_entropy),
                      peers=(_step("torch SDPA", peer, peer.embedding, tokens[:, :-1], tokens[:, 1:]),),
                      size=f"B={batch}, {length} characters, 192 channels, 6 blocks")


def _decoding(size: Size, batch: int, steps: int = 60) -> Comparison:
    """So many tokens of each source, greedily: with cached keys and values, and with a full pass for each."""
    steps, vocabulary = (5, 50) if size.quick else (steps, 8000)
    model = Transformer(vocabulary).eval()
    source = _tokens_of(batch, 15, 15, vocabulary, 0)

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


class _RNNsearch(nn.Module):
    """Packed sentences, keys projected once, and a loop over the words of the target."""

    def __init__(self, ours: RNNsearch) -> None:
        super().__init__()
        context: Any = ours.context
        score, theta = context.mechanism.operands[0], context.weight.theta.squeeze(0).mT
        gates = ours.sizes[0]
        self.source, self.target = _embedding(ours.source), _embedding(ours.target)
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
        self.words, self.tags, self.characters = map(_embedding, (ours.words, tags, letters.characters))
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
        y = self.letters((self.characters(letters) * exist).flatten(0, 1).mT).mT.unflatten(0, letters.shape[:2])
        return (F.relu(y) * exist).amax(-2)


def _parameter(own: Tensor) -> nn.Parameter:
    return nn.Parameter(own.detach().clone())


def _unbiased(own: Recurrent, kind: type[nn.GRU] | type[nn.LSTM]) -> nn.GRU | nn.LSTM:
    """torch's module with our numbers, whose biases are the weights of one more input."""
    first: Any = own.layers[0]
    layer = kind(first.input_size - 1, first.hidden_size, len(own.layers), batch_first=True, bidirectional=True)
    for number, part in enumerate(own.layers):
        for end in ("", "_reverse"):
            weight, suffix = getattr(part, f"weight_ih_l0{end}"), f"l{number}{end}"
            copied(getattr(layer, f"weight_ih_{suffix}"), weight[:, :-1], zeroed=getattr(layer, f"bias_hh_{suffix}"))
            copied(getattr(layer, f"bias_ih_{suffix}"), weight[:, -1])
            copied(getattr(layer, f"weight_hh_{suffix}"), getattr(part, f"weight_hh_l0{end}"))
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
    source, target = (_tokens_of(batch, n, length - 2, vocabulary, n) for n in (length, length + 1))
    tokens = source, target[:, :-1], target[:, 1:]
    return Comparison(ours=_step("ours", ours, ours.source, *tokens, entropy=cross_entropy),
                      peers=(_step("plain torch", peer, peer.source, *tokens),),
                      size=f"B={batch}, {length - 2} to {length} tokens, V={vocabulary}, 256 channels")


def _parsing(size: Size, relations: int = 40) -> Comparison:
    """The sizes of our recipe, without dropout."""
    batch, length = (2, 6) if size.quick else (40, 24)
    words, tags = (_tokens_of(batch, length, length - 2, count, count) for count in (8000, 18))
    exist = words != 0
    letters = _tokens_of(batch * length, 12, 1, 80, 0).unflatten(0, (batch, length)) * exist.unsqueeze(-1)
    sizes, generator = exist.sum(1, keepdim=True), torch.Generator().manual_seed(0)
    heads = torch.randint(0, 1 << 20, words.shape, generator=generator) % (sizes + 1) * exist
    labels = torch.randint(1, relations, words.shape, generator=generator) * exist
    ours = Parser(8000, 18, relations, characters=80, hidden=200, layers=2, arc=300, label=100)
    peer = _Parser(ours)
    inputs = words, tags * exist, heads, labels, letters
    entrants = [_by_loss(name, model, model.words, partial(model.loss, *inputs))
                for name, model in (("ours", ours), ("plain torch", peer))]
    return Comparison(ours=entrants[0], peers=(entrants[1],),
                      size=f"B={batch}, {length - 2} to {length} words, {relations} relations, LSTMs of 2 x 200")


@dataclass(frozen=True, kw_only=True)
class _Options(Trained):
    name = "training-loop"


class _CharacterTask(BatchTask):
    """The next of random characters; nothing is validated."""

    def __init__(self, options: Trained, text: Tensor) -> None:
        self.text = text
        model = CharacterModel(_LETTERS, channels=128, layers=2, heads=4, dropout=0.0)
        super().__init__(model, options, Windows(len(text) - _LENGTH, size=_BATCH, seed=0))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        tokens = torch.stack([self.text[first:first + _LENGTH + 1] for first in samples])
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), _BATCH * _LENGTH

    def figures(self, part: str) -> dict[str, float]:
        return {f"{part}_loss": 0.0}


class _Trainings:
    """One training twice: by `fit`, in a folder that is removed with the object, and by torch alone."""

    def __init__(self, steps: int) -> None:
        self.options = _Options(steps=steps, checkpoint_every=steps, validate_every=steps)
        self.text = torch.randint(0, _LETTERS, (20_000,))
        self._folder = tempfile.TemporaryDirectory()
        self._run, self._numbers = Run.create(self._folder.name, self.options), itertools.count()

    def task(self, seed: int = 0) -> _CharacterTask:
        torch.manual_seed(seed)
        return _CharacterTask(self.options, self.text)

    @torch.enable_grad()
    def loop(self) -> Tensor:
        task, (job,) = self.task(), jobs_of(self.options, f"number-{next(self._numbers)}", self.task, _CharacterTask)
        fit(lambda: task, job.schedule(), run=self._run, job=job.name, interrupt=Interrupt(), progress=Quiet())
        shutil.rmtree(self._run.checkpoint_folder(job.name))
        return nn.utils.parameters_to_vector(task.model.parameters()).detach()

    @torch.enable_grad()
    def bare(self) -> Tensor:
        task = self.task()
        optimizer = torch.optim.Adam(task.model.parameters(), lr=self.options.learning_rate)
        for step in range(1, self.options.steps + 1):
            loss, count = task.loss(task.batches.at(step))
            optimizer.zero_grad()
            (loss / count).backward()
            nn.utils.clip_grad_norm_(task.model.parameters(), self.options.clip)
            optimizer.step()
        return nn.utils.parameters_to_vector(task.model.parameters()).detach()


def _loop(size: Size) -> Comparison:
    trainings = _Trainings(size.pick(10, 100))
    ours, bare = (Entrant(name=name, run=run, phases=(FORWARD,))
                  for name, run in (("ours", trainings.loop), ("bare steps", trainings.bare)))
    return Comparison(ours=ours, peers=(bare,),
                      size=f"{trainings.options.steps} steps, B={_BATCH}, {_LENGTH} characters, 128 channels")


CASES = (
    Case(suite="models", name="transformer-step", build=partial(_translation, batch=64, length=15, shortest=13)),
    Case(suite="models", name="transformer-step-padded", build=partial(_translation, batch=64, length=15, shortest=5),
         headline=False),
    Case(suite="models", name="transformer-step-long", build=partial(_translation, batch=16, length=30, shortest=28),
         headline=False),
    Case(suite="models", name="characters-step", build=_characters),
    Case(suite="models", name="transformer-decoding-60", build=partial(_decoding, batch=16)),
    Case(suite="models", name="rnnsearch-step", build=_search),
    Case(suite="models", name="parser-step", build=_parsing),
    Case(suite="models", name="training-loop", build=_loop, headline=False),
)
