"""Mechanisms that read a graph or a knowledge graph: adjacency, polynomials, walks, relations, incidence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any, cast

import torch

from structconv.bases.base import OPERATORS, Basis
from structconv.bases.matrices import (
    NORMALIZATIONS,
    OF_A_SIDE,
    Normalize,
    adjacency,
    laplacian_bound,
    lazy_adjacency,
    random_walk,
    scaled_laplacian,
)
from structconv.bases.polynomial import Polynomial
from structconv.bases.sparse import Sparse
from structconv.bases.typed import relational
from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.shapes import check_choice, check_positive
from structconv.structures.batching import entries_to_samples, num_samples_of, samples_of
from structconv.structures.graph import Graph, looped, with_listed_edges
from structconv.structures.relations import KnowledgeGraph
from structconv.structures.samples import Samples
from structconv.written import written

__all__ = ["Adjacency", "Chebyshev", "Incidence", "Powers", "Relation", "Relations", "Walks"]

_INVERSE = "^-1"


class GraphMechanism(Mechanism):
    """A mechanism over a `Graph` or a `KnowledgeGraph`. Its tensors are derived from the graph once for each dtype."""

    reads: Collection[str] = ("structure",)
    _reads_sizes = False
    batching = "structure"

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        return "x" if getattr(structure, "is_square", True) else None


class MatrixMechanism(GraphMechanism):
    """One matrix over the edges of a graph, with values or with ones."""

    def matrix(self, structure: Any, dtype: torch.dtype) -> Sparse:
        """The matrix that this mechanism makes of a structure."""
        raise NotImplementedError

    def checked(self, structure: Any) -> Graph | KnowledgeGraph:
        """The structure, if it is of the right kind: by default a graph whose outputs are its inputs."""
        graph = graph_of(self, structure)
        if not graph.is_square:
            sizes = f"M={graph.num_inputs}, N={graph.num_outputs}"
            raise StructureError(type(self).__name__, "the graph must have as many inputs as outputs", sizes,
                                 "Powers of a matrix need a square one.")
        return graph

    def forward(self, inputs: Inputs) -> Basis:
        structure, dtype = inputs.structure, inputs.x.dtype
        if not isinstance(structure, Graph | KnowledgeGraph):
            self.checked(structure)
        graph, values = derived(structure, (self._static_key, dtype), lambda: self._parts(structure, dtype))
        return Sparse(cast(Graph, structure) if graph is None else graph, values)

    def _parts(self, structure: Any, dtype: torch.dtype) -> tuple[Graph | None, torch.Tensor | None]:
        """The edges, `None` for the structure's own, and the values."""
        matrix = self.matrix(self.checked(structure), dtype)
        return None if matrix.graph is structure else with_listed_edges(matrix.graph), matrix.values


class Adjacency(GraphMechanism):
    """A[m, n] = the weight of the edge m -> n, normalized; with self-loops and "sym" it is GCN's.

    - "sym": D^-1/2 W D^-1/2 (Kipf and Welling 2017, equation 2), D_n = sum_m W_mn, self-loops included. Where inputs
      are not outputs, D_m of an input is the sum of its outgoing weights.
    - "row": W D^-1, so that the weights into each output sum to one: a mean over neighbors.
    - None: W.
    - A pair (of inputs, of outputs): what each side is divided by, "sum" of an entry's weights, "count" of its edges,
      their roots "sqrt" and "sqrt_count", or None. With nodes as inputs and hyperedges as outputs of a bipartite graph,
      `Adjacency(("sqrt", "count"), weighted=False) @ Adjacency(("sqrt", None)).transpose()` is the matrix
      D^-1/2 H W B^-1 H^T D^-1/2 of a hypergraph convolution (Bai et al. 2021, eq. 6).

    `.transpose()` is the reversed graph's matrix, from its targets to its sources. Entries of degree 0 weigh 0.
    Self-loops of weight 1 are appended for all nodes, also for those that have one.

    Args:
        normalize: one of the above.
        self_loops: add the identity to W first; a graph with M != N is refused.
        weighted: whether the entries are the weights, or ones; a pair's "sum" and "sqrt" are of weights in any case.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Adjacency, Graph
        >>> graph = Graph(torch.tensor([[0, 1, 2], [2, 2, 0]]), num_nodes=3)
        >>> Adjacency("row").basis(torch.zeros(3, 1), structure=graph).dense()[0]
        tensor([[0.0000, 0.0000, 0.5000],
                [0.0000, 0.0000, 0.5000],
                [1.0000, 0.0000, 0.0000]])
    """

    def __init__(self, normalize: Normalize = "sym", self_loops: bool = False, *, weighted: bool = True,
                 structure: str | None = None) -> None:
        super().__init__(structure=structure)
        if isinstance(normalize, list | tuple):
            normalize = _sides(normalize)
        else:
            check_choice("Adjacency", "normalize", normalize, NORMALIZATIONS)
        self.normalize_by, self.self_loops, self.weighted = normalize, self_loops, weighted

    def forward(self, inputs: Inputs) -> Basis:
        """The matrix; a kernel that sorts the edges anyway may compute its weights."""
        graph = inputs.structure if type(inputs.structure) is Graph else graph_of(self, inputs.structure)
        graph = looped(graph) if self.self_loops else graph
        return lazy_adjacency(graph, self.normalize_by, inputs.x.dtype, self.weighted)


