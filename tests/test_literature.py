"""Every row of `examples/literature.py` against an implementation of its own: torch's layer, an einsum or loops.

The implementation of a row is the function of its name, or its entry in `FORMULAS`.
"""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.literature import GRAPH, GRID, HYPERGRAPH, KNOWLEDGE, LINKS, REGIONS, ROWS, D

F64 = torch.float64


def held(layer: torch.nn.Module, end: str) -> Tensor:
    """The one parameter whose name ends so; a factor of a low rank weight with its axes."""
    if end in ("value", "output"):
        return getattr(layer.weight(), end)
    actual = {id(p): p for name, p in layer.named_parameters() if f".{name}".endswith(f".{end}")}
    assert len(actual) == 1, (end, [name for name, _ in layer.named_parameters()])
    return next(iter(actual.values()))


def doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: doubled(part) for name, part in value.items()}
    return value.to(F64) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    entry = ROWS[name]
    layer = entry.build().to(F64)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if parameter_name.endswith("bias") or "table" in parameter_name:
                parameter.normal_()
    inputs = {key: doubled(value) for key, value in entry.inputs().items()}
    y, expected = layer(**inputs), (FORMULAS.get(name) or globals()[name])(layer, **inputs)
    pairs = zip(y, expected, strict=True) if isinstance(y, tuple) else [(y, expected)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        assert ours.abs().max() > 1e-3
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    assert not [key for key, p in layer.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def test_the_example_prints_every_row(capsys):
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "literature.py"), run_name="__main__")
    assert capsys.readouterr().out.count("->") == len(ROWS)


# Grids


