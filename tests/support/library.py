"""The specimens of the package: every basis and every mechanism, and the inputs that break things.

Sizes are a few entries and channels, so that all checks of all specimens take minutes on one core.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from structconv import Basis, Causal, Graph, Grid, KnowledgeGraph, Padding, Samples, Window, batch
from structconv import mechanisms as index
from structconv.bases import Mixture, Pooling, Shift, Sparse, Taps, TopK, Typed, cuboid_offsets, positions, scores
from structconv.bases import algebra as _algebra  # noqa: F401 - registers the operators
from structconv.bases.dense import Dense, Identity
from structconv.bases.entrywise import DroppedWithin
from structconv.bases.linear import BlockDiagonal
from structconv.bases.placed import Moved, Selected
from structconv.bases.polynomial import Polynomial
from structconv.mechanisms import STRUCTURE, Context, EdgeNetwork, Mechanism
from structconv.mechanisms import positions as terms
from structconv.mechanisms import scores as mechanisms
from structconv.mechanisms.dynamic import Deformable, DynamicShifts
from structconv.mechanisms.given import Given, Learned
from structconv.structures import Blocks, DenseMask, Global
from structconv.structures.output_positions import OutputPositions
from structconv.testing.specimens import SPECIMENS as SPECIMENS
from structconv.testing.specimens import Setup, add

F64 = torch.float64
M, P, Q, HEADS = 6, 4, 3, 2
CONTENT = ("resizes", "compiles", "exports")
FREE = ("permutes", *CONTENT)
GRAPH = ("permutes", "blockwise", *CONTENT)


def random(*shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=F64)


def random_graph(inputs: int = M, outputs: int = M, edges: int = 13, dtype: torch.dtype = torch.int64,
                 weighted: bool = False, attributes: int | None = None) -> Graph:
    """Distinct random edges; the last input and the last output have none."""
    pairs = torch.randperm((inputs - 1) * (outputs - 1))[:edges]
    edge_index = torch.stack([pairs // (outputs - 1), pairs % (outputs - 1)]).to(dtype)
    return Graph(edge_index, num_inputs=inputs, num_outputs=outputs,
                 edge_weight=torch.rand(pairs.shape[0], dtype=F64) + 0.5 if weighted else None,
                 edge_attr=None if attributes is None else random(pairs.shape[0], attributes))


def of_few_kinds() -> Graph:
    """A random graph with two kinds of edges."""
    graph = random_graph(edges=20)
    return dataclasses.replace(graph, edge_attr=(torch.arange(graph.num_edges) % 2).to(F64).view(-1, 1).repeat(1, 2))


def attributed(batch: int) -> Graph:
    """A random graph whose edges have other attributes in each sample."""
    graph = random_graph()
    return dataclasses.replace(graph, edge_attr=random(batch, graph.num_edges, 2))


def weighed(batch: int) -> Graph:
    """A random graph whose edges have other weights in each sample."""
    graph = random_graph()
    return dataclasses.replace(graph, edge_weight=torch.rand(batch, graph.num_edges, dtype=F64) + 0.5)


def repeated_graph() -> Graph:
    """Self-loops, duplicate edges and isolated nodes."""
    return Graph(torch.tensor([[0, 0, 0, 1, 1, 2, 3], [1, 1, 0, 1, 2, 2, 1]]), num_nodes=M)


def empty_graph(nodes: int = 3) -> Graph:
    """No edges."""
    return Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes)


def knowledge() -> KnowledgeGraph:
    """Two relations among five entities, one triple given twice."""
    triples = [[0, 0, 1], [1, 0, 2], [1, 0, 2], [3, 0, 1], [2, 1, 4], [1, 1, 3], [4, 1, 0]]
    return KnowledgeGraph(torch.tensor(triples), 5, ("played", "genre"))


def setup(mechanism: Mechanism, structure: Any = None, *, entries: int = M, outputs: int | None = None,
          lead: tuple[int, ...] = ()) -> Setup:
    """The mechanism bound, with random x (*lead, entries, P) and, given `outputs`, z (*lead, outputs, P + 1)."""
    bound = mechanism.bound(P, Q, P if outputs is None else P + 1).to(F64)
    z = None if outputs is None else random(*lead, outputs, P + 1)
    return Setup(bound, random(*lead, entries, P), z, structure)


def several(traits: tuple[str, ...], **makers: Callable[[], Basis | Setup]) -> None:
    """Register specimens that promise the same."""
    for name, make in makers.items():
        add(name.replace("_", " "), make, traits)


def _values() -> None:
    several((), dense=lambda: Dense(random(3, 4, 5)), dense_batched=lambda: Dense(random(2, 1, 4, 4)),
            dense_without_entries=lambda: Dense(random(2, 0, 3)), identity=lambda: Identity(4),
            polynomial_chebyshev=lambda: Polynomial(Sparse(random_graph(), 0.4 * random(13)), 3),
            polynomial_monomial=lambda: Polynomial(Dense(0.4 * random(1, 4, 4)), 3, "monomial", first=1),
            pooling=lambda: Pooling(Shift(Grid((4, 5)), cuboid_offsets((2, 2)), "none", 2), 0.25))
    several((), sparse=lambda: Sparse(random_graph(5, 7), random(3, 13)),
            sparse_batched=lambda: Sparse(random_graph(), random(2, 1, 13)),
            sparse_without_edges=lambda: Sparse(empty_graph(), random(2, 0)))
    several((), taps=lambda: Taps(torch.randint(-1, M, (HEADS, 5, 3)), random(2, HEADS, 5, 3), M),
            shared_taps=lambda: Taps(torch.randint(-1, M, (1, 5, 2)), random(HEADS, 5, 2), M))
    several(("repeats",), sparse_with_repeated_edges=lambda: Sparse(repeated_graph(), random(2, 7)))
    several((), typed=lambda: Typed(random_graph(5, 7), torch.arange(13) % 3, 4, random(13)),
            typed_with_repeated_edges=lambda: Typed(repeated_graph(), torch.tensor([0, 0, 1, 1, 0, 1, 0]), 2,
                                                    random(7)))
    several(("translates",), shift_circular=lambda: Shift(Grid(7, periodic=True), (0, 2, -3)))
    several((), shift_zeros=lambda: Shift(Grid(7), (0, 2, -3)),
            shift_reflect=lambda: Shift(Grid((4, 4)), ((1, -1), (0, 2)), "reflect"),
            shift_shrinking=lambda: Shift(Grid(7), (0, 2, -1), "none"),
            shift_strided=lambda: Shift(Grid((5, 4)), cuboid_offsets((3, 3), 1, 1), stride=2),
            shift_strided_transposed=lambda: Shift(Grid((5, 4)), cuboid_offsets((3, 3), 1, 1), stride=2).transpose(),
            shift_on_a_batch=lambda: Shift(batch([Grid(3), Grid(5)]), (0, 1)))


def _leaves() -> None:
    several((), bilinear=lambda: scores.Bilinear(random(2, HEADS, 5, 3), random(2, 1, M, 3)),
            affine=lambda: scores.Affine(random(HEADS, M), random(2, HEADS, 5)),
            additive=lambda: scores.Additive(random(HEADS, M, 3), random(HEADS, 5, 3), random(HEADS, 3)),
            edge_score=lambda: scores.EdgeScore(random_graph(), random(HEADS, 13)),
            uniform=lambda: scores.Uniform(torch.ones((), dtype=F64), M, 5),
            lookup=lambda: positions.Lookup(random(HEADS, 1, 5), "clip", 2, M, 5),
            lookup_by_output=lambda: positions.Lookup(random(2, HEADS, 5, 5), "clip", 2, M, 5),
            lookup_by_position=lambda: positions.Lookup(random(1, 5, 8), "position", 8, M, 5),
            lookup_on_a_grid=lambda: positions.GridLookup(random(2, HEADS, 3, 5), Grid((3, 4))),
            distance=lambda: positions.Distance(random(HEADS), M, 5),
            gaussian_bump=lambda: positions.GaussianBump(2 + random(2, 5), 1.5, M),
            moved_in_a_batch=lambda: Moved(positions.Lookup(random(2, HEADS, 3, 5), "clip", 2, M, 3),
                                           OutputPositions(0, torch.tensor([[4, 0, 2], [1, 1, 5]])), 3))


def _algebra_of_values() -> None:
    several((), of_two_inputs=lambda: Mixture((Sparse(random_graph(5, 4, 9), random(2, 9)), Identity(4), Dense(random(
                2, 1, 3, 4)))),
            concatenated=lambda: Dense(random(2, M, M)) | Sparse(random_graph(), random(13)) | Identity(M),
            composed=lambda: Sparse(random_graph(5, 6), random(2, 13)) @ Dense(random(3, 6, 4)),
            summed=lambda: Sparse(random_graph(), random(2, 13)) + Identity(M),
            selected=lambda: Selected(Sparse(random_graph(), random(2, 13)), OutputPositions(2), 3),
            selected_in_a_batch=lambda: Selected(
                Dense(random(2, M, M)), OutputPositions(0, torch.tensor([[4, 0], [1, 5]])), 2),
            side_by_side=lambda: BlockDiagonal((Dense(random(2, 3, 4)), Sparse(random_graph(), random(2, 13)))),
            scaled_by_head=lambda: Dense(random(2, 3, 4)) * random(2),
            product=lambda: Sparse(random_graph(), random(2, 13)) * Dense(random(1, M, M)),
            outer=lambda: Sparse(random_graph(), random(2, 13)).outer(Dense(random(3, M, M))),
            transposed_product=lambda: (Dense(random(2, M, M)).softmax() * Sparse(random_graph(), random(13)))
            .transpose(),
            mixed_matrices=lambda: (Dense(random(2, M, M)) | Shift(Grid(M), (0, 1))).mix(random(4, 3)),
            sparsemax=lambda: Dense(random(2, M, 5)).normalize("sparsemax"),
            entmax_over_outputs=lambda: Dense(random(2, M, 5)).normalize("entmax", over="outputs"),
            sink_by_head=lambda: Dense(random(2, M, 5)).softmax(sink=random(2)),
            log_softmax=lambda: Dense(random(2, M, 5)).log_softmax(),
            plus_a_table=lambda: scores.Bilinear(random(HEADS, 5, 3), random(HEADS, M, 3)) + random(M, 5))
    several(("masks",), masked_zeros=lambda: Dense(random(2, M, M).relu()).masked(keep=Window(1)),
            masked_matrix=lambda: Dense(random(2, M, M)).masked(keep=Window(1)),
            transposed_scores=lambda: scores.Bilinear(random(HEADS, 5, 3), random(HEADS, M, 3)).masked(keep=Causal())
            .transpose())
    several(("repeats",), product_over_repeated_edges=lambda: Sparse(repeated_graph(), random(7))
            * Dense(random(2, M, M)))


def _index_based() -> None:
    several((), given=lambda: setup(Given(Shift(Grid(M), (0, 2, -3)))),
            given_table=lambda: setup(Given(torch.nn.Parameter(random(2, M, 4))) | Given(random(M, 4))))
    several(GRAPH, adjacency=lambda: setup(index.Adjacency(), random_graph(weighted=True)),
            chebyshev=lambda: setup(index.Chebyshev(3), random_graph()),
            edge_network=lambda: setup(EdgeNetwork(2, 3), random_graph(attributes=2)),
            edge_network_of_few_kinds=lambda: setup(EdgeNetwork(2, 3, normalize="row"), of_few_kinds()),
            diffusion=lambda: setup(index.Powers(2, "forward") | index.Powers(2, "backward"),
                                    random_graph(weighted=True)))
    several((*GRAPH, "repeats"), gcn=lambda: setup(index.Adjacency("sym", self_loops=True), random_graph()))
    several(("permutes", "blockwise"),
            adjacency_without_edges=lambda: setup(index.Adjacency(), empty_graph(), entries=3),
            powers=lambda: setup(index.Powers(3, normalize="sym", self_loops=True, first=1), random_graph()),
            relation=lambda: setup(index.Relation("genre^-1", "sym"), knowledge(), entries=5),
            relations=lambda: setup(index.Relations(2) | index.Identity(), knowledge(), entries=5),
            walks=lambda: setup(index.Walks(["played.genre", "genre.played^-1.genre"]), knowledge(), entries=5))
    several(("permutes", *CONTENT),
            adjacency_of_a_batch=lambda: setup(index.Adjacency(), weighed(2), lead=(2,)),
            laplacian_of_a_batch=lambda: setup(index.Chebyshev(2, None, 9.0), weighed(2), lead=(2,)))
    several(("permutes",), laplacian_by_its_spectrum=lambda: setup(
        index.Chebyshev(2, None, "computed"), random_graph()))
    several((), bipartite_adjacency=lambda: setup(index.Adjacency(), random_graph(5, 7), entries=5),
            hypergraph=lambda: setup(index.Adjacency(("sqrt", "count"), weighted=False) @ index.Adjacency(
                ("sqrt", None)).transpose(), random_graph(6, 4, 11, weighted=True)),
            senders_and_receivers=lambda: setup(index.Incidence("sender") | index.Incidence("receiver"),
                                                random_graph()),
            nodes_from_edges=lambda: setup(index.Incidence("receiver").transpose(), random_graph(), entries=13))
    several(("compiles",), learned=lambda: setup(Learned(9, size=2)), learned_scores=lambda: setup(Learned(9, size=2)
            .masked(keep=Causal()).softmax()))
    several(FREE, identity_mechanism=lambda: setup(index.Identity(2)))
    several(CONTENT, shifts=lambda: setup(index.Shifts([-1, 0, 2])))
    several(("compiles", "exports"), cuboid=lambda: setup(index.Cuboid((3, 3)), Grid((4, 5)), entries=20),
            cuboid_strided=lambda: setup(index.Cuboid((3, 2), stride=2, dilation=(1, 2), padding=1), Grid((5, 4)),
                                         entries=20),
            pool_padded=lambda: setup(index.Pool(3, 2, 1), Grid((4, 5)), entries=20),
            unpool=lambda: setup(index.Pool(2).transpose(), Grid((4, 4)), entries=4))
    several(("translates",), cuboid_on_a_torus=lambda: setup(index.Cuboid((3, 3)), Grid((3, 4), periodic=True),
                                                             entries=12))


def _deformable(kernel: Any, structure: Grid | None, entries: int, **options: Any) -> Setup:
    """Taps that move by other than whole numbers."""
    outputs = options.pop("outputs", None)
    made = setup(Deformable(kernel, **options), structure, entries=entries, outputs=outputs)
    for parameter in made.mechanism.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


def _attention() -> None:
    dot = mechanisms.DotProduct(heads=HEADS, dim=3)
    several((*FREE, "exports"), self_attention=lambda: setup(dot.scaled().softmax()),
            cross_attention=lambda: setup(dot.scaled().softmax(), outputs=5, lead=(2,)),
            additive_attention=lambda: setup(mechanisms.Additive(dim=3, heads=HEADS).softmax(), outputs=5),
            biaffine=lambda: setup(mechanisms.BiAffine(HEADS, constant=True).leaky_relu(0.2).softmax(), outputs=5))
    several(FREE, dot_product=lambda: setup(mechanisms.DotProduct().softmax()),
            gaussian=lambda: setup(mechanisms.Gaussian().normalize("sum")),
            softcapped=lambda: setup(dot.softcap(3.0).softmax()),
            talking_heads=lambda: setup(dot.scaled().mix(4).softmax().mix(3), outputs=5),
            pair=lambda: setup(mechanisms.Pair(heads=HEADS, hidden=5).softmax(), outputs=5))
    several(("permutes",),
            grouped_queries=lambda: setup(mechanisms.DotProduct(heads=4, dim=2, shared_by=2).scaled().softmax()),
            general=lambda: setup(mechanisms.General().softmax(), outputs=5),
            factorized_biaffine=lambda: setup(mechanisms.BiAffine(HEADS, rank=2, target=False).softmax(over="outputs")),
            embedded_gaussian=lambda: setup(mechanisms.EmbeddedGaussian(3).normalize("sum")),
            linear_attention=lambda: setup(mechanisms.DotProduct(dim=3).normalize("count")),
            sigmoid_attention=lambda: setup(dot.scaled().normalize("sigmoid")))
    several((*CONTENT, "masks"), causal_attention=lambda: setup(dot.scaled().masked(keep=Causal()).softmax()),
            causal_over_outputs=lambda: setup(dot.scaled().masked(keep=Causal()).softmax(over="outputs")),
            window_attention=lambda: setup(dot.scaled().masked(keep=Window(1)).softmax()),
            block_attention=lambda: setup(dot.masked(keep=Blocks(4)).softmax()),
            global_tokens=lambda: setup(dot.scaled().masked(keep=Window(1) | Global(1)).softmax()),
            causal_additive=lambda: setup(mechanisms.Additive(dim=3).masked(keep=Causal()).softmax()),
            average=lambda: setup(mechanisms.Uniform(window=2).normalize("sum")))
    several(CONTENT, location=lambda: setup(terms.Location(300).softmax(), outputs=5),
            rotary=lambda: setup(mechanisms.DotProduct(heads=HEADS, dim=4, rotary=mechanisms.Rotary()).softmax()),
            context_attention=lambda: setup(Context(3).softmax()),
            context_by_additive_scores=lambda: setup(Context(
                3, score=mechanisms.Additive(dim=3, heads=HEADS)).softmax()),
            context_by_masked_scores=lambda: setup(Context(
                3, score=(dot + terms.RelativeBias(2)).scaled().masked(keep=Causal())).softmax()),
            relative_key=lambda: setup((dot + terms.RelativeKey(2)).scaled().softmax()),
            sinusoidal_key=lambda: setup((mechanisms.DotProduct(heads=2, dim=4)
                                          + terms.RelativeKey(2, sinusoidal=True)).softmax()),
            relative_bias=lambda: setup((dot.scaled() + terms.RelativeBias(2)).softmax()),
            logarithmic_bias=lambda: setup((dot.scaled() + terms.RelativeBias(4, buckets="log")).softmax()),
            biases_of_one_product_in_a_window=lambda: setup((
                mechanisms.DotProduct(dim=3) + terms.ALiBi(heads=2)).masked(keep=Window(2) & Causal()).softmax()),
            local_monotonic=lambda: setup(mechanisms.General().softmax() * terms.GaussianWindow(1.0)),
            one_relative_key=lambda: setup((dot + terms.RelativeKey(0)).scaled().softmax()),
            one_clipped_shift=lambda: setup(dot.scaled().softmax().outer(terms.ClippedShifts(0))),
            shaw_values=lambda: setup(dot.scaled().softmax().outer(terms.ClippedShifts(2))))


def _moving_shifts() -> None:
    several(("resizes", "compiles"), location_of_one=lambda: setup(terms.Location(300).softmax(), entries=1, outputs=5))
    several((), dynamic_shifts=lambda: setup(DynamicShifts([-1, 0, 2], heads=HEADS)),
            deformable=lambda: _deformable(3, None, M),
            deformable_on_a_grid=lambda: _deformable((3, 2), Grid((4, 5)), 20),
            deformable_strided=lambda: _deformable(3, Grid(7), 7, stride=2, outputs=4))


def _other_normalizations() -> None:
    dot, earlier = mechanisms.DotProduct(heads=HEADS, dim=3).scaled(), torch.ones(M, M, dtype=torch.bool).tril(-1)
    several((*FREE,), sparsemax_attention=lambda: setup(dot.normalize("sparsemax")),
            entmax_attention=lambda: setup(mechanisms.Additive(dim=3).normalize("entmax"), outputs=5),
            attention_with_a_sink=lambda: setup(dot.softmax(sink=0.0), outputs=5),
            hard_attention=lambda: setup(dot.normalize("hard")))
    several(CONTENT, largest_two=lambda: setup(dot.masked(keep=Causal()).normalize(TopK(2))))
    several((*CONTENT, "masks"),
            causal_sparsemax=lambda: setup(dot.masked(keep=Causal()).normalize("sparsemax")),
            causal_sink=lambda: setup((dot + Causal()).softmax(sink=torch.nn.Parameter(torch.tensor([0.5, -1.0])))),
            causal_logarithm=lambda: setup((dot.masked(keep=Causal()).log_softmax() * 2.0).softmax()))
    several(("permutes", "blockwise", "resizes", "masks"),
            graph_sparsemax=lambda: setup(dot.masked(keep=STRUCTURE).normalize("sparsemax"), random_graph()),
            graph_logarithm=lambda: setup(dot.masked(keep=STRUCTURE).log_softmax().map(torch.square).softmax(),
                                          random_graph()))
    several(("resizes", "masks"), windowed_entmax=lambda: setup(dot.masked(keep=Window(1)).normalize("entmax")))
    several(("masks", "repeats"),
            entmax_over_repeated_edges=lambda: setup(dot.masked(keep=STRUCTURE).normalize("entmax"), repeated_graph()),
            sink_over_repeated_edges=lambda: setup(dot.masked(keep=STRUCTURE).softmax(sink=1.0), repeated_graph()))
    several(("masks",),
            table_with_infinities=lambda: setup((dot + random(M, M).masked_fill(earlier, -torch.inf)).softmax()),
            sparsemax_of_nothing=lambda: setup(dot.masked(keep=Padding(torch.zeros(M, dtype=torch.bool)))
                                               .normalize("sparsemax")))
    several((), log_softmax_over_outputs=lambda: setup(dot.masked(keep=STRUCTURE).log_softmax(over="outputs"),
                                                       random_graph()),
            one_term_learned=lambda: setup((dot + torch.nn.Parameter(random(HEADS, M, M))).softmax()))


def _local_predictive() -> Setup:
    center = terms.PredictedPosition()
    local = mechanisms.General().masked(keep=Window(2, center=center)).softmax()  # type: ignore[arg-type]
    return setup(local * terms.GaussianWindow(1.0, center=center), outputs=5)


def _dropped_within() -> Basis:
    """The weights of the second sample, behind four inputs and two outputs of the first."""
    weights = scores.Bilinear(random(2, HEADS, 5, 3), random(HEADS, M, 3)).softmax()
    return DroppedWithin(weights, 0.5, torch.tensor(3), 0, torch.tensor(4), torch.tensor(2), 9)


def _attention_on_structures() -> None:
    dot = mechanisms.DotProduct(heads=HEADS, dim=3)
    on_graph = dot.scaled().masked(keep=STRUCTURE).softmax()
    several((*GRAPH, "exports", "masks"), graph_attention=lambda: setup(on_graph, random_graph()))
    several(GRAPH, graph_concatenation=lambda: setup(mechanisms.Concatenation(3).relu().masked(keep=STRUCTURE)
                                                     .normalize("sum"), random_graph()))
    several((*GRAPH, "masks"), softmax_by_channel=lambda: setup((mechanisms.Channelwise(P) * 2.0).masked(
                keep=STRUCTURE).softmax(), random_graph()))
    several(("permutes", "blockwise", "resizes"), maximum=lambda: setup(mechanisms.Channelwise(P).masked(
                keep=STRUCTURE).normalize("hard"), random_graph()))
    several((*GRAPH, "masks"), talking_heads_on_a_graph=lambda: setup(
                dot.masked(keep=STRUCTURE).mix(3).softmax().mix(HEADS), random_graph()),
            graph_attention_over_outputs=lambda: setup(
                dot.masked(keep=STRUCTURE).softmax(over="outputs"), random_graph(dtype=torch.int32)),
            graph_pair=lambda: setup(mechanisms.Pair(hidden=5).masked(keep=STRUCTURE).softmax(), random_graph()),
            graph_additive=lambda: setup(mechanisms.Additive(dim=3).masked(keep=STRUCTURE).softmax(), random_graph()),
            edge_bias=lambda: setup((dot.scaled() + terms.EdgeBias(2)).softmax(), random_graph(attributes=2)),
            edge_bias_by_a_module=lambda: setup((dot.scaled() + terms.EdgeBias(nn.Sequential(
                nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, HEADS)))).softmax(), random_graph(attributes=2)))
    several(("permutes", "masks", "compiles"), edge_bias_of_a_batch=lambda: setup(
        (dot.scaled() + terms.EdgeBias(2)).softmax(), attributed(2), lead=(2,)))
    several(("masks", "repeats"), attention_over_repeated_edges=lambda: setup(on_graph, repeated_graph()))
    several(("masks",), attention_without_edges=lambda: setup(on_graph, empty_graph(), entries=3),
            bipartite_attention=lambda: setup(on_graph, random_graph(6, 5, 9), outputs=5),
            padded=lambda: setup(dot.masked(keep=Padding(torch.arange(M) < 4)).softmax()),
            padded_batch=lambda: setup(mechanisms.Additive(3).masked(
                keep=Padding(torch.arange(M) < torch.tensor([[4], [5]]))).softmax(), lead=(2,)),
            padded_window=lambda: setup(dot.masked(keep=Window(1) & Padding(torch.arange(M) < torch.tensor([[4], [5]])))
                                        .softmax(), lead=(2,)),
            padded_pairs=lambda: setup(mechanisms.Pair(heads=HEADS, hidden=5).masked(
                keep=Padding(torch.arange(M) < 4)).softmax()),
            masked_columns=lambda: setup(dot.masked(drop=DenseMask(torch.eye(M, dtype=torch.bool)[:, [0]].expand(M, M)))
                                         .softmax()),
            everything_masked=lambda: setup(dot.masked(drop=DenseMask(torch.ones(M, M, dtype=torch.bool))).softmax()),
            masked_then_capped=lambda: setup(dot.masked(keep=Padding(torch.arange(M) < 4)).softcap(2.0).softmax()),
            masked_sum=lambda: setup((dot.masked(keep=Causal()) + terms.RelativeBias(2)).masked(
                keep=Padding(torch.arange(M) < 4)).softmax()))
    several((), samples_of_attention=lambda: setup(dot.scaled().softmax(), Samples([3, 2, 1])),
            samples_of_global_tokens=lambda: setup(dot.masked(keep=Window(1) | Global((0, 2))).softmax(),
                                                   Samples([4, 2])),
            samples_of_two_sides=lambda: setup((dot + terms.RelativeBias(2)).masked(keep=Causal()).softmax(),
                                               Samples([4, 2], [1, 4]), outputs=5),
            local_predictive=_local_predictive,
            grid_bias=lambda: setup((dot.scaled() + terms.RelativeBias((1, 2))).softmax(), Grid((2, 3)), entries=6),
            attention_of_attention=lambda: setup(dot.softmax() @ mechanisms.Uniform().normalize("sum")),
            dropped=lambda: scores.Bilinear(random(2, HEADS, 5, 3), random(HEADS, M, 3)).softmax().dropout(0.5),
            dropped_within=_dropped_within,
            attention_of_nothing=lambda: setup(dot.softmax(), entries=0),
            attention_to_nothing=lambda: setup(dot.softmax(), outputs=0))


for _register in (_values, _leaves, _algebra_of_values, _index_based, _attention, _moving_shifts, _other_normalizations,
                  _attention_on_structures):
    _register()
