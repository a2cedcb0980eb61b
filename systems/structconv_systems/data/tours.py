"""Closed tours: lengths, uniformly drawn points, and the shortest tours, exactly or by local search."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.shapes import check_natural, check_positive

__all__ = ["check_distances", "distances", "exact", "farthest_insertion", "lengths", "local_search",
           "permutations", "two_opt", "uniform", "ways"]

#: Nodes in a row that Or-opt moves at most (Or 1976).
_LONGEST = 3
#: An improvement below this share of the mean distance counts as rounding.
_LEAST = 1e-9


def uniform(samples: int, nodes: int, seed: int) -> Tensor:
    """Points (B, N, 2), float32, drawn uniformly in the unit square.

    Example:

        >>> from structconv_systems.data.tours import uniform
        >>> uniform(samples=2, nodes=5, seed=0).shape
        torch.Size([2, 5, 2])
    """
    return torch.rand(samples, nodes, 2, generator=torch.Generator().manual_seed(seed), device="cpu")


def permutations(samples: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Tours (B, N) drawn uniformly."""
    return torch.stack([torch.randperm(nodes, generator=generator) for _ in range(samples)])


def distances(points: Tensor) -> Tensor:
    """Return the distances between points (B, N, 2), (B, N, N), in float64.

    Example:

        >>> from structconv_systems.data.tours import distances
        >>> distances(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])).tolist()
        [[[0.0, 5.0], [5.0, 0.0]]]
    """
    points = points.double()
    return (points.unsqueeze(-2) - points.unsqueeze(-3)).norm(dim=-1)


def lengths(table: Tensor, tours: Tensor) -> Tensor:
    """Return the lengths of closed tours (..., N) by distances (..., N, N): (...,).

    Raises:
        ShapeError: a tour does not have each node once.

    Example:

        >>> from structconv_systems.data.tours import distances, lengths
        >>> square = torch.tensor([[[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]])
        >>> lengths(distances(square), torch.tensor([[0, 1, 2, 3]])).tolist()  # back to the first node
        [4.0]
    """
    nodes = torch.arange(table.shape[-1], device=tours.device)
    if tours.shape[-1] != table.shape[-1] or not bool((tours.sort(-1).values == nodes).all()):
        raise ShapeError("lengths", f"tours must have each of N={table.shape[-1]} nodes once", tuple(tours.shape))
    return table.flatten(-2).gather(-1, len(nodes) * tours + tours.roll(-1, -1)).sum(-1)


def ways(points: Tensor, tours: Tensor) -> Tensor:
    """The lengths of closed tours (B, N) by their points (B, N, 2), in O(N): (B,)."""
    visited = points.gather(1, tours.unsqueeze(-1).expand_as(points))
    return (visited - visited.roll(-1, 1)).norm(dim=-1).sum(-1)


