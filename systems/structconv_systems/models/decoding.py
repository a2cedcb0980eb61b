"""Step-by-step decoding for any model: greedy, by sampling, by beams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import ConfigError
from structconv.shapes import check_choice, check_natural, check_positive
from structconv_systems.models.protocol import Decoding, next_logits

__all__ = ["LARGEST_PENALTY", "Decoding", "beam", "greedy", "sample"]

#: The greatest power of a length; greater ones overflow.
LARGEST_PENALTY = 20


def greedy(decoding: Decoding, batch: int, *, begin: int | Tensor, end: int | None, most: int) -> list[list[int]]:
    """Take the likeliest token at each step: y_n = argmax_v logits_v(y_<n).

    Args:
        decoding: the decoding of `batch` samples, at their beginning; its model is in evaluation mode.
        begin: the token before the first, for a model on the CPU; or a prompt, tokens (batch, n >= 1), int64, on the
            device of the model.
        end: the token after the last; `None` if there is none.
        most: greatest number of tokens of a sample.

    Returns:
        The tokens of each sample after `begin` and before `end`. Once half of the samples have ended the others go on
            alone. No gradients. At most n - 1 + `most` steps of the model.

    Raises:
        ConfigError: a number is out of range, the prompt has another batch, or logits are not finite.

    Example:

        >>> from structconv_systems.models.decoding import greedy
        >>> from structconv_systems.models.transformer import Transformer
        >>> model = Transformer(20, channels=8, hidden=16, layers=1, heads=2).eval()
        >>> source = torch.tensor([[5, 6, 2], [7, 2, 0]])
        >>> tokens = greedy(model.begin(source), 2, begin=1, end=2, most=5)
        >>> len(tokens), max(map(len, tokens)) <= 5
        (2, True)
    """
    return _followed(decoding, batch, lambda logits: logits.argmax(-1), begin, end, most)


def sample(decoding: Decoding, batch: int, *, begin: int | Tensor, end: int | None, most: int,
           temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
           generator: torch.Generator | None = None) -> list[list[int]]:
    """Draw each token from softmax(logits / temperature).

    Args:
        decoding, batch, begin, end, most: as of `greedy`, and so is what it returns.
        temperature: above 0.
        top_k: draw among the k likeliest (Fan et al. 2018, section 5.4).
        top_p: draw among the fewest of the likeliest with this total share (nucleus sampling, Holtzman et al. 2020,
            section 3.1), after `top_k`.
        generator: of the random numbers, on any device; default: torch's own.

    Returns:
        As of `greedy`.

    Raises:
        ConfigError: a number is out of range, the prompt has another batch, or logits are not finite.

    Example:

        >>> from structconv_systems.models.decoding import sample
        >>> from structconv_systems.models.transformer import Transformer
        >>> model = Transformer(20, channels=8, hidden=16, layers=1, heads=2).eval()
        >>> source = torch.tensor([[5, 6, 2], [7, 2, 0]])
        >>> generator = torch.Generator().manual_seed(0)
        >>> tokens = sample(model.begin(source), 2, begin=1, end=2, most=5, top_k=3, generator=generator)
        >>> len(tokens), max(map(len, tokens)) <= 5
        (2, True)
    """
    if not temperature > 0:
        raise ConfigError("sample", "temperature must be above 0", temperature,
                          "Its limit at 0 is top_k=1, or greedy().")
    if top_k is not None:
        check_positive("sample", "top_k", top_k)
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError("sample", "top_p must be above 0 and at most 1", top_p)

    def drawn(logits: Tensor) -> Tensor:
        below = (logits - logits.amax(-1, keepdim=True)).double()
        likely = _likely(below / temperature, top_k, top_p)
        place = logits.device if generator is None else generator.device
        return torch.multinomial(likely.softmax(-1).to(place), 1, generator=generator).squeeze(-1).to(logits.device)

    return _followed(decoding, batch, drawn, begin, end, most)


@torch.no_grad()
def beam(decoding: Decoding, batch: int, *, width: int, begin: int | Tensor, end: int, most: int,
         length_penalty: float = 0.6, normalization: str = "gnmt") -> list[list[int]]:
    """Search by `width` beams, and return the results with the best log P(y) / penalty(|y|).

    |y| counts the tokens of y with `end`; the penalty is ((5 + |y|) / 6)^a with normalization "gnmt" (Wu et al. 2016,
    eq. 14) and |y|^a with "length", a = `length_penalty`. A step takes the likeliest continuations of the active beams;
    those among the first `width` that end are results. A search is over when it has `width` results, or when no active
    beam can become better than the best of them. One beam is `greedy`.

    Args:
        decoding: of `batch` samples, at their beginning; it goes on with `width` beams of each, those of sample b being
            b width ... b width + width - 1.
        width: number of beams, at least 1.
        begin, most: see `greedy`; a beam of `most` tokens is a result without `end`.
        end: the token after the last.
        length_penalty: a, from 0 to 20.
        normalization: "gnmt" or "length".

    Returns:
        The tokens of the best result of each sample, as of `greedy`. No gradients. A step costs that of `width` times
            as many samples.

    Raises:
        ConfigError: a number is out of range, the prompt has another batch, or logits are not finite.

    Example:

        >>> from structconv_systems.models.decoding import beam, greedy
        >>> from structconv_systems.models.transformer import Transformer
        >>> model = Transformer(20, channels=8, hidden=16, layers=1, heads=2).eval()
        >>> source = torch.tensor([[5, 6, 2], [7, 2, 0]])
        >>> one = beam(model.begin(source), 2, width=1, begin=1, end=2, most=5)
        >>> one == greedy(model.begin(source), 2, begin=1, end=2, most=5)
        True
    """
    check_positive("beam", "width", width)
    check_choice("beam", "normalization", normalization, ("gnmt", "length"))
    if not 0 <= length_penalty <= LARGEST_PENALTY:
        raise ConfigError("beam", f"length_penalty must be from 0 to {LARGEST_PENALTY}", length_penalty)
    if not isinstance(end, int):
        raise ConfigError("beam", "end must be a token", repr(end), "Where nothing ends, take greedy() or sample().")
    newest = _primed(decoding, batch, begin, most)
    device = newest.device
    decoding.reorder(torch.arange(batch, device=device).repeat_interleave(width))
    searches = [Search(width, most, length_penalty, normalization == "gnmt") for _ in range(batch)]
    scores = torch.tensor([0.0, *[-torch.inf] * (width - 1)], device=device).expand(batch, width)
    beams = Beams(searches, scores, newest[:, None, None].expand(batch, width, 1))
    while beams.searches and beams.tokens.shape[-1] <= most:
        beams = beams.next(decoding, end)
    beams.close()
    return [search.best() for search in searches]


@torch.no_grad()
def _followed(decoding: Decoding, batch: int, choose: Callable[[Tensor], Tensor], begin: int | Tensor,
              end: int | None, most: int) -> list[list[int]]:
    """Choose tokens one by one; once half of the samples have ended the others go on alone."""
    newest = _primed(decoding, batch, begin, most)
    rows = torch.arange(batch, device=newest.device)
    chosen, going = newest.new_full((batch, most), -1), torch.ones_like(rows, dtype=torch.bool)
    for place in range(most):
        newest = choose(next_logits(decoding, newest))
        chosen[rows, place] = newest
        if end is None:
            continue
        going &= newest != end
        count = int(going.sum())
        if count == 0:
            break
        if 2 * count <= len(going):
            left = going.nonzero().squeeze(-1)
            decoding.reorder(left)
            newest, rows, going = newest[left], rows[left], going[left]
    return [row[:row.index(end)] if end in row else row for row in chosen.tolist()]


def _primed(decoding: Decoding, batch: int, begin: int | Tensor, most: int) -> Tensor:
    """Return the newest tokens (batch,), after steps for those before them."""
    check_positive("decoding", "batch", batch)
    check_natural("decoding", "most", most)
    if not isinstance(begin, Tensor):
        return torch.full((batch,), begin)
    if begin.dim() != 2 or begin.shape[0] != batch or begin.shape[1] == 0:
        raise ConfigError("decoding", f"begin must be a token, or tokens (batch={batch}, n >= 1)", tuple(begin.shape))
    *before, newest = begin.unbind(1)
    for tokens in before:
        decoding.step(tokens)
    return newest


def _likely(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set the logits of unlikely tokens to -inf."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is None:
        return logits
    ordered, index = logits.sort(descending=True)
    share = ordered.softmax(-1)
    beyond = share.cumsum(-1) - share >= top_p
    return logits.masked_fill(beyond.scatter(-1, index, beyond), -torch.inf)


class Search:
    """The results for one sample.

    Args:
        width: how many results are enough. most: greatest number of tokens. power: a. gnmt: the kind of penalty.
    """

    def __init__(self, width: int, most: int, power: float, gnmt: bool) -> None:
        self._width, self._most, self._power, self._gnmt = width, most, power, gnmt
        self._results: list[tuple[float, list[int]]] = []

    def normalized(self, score: float, length: int) -> float:
        """log P(y) / penalty(|y|)."""
        return score / ((5 + length) / 6 if self._gnmt else max(length, 1)) ** self._power

    def add(self, score: float, length: int, tokens: list[int]) -> None:
        """Add a result, unless it is impossible."""
        if score > -math.inf:
            self._results.append((self.normalized(score, length), tokens))

    def over(self, score: float) -> bool:
        """Return True if the search is finished, given the score of the likeliest active beam."""
        if not self._results:
            return False
        return len(self._results) >= self._width or max(self._results)[0] >= self.normalized(score, self._most)

    def best(self) -> list[int]:
        return max(self._results, key=lambda result: result[0])[1]


class Beams(NamedTuple):
    """The beams of B unfinished searches.

    Args:
        scores: log P (B, W). tokens: (B, W, 1 + t), the first is the newest before the search.
    """

    searches: list[Search]
    scores: Tensor
    tokens: Tensor

    def next(self, decoding: Decoding, end: int) -> Beams:
        """Return the beams with one more token."""
        batch, width, _ = self.tokens.shape
        logits = next_logits(decoding, self.tokens[..., -1].flatten())
        scores = (logits.float().log_softmax(-1).unflatten(0, (batch, width)) + self.scores.unsqueeze(-1)).flatten(1)
        scores, index = scores.topk(min(2 * width, scores.shape[-1]))  # of 2 W at most W end, one of each beam
        beams, tokens = index // logits.shape[-1], index % logits.shape[-1]
        ended = tokens == end
        self._collect(ended[:, :width], scores, beams)
        scores, going = scores.masked_fill(ended, -torch.inf).topk(width)
        beams, tokens = beams.gather(1, going), tokens.gather(1, going)
        best = scores[:, 0].tolist()
        open_rows = [row for row, search in enumerate(self.searches) if not search.over(best[row])]
        rows = torch.tensor(open_rows, dtype=torch.int64, device=tokens.device)
        sources = (rows[:, None] * width + beams[rows]).flatten()
        if sources.tolist() != [*range(batch * width)] and open_rows:
            decoding.reorder(sources)
        before = self.tokens.flatten(0, 1)[sources].unflatten(0, (len(open_rows), width))
        return Beams([self.searches[row] for row in open_rows], scores[rows],
                      torch.cat([before, tokens[rows].unsqueeze(-1)], -1))

    def _collect(self, ended: Tensor, scores: Tensor, beams: Tensor) -> None:
        """Give each search its beams that end."""
        rows, ranks = ended.nonzero(as_tuple=True)
        sequences = self.tokens[rows, beams[rows, ranks], 1:].tolist()
        for row, score, tokens in zip(rows.tolist(), scores[rows, ranks].tolist(), sequences, strict=True):
            self.searches[row].add(score, len(tokens) + 1, tokens)

    def close(self) -> None:
        """Turn unfinished beams into results."""
        scores, sequences = self.scores.flatten().tolist(), self.tokens[..., 1:].flatten(0, 1).tolist()
        for row, (score, tokens) in enumerate(zip(scores, sequences, strict=True)):
            self.searches[row // self.scores.shape[-1]].add(score, len(tokens), tokens)
