"""The systems of the literature, one expression each.

Run it to see every row: its name, where it comes from, the expression, and the shape of what it computes::

    python examples/literature.py

x (..., M, P) embeds the inputs and z (..., N, P') the outputs where they are others. Sequences have M = 12 entries,
images 6 x 8 pixels, the graph has 7 nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from structconv.bases import fourier_basis, haar_basis
from structconv.mechanisms import (
    STRUCTURE,
    Additive,
    Adjacency,
    ALiBi,
    BiAffine,
    Channelwise,
    Chebyshev,
    Concatenation,
    Context,
    Cuboid,
    Deformable,
    DotProduct,
    DynamicShifts,
    EmbeddedGaussian,
    Gaussian,
    GaussianWindow,
    General,
    Given,
    Identity,
    Incidence,
    Learned,
    Location,
    Pool,
    Powers,
    PredictedPosition,
    Relation,
    Relations,
    RelativeBias,
    RelativeKey,
    Rotary,
    Shifts,
    Uniform,
    Walks,
)
from structconv.nn import Conv, ConvGRUCell, ConvLSTMCell, RelativeValue
from structconv.structures import Causal, Global, Graph, Grid, KnowledgeGraph, Window
from structconv.weights import Depthwise, DepthwiseSeparable, Eye, EyeBlocks, Full, HeadBlocks, LowRank, Separable

P, Q = 16, 24
D, T = 4, 5  # half of a window, learned outputs
GRID = Grid((6, 8))
GRAPH = Graph(torch.tensor([[0, 1, 1, 2, 3, 3, 4, 5, 0, 6], [1, 0, 2, 1, 2, 0, 5, 4, 3, 0]]), num_nodes=7)
HYPERGRAPH = Graph(torch.tensor([[0, 1, 2, 1, 3, 4, 5, 5, 0], [0, 0, 0, 1, 1, 2, 2, 3, 3]]), num_inputs=6,
                   num_outputs=4, edge_weight=torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 0.5, 0.5, 4.0, 4.0]))
KNOWLEDGE = KnowledgeGraph.from_labels([
    ("Leonard Nimoy", "played", "Spock"), ("Alec Guinness", "played", "Obi-Wan Kenobi"),
    ("William Shatner", "played", "Kirk"), ("Kirk", "characterIn", "Star Trek"), ("Spock", "characterIn", "Star Trek"),
    ("Obi-Wan Kenobi", "characterIn", "Star Wars"), ("Star Trek", "genre", "science fiction"),
    ("Star Wars", "genre", "science fiction"), ("Star Wars", "genre", "fantasy")])
LINKS = Graph(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8, 9]]), num_nodes=10)
SCALES = torch.diag_embed(torch.stack([torch.tensor([0, *(i.bit_length() for i in range(1, 16))]) == k
                                       for k in range(5)]).float())
REGIONS = Graph(torch.tensor([[0, 5, 5, 2, 11, 7], [5, 0, 2, 9, 7, 3]]), num_nodes=12)


@dataclass(frozen=True)
class Row:
    """One system: its title, its source, the function whose body is the expression, and inputs to call it with."""

    title: str
    source: str
    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]

    @property
    def expression(self) -> str:
        """The source text of the expression, on one line."""
        body = inspect.getsource(self.build).split("    return ", 1)[1]
        return " ".join(body.split()).replace("( ", "(")


ROWS: dict[str, Row] = {}


def row(title: str, source: str, inputs: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    """Enter a function into `ROWS`."""

    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        ROWS[build.__name__] = Row(title, source, build, inputs)
        return build

    return enter


def sequence() -> dict[str, Any]:
    return {"x": torch.randn(2, 12, P)}


def long_sequence() -> dict[str, Any]:
    return {"x": torch.randn(2, 16, P)}


def sequences() -> dict[str, Any]:
    return {"x": torch.randn(2, 12, P), "z": torch.randn(2, 9, P)}


def one_step() -> dict[str, Any]:
    return {"x": torch.randn(2, 12, P), "z": torch.randn(2, 1, P), "positions": 7}


def image() -> dict[str, Any]:
    return {"x": torch.randn(2, GRID.num_entries, P), "structure": GRID}


def pixels() -> dict[str, Any]:
    return {"x": torch.randn(2, GRID.num_entries, P)}


def graph() -> dict[str, Any]:
    return {"x": torch.randn(GRAPH.num_nodes, P), "structure": GRAPH}


def hypergraph() -> dict[str, Any]:
    return {"x": torch.randn(HYPERGRAPH.num_inputs, P), "structure": HYPERGRAPH}


def looped_graph() -> dict[str, Any]:
    return {"x": torch.randn(GRAPH.num_nodes, P), "structure": GRAPH.with_self_loops()}


def edges() -> dict[str, Any]:
    return {"x": torch.randn(GRAPH.num_edges, P), "structure": GRAPH}


def nodes_and_edges() -> dict[str, Any]:
    return {"x": {"nodes": torch.randn(GRAPH.num_nodes, P), "edges": torch.randn(GRAPH.num_edges, 3)},
            "structure": GRAPH}


def knowledge() -> dict[str, Any]:
    return {"x": torch.randn(KNOWLEDGE.num_entities, P), "structure": KNOWLEDGE}


def structures() -> dict[str, Any]:
    return {"x": torch.randn(7, P), "structure": {"chain": Grid(7), "bonds": GRAPH}}


def facts() -> dict[str, Any]:
    return {"x": torch.randn(10, P), "structure": {"facts": KNOWLEDGE, "links": LINKS}}


def regions() -> dict[str, Any]:
    return {"x": torch.randn(2, GRID.num_entries, P), "structure": {"pixels": GRID, "regions": REGIONS}}


# Grids


@row("1x1 convolution", "Lin et al. 2014", image)
def one_by_one() -> Conv:
    return Conv(Identity(), P, Q)


@row("Conv2d", "LeCun et al. 1998", image)
def conv2d() -> Conv:
    return Conv(Cuboid((3, 3), stride=2, padding="zeros"), P, Q)


@row("dilated convolution", "Yu and Koltun 2016", image)
def dilated_conv2d() -> Conv:
    return Conv(Cuboid((3, 3), stride=2, dilation=2, padding="zeros"), P, Q)


@row("any set of offsets", "Andreoli 2019, Definition 1", image)
def any_offsets() -> Conv:
    return Conv(Shifts([(0, 0), (5, -3), (-8, 1)]), P, Q)


@row("separable convolution", "Andreoli 2019, eq. 9", image)
def separable() -> Conv:
    return Conv(Cuboid((3, 3)), P, Q, weight=Separable(rank=2))


@row("depthwise separable convolution (Xception)", "Chollet 2017", image)
def depthwise_separable() -> Conv:
    return Conv(Cuboid((3, 3)), P, Q, weight=DepthwiseSeparable())


@row("lightweight convolution", "Wu et al. 2019, eq. 4 and 5", sequence)
def lightweight() -> Conv:
    return Conv(Shifts([-2, -1, 0, 1, 2]), P, P, weight=Depthwise(heads=4, normalize="softmax"))


@row("dynamic convolution", "Wu et al. 2019, eq. 6 and 7", sequence)
def dynamic() -> Conv:
    return Conv(DynamicShifts([-2, -1, 0, 1, 2], heads=4), P, P, weight=EyeBlocks())


@row("deformable convolution", "Dai et al. 2017, eq. 2", image)
def deformable() -> Conv:
    return Conv(Deformable((3, 3)), P, Q)


@row("average pooling", "LeCun et al. 1998", image)
def average_pooling() -> Conv:
    return Conv(Pool(2), P, P, weight=Eye())


# Graphs


@row("GCN", "Kipf and Welling 2017, eq. 2", graph)
def gcn() -> Conv:
    return Conv(Adjacency(normalize="sym", self_loops=True), P, Q)


@row("hypergraph convolution", "Bai et al. 2021, eq. 6", hypergraph)
def hypergraph_convolution() -> Conv:
    return Conv(Adjacency(("sqrt", "count"), weighted=False) @ Adjacency(("sqrt", None)).transpose(), P, Q)


@row("ChebNet", "Defferrard et al. 2016, eq. 4", graph)
def chebyshev() -> Conv:
    return Conv(Chebyshev(order=3), P, Q)


@row("diffusion convolution", "Li et al. 2018, eq. 2", graph)
def diffusion() -> Conv:
    return Conv(Powers(2, walk="forward") | Powers(2, walk="backward"), P, Q)


@row("R-GCN with basis decomposition", "Schlichtkrull et al. 2018, eq. 2 and 3", knowledge)
def relational() -> Conv:
    return Conv(Relations(3, normalize="row") | Identity(), P, Q, weight=[Separable(rank=30), Full()])


@row("typed walk", "Andreoli 2019, Definition 3", knowledge)
def typed_walk() -> Conv:
    return Conv(Walks(["played.characterIn.genre"]), P, Q)


@row("typed walk, as a product", "Andreoli 2019, Proposition 3", knowledge)
def typed_walk_product() -> Conv:
    return Conv(Relation("played") @ Relation("characterIn") @ Relation("genre"), P, Q)


@row("GAT, heads summed", "Velickovic et al. 2018, eq. 3; Andreoli 2019, section 3.2", looped_graph)
def gat() -> Conv:
    return Conv(BiAffine(heads=8, bilinear=False, on="projected").leaky_relu(0.2).masked(keep=STRUCTURE).softmax(),
                P, Q)


@row("GAT, heads side by side", "Velickovic et al. 2018, eq. 5", looped_graph)
def gat_concatenated() -> Conv:
    return Conv(BiAffine(heads=8, bilinear=False, on="projected").leaky_relu(0.2).masked(keep=STRUCTURE).softmax(),
                P, Q, weight=HeadBlocks())


@row("maximum over neighbors", "Hamilton et al. 2017, eq. 3, the pooling of features", graph)
def max_aggregation() -> Conv:
    return Conv(Channelwise(P).masked(keep=STRUCTURE).normalize("hard"), P, P, weight=EyeBlocks())


@row("softmax aggregation", "Li et al. 2020, eq. 3", graph)
def softmax_aggregation() -> Conv:
    return Conv((Channelwise(P) * torch.nn.Parameter(torch.tensor(2.0))).masked(keep=STRUCTURE).softmax(), P, P,
                weight=EyeBlocks())


@row("edge update of a graph network", "Battaglia et al. 2018, section 3.2", graph)
def edge_update() -> Conv:
    return Conv(Incidence("sender") | Incidence("receiver"), P, Q)


@row("interaction network: an edge with its ends", "Battaglia et al. 2016, eq. 2 and 3; 2018, eq. 1", nodes_and_edges)
def interaction() -> Conv:
    return Conv((Incidence("sender") | Incidence("receiver")).of("nodes") | Identity().of("edges"),
                {"nodes": P, "edges": 3}, Q)


@row("nodes from edges", "Battaglia et al. 2018, section 3.2", edges)
def nodes_from_edges() -> Conv:
    return Conv(Incidence("receiver").transpose(), P, P, weight=Eye())


# Attention


@row("Transformer self-attention, causal", "Vaswani et al. 2017, eq. 1", sequence)
def causal_attention() -> Conv:
    return Conv(DotProduct(heads=8, dim=64).scaled().masked(keep=Causal()).softmax(), P, Q, weight=LowRank(64))


@row("cross-attention", "Vaswani et al. 2017, section 3.2.3", sequences)
def cross_attention() -> Conv:
    return Conv(DotProduct(heads=8, dim=64).scaled().softmax(), P, Q, weight=LowRank(64))


@row("grouped queries", "Ainslie et al. 2023", sequence)
def grouped_queries() -> Conv:
    return Conv(DotProduct(heads=8, dim=64, shared_by=4).scaled().softmax(), P, Q, weight=LowRank(64, shared_by=4))


@row("Bahdanau's additive attention", "Bahdanau et al. 2015, section A.1.2", sequences)
def bahdanau() -> Conv:
    return Conv(Additive(dim=64).softmax(), P, P, weight=Eye())


@row("Luong, dot", "Luong et al. 2015, section 3.1", sequences)
def luong_dot() -> Conv:
    return Conv(DotProduct().softmax(), P, P, weight=Eye())


@row("Luong, general", "Luong et al. 2015, section 3.1", sequences)
def luong_general() -> Conv:
    return Conv(General().softmax(), P, P, weight=Eye())


@row("Luong, location", "Luong et al. 2015, eq. 8", sequences)
def luong_location() -> Conv:
    return Conv(Location(length=20).softmax(), P, P, weight=Eye())


@row("Luong, local-m", "Luong et al. 2015, section 3.2", sequence)
def luong_local_m() -> Conv:
    return Conv(General().masked(keep=Window(D)).softmax(), P, P, weight=Eye())


@row("Luong, local-p", "Luong et al. 2015, eq. 9 and 10", sequences)
def luong_local_p() -> Conv:
    return Conv(General().masked(keep=Window(D, center=(p := PredictedPosition()))).softmax()
                * GaussianWindow(D / 2, center=p), P, P, weight=Eye())


@row("relative positions, key side", "Shaw et al. 2018, eq. 4", sequence)
def shaw_key() -> Conv:
    return Conv((DotProduct(heads=8, dim=64) + RelativeKey(clip=3)).scaled().softmax(), P, Q, weight=LowRank(64))


@row("relative positions, key and value side", "Shaw et al. 2018, eq. 3 and 4", sequence)
def shaw() -> Conv:
    return Conv((DotProduct(heads=8, dim=64) + RelativeKey(clip=3)).scaled().softmax(), P, Q, weight=LowRank(64),
                relative_value=RelativeValue(clip=3))


@row("T5's relative bias", "Raffel et al. 2020, section 2.1", sequence)
def t5() -> Conv:
    return Conv((DotProduct(heads=8, dim=64).scaled() + RelativeBias(clip=16, buckets="log")).softmax(), P, Q,
                weight=LowRank(64))


@row("ALiBi", "Press et al. 2022, section 3", sequence)
def alibi() -> Conv:
    return Conv((DotProduct(heads=8, dim=64).scaled() + ALiBi(heads=8)).softmax(), P, Q, weight=LowRank(64))


@row("attention with a zero sink (softmax1)", "Xiao et al. 2024, section 3.3", sequence)
def zero_sink() -> Conv:
    return Conv(DotProduct(heads=8, dim=64).scaled().masked(keep=Causal()).softmax(sink=0.0), P, Q, weight=LowRank(64))


@row("talking heads", "Shazeer et al. 2020, section 3", sequences)
def talking_heads() -> Conv:
    return Conv(DotProduct(heads=4, dim=16).scaled().mix(6).softmax().mix(4), P, Q, weight=LowRank(16))


@row("sparsemax attention", "Martins and Astudillo 2016, eq. 2", sequences)
def sparsemax_attention() -> Conv:
    return Conv(General().normalize("sparsemax"), P, P, weight=Eye())


@row("MLP-Mixer, one layer of token mixing", "Tolstikhin et al. 2021, eq. 1", sequence)
def token_mixing() -> Conv:
    return Conv(Learned(12), P, P, weight=Eye())


@row("random Synthesizer", "Tay et al. 2021, section 3.3", sequence)
def random_synthesizer() -> Conv:
    return Conv(Learned(20, size=4).masked(keep=Causal()).softmax(), P, Q, weight=LowRank(8))


@row("Fourier mixing of tokens", "Lee-Thorp et al. 2022, eq. 3, with learned channels", sequence)
def fourier_mixing() -> Conv:
    return Conv(Given(fourier_basis(12)), P, Q)


@row("Haar wavelets, a matrix for each scale", "Mallat 1989, section III", long_sequence)
def wavelets() -> Conv:
    return Conv(Given(haar_basis(16)) @ Given(SCALES) @ Given(haar_basis(16)).transpose(), P, Q)


@row("non-local, Gaussian", "Wang et al. 2018, eq. 2", pixels)
def non_local_gaussian() -> Conv:
    return Conv(Gaussian().normalize("sum"), P, P, weight=LowRank(8))


@row("non-local, embedded Gaussian", "Wang et al. 2018, eq. 3", pixels)
def non_local_embedded() -> Conv:
    return Conv(EmbeddedGaussian(8).normalize("sum"), P, P, weight=LowRank(8))


@row("non-local, dot product", "Wang et al. 2018, eq. 4", pixels)
def non_local_dot() -> Conv:
    return Conv(DotProduct(dim=8).normalize("count"), P, P, weight=LowRank(8))


@row("non-local, concatenation", "Wang et al. 2018, eq. 5", pixels)
def non_local_concatenation() -> Conv:
    return Conv(Concatenation(8).relu().normalize("count"), P, P, weight=LowRank(8))


@row("spatial attention (a mean over a window)", "Andreoli 2019", sequence)
def spatial_attention() -> Conv:
    return Conv(Uniform(window=2).normalize("sum"), P, Q)


@row("context attention", "Andreoli 2019", sequence)
def context_attention() -> Conv:
    return Conv(Context(queries=T).softmax(), P, Q)


@row("neighborhood attention on an image", "Hassani et al. 2023", image)
def neighborhood_attention() -> Conv:
    return Conv(DotProduct(heads=4, dim=32).scaled().masked(keep=Window((7, 7), dilation=2)).softmax(), P, Q)


@row("a window with global tokens (Longformer)", "Beltagy et al. 2020, section 3.1", sequence)
def global_tokens() -> Conv:
    return Conv(DotProduct(heads=4, dim=32).scaled().masked(keep=Window(2) | Global(1)).softmax(), P, Q)


@row("causal attention, one step of decoding", "Vaswani et al. 2017, section 3.2.3", one_step)
def decoding_step() -> Conv:
    return Conv(DotProduct(heads=8, dim=8).scaled().masked(keep=Causal()).softmax(), P, Q, weight=LowRank(8))


@row("rotary positions in a sliding window, one step", "Su et al. 2021, eq. 34; Jiang et al. 2023", one_step)
def sliding_step() -> Conv:
    return Conv(DotProduct(heads=4, dim=8, shared_by=2, rotary=Rotary(layout="half")).scaled()
                .masked(keep=Window(3) & Causal()).softmax(), P, Q, weight=LowRank(8, shared_by=2))


@row("attention heads beside shift heads", "Andreoli 2019", sequence)
def mixed_heads() -> Conv:
    return Conv(DotProduct(heads=6, dim=8).scaled().softmax() | Shifts([-1, 1]), P, P)


# Several structures in one call


@row("attention beside a chain and its bonds", "Andreoli 2019, section 2; Rampasek et al. 2022", structures)
def chain_and_bonds() -> Conv:
    return Conv(DotProduct(heads=2, dim=8).scaled().softmax() | Shifts([-1, 1], structure="chain")
                | Adjacency(structure="bonds"), P, Q)


@row("ChebNet beside R-GCN", "Defferrard et al. 2016, eq. 4; Schlichtkrull et al. 2018, eq. 2", facts)
def polynomials_and_relations() -> Conv:
    return Conv(Chebyshev(order=2, structure="links") | Relations(3, structure="facts"), P, Q)


@row("means over a grid, then along a graph of regions", "Andreoli 2019, Proposition 3", regions)
def pixels_to_regions() -> Conv:
    return Conv(Pool((2, 2), structure="pixels") @ Adjacency(normalize="row", structure="regions"), P, Q)


# Recurrent cells


@row("ConvLSTM", "Shi et al. 2015, eq. 3", image)
def conv_lstm() -> ConvLSTMCell:
    return ConvLSTMCell(Cuboid((3, 3)), P, Q)


@row("DCRNN's cell", "Li et al. 2018, eq. 3", graph)
def dcrnn() -> ConvGRUCell:
    return ConvGRUCell(Powers(2, walk="forward") | Powers(2, walk="backward"), P, Q)


def main() -> None:
    """Print every row."""
    torch.manual_seed(0)
    for entry in ROWS.values():
        y = entry.build()(**entry.inputs())
        shape = tuple((y[0] if isinstance(y, tuple) else y).shape)
        print(f"{entry.title} [{entry.source}]\n    {entry.expression}\n    -> {shape}")


if __name__ == "__main__":
    main()