def on_image(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, M, P) -> the image (B, P, H, W) -> fn -> (B, N, Q)."""
    return fn(x.mT.unflatten(-1, GRID.shape)).flatten(2).mT


def theta(layer: torch.nn.Module) -> Tensor:
    return held(layer, "theta")


def kernel(theta_KPQ: Tensor) -> Tensor:
    """(9, P, Q) -> (Q, P, 3, 3)."""
    return theta_KPQ.permute(2, 1, 0).unflatten(-1, (3, 3))


def any_offsets(layer, x, structure):
    height, width = GRID.shape
    y = torch.zeros(x.shape[0], height, width, theta(layer).shape[2], dtype=F64)
    image = x.unflatten(1, GRID.shape)
    for k, (down, right) in enumerate([(0, 0), (5, -3), (-8, 1)]):
        for i in range(height):
            for j in range(width):
                if 0 <= i - down < height and 0 <= j - right < width:
                    y[:, i, j] += image[:, i - down, j - right] @ theta(layer)[k]
    return y.flatten(1, 2) + layer.bias


def separable(layer, x, structure):
    mix, filters = held(layer, "mix"), held(layer, "filters")
    assert mix.numel() + filters.numel() == 2 * (9 + 16 * 24)
    whole = sum(mix[:, h, None, None] * filters[h] for h in range(2))
    return on_image(x, lambda image: F.conv2d(image, kernel(whole), layer.bias, padding=1))


def depthwise_separable(layer, x, structure):
    depthwise, pointwise = held(layer, "depthwise"), held(layer, "pointwise")

    def xception(image):
        filtered = F.conv2d(image, depthwise.mT.reshape(-1, 1, 3, 3), padding=1, groups=16)
        return F.conv2d(filtered, pointwise.mT[:, :, None, None], layer.bias)

    return on_image(x, xception)


def lightweight(layer, x):
    taps = held(layer, "depthwise").squeeze(-1).softmax(0)
    filters = torch.stack([taps[:, c * 4 // 16].flip(0) for c in range(16)]).unsqueeze(1)
    return F.conv1d(x.mT, filters, layer.bias, padding=2, groups=16).mT


def dynamic(layer, x):
    taps = by_heads(x, held(layer, "taps.weight"), 4).softmax(-1)
    padded = F.pad(x, (0, 0, 2, 2))
    y = torch.zeros_like(x)
    for c in range(16):
        for j, offset in enumerate([-2, -1, 0, 1, 2]):
            y[..., c] += taps[:, c * 4 // 16, :, j] * padded[:, 2 - offset:14 - offset, c]
    return y + layer.bias


def deformable(layer, x, structure):
    height, width = GRID.shape
    offsets = (x @ held(layer, "offsets.weight").T + held(layer, "offsets.bias")).unflatten(-1, (9, 2))
    assert offsets.abs().max() > 0.1
    down, right = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y = layer.bias
    for k in range(9):
        places = torch.stack([right.flatten() + k % 3 - 1 + offsets[:, :, k, 1],
                              down.flatten() + k // 3 - 1 + offsets[:, :, k, 0]], -1)
        places = 2 * places / torch.tensor([width - 1, height - 1]) - 1
        sampled = F.grid_sample(x.mT.unflatten(-1, GRID.shape), places.unsqueeze(1), align_corners=True)
        y = y + sampled.squeeze(2).mT @ theta(layer)[k]
    return y


#: Rows of one expression.
FORMULAS: dict[str, Callable[..., Any]] = {
    "one_by_one": lambda layer, x, structure: x @ theta(layer)[0] + layer.bias,
    "conv2d": lambda layer, x, structure: (
        on_image(x, lambda image: F.conv2d(image, kernel(theta(layer)), layer.bias, stride=2, padding=1))),
    "dilated_conv2d": lambda layer, x, structure: (
        on_image(x, lambda image: F.conv2d(image, kernel(theta(layer)), layer.bias, 2, 2, 2))),
    "average_pooling": lambda layer, x, structure: on_image(x, lambda image: F.avg_pool2d(image, 2)) + layer.bias,
    "diffusion": lambda layer, x, structure: diffused(theta(layer), x) + layer.bias,
    "gat": lambda layer, x, structure: sum(gat_heads(layer, x, theta(layer))) + layer.bias,
    "gat_concatenated": lambda layer, x, structure: (
        torch.cat(gat_heads(layer, x, held(layer, "theta")), -1) + layer.bias),
    "nodes_from_edges": lambda layer, x, structure: (
        torch.stack([x[GRAPH.edge_index[1] == n].sum(0) for n in range(7)]) + layer.bias),
    "cross_attention": lambda layer, x, z: attended(layer, x, (products(layer, x, z) / 8).softmax(-1)),
    "luong_dot": lambda layer, x, z: (z @ x.mT).softmax(-1) @ x + layer.bias,
    "luong_general": lambda layer, x, z: (z @ held(layer, "key.weight") @ x.mT).softmax(-1) @ x + layer.bias,
    "luong_location": lambda layer, x, z: (z @ held(layer, "table.weight")[:12].T).softmax(-1) @ x + layer.bias,
    "shaw_key": lambda layer, x: attended(layer, x, shaw_weights(layer, x)),
    "non_local_dot": lambda layer, x: attended(layer, x, products(layer, x, heads=1) / 48),
    "token_mixing": lambda layer, x: held(layer, "table")[0].mT @ x + layer.bias,
    "context_attention": lambda layer, x: (
        (held(layer, "query")[0] @ x.mT).softmax(-1) @ x @ theta(layer)[0] + layer.bias),
}


# Graphs


def adjacency(graph=GRAPH) -> Tensor:
    a = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=F64)
    for m, n in graph.edge_index.T.tolist():
        a[m, n] += 1
    return a


def reciprocal(degree: Tensor) -> Tensor:
    return torch.where(degree > 0, 1 / degree, torch.zeros((), dtype=F64))


def gcn(layer, x, structure):
    a = adjacency() + torch.eye(7, dtype=F64)
    d = torch.diag(a.sum(0).rsqrt())
    return (d @ a @ d).T @ x @ theta(layer)[0] + layer.bias


def hypergraph_convolution(layer, x, structure):
    h = torch.zeros(6, 4, dtype=F64)
    h[HYPERGRAPH.source, HYPERGRAPH.target] = 1
    w = torch.diag(torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=F64))
    d, b = torch.diag((h @ w).sum(1).rsqrt()), torch.diag(1 / h.sum(0))
    return d @ h @ w @ b @ h.T @ d @ x @ theta(layer)[0] + layer.bias


def chebyshev(layer, x, structure):
    a, eye = adjacency(), torch.eye(7, dtype=F64)
    d = torch.diag(reciprocal(a.sum(0)).sqrt())
    scaled = (2 * (eye - d @ a @ d) / 2 - eye).T
    t = [x, scaled @ x]
    t += [2 * scaled @ t[1] - t[0]]
    t += [2 * scaled @ t[2] - t[1]]
    return sum(t[k] @ theta(layer)[k] for k in range(4)) + layer.bias


def diffused(weights: Tensor, x: Tensor) -> Tensor:
    """Both random walks, powers 0 to 2, by products from the left."""
    a, y = adjacency(), 0
    for direction, walk in enumerate((reciprocal(a.sum(1))[:, None] * a, reciprocal(a.sum(0))[:, None] * a.T)):
        state = x
        for k in range(3):
            y = y + state @ weights[3 * direction + k]
            state = walk.T @ state
    return y


def relation(name: str) -> Tensor:
    a = torch.zeros(KNOWLEDGE.num_entities, KNOWLEDGE.num_entities, dtype=F64)
    for m, r, n in KNOWLEDGE.triples.tolist():
        a[m, n] += KNOWLEDGE.relations[r] == name
    return a


def relational(layer, x, structure):
    matrices = [relation(name) for name in KNOWLEDGE.relations]
    matrices = [a / a.sum(0).clamp(min=1) for a in matrices]
    mix, bases, own = held(layer, "mix"), held(layer, "filters"), held(layer, "theta")
    assert mix.shape == (3, 30) and own.shape == (1, 16, 24)
    return torch.einsum("kmn,mp,kh,hpq->nq", torch.stack(matrices), x, mix, bases) + x @ own[0] + layer.bias


def typed_walk(layer, x, structure):
    walk = relation("played") @ relation("characterIn") @ relation("genre")
    assert walk[KNOWLEDGE.entity("Leonard Nimoy"), KNOWLEDGE.entity("science fiction")] == 1
    assert walk.sum() == 4
    return walk.T @ x @ theta(layer)[0] + layer.bias


typed_walk_product = typed_walk


def gat_heads(layer, x, values: Tensor) -> list[Tensor]:
    """Each head by loops over the nodes, their loops included."""
    source, target = held(layer, "vector_source"), held(layer, "vector_target")
    into = adjacency() + torch.eye(7, dtype=F64)
    heads = []
    for k in range(8):
        h = x @ values[k]
        y = torch.zeros_like(h)
        for n in range(7):
            near = into[:, n].nonzero().squeeze(-1)
            y[n] = F.leaky_relu(h[near] @ source[k] + h[n] @ target[k], 0.2).softmax(0) @ h[near]
        heads.append(y)
    return heads


def max_aggregation(layer, x, structure):
    source, target = GRAPH.edge_index
    expected = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand(-1, 16), x[source], "amax",
                                                  include_self=False)
    return expected + layer.bias


def softmax_aggregation(layer, x, structure):
    y = torch.zeros_like(x)
    for n in range(7):
        near = x[GRAPH.source[GRAPH.target == n]]
        y[n] = ((near * held(layer, "factor")).softmax(0) * near).sum(0)
    return y + layer.bias


def edge_update(layer, x, structure):
    source, target = GRAPH.edge_index
    return torch.cat([x[source], x[target]], -1) @ theta(layer).flatten(0, 1) + layer.bias


def interaction(layer, x, structure):
    (source, target), nodes = GRAPH.edge_index, x["nodes"]
    stacked = torch.cat([held(weight, "theta").squeeze(0) for weight in layer.weight.weights])
    return torch.cat([nodes[source], nodes[target], x["edges"]], -1) @ stacked + layer.bias


# Attention


def by_heads(x: Tensor, weight: Tensor, heads: int = 8) -> Tensor:
    """x W^T, (B, M, P) -> (B, K, M, D)."""
    return (x @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)


def products(layer, x: Tensor, z: Tensor | None = None, heads: int = 8) -> Tensor:
    """<q_kn, k_km>, (B, K, N, M): outputs are rows, as libraries lay them out."""
    q = by_heads(x if z is None else z, held(layer, "query.weight"), heads)
    k = by_heads(x, held(layer, "key.weight"), heads)
    return q @ k.mT


def attended(layer, x: Tensor, weights_BKNM: Tensor, extra: Tensor | float = 0.0) -> Tensor:
    """Values and output projection of a low-rank Theta."""
    v = torch.einsum("bmp,kpd->bkmd", x, held(layer, "value"))
    return torch.einsum("bknd,kdq->bnq", weights_BKNM @ v + extra, held(layer, "output")) + layer.bias


def causal_attention(layer, x):
    q, k = (by_heads(x, held(layer, f"{name}.weight")) for name in ("query", "key"))
    v = torch.einsum("bmp,kpd->bkmd", x, held(layer, "value"))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.einsum("bknd,kdq->bnq", y, held(layer, "output")) + layer.bias


def grouped_queries(layer, x):
    q = by_heads(x, held(layer, "query.weight"))
    k = by_heads(x, held(layer, "key.weight"), 2)
    v = torch.einsum("bmp,gpd->bgmd", x, held(layer, "value"))
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return torch.einsum("bknd,kdq->bnq", y, held(layer, "output")) + layer.bias


def decoding_step(layer, x, z, positions):
    seen = x[:, :positions + 1]
    q, k = by_heads(z, held(layer, "query.weight")), by_heads(seen, held(layer, "key.weight"))
    v = torch.einsum("bmp,kpd->bkmd", seen, held(layer, "value"))
    return torch.einsum("bknd,kdq->bnq", F.scaled_dot_product_attention(q, k, v), held(layer, "output")) + layer.bias


def sliding_step(layer, x, z, positions):
    seen, places = x[:, positions - 3:positions + 1], torch.arange(positions - 3, positions + 1)
    q = turned(by_heads(z, held(layer, "query.weight"), 4), torch.tensor([positions]))
    k = turned(by_heads(seen, held(layer, "key.weight"), 2), places)
    v = torch.einsum("bmp,gpd->bgmd", seen, held(layer, "value"))
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return torch.einsum("bknd,kdq->bnq", y, held(layer, "output")) + layer.bias


def turned(t: Tensor, places: Tensor) -> Tensor:
    """Complex numbers of the first and the second half of the channels, turned."""
    half = t.shape[-1] // 2
    angles = places.to(F64)[:, None] * 10000.0 ** (-torch.arange(half, dtype=F64) / half)
    y = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([y.real, y.imag], -1)


def bahdanau(layer, x, z):
    w, u = held(layer, "target.weight"), held(layer, "source.weight")
    b, v = held(layer, "target.bias"), held(layer, "vector")[0]
    scores = torch.stack([torch.tanh(z @ w.T + b + (x[:, m] @ u.T).unsqueeze(1)) @ v for m in range(12)], -1)
    return scores.softmax(-1) @ x + layer.bias


def luong_local_m(layer, x):
    scores = x @ held(layer, "key.weight") @ x.mT
    far = (torch.arange(12)[:, None] - torch.arange(12)).abs() > D
    return scores.masked_fill(far, -torch.inf).softmax(-1) @ x + layer.bias


def luong_local_p(layer, x, z):
    hidden, vector = held(layer, "hidden.weight"), held(layer, "vector.weight")[0]
    position = 12 * torch.sigmoid(torch.tanh(z @ hidden.T) @ vector)
    distance = torch.arange(12, dtype=F64) - position.unsqueeze(-1)
    scores = z @ held(layer, "key.weight") @ x.mT
    weights = scores.masked_fill(distance.abs() > D, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights * torch.exp(-distance ** 2 / (2 * (D / 2) ** 2))) @ x + layer.bias


def relative(layer, x: Tensor, end: str) -> Tensor:
    """r[clip(m - n)] for every pair, (N, M, D)."""
    index = (torch.arange(12) - torch.arange(12)[:, None]).clamp(-3, 3) + 3
    return held(layer, end)[index]


def shaw_weights(layer, x: Tensor) -> Tensor:
    q = by_heads(x, held(layer, "query.weight"))
    key_side = torch.einsum("bknd,nmd->bknm", q, relative(layer, x, "relative_key.table"))
    return ((products(layer, x) + key_side) / 8).softmax(-1)


def shaw(layer, x):
    a = shaw_weights(layer, x)
    value_side = torch.einsum("bknm,nmd->bknd", a, relative(layer, x, "relative_value.table"))
    return attended(layer, x, a, value_side)


def t5_bucket(offset: int) -> int:
    """32 buckets, 16 for each sign, up to distance 128."""
    half, distance = 16 if offset > 0 else 0, abs(offset)
    if distance < 8:
        return half + distance
    return half + min(15, 8 + int(math.log(distance / 8) / math.log(128 / 8) * 8))


def t5(layer, x):
    index = torch.tensor([[t5_bucket(m - n) for m in range(12)] for n in range(12)])
    bias = held(layer, "table").squeeze(1)[:, index]
    return attended(layer, x, (products(layer, x) / 8 + bias).softmax(-1))


def alibi(layer, x):
    slopes = torch.tensor([2.0 ** -k for k in range(1, 9)], dtype=F64)
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    return attended(layer, x, (products(layer, x) / 8 - slopes[:, None, None] * distance).softmax(-1))


def non_local_gaussian(layer, x):
    f = (x @ x.mT).exp()
    return attended(layer, x, (f / f.sum(-1, keepdim=True)).unsqueeze(1))


def non_local_embedded(layer, x):
    f = products(layer, x, heads=1).exp()
    return attended(layer, x, f / f.sum(-1, keepdim=True))


def non_local_concatenation(layer, x):
    theta_x = x @ held(layer, "theta.weight").T + held(layer, "theta.bias")
    phi_x = x @ held(layer, "phi.weight").T + held(layer, "phi.bias")
    pair = torch.cat([theta_x.unsqueeze(1).expand(-1, 48, -1, -1), phi_x.unsqueeze(2).expand(-1, -1, 48, -1)], -1)
    f = (pair @ held(layer, "vector")[0]).relu()
    return attended(layer, x, (f / 48).unsqueeze(1))


def spatial_attention(layer, x):
    mean = torch.stack([x[:, max(0, n - 2):n + 3].mean(1) for n in range(12)], 1)
    return mean @ theta(layer)[0] + layer.bias


def zero_sink(layer, x):
    powers = (products(layer, x, heads=8) / 8).exp() * torch.ones(12, 12, dtype=torch.bool).tril()
    return attended(layer, x, powers / (1 + powers.sum(-1, keepdim=True)))


def talking_heads(layer, x, z):
    names = dict(layer.named_parameters())
    before, after = (names[f"{name}.mixing"] for name in ("mixing", "mixing_1"))
    scores = torch.einsum("bknm,kj->bjnm", products(layer, x, z, heads=4) / 4, before)
    return attended(layer, x, torch.einsum("bjnm,ji->binm", scores.softmax(-1), after))


def sparsemax_attention(layer, x, z):
    scores = z @ held(layer, "key.weight") @ x.mT
    low, high = scores.amax(-1, keepdim=True) - 1, scores.amax(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        above = (scores - middle).clamp(min=0).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (scores - low).clamp(min=0) @ x + layer.bias


def random_synthesizer(layer, x):
    scores = held(layer, "table")[:, :12, :12].masked_fill(torch.ones(12, 12, dtype=torch.bool).tril(-1), -torch.inf)
    return attended(layer, x, scores.softmax(-2).mT.expand(2, -1, -1, -1))


def fourier_mixing(layer, x):
    transform = torch.fft.fft(torch.eye(12, dtype=F64))
    parts = (part.float().double() for part in (transform.real, transform.imag))
    return sum(part @ x @ theta(layer)[k] for k, part in enumerate(parts)) + layer.bias


def wavelets(layer, x):
    columns = [(0, torch.ones(16, dtype=F64) / 4)]
    for scale in range(1, 5):
        length = 32 >> scale
        for start in range(0, 16, length):
            wave = torch.zeros(16, dtype=F64)
            wave[start:start + length // 2], wave[start + length // 2:start + length] = length ** -0.5, -length ** -0.5
            columns.append((scale, wave))
    y = layer.bias
    for scale, wave in columns:
        wave = wave.float().double()
        y = y + wave[:, None] * (wave @ x)[:, None] @ theta(layer)[scale]
    return y


def neighborhood_attention(layer, x, structure):
    scores = products(layer, x, heads=4) / math.sqrt(32)
    point = torch.cartesian_prod(torch.arange(6), torch.arange(8))
    offset = point[:, None] - point
    near = ((offset.abs() <= 6) & (offset % 2 == 0)).all(-1)
    a = scores.masked_fill(~near, -torch.inf).softmax(-1)
    return torch.einsum("bknm,bmp,kpq->bnq", a, x, theta(layer)) + layer.bias


def global_tokens(layer, x):
    place = torch.arange(12)
    near = (place[:, None] - place).abs() <= 2
    near[0], near[:, 0] = True, True
    a = (products(layer, x, heads=4) / math.sqrt(32)).masked_fill(~near, -torch.inf).softmax(-1)
    return torch.einsum("bknm,bmp,kpq->bnq", a, x, theta(layer)) + layer.bias


def mixed_heads(layer, x):
    a = (products(layer, x, heads=6) / math.sqrt(8)).softmax(-1)
    left, right = F.pad(x[:, 1:], (0, 0, 0, 1)), F.pad(x[:, :-1], (0, 0, 1, 0))
    heads = torch.einsum("bknm,bmp,kpq->bnq", a, x, theta(layer)[:6])
    return heads + left @ theta(layer)[6] + right @ theta(layer)[7] + layer.bias


# Several structures in one call


def chain_and_bonds(layer, x, structure):
    a = (products(layer, x.unsqueeze(0), heads=2)[0] / math.sqrt(8)).softmax(-1)
    left, right = F.pad(x[1:], (0, 0, 0, 1)), F.pad(x[:-1], (0, 0, 1, 0))
    w = torch.zeros(7, 7, dtype=F64)
    w[GRAPH.source, GRAPH.target] = 1
    scale = (degree := w.sum(0)).where(degree > 0, torch.inf).rsqrt()
    along = (scale[:, None] * w * scale).mT @ x
    heads = torch.einsum("knm,mp,kpq->nq", a, x, theta(layer)[:2])
    return heads + left @ theta(layer)[2] + right @ theta(layer)[3] + along @ theta(layer)[4] + layer.bias


def polynomials_and_relations(layer, x, structure):
    w = torch.zeros(10, 10, dtype=F64)
    w[LINKS.source, LINKS.target] = 1
    scale = (degree := w.sum(0)).where(degree > 0, torch.inf).rsqrt()
    t = -(scale[:, None] * w * scale)
    y = sum(a.mT @ x @ theta(layer)[k] for k, a in enumerate((torch.eye(10, dtype=F64), t, 2 * t @ t - torch.eye(10))))
    for k in range(3):
        a = torch.zeros(10, 10, dtype=F64)
        for head, relation, tail in KNOWLEDGE.triples.tolist():
            a[head, tail] += relation == k
        y = y + (a / a.sum(0).clamp(min=1)).mT @ x @ theta(layer)[3 + k]
    return y + layer.bias


def pixels_to_regions(layer, x, structure):
    coarse = on_image(x, lambda image: F.avg_pool2d(image, 2))
    w = torch.zeros(12, 12, dtype=F64)
    w[REGIONS.source, REGIONS.target] = 1
    return (w / w.sum(0).clamp(min=1)).mT @ coarse @ theta(layer)[0] + layer.bias


# Recurrent cells, after a first step from zeros


def conv_lstm(layer, x, structure):
    both = torch.cat([x, x.new_zeros(2, 48, 24)], -1)
    gates = on_image(both, lambda image: F.conv2d(image, kernel(theta(layer)), layer.gates.bias, padding=1))
    i, _, g, o = gates.chunk(4, -1)
    c = i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def dcrnn(layer, x, structure):
    both = torch.cat([x, x.new_zeros(7, 24)], -1)
    _, u = (diffused(layer.gates.weight.theta, both) + layer.gates.bias).sigmoid().chunk(2, -1)
    return (1 - u) * (diffused(layer.candidate.weight.theta, both) + layer.candidate.bias).tanh()
