"""Lists of edges, and the operators along them, each with what it means: sums over the edges in plain torch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv import Full, Graph, conv
from structconv.bases.typed import Typed
from structconv.primitives.conditioned import conditioned_product
from structconv.primitives.csr import sddmm, spmm, spmm_add
from structconv.primitives.dense_additive import dense_additive_attention
from structconv.primitives.edge_attention import (
    additive_attention,
    additive_weights,
    affine_attention,
    affine_weights,
    bilinear_attention,
    bilinear_weights,
    packed_attention,
    projected_attention,
)
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.layout import compress
from structconv.primitives.polynomials import polynomial_analysis, polynomial_synthesis

#: Heads, channels and the depth of a score: every width of a kernel's blocks of heads and channels, and their rests.
SHAPES = [(4, 32, 20), (3, 20, 12), (17, 7, 3), (1, 300, 16), (2, 64, 64), (8, 16, 8), (5, 1, 1), (1, 40, 300)]


def activate(t, activation, slope):
    return torch.nn.functional.leaky_relu(t, slope) if activation == "leaky_relu" else getattr(t, activation)()


class Edges:
    """An edge list with its two layouts, whose indices have `dtype`."""

    def __init__(self, source: Tensor, target: Tensor, m: int, n: int, dtype: torch.dtype = torch.int64,
                 device: torch.device | str = "cpu") -> None:
        self.m, self.n, self.e = m, n, len(source)
        self.source, self.target = source.to(device).long(), target.to(device).long()
        source, target = self.source.to(dtype), self.target.to(dtype)
        self.layouts = compress(target, source, n), compress(source, target, m)


def random_edges(m: int = 60, n: int = 40, e: int = 400, dtype: torch.dtype = torch.int64) -> Edges:
    """Isolated entries on both sides, duplicates, loops, and one output with a third of all edges."""
    g = torch.Generator().manual_seed(0)
    source, target = torch.randint(m - m // 6, (e,), generator=g), torch.randint(n - n // 6, (e,), generator=g)
    target[: e // 3] = n // 5
    source[:3], target[:3] = 1, 1
    return Edges(source[torch.randperm(e, generator=g)], target, m, n, dtype)


def every_pair(m: int, n: int, causal: bool = False) -> Edges:
    """All pairs, or those of inputs that are not behind their output."""
    source, target = torch.arange(m).repeat(n), torch.arange(n).repeat_interleave(m)
    keep = source <= target if causal else torch.ones_like(source, dtype=torch.bool)
    return Edges(source[keep], target[keep], m, n)


def softmax(edges: Edges, scores: Tensor, drop: tuple[float, Tensor, int] | None = None) -> Tensor:
    """(K, E) -> (K, E), output by output; `drop`: p, seed and the heads of one entry of a batch."""
    weights = torch.zeros_like(scores)
    for n in edges.target.unique():
        of = edges.target == n
        weights[:, of] = torch.softmax(scores[:, of], -1)
    if drop is None:
        return weights
    p, seed, heads = drop
    k = torch.arange(len(scores)).unsqueeze(-1)
    pair = edges.source * edges.n + edges.target
    return weights * (hash_uniform(seed, k // heads, k % heads, pair) >= p) / (1 - p)


def weighed(edges: Edges, weights: Tensor, values: Tensor) -> Tensor:
    """sum_e w_ke v_mk."""
    messages = weights.t().unsqueeze(-1) * values[edges.source]
    return messages.new_zeros(edges.n, *messages.shape[1:]).index_add(0, edges.target, messages)


class Operator(NamedTuple):
    """How it is called with (edges, *tensors, **dropout), the shapes of its tensors by (edges, heads, channels, depth),
    and its reference, called with (edges, *tensors, drop)."""

    call: Callable[..., Tensor]
    shapes: Callable[[Edges, int, int, int], list[tuple[int, ...]]]
    reference: Callable[..., Tensor]
    pairs: str = "listed"  # or "square": listed, of an entry with another; "every", "causal" and "few": not listed
    drops: bool = True
    bits: tuple[int, ...] = (32, 16)  # of the dtypes that native kernels take
    constant: bool = False  # its first tensor gets no gradient

    def edges(self, m: int = 60, n: int = 40, e: int = 400, dtype: torch.dtype = torch.int64) -> Edges:
        """Random ones of the kind that it takes."""
        if self.pairs in ("listed", "square"):
            return random_edges(m, m if self.pairs == "square" else n, e, dtype)
        return every_pair(m, 3 if self.pairs == "few" else n, self.pairs == "causal")

    def tensors(self, edges: Edges, heads: int, channels: int, depth: int, dtype: torch.dtype) -> list[Tensor]:
        """Its arguments: random numbers, scaled so that products of rows are of the size of one."""
        actual = []
        for number, shape in enumerate(self.shapes(edges, heads, channels, depth)):
            size = shape[-1]**-0.25 if len(shape) > 1 and shape[-1] == depth else 1.0
            size = 0.2 if self.constant and number == 0 else size
            actual.append((size * torch.randn(shape)).to(dtype).requires_grad_(not (self.constant and number == 0)))
        return actual


def _affine(slope: float) -> Operator:
    def scores(g: Edges, s: Tensor, t: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(s[g.source] + t[g.target], slope).t()

    return Operator(lambda g, s, t, x, **o: affine_attention(*g.layouts, s, t, x, slope=slope, **o),
                    lambda g, k, c, d: [(g.m, k), (g.n, k), (g.m, k, c)],
                    lambda g, s, t, x, drop=None: weighed(g, softmax(g, scores(g, s, t), drop), x))


def _projected(*more: str, slope: float = 0.2) -> Operator:
    """With z, with a bias, or without."""
    def reference(g: Edges, x: Tensor, u: Tensor, v: Tensor, *rest: Tensor, drop: Any = None) -> Tensor:
        given = dict(zip(more, rest, strict=True))
        terms = (x * u).sum(-1), (given.get("z", x) * v).sum(-1)
        y = _affine(slope).reference(g, *terms, x, drop=drop)
        return y + given["bias"] if "bias" in given else y

    return Operator(lambda g, x, u, v, *rest, **o: projected_attention(
        *g.layouts, x, u * u.shape[-1]**-0.5, v * u.shape[-1]**-0.5, **dict(zip(more, rest, strict=True)), slope=slope,
        **o),
        lambda g, k, c, d: [(g.m, k, c), (k, c), (k, c), *[{"z": (g.n, k, c), "bias": (k, c)}[name] for name in more]],
        lambda g, x, u, v, *rest, drop=None: reference(g, x, u * u.shape[-1]**-0.5, v * u.shape[-1]**-0.5, *rest,
                                                       drop=drop),
        "listed" if "z" in more else "square", bits=(32,) if "bias" in more else (32, 16))


def _product_scores(g: Edges, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    actual = 0.7 * (q[g.target] * k[g.source]).sum(-1).t()
    return actual if bias is None else actual + bias


def _bilinear(biased: bool) -> Operator:
    return Operator(lambda g, *t, **o: bilinear_attention(*g.layouts, *t, scale=0.7, **o),
                    lambda g, k, c, d: [(g.n, k, d), (g.m, k, d), (g.m, k, c), *([(k, g.e)] if biased else [])],
                    lambda g, q, k, v, *b, drop=None: weighed(g, softmax(g, _product_scores(g, q, k, *b), drop), v))


def _joint(square: bool) -> Operator:
    """Queries, keys and values of one table, or keys and values."""
    def shapes(g: Edges, k: int, c: int, d: int) -> list[tuple[int, ...]]:
        return [(g.m, k, 2 * d + c)] if square else [(g.m, k, d + c), (g.n, k, d), (k, g.e)]

    def columns(table: Tensor, *sizes: int) -> Tensor:
        """Heads by heads in each part."""
        return torch.cat([part.flatten(1) for part in table.split(sizes, -1)], 1)

    def sizes(table: Tensor, q: tuple[Tensor, ...]) -> list[int]:
        depth = q[0].shape[-1] if q else table.shape[-1] // 5
        return [depth] * (1 if q else 2) + [table.shape[-1] - depth * (1 if q else 2)]

    def call(g: Edges, table: Tensor, *q: Tensor, **o: Any) -> Tensor:
        parts = sizes(table, q)
        return packed_attention(*g.layouts, columns(table, *parts), *q, heads=table.shape[1], depth=parts[0], scale=0.7,
                               **o)

    def reference(g: Edges, table: Tensor, *q: Tensor, drop: Any = None) -> Tensor:
        *front, v = table.split(sizes(table, q), -1)
        scores = _product_scores(g, q[0], front[0], q[1]) if q else _product_scores(g, *front)
        return weighed(g, softmax(g, scores, drop), v)

    return Operator(call, shapes, reference, "square" if square else "listed")


def _additive(activation: str, slope: float = 0.0, pairs: str = "listed") -> Operator:
    chosen = {"activation": activation, "slope": slope}

    def reference(g: Edges, q: Tensor, k: Tensor, x: Tensor, v: Tensor, drop: Any = None) -> Tensor:
        scores = (activate(q[g.target] + k[g.source], activation, slope) * v).sum(-1).t()
        return weighed(g, softmax(g, scores, drop), x)

    def call(g: Edges, *t: Tensor, **o: Any) -> Tensor:
        if pairs == "listed":
            return additive_attention(*g.layouts, *t, **chosen, **o)
        return dense_additive_attention(*t, causal=pairs == "causal", **chosen, **o)

    return Operator(call, lambda g, k, c, d: [(g.n, k, d), (g.m, k, d), (g.m, k, c), (k, d)], reference, pairs)


def _additive_weights(activation: str, slope: float) -> Operator:
    def scores(g: Edges, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (activate(q[g.target] + k[g.source], activation, slope) * v).sum(-1).t()

    return Operator(lambda g, *t, **o: additive_weights(*g.layouts, *t, activation=activation, slope=slope, **o),
                    lambda g, k, c, d: [(g.n, k, d), (g.m, k, d), (k, d)],
                    lambda g, *t, drop=None: softmax(g, scores(g, *t), drop))


def _sums(g: Edges, a: Tensor, x: Tensor, z: Tensor | None = None) -> Tensor:
    """2 A^T x - z / 2, or A^T x."""
    messages = a.unsqueeze(-1) * x[..., g.source, :]
    actual = messages.new_zeros(*messages.shape[:-2], g.n, x.shape[-1]).index_add(-2, g.target, messages)
    return actual if z is None else 2 * actual - 0.5 * z


def _degrees(g: Edges, a: Tensor, r: Tensor) -> Tensor:
    """T_k(A)^T r_k for k = 0 to 3."""
    steps = [r, _sums(g, a, r)]
    while len(steps) < 4:
        steps.append(2 * _sums(g, a, steps[-1]) - steps[-2])
    return torch.stack([step[k] for k, step in enumerate(steps)])


def _relational(g: Edges, values: Tensor, x: Tensor, theta: Tensor) -> Tensor:
    graph = Graph(torch.stack([g.source, g.target]), num_inputs=g.m, num_outputs=g.n)
    return conv(x, Typed(graph, torch.arange(g.e) % 3, 3, values), Full.of(theta))


def _by_relation(g: Edges, values: Tensor, x: Tensor, theta: Tensor) -> Tensor:
    messages = torch.einsum("e,ep,epq->eq", values, x[g.source], theta[torch.arange(g.e) % 3])
    return messages.new_zeros(g.n, theta.shape[-1]).index_add(0, g.target, messages)


_product = partial(Operator, drops=False)
OPERATORS: dict[str, Operator] = {
    "affine": _affine(0.2), "affine, ReLU": _affine(0.0), "affine, linear": _affine(1.0),
    "projected": _projected("z"), "projected, one side": _projected(slope=0.5),
    "projected, bias": _projected("z", "bias", slope=0.0), "projected, one side, bias": _projected("bias"),
    "bilinear": _bilinear(False), "bilinear, bias": _bilinear(True),
    "joint": _joint(False), "joint, one table": _joint(True),
    "additive": _additive("leaky_relu", 0.2), "additive, ReLU": _additive("leaky_relu"),
    "additive, tanh": _additive("tanh"), "additive, sigmoid": _additive("sigmoid"),
    "every pair, ReLU": _additive("leaky_relu", pairs="every"), "every pair, tanh": _additive("tanh", pairs="every"),
    "causal pairs, tanh": _additive("tanh", pairs="causal"),
    "causal pairs, leaky": _additive("leaky_relu", 0.2, pairs="causal"),
    "every pair, sigmoid": _additive("sigmoid", pairs="every"), "few outputs, tanh": _additive("tanh", pairs="few"),
    "weights, affine": Operator(lambda g, s, t, **o: affine_weights(*g.layouts, s, t, slope=0.2, **o),
                                lambda g, k, c, d: [(g.m, k), (g.n, k)], lambda g, s, t, drop=None: softmax(
                                    g, torch.nn.functional.leaky_relu(s[g.source] + t[g.target], 0.2).t(), drop)),
    **{f"weights, bilinear{', bias' if biased else ''}": Operator(
        lambda g, *t, **o: bilinear_weights(*g.layouts, *t, scale=0.7, **o),
        lambda g, k, c, d, biased=biased: [(g.n, k, d), (g.m, k, d), *([(k, g.e)] if biased else [])],
        lambda g, *t, drop=None: softmax(g, _product_scores(g, *t), drop)) for biased in (False, True)},
    "weights, additive": _additive_weights("leaky_relu", 0.2), "weights, tanh": _additive_weights("tanh", 0.0),
    "weights, sigmoid": _additive_weights("sigmoid", 0.0),
    "spmm": _product(lambda g, a, x: spmm(*g.layouts, a, x), lambda g, k, c, d: [(k, g.e), (k, g.m, c)], _sums),
    "spmm, one row of values": _product(lambda g, a, x: spmm(*g.layouts, a, x),
                                        lambda g, k, c, d: [(g.e,), (k, g.m, c)], _sums),
    "spmm, one table": _product(lambda g, a, x: spmm(*g.layouts, a, x), lambda g, k, c, d: [(k, g.e), (g.m, c)], _sums),
    "spmm, one table, summed": _product(lambda g, a, x: spmm(*g.layouts, a, x, sum_heads=True), lambda g, k, c, d: [
        (k, g.e), (1, g.m, c)], lambda g, a, x: _sums(g, a, x).sum(0)),
    "spmm, ones": _product(lambda g, x: spmm(*g.layouts, None, x), lambda g, k, c, d: [(k, g.m, c)],
                           lambda g, x: _sums(g, x.new_ones(g.e), x)),
    "spmm, summed": _product(lambda g, a, x: spmm(*g.layouts, a, x, sum_heads=True),
                             lambda g, k, c, d: [(k, g.e), (k, g.m, c)], lambda g, a, x: _sums(g, a, x).sum(0)),
    "spmm_add": _product(lambda g, a, x, z: spmm_add(*g.layouts, a, x, z, alpha=2.0, beta=-0.5),
                         lambda g, k, c, d: [(k, g.e), (k, g.m, c), (k, g.n, c)], _sums),
    "sddmm": _product(lambda g, q, k: sddmm(*g.layouts, q, k), lambda g, k, c, d: [(k, g.n, d), (g.m, d)],
                      lambda g, q, k: (q[:, g.target] * k[g.source]).sum(-1)),
    "recurrence, analysis": _product(lambda g, a, x: polynomial_analysis(*g.layouts, a, x, order=3),
                                     lambda g, k, c, d: [(g.e,), (g.m, c)],
                                     lambda g, a, x: _degrees(g, a, x.expand(4, *x.shape)), "square", constant=True),
    "recurrence, synthesis": _product(lambda g, a, r: polynomial_synthesis(*g.layouts, a, r),
                                      lambda g, k, c, d: [(g.e,), (4, g.m, c)],
                                      lambda g, a, r: _degrees(g, a, r).sum(0), "square", constant=True),
    "relational": _product(_relational, lambda g, k, c, d: [(g.e,), (g.m, c), (3, c, 8)], _by_relation),
    "conditioned": _product(lambda g, v, x, t: conditioned_product(*g.layouts, v, x, t),
                            lambda g, k, c, d: [(g.e, k), (g.m, 12), (k, 12, 8)],
                            lambda g, v, x, t: torch.zeros(g.n, 8, dtype=x.dtype).index_add(
                                0, g.target, torch.einsum("ek,ep,kpq->eq", v, x[g.source], t))),
}