def _sides(normalize: Sequence[Any]) -> tuple[str | None, str | None]:
    """Return the divisors of inputs and of outputs."""
    if len(normalize) != 2:
        raise ConfigError("Adjacency", "normalize must have one for the inputs and one for the outputs",
                          repr(normalize))
    for side in normalize:
        check_choice("Adjacency", "each side of normalize", side, OF_A_SIDE)
    return normalize[0], normalize[1]


class Chebyshev(MatrixMechanism):
    """Chebyshev polynomials T_0 .. T_order of the scaled Laplacian 2 L / lambda_max - I; K = order + 1.

    L = I - W' with W' the adjacency normalized by "sym" or "row" as in `Adjacency`, or D - W without normalization
    (Defferrard et al. 2016, equation 4). `order` is the polynomials' highest degree, as in the paper; libraries that
    count terms instead call order + 1 their K. Self-loops of the graph count as edges.

    Args:
        order: the highest degree, >= 0.
        normalize: "sym", "row" or None.
        lambda_max: an upper bound of L's eigenvalues; 2 always holds for "sym". Without normalization give it, or
            "computed": the largest absolute value of an eigenvalue of this graph's L, found once a graph, by O(E)
            products where the graph is large. Of a batch it is that of the whole; no gradient comes to it from weights.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Chebyshev, Grid
        >>> Chebyshev(order=2).basis(torch.zeros(9, 1), structure=Grid((3, 3)).graph()).dense().shape
        torch.Size([3, 9, 9])
    """

    def __init__(self, order: int, normalize: str | None = "sym", lambda_max: float | str | None = None, *,
                 structure: str | None = None) -> None:
        super().__init__(structure=structure)
        check_choice("Chebyshev", "normalize", normalize, NORMALIZATIONS)
        if normalize is None and lambda_max is None:
            raise ConfigError("Chebyshev", "lambda_max must be given without normalization", None,
                              "Twice the largest degree is an upper bound; 'computed' finds the largest eigenvalue.")
        if isinstance(lambda_max, str):
            check_choice("Chebyshev", "lambda_max", lambda_max, ("computed",))
            self.batching = "apart"  # each graph has its own
        self.lambda_max = None if isinstance(lambda_max, str) else 2.0 if lambda_max is None else float(lambda_max)
        if self.lambda_max is not None and not self.lambda_max > 0:
            raise ConfigError("Chebyshev", "lambda_max must be positive", lambda_max)
        self.order, self.normalize_by = _degree("Chebyshev", order), normalize

    @property
    def size(self) -> int:
        return self.order + 1

    def matrix(self, structure: Graph, dtype: torch.dtype) -> Sparse:
        bound = laplacian_bound(structure, self.normalize_by) if self.lambda_max is None else self.lambda_max
        return scaled_laplacian(structure, self.normalize_by, bound, dtype)

    def forward(self, inputs: Inputs) -> Basis:
        return Polynomial(super().forward(inputs), self.order)

    def extra_repr(self) -> str:
        usual = self.lambda_max == 2.0 and self.normalize_by is not None
        bound = "computed" if self.lambda_max is None else None if usual else self.lambda_max
        return written(self, {"lambda_max": bound})