def exact(table: Tensor) -> Tensor:
    """Return the shortest tour (N,) by symmetric distances (N, N), from node 0 on, by an integer program.

    Each node has two edges; if the best edges form several rings, each ring is forbidden and the program solved again
    (Dantzig, Fulkerson and Johnson 1954). SciPy's HiGHS proves the optimum, in a tenth of a second for 20 nodes and in
    seconds for 50; there is no bound on the time.

    Raises:
        ShapeError: the table has another shape, or is not symmetric. ConfigError: the solver gave up.

    Example:

        >>> from structconv_systems.data.tours import distances, exact, lengths
        >>> square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
        >>> table = distances(square)[0]
        >>> lengths(table, exact(table)).item()
        4.0
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, vstack
    from scipy.sparse.csgraph import connected_components

    _, nodes = check_distances("exact", table.unsqueeze(0))
    if not torch.equal(table, table.mT):
        raise ShapeError("exact", "distances must be symmetric", "others")
    if nodes < 4:
        return torch.arange(nodes)
    ends = np.stack(np.triu_indices(nodes, 1))
    edges, costs = np.arange(ends.shape[1]), table.double().numpy()[*ends]
    rows = coo_array((np.ones(2 * len(edges)), (ends.ravel(), np.tile(edges, 2))), shape=(nodes, len(edges))).tocsr()
    least, most = np.full(nodes, 2.0), np.full(nodes, 2.0)
    while True:
        solution = milp(costs, constraints=LinearConstraint(rows, least, most), bounds=Bounds(0, 1),
                     integrality=np.ones(len(edges)), options={"mip_rel_gap": 0.0})
        if solution.x is None or solution.status != 0:
            raise ConfigError("exact", "the solver must find an optimum", solution.message)
        chosen = ends[:, solution.x > 0.5]
        rings, ring = connected_components(coo_array((np.ones(nodes), (chosen[0], chosen[1])), shape=(nodes, nodes)),
                                           directed=False)
        if rings == 1:
            return _in_a_row(chosen)
        leaving = np.stack([(ring[ends[0]] == number) != (ring[ends[1]] == number) for number in range(rings)])
        rows = vstack([rows, coo_array(leaving.astype(float))]).tocsr()
        least, most = np.append(least, np.full(rings, 2.0)), np.append(most, np.full(rings, np.inf))


def _in_a_row(edges: np.ndarray) -> Tensor:
    """Return the nodes of one ring of edges (2, N), from node 0 on."""
    near: dict[int, list[int]] = {}
    for one, other in edges.T.tolist():
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    tour = [0, near[0][0]]
    while len(tour) < edges.shape[1]:
        tour.append(next(node for node in near[tour[-1]] if node != tour[-2]))
    return torch.tensor(tour)


def local_search(table: Tensor, *, kicks: int = 20, seed: int = 0) -> Tensor:
    """Return short tours (B, N) by symmetric distances (B, N, N): 2-opt and Or-opt from a random tour, with kicks.

    A step takes, for each tour, the best move that reverses a part, or moves up to three consecutive nodes elsewhere in
    either direction (Croes 1958; Or 1976), until no move helps. Then, `kicks` times, two neighboring parts are
    exchanged (the double bridge of Martin, Otto and Felten 1991), and the improved tour is accepted if it is shorter.

    O(N^2) memory and time of a step, all tables at once. No optimum is proven: see `exact`.

    Raises:
        ShapeError: the table has another shape. ConfigError: a negative number of kicks.

    Example:

        >>> from structconv_systems.data.tours import distances, lengths, local_search
        >>> square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
        >>> table = distances(square)
        >>> lengths(table, local_search(table)).tolist()
        [4.0]
    """
    check_natural("local_search", "kicks", kicks)
    batch, nodes = check_distances("local_search", table)
    random, table = torch.Generator().manual_seed(seed), table.double()
    tours = permutations(batch, nodes, random)
    if nodes < 4:
        return tours
    tours = _mended(table, tours)
    for _ in range(kicks if nodes > 4 else 0):
        other = _mended(table, _moved(tours, _kick(batch, nodes, random)))
        shorter = lengths(table, other) < lengths(table, tours)
        tours = torch.where(shorter.unsqueeze(-1), other, tours)
    return tours


def farthest_insertion(table: Tensor) -> Tensor:
    """Return tours (B, N) by symmetric distances (B, N, N): start with the two nodes farthest apart, then insert the
    node farthest from the tour where it adds the least length (Rosenkrantz, Stearns and Lewis 1977).

    O(N^3) time and O(N^2) memory of each table, in N steps over all tables at once.

    Raises:
        ShapeError: other tables.

    Example:

        >>> from structconv_systems.data.tours import distances, farthest_insertion, lengths
        >>> square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
        >>> table = distances(square)
        >>> lengths(table, farthest_insertion(table)).tolist()
        [4.0]
    """
    batch, nodes = check_distances("farthest_insertion", table)
    table, rows = table.double(), torch.arange(batch)
    off_diagonal = table.masked_fill(torch.eye(nodes, dtype=torch.bool), -torch.inf)
    ends = off_diagonal.flatten(1).argmax(-1)
    tours = torch.stack([ends // nodes, ends % nodes], -1)[:, :nodes]
    inside = torch.zeros(batch, nodes, dtype=torch.bool).scatter(1, tours, True)
    near = table[rows.unsqueeze(-1), tours].amin(1)
    while tours.shape[1] < nodes:
        node = near.masked_fill(inside, -torch.inf).argmax(-1)
        after = tours.roll(-1, -1)
        way = rows.unsqueeze(-1)
        position = (table[way, tours, node.unsqueeze(-1)] + table[way, node.unsqueeze(-1), after]
                 - table[way, tours, after]).argmin(-1, keepdim=True)
        positions = torch.arange(tours.shape[1] + 1)
        kept = tours.gather(1, (positions - (positions > position).long()).clamp(max=tours.shape[1] - 1))
        tours = torch.where(positions == position + 1, node.unsqueeze(-1), kept)
        inside[rows, node] = True
        near = torch.minimum(near, table[rows, node])
    return tours


def two_opt(table: Tensor, tours: Tensor) -> Tensor:
    """Reverse the part of each tour (B, N) that shortens it most, until none does (Croes 1958); distances (B, N, N).

    Example:

        >>> from structconv_systems.data.tours import distances, lengths, two_opt
        >>> square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
        >>> table, crossing = distances(square), torch.tensor([[0, 1, 2, 3]])
        >>> lengths(table, two_opt(table, crossing)).tolist()
        [4.0]
    """
    check_distances("two_opt", table)
    return tours if tours.shape[-1] < 4 else _mended(table.double(), tours, longest=0)


class _Move(NamedTuple):
    """Move the part of `size` nodes from `start` after the next `after` nodes, reversed or not; each (B,)."""

    start: Tensor
    size: Tensor
    after: Tensor
    reverse: Tensor


def _moved(tours: Tensor, move: _Move) -> Tensor:
    """Return tours (B, N) after one move each."""
    positions, nodes = torch.arange(tours.shape[-1]).expand_as(tours), tours.shape[-1]
    start, size, after, reverse = (part.unsqueeze(-1) for part in move)
    within = positions - after
    part = torch.where(reverse, size - 1 - within, within)
    order = torch.where(within < 0, positions + size, torch.where(within < size, part, positions))
    return tours.gather(-1, (start + order) % nodes)


def _kick(batch: int, nodes: int, random: torch.Generator) -> _Move:
    """Draw two neighboring parts that change places; at least one node of the tour is in neither."""
    cuts = torch.rand(batch, nodes - 1, generator=random).topk(2).indices.sort(-1).values + 1
    start = torch.randint(nodes, (batch,), generator=random)
    return _Move(start, cuts[:, 0], cuts[:, 1] - cuts[:, 0], torch.zeros(batch, dtype=torch.bool))


def _mended(table: Tensor, tours: Tensor, longest: int = _LONGEST) -> Tensor:
    """Apply the best moves to each tour until none shortens it; Or-opt moves at most `longest` nodes in a row."""
    tours, going = tours.clone(), torch.arange(len(tours))
    least = _LEAST * table.mean((1, 2))
    while len(going):
        gain, move = _best(table[going], tours[going], longest)
        better = gain > least[going]
        going, move = going[better], _Move(*(part[better] for part in move))
        tours[going] = _moved(tours[going], move)
    return tours


def _best(table: Tensor, tours: Tensor, longest: int) -> tuple[Tensor, _Move]:
    """Return the gain of each tour's best move, (B,), and the move."""
    nodes, count = tours.shape[-1], len(tours)
    rows = torch.arange(count)[:, None, None]
    near = table[rows, tours.unsqueeze(-1), tours.unsqueeze(-2)]
    edge = near.diagonal(1, -2, -1)
    edge = torch.cat([edge, near[:, -1:, 0]], -1)
    tables, kinds = [_reversals(near, edge)], [(0, True)]
    for size in range(1, min(longest, nodes - 3) + 1):
        for way in (False, True)[:1 if size == 1 else 2]:
            tables.append(_insertions(near, edge, size, way))
            kinds.append((size, way))
    gain, best = torch.stack(tables, 1).flatten(1).max(-1)
    kind, start, end = best // nodes ** 2, best // nodes % nodes, best % nodes
    sizes, reverse = (torch.tensor(column)[kind] for column in zip(*kinds, strict=True))
    sizes = torch.where(kind == 0, end - start, sizes)
    after = torch.where(kind == 0, 0, (end - start - sizes + 1) % nodes)
    return gain, _Move((start + (kind == 0)) % nodes, sizes, after, reverse)


