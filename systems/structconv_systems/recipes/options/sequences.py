"""Options of the recipes on sequences."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, OnFiles, option

__all__ = ["Characters", "FixedHeads", "Luong", "Parser", "Pervasive", "RNNSearch", "RelativePositions",
           "Transformer", "Translation"]


@dataclass(frozen=True, kw_only=True)
class Translation(OnFiles):
    """Options of the recipes that translate."""

    folder = "multi30k"
    where = "Multi30k is at github.com/multi30k/dataset, in data/task1/raw; other parallel text goes as well."
    train: str = option("train", "stem of the training files: STEM.SOURCE and STEM.TARGET, plain or gzipped")
    valid: str = option("val", "stem of the validation files")
    test: str = option("test_2016_flickr", "stem of the test files")
    from_language: str = option("en", "file ending of the source language")
    to_language: str = option("de", "file ending of the target language")
    sentences: int = option(0, "number of training pairs, the first ones; 0: all", minimum=0)
    in_a_row: int = option(1, "join up to this many neighboring sentences to one, as further training pairs", minimum=1)
    vocabulary: int = option(5000, "subwords in the vocabulary of both languages", minimum=300)
    longest: int = option(100, "subwords of the longest training sentence; longer ones are dropped, and a "
                              "translation has at most 50 more", minimum=2)
    batch_tokens: int = option(2048, "tokens in a batch, padding included, of the longer language", minimum=1)
    label_smoothing: float = option(0.1, "share of the target spread over all subwords", minimum=0, below=1)
    beam: int = option(5, "hypotheses kept in decoding; 1: greedy", minimum=1)
    length_penalty: float = option(1.0, "scores are divided by the length to this power", minimum=0, below=20)
    channels: int = option(256, "channels of the hidden layers", minimum=1)
    dropout: float = option(0.1, "share of hidden units dropped", minimum=0, below=1)

    def _files_at(self, path: Path) -> list[Path]:
        names = [f"{path}.{language}{packed}" for language in (self.from_language, self.to_language)
                 for packed in ("", ".gz")]
        return [file for name in names for file in super(Translation, self)._files_at(Path(name))]


@dataclass(frozen=True, kw_only=True)
class Attending(Translation, sentences=12_000, batch_tokens=1024, channels=128, dropout=0.2, beam=1, optimizer="adamw",
                learning_rate=1.5e-3, schedule="inverse_root", warmup=200):
    """Options of the recipes that train a Transformer."""

    layers: int = option(3, "layers of the encoder and of the decoder", minimum=1)
    hidden: int = option(512, "hidden channels of the feed-forward parts", minimum=1)
    norm: str = option("pre", "position of layer norm: pre or post", choices=("pre", "post"))
    recompute: bool = option(False, "recompute activations in the backward pass, to save memory")


@dataclass(frozen=True, kw_only=True)
class Transformer(Attending, seeds=3, steps=1000):
    """Vaswani et al. (2017)."""

    name = "transformer"
    published = "27.3 vs 24.6 (recurrent, GNMT + RL) on WMT 14 EN-DE"  # Table 2, from memory, unchecked
    effect: ClassVar = Effect(claim="BLEU of the Transformer over RNNsearch", figure="test_bleu", published=27.3 - 24.6,
                              pairs=(("transformer", "rnnsearch"),))
    presets: ClassVar = {
        "quick": {"seeds": 1, "sentences": 4000, "vocabulary": 2000, "channels": 128, "hidden": 256, "layers": 2,
                  "steps": 300, "warmup": 100, "validate_every": 150, "checkpoint_every": 50, "beam": 1,
                  "learning_rate": 5e-3, "rates": ("rnnsearch=1e-2",), "batch_tokens": 2048},
        "paper": {"seeds": 1, "channels": 512, "hidden": 2048, "layers": 6, "heads": 8, "steps": 100_000,
                  "warmup": 4000, "batch_tokens": 25_000, "learning_rate": 7e-4, "beam": 4, "length_penalty": 0.6,
                  "dropout": 0.1, "norm": "post", "sentences": 0}}
    # Both are the best in validation (seed 0) of those that docs/systems/transformer.md lists.
    learning_rate: float = 3e-3
    rates: tuple[str, ...] = ("rnnsearch=5e-3",)
    heads: int = option(4, "attention heads", minimum=1)
    positions: str = option("sinusoidal", "encoding of positions: sinusoidal or learned",
                            choices=("sinusoidal", "learned"))


@dataclass(frozen=True, kw_only=True)
class RNNSearch(Translation, in_a_row=4, seeds=3, steps=1000, learning_rate=5e-3, channels=192, label_smoothing=0.0,
                dropout=0.2, schedule="cosine", warmup=100):
    """Bahdanau, Cho and Bengio (2015), with and without attention."""

    name = "rnnsearch"
    published = "26.75 vs 17.82 on WMT 14 EN-FR"
    effect: ClassVar = Effect(claim="BLEU of attention over none", figure="test_bleu", published=26.75 - 17.82,
                              pairs=(("with-attention", "without-attention"),))
    further: ClassVar = (("in_a_row=1",),)
    presets: ClassVar = {
        "quick": {"seeds": 1, "sentences": 4000, "in_a_row": 1, "vocabulary": 2000, "channels": 128, "steps": 300,
                  "validate_every": 150, "checkpoint_every": 50, "beam": 1, "learning_rate": 3e-3, "warmup": 200}}


#: The rows of table 4 of Luong et al.: no attention, or its window and its score.
_ALIGNMENTS = ("none", "global-location", "global-dot", "global-general", "global-additive", "local-m-dot",
               "local-m-general", "local-p-dot", "local-p-general")


@dataclass(frozen=True, kw_only=True)
class Luong(Translation, sentences=8000, vocabulary=4000, label_smoothing=0.0, dropout=0.2, seeds=3, steps=600, beam=1,
            schedule="cosine", learning_rate=1e-2, warmup=100, channels=128):
    """Luong, Pham and Manning (2015), table 4."""

    name = "luong"
    published = "perplexity 6.4 (location) to 5.9 (local-p, general) on WMT 14 EN-DE"
    effect: ClassVar = Effect(
        claim="perplexity, global location over local-p general", figure="test_perplexity", higher=False, ratio=True,
        pairs=(("local-p-general", "global-location"),), published=6.4 / 5.9)
    presets: ClassVar = {
        "quick": {"seeds": 1, "rows": ("global-location", "local-p-general"), "sentences": 3000, "vocabulary": 1500,
                  "channels": 96, "layers": 1, "steps": 200, "warmup": 20, "validate_every": 100,
                  "checkpoint_every": 50, "beam": 1, "learning_rate": 5e-3},
        "paper": {"seeds": 1, "channels": 1000, "layers": 4, "steps": 300_000, "vocabulary": 50_000, "sentences": 0,
                  "learning_rate": 2e-3}}
    rows: tuple[str, ...] = option(_ALIGNMENTS, "rows of the table, a,b,c: alignment and score of attention; none: no "
                                   "attention", choices=_ALIGNMENTS)
    layers: int = option(1, "LSTM layers of encoder and decoder", minimum=1)
    radius: int = option(10, "half width D of local attention", minimum=1)
    input_feeding: bool = option(True, "the decoder reads its last attentional state")


_ROWS = ("keys", "values", "neither", "sinusoidal", "t5", "alibi", "rotary")


@dataclass(frozen=True, kw_only=True)
class RelativePositions(Attending, vocabulary=4000, layers=2, seeds=3, steps=700, learning_rate=6e-3):
    """Shaw, Uszkoreit and Vaswani (2018), tables 2 and 3."""

    name = "relative-positions"
    published = "WMT 14 EN-DE, clip 0: 12.5, 2: 25.8; both sides 25.8, keys 25.8, values 25.3, none 12.5"
    effect: ClassVar = Effect(
        claim="BLEU of clip 2 over clip 0", figure="test_bleu", pairs=(("clip-2", "clip-0"),), published=25.8 - 12.5)
    presets: ClassVar = {
        "quick": {"seeds": 1, "rows": ("clip-0", "clip-2"), "sentences": 6000, "vocabulary": 2000, "channels": 96,
                  "hidden": 192, "layers": 2, "steps": 350, "warmup": 100, "validate_every": 175,
                  "checkpoint_every": 50, "learning_rate": 3e-3},
        "paper": {"seeds": 1, "channels": 512, "hidden": 2048, "layers": 6, "heads": 8, "steps": 100_000,
                  "sentences": 0, "batch_tokens": 25_000, "warmup": 4000, "beam": 4, "learning_rate": 1.5e-3,
                  "rows": ("clip-0", "clip-1", "clip-2", "clip-4", "clip-16", "clip-64", *_ROWS)}}
    rows: tuple[str, ...] = option(
        ("clip-0", "clip-2", "clip-16", "keys", "values", "rotary"),
        "rows of the tables, a,b,c: clip-C: positions up to C for keys and values; keys, values: up to 16 for one")
    heads: int = option(4, "attention heads", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [row for row in self.rows if row not in _ROWS and not re.fullmatch(r"clip-(0|[1-9]\d*)", row)]
        if unknown or not self.rows or len(set(self.rows)) < len(self.rows):
            raise ConfigError(self.name, f"rows must be of clip-C, {', '.join(_ROWS)}, each once",
                              ",".join(unknown or self.rows) or "none")


@dataclass(frozen=True, kw_only=True)
class FixedHeads(Attending, vocabulary=4000, hidden=256, layers=2, seeds=3, steps=1200, learning_rate=6e-3):
    """Raganato, Scherrer and Tiedemann (2020); Andreoli (2019), section 3.3."""

    name = "fixed-heads"
    published = "within 0.5 BLEU of learned heads"
    effect: ClassVar = Effect(claim="BLEU of fixed heads over learned ones; 0.5 less counts as none",
                              figure="test_bleu", pairs=(("fixed-heads", "learned-heads"),), published=0.0, margin=-0.5)
    presets: ClassVar = {
        "quick": {"seeds": 1, "sentences": 3000, "vocabulary": 1500, "channels": 64, "hidden": 128, "layers": 2,
                  "steps": 300, "warmup": 100, "validate_every": 150, "checkpoint_every": 50, "learning_rate": 3e-3,
                  "batch_tokens": 2048},
        "paper": {"seeds": 1, "channels": 512, "hidden": 2048, "layers": 6, "shifts": (-3, -2, -1, 0, 1, 2, 3),
                  "steps": 100_000, "sentences": 0, "batch_tokens": 25_000, "warmup": 4000, "beam": 4,
                  "learning_rate": 1.5e-3}}
    shifts: tuple[int, ...] = option((-1, 0, 1), "offsets of the fixed heads; one more head is learned")
    positions: str = option("sinusoidal", "encoding of positions: sinusoidal or learned",
                            choices=("sinusoidal", "learned"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels % (heads := len(self.shifts) + 1):
            raise ConfigError(self.name, f"channels must be a multiple of the {heads} heads, one for each of shifts "
                              "and one that is learned", self.channels)


@dataclass(frozen=True, kw_only=True)
class Pervasive(Translation, sentences=8000, vocabulary=3000, longest=50, batch_tokens=1024, channels=192, dropout=0.2,
                seeds=3, steps=1000, learning_rate=8e-3, schedule="cosine", warmup=200, validate_every=250):
    """Elbayad, Besacier and Verbeek (2018), beside RNNsearch on the same pairs."""

    name = "pervasive"
    learning = "loss"
    published = "IWSLT DE-EN 34.18, EN-DE 27.99"
    effect: ClassVar = Effect(
        claim="BLEU of pervasive attention over RNNsearch", figure="test_bleu", pairs=(("pervasive", "rnnsearch"),))
    presets: ClassVar = {
        "quick": {"seeds": 1, "sentences": 3000, "vocabulary": 1500, "batch_tokens": 768, "channels": 96, "pairs": 32,
                  "layers": 3, "growth": 16, "hidden": 48, "steps": 200, "warmup": 50, "validate_every": 100,
                  "checkpoint_every": 50, "beam": 1, "learning_rate": 3e-3},
        "paper": {"seeds": 1, "channels": 128, "pairs": 128, "layers": 24, "growth": 32, "hidden": 128, "kernel": 5,
                  "positions": "none", "sentences": 0, "steps": 50_000, "learning_rate": 5e-4}}
    pairs: int = option(64, "channels of a pair of words before the first layer", minimum=1)
    layers: int = option(4, "convolution layers", minimum=1)
    growth: int = option(24, "growth rate: channels that a layer adds", minimum=1)
    hidden: int = option(64, "channels of the convolutions", minimum=1)
    kernel: int = option(5, "kernel size over source words; odd", minimum=1)
    pooling: str = option("max", "pooling over the source: max, attention or both")
    positions: str = option("sinusoidal", "encoding of positions: none, sinusoidal or learned")


@dataclass(frozen=True, kw_only=True)
class Parser(OnFiles, seeds=3, steps=1000, learning_rate=2e-3, schedule="cosine", warmup=100, clip=5.0,
             validate_every=250):
    """Dozat and Manning (2017)."""

    name = "parser"
    folder = "ud_ewt"
    where = "Universal Dependencies are at universaldependencies.org; any CoNLL-U goes."
    published = "UAS 95.7, LAS 94.1 on PTB"  # abstract
    effect: ClassVar = Effect(claim="UAS of bi-affine over additive scores, points", figure="test_uas",
                              pairs=(("parser", "additive"),))
    presets: ClassVar = {
        "quick": {"seeds": 1, "sentences": 1500, "hidden": 96, "layers": 1, "arc": 96, "label": 48, "steps": 150,
                  "warmup": 20, "validate_every": 150, "checkpoint_every": 50, "learning_rate": 5e-3},
        "paper": {"seeds": 1, "steps": 75_000, "hidden": 400, "layers": 3, "arc": 500, "label": 100,
                  "batch_words": 5000}}
    train: str = option("en_ewt-ud-train.conllu.gz", "training file, CoNLL-U, plain or gzipped")
    valid: str = option("en_ewt-ud-dev.conllu.gz", "validation file")
    test: str = option("en_ewt-ud-test.conllu.gz", "test file")
    sentences: int = option(0, "number of training sentences, the first ones; 0: all", minimum=0)
    batch_words: int = option(1000, "words in a batch, padding included", minimum=1)
    least: int = option(2, "words with fewer occurrences in the training file are unknown words", minimum=1)
    tags: bool = option(False, "read gold part-of-speech tags (column UPOS) in training, validation and test")
    embed: int = option(100, "channels of the embedding of a word, of a part of speech and of the letters", minimum=1)
    hidden: int = option(200, "channels of each direction of the LSTMs", minimum=1)
    layers: int = option(2, "LSTM layers", minimum=1)
    arc: int = option(300, "channels of the perceptrons for arcs", minimum=1)
    label: int = option(100, "channels of the perceptrons for relations", minimum=1)
    dropout: float = option(0.33, "share of hidden units dropped", minimum=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Characters(OnFiles, seeds=3, steps=1500, optimizer="adamw", learning_rate=5e-3, schedule="cosine", warmup=100,
                 weight_decay=0.05, validate_every=250):
    """A causal Transformer on characters, with rotary positions (Su et al. 2021)."""

    name = "characters"
    folder = "text"
    where = "Tiny Shakespeare is at github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt; any text goes."
    published = "1.47 on Tiny Shakespeare"  # README of nanoGPT: learned positions, validation on the last tenth
    effect: ClassVar = Effect(
        claim="nats a character, the best of sinusoidal and learned positions over rotary", figure="test_loss",
        higher=False, ratio=True, pairs=(("characters", "sinusoidal"), ("characters", "learned")))
    reads = ("text", "test")
    presets: ClassVar = {
        "quick": {"seeds": 1, "channels": 96, "layers": 2, "heads": 3, "length": 64, "batch_size": 16, "steps": 300,
                  "warmup": 50, "validate_every": 150, "checkpoint_every": 50, "dropout": 0.0, "learning_rate": 3e-3},
        "paper": {"seeds": 1, "channels": 384, "layers": 6, "heads": 6, "length": 256, "batch_size": 64, "steps": 5000}}
    text: str = option("tinyshakespeare.txt", "text file, plain or gzipped")
    test: str = option("", "another text file for testing; empty: the last tenth of the text")
    length: int = option(96, "characters of a sample", minimum=2)
    batch_size: int = option(16, "samples in a batch", minimum=1)
    channels: int = option(128, "channels of the hidden layers", minimum=2)
    layers: int = option(3, "layers of the Transformer", minimum=1)
    heads: int = option(4, "attention heads", minimum=1)
    dropout: float = option(0.15, "share of hidden units dropped", minimum=0, below=1)
    sample: int = option(300, "characters of the sample that the report shows", minimum=0)