class Powers(MatrixMechanism):
    """Monomials L^first .. L^order of an adjacency or of a random walk; K = order - first + 1.

    - walk="forward": L = D_O^-1 W, L[m, n] = w(m -> n) / (sum of m's outgoing weights): the walk along the edges.
    - walk="backward": L = D_I^-1 W^T, L[m, n] = w(n -> m) / (sum of m's incoming weights).
    - walk=None: the adjacency, normalized as in `Adjacency`.

    Both walks side by side are DCRNN's diffusion convolution (Li et al. 2018, equation 2) as its published code
    applies it, y = sum_k (L^k)^T x Theta_k; `.transpose()` gives the product as the equation prints it.

    Args:
        order: the highest power.
        walk: "forward", "backward" or None.
        normalize: "sym", "row" or None, for walk=None only.
        self_loops: add the identity to W first.
        first: the lowest power; 1 leaves the identity out.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Graph, Powers
        >>> ring = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        >>> Powers(2, walk="forward").basis(torch.zeros(3, 1), structure=ring).dense()[2]      # two steps
        tensor([[0., 0., 1.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """

    def __init__(self, order: int, walk: str | None = None, normalize: str | None = None, self_loops: bool = False,
                 first: int = 0, *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        check_choice("Powers", "walk", walk, ("forward", "backward", None))
        check_choice("Powers", "normalize", normalize, NORMALIZATIONS)
        if walk is not None and normalize is not None:
            raise ConfigError("Powers", "a walk is normalized already: give walk or normalize",
                              f"walk={walk!r}, normalize={normalize!r}")
        self.order, self.first = _degree("Powers", order), _degree("Powers", first)
        if self.first > self.order:
            raise ConfigError("Powers", f"first must be at most order={order}", first)
        self.walk, self.normalize_by, self.self_loops = walk, normalize, self_loops

    @property
    def size(self) -> int:
        return self.order - self.first + 1

    def matrix(self, structure: Graph, dtype: torch.dtype) -> Sparse:
        graph = structure.with_self_loops() if self.self_loops else structure
        if self.walk is None:
            return adjacency(graph, self.normalize_by, dtype)
        return random_walk(graph if self.walk == "forward" else graph.reversed(), dtype)

    def forward(self, inputs: Inputs) -> Basis:
        return Polynomial(super().forward(inputs), self.order, "monomial", self.first)


class Relation(MatrixMechanism):
    """The matrix of one relation of a `KnowledgeGraph`: A[m, n] = the number of triples (m, name, n), normalized.

    Args:
        name: the relation; "name^-1" is its inverse, whether or not the knowledge graph lists inverses.
        normalize: "sym", "row" or None, as in `Adjacency`.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv.mechanisms import Relation
        >>> facts = KnowledgeGraph.from_labels([("Ada", "knows", "Bob"), ("Bob", "likes", "Ada")])
        >>> Relation("likes").basis(torch.zeros(2, 1), structure=facts).dense()[0]
        tensor([[0., 0.],
                [1., 0.]])
    """

    def __init__(self, name: str, normalize: str | None = None, *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        check_choice("Relation", "normalize", normalize, NORMALIZATIONS)
        self.name, self.normalize_by = name, normalize

    def checked(self, structure: Any) -> KnowledgeGraph:
        return _knowledge(self, structure)

    def matrix(self, structure: KnowledgeGraph, dtype: torch.dtype) -> Sparse:
        return adjacency(_relation(structure, self.name), self.normalize_by, dtype)


class Relations(GraphMechanism):
    """One matrix a relation of a `KnowledgeGraph`, in its order, as one `Typed` basis; "row" is R-GCN's 1 / c_ir.

    (Schlichtkrull et al. 2018, equation 2: c_ir is the number of neighbors of i under r.)

    Args:
        count: K, how many relations the knowledge graph will have; the weight's size depends on it.
        normalize: "sym", "row" or None, as in `Adjacency`, within each relation.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Conv, KnowledgeGraph, Relations
        >>> facts = KnowledgeGraph.from_labels([("Ada", "knows", "Bob"), ("Bob", "likes", "Ada")])
        >>> Conv(Relations(2), 4, 8)(torch.randn(2, 4), facts).shape
        torch.Size([2, 8])
    """

    def __init__(self, count: int, normalize: str | None = "row", *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        check_choice("Relations", "normalize", normalize, NORMALIZATIONS)
        self.count, self.normalize_by = check_positive("Relations", "count", count), normalize

    @property
    def size(self) -> int:
        return self.count

    def forward(self, inputs: Inputs) -> Basis:
        knowledge, dtype = _knowledge(self, inputs.structure), inputs.x.dtype
        if knowledge.num_relations != self.count:
            raise StructureError("Relations", f"the structure must have {self.count} relations",
                                 knowledge.num_relations, "Create the layer for "
                                 f"{knowledge.num_relations} relations: Relations({knowledge.num_relations}).")
        return derived(knowledge, ("relations", self.normalize_by, dtype),
                       lambda: relational(knowledge, self.normalize_by, dtype))


class Walks(GraphMechanism):
    """Typed walks in a `KnowledgeGraph`: A_k[m, n] = the number of walks m -> n along the relations of walk k.

    "played.characterIn.genre" is `Relation("played") @ Relation("characterIn") @ Relation("genre")`; the product of
    the matrices is never formed.

    Args:
        walks: for each k names joined by dots, or a sequence of names where these have dots themselves; "name^-1"
            goes against the relation.
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv.mechanisms import Walks
        >>> facts = KnowledgeGraph.from_labels([("Ada", "knows", "Bob"), ("Bob", "likes", "Eve")])
        >>> Walks(["knows.likes"]).basis(torch.zeros(3, 1), structure=facts).dense()[0]     # from Ada to Eve
        tensor([[0., 0., 1.],
                [0., 0., 0.],
                [0., 0., 0.]])
    """

    def __init__(self, walks: Sequence[str | Sequence[str]], *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        if isinstance(walks, str) or not walks:
            raise ConfigError("Walks", "walks must be a non-empty sequence of walks", repr(walks),
                              'For one write Walks(["played.characterIn"]).')
        self.walks = tuple(tuple(walk.split(".")) if isinstance(walk, str) else tuple(walk) for walk in walks)
        if not all(walk and all(walk) for walk in self.walks):
            raise ConfigError("Walks", "each walk must name at least one relation", repr(walks))

    @property
    def size(self) -> int:
        return len(self.walks)

    def forward(self, inputs: Inputs) -> Basis:
        knowledge, dtype = _knowledge(self, inputs.structure), inputs.x.dtype
        return derived(knowledge, ("walks", self.walks, dtype), lambda: reduce(OPERATORS["concat"], (
            reduce(OPERATORS["compose"], (adjacency(_relation(knowledge, name), None, dtype) for name in walk))
            for walk in self.walks)))

    def extra_repr(self) -> str:
        return repr([list(walk) if any("." in name for name in walk) else ".".join(walk) for walk in self.walks])


class Incidence(GraphMechanism):
    """A[m, e] = 1 iff node m is the sender, or the receiver, of edge e: from M nodes to N = E edges; or iff entry m is
    of sample e of a batch: from all entries to N = B samples.

    `.transpose()` sums over the edges that leave, or reach, each node, or hands each sample's row to its entries. Edges
    are entries in the graph's order. A readout by sums is `Incidence("sample")`, one by means its `.normalize("sum")`.

    Args:
        end: "sender" (row 0 of `edge_index`), "receiver" (row 1) or "sample".
        structure: the name of the one that it reads, in a call with several.

    Example:

        >>> from structconv import Graph, Incidence
        >>> graph = Graph(torch.tensor([[0, 0, 1], [1, 2, 2]]), num_nodes=3)
        >>> x = torch.tensor([[1.0], [10.0], [100.0]])
        >>> Incidence("sender").basis(x, structure=graph).analysis(x).flatten()      # x of each edge's source
        tensor([ 1.,  1., 10.])
    """

    def __init__(self, end: str, *, structure: str | None = None) -> None:
        super().__init__(structure=structure)
        check_choice("Incidence", "end", end, ("sender", "receiver", "sample"))
        self.end = end

    def _input_entries(self, structure: Any) -> int | None:
        receivers = self.end == "receiver" and isinstance(structure, Graph)
        return structure.num_outputs if receivers else super()._input_entries(structure)

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        return None

    def _output_entries(self, structure: Any) -> int | None:
        if self.end == "sample" and structure is not None:
            return num_samples_of(structure)
        return structure.num_edges if isinstance(structure, Graph) else None

    def _samples_of_outputs(self, structure: Any) -> Samples | None:
        return None if self.end == "sample" else self._pairs_of(self._own(structure)).of_outputs()

    def forward(self, inputs: Inputs) -> Basis:
        if self.end == "sample":
            return Sparse(entries_to_samples(inputs.structure, inputs.device))
        graph = graph_of(self, inputs.structure)
        key = ("incidence", self.end, graph.num_inputs, graph.num_outputs)
        return Sparse(derived(graph.edge_index, key, lambda: self._incidence(graph)))

    def _pairs_of(self, structure: Any) -> Samples:
        samples = samples_of(structure)
        if self.end == "sample":
            return derived(samples, "to each", lambda: samples.leading_to(Samples([1] * samples.num_samples)))
        return derived((structure.edge_index, samples.input_starts, samples.output_starts), ("to edges", self.end),
                       lambda: _to_edges(structure, samples, self.end))

    def _incidence(self, graph: Graph) -> Graph:
        sender = self.end == "sender"
        node = graph.source if sender else graph.target
        edge = torch.arange(graph.num_edges, dtype=node.dtype, device=node.device)
        return Graph(torch.stack([node, edge]), num_inputs=graph.num_inputs if sender else graph.num_outputs,
                     num_outputs=graph.num_edges)


def _to_edges(graph: Graph, samples: Samples, end: str) -> Samples:
    """Return the samples with the nodes and edges of each graph as inputs and outputs."""
    inputs, outputs = samples.sizes()
    owner = samples.members(graph.edge_index.device)[0][graph.source.long()]
    if not torch.equal(owner, owner.sort().values):
        raise StructureError("Incidence", "edges must come in the order of their graphs", "others between",
                             "batch(graphs) has them so.")
    counts = torch.zeros(len(inputs), dtype=torch.int64).index_add(0, owner.cpu(), torch.ones_like(owner.cpu()))
    return Samples(inputs if end == "sender" else outputs, counts)


def graph_of(mechanism: Mechanism, structure: Any) -> Graph:
    """The structure, or a `StructureError` if it is no graph."""
    if not isinstance(structure, Graph):
        raise StructureError(type(mechanism).__name__, "structure must be a Graph", type(structure).__name__,
                             "Call it as layer(x, structure=graph); the pixel graph of a grid is grid.graph().")
    return structure


def _knowledge(mechanism: Mechanism, structure: Any) -> KnowledgeGraph:
    if not isinstance(structure, KnowledgeGraph):
        raise StructureError(type(mechanism).__name__, "structure must be a KnowledgeGraph",
                             type(structure).__name__, "Call it as layer(x, structure=knowledge_graph).")
    return structure


def _relation(knowledge: KnowledgeGraph, name: str) -> Graph:
    if name.endswith(_INVERSE) and name not in knowledge.relations:
        return knowledge.relation(name.removesuffix(_INVERSE)).reversed()
    return knowledge.relation(name)


def _degree(owner: str, order: Any) -> int:
    if isinstance(order, bool) or not isinstance(order, int) or order < 0:
        raise ConfigError(owner, "degrees must be integers >= 0", repr(order))
    return order