def _reversals(near: Tensor, edge: Tensor) -> Tensor:
    """Return the gains of reversing i + 1 ... j, (B, i, j): the edges after i and after j change."""
    gain = edge.unsqueeze(-1) + edge.unsqueeze(-2) - near - near.roll((-1, -1), (-2, -1))
    return gain.masked_fill(torch.ones_like(gain[0], dtype=torch.bool).tril(1), -torch.inf)


def _insertions(near: Tensor, edge: Tensor, size: int, reverse: bool) -> Tensor:
    """Return the gains of moving the `size` nodes from i between j and j + 1, (B, i, j)."""
    nodes = near.shape[-1]
    closed = near.roll(1, -2).roll(-size, -1).diagonal(0, -2, -1)  # from i - 1 to i + size
    removed = edge.roll(1, -1) + edge.roll(1 - size, -1) - closed
    last = near.roll(1 - size, -2)  # row i: from place i + size - 1
    ends = (last, near) if reverse else (near, last)
    added = ends[0] + ends[1].roll(-1, -1) - edge.unsqueeze(-2)
    positions = torch.arange(nodes)
    offset = (positions - positions.unsqueeze(-1)) % nodes
    return (removed.unsqueeze(-1) - added).masked_fill((offset < size) | (offset == nodes - 1), -torch.inf)


def check_distances(owner: str, table: Tensor) -> tuple[int, int]:
    """Return B and N of distances (B, N, N)."""
    if table.dim() != 3 or table.shape[-1] != table.shape[-2] or not table.shape[-1]:
        raise ShapeError(owner, "distances must have shape (B, N, N), N >= 1", tuple(table.shape))
    if not bool(table.isfinite().all()):
        raise ShapeError(owner, "distances must be finite numbers", "others")
    return table.shape[0], check_positive(owner, "nodes", table.shape[-1])
