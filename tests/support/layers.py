"""The layers on which the suite of mutations runs: every named layer, and a `Conv` over every specimen.

Sizes are a few entries and channels; numbers are float64, drawn anew and alike for each use.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structconv import Adjacency, Chebyshev, Conv, Identity, Incidence, Pool, Powers, Relations, Shifts
from structconv import nn as layers
from structconv.bases import Basis, Shift, Sparse
from structconv.compat import pyg
from structconv.compat import torch as torch_layers
from structconv.mechanisms import STRUCTURE, STRUCTURE_IF_GIVEN, ALiBi, Cuboid, RelativeBias
from structconv.mechanisms import scores as mechanisms
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.structures import Causal, Graph, Grid, Padding, Samples, Window
from structconv.testing.layers import layer_over
from structconv.testing.specimens import SPECIMENS
from structconv.testing.use import Make, Use, seeded, use
from structconv.weights import Depthwise, Full, Grouped, HeadBlocks, LowRank, Separable, Shared
from tests.support import library
from tests.support.drawn import EVERY as EVERY
from tests.support.drawn import drawn

F64, M, P, Q = torch.float64, library.M, library.P, library.Q
#: Every named layer by its name, made anew at each call.
LAYERS: dict[str, Make] = {}
#: Drop-in layers, by their modules and names.
COMPAT: dict[str, Make] = {}


class Weighed(Mechanism):
    """A user's mechanism of two halves: edges weighed by what a module makes of both ends' features."""

    has_scores = False

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden

    def bind(self, channels: Any) -> None:
        self.net = nn.Sequential(nn.Linear(channels.inputs, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 2))

    @property
    def size(self) -> int:
        return 2

    def forward(self, inputs: Inputs) -> Basis:
        graph = inputs.structure
        return Sparse(graph, self.net(inputs.x)[..., graph.source, :].mT)


class Graded(Mechanism):
    """A user's mechanism whose options may change in place: shifts by so much, each with its factor."""

    def __init__(self, shifts: list[int], factors: dict[str, float]) -> None:
        super().__init__()
        self.shifts, self.factors = shifts, factors

    @property
    def size(self) -> int:
        return len(self.shifts)

    def forward(self, inputs: Inputs) -> Basis:
        first, second = self.factors.values()
        return Shift(Grid(inputs.num_inputs), self.shifts) * (first - second)


def named(**makers: Make) -> None:
    LAYERS.update({name: seeded(make) for name, make in makers.items()})


def image(*sizes: int) -> Tensor:
    """A batch of two images with P channels."""
    return library.random(2, P, *sizes)


def graph(**options: Any) -> Graph:
    return library.random_graph(**options)


def x() -> Tensor:
    return library.random(M, P)


def xs() -> Tensor:
    return library.random(2, M, P)


def _graphs() -> None:
    named(gcn=lambda: use(layers.GCNConv(P, Q), x(), graph(weighted=True)),
          gcn_batch=lambda: use(layers.GCNConv(P, Q), xs(), graph()),
          cheb=lambda: use(layers.ChebConv(P, Q, 3), x(), graph(weighted=True)),
          diffusion=lambda: use(layers.DiffusionConv(P, Q, 2), x(), graph(weighted=True)),
          edge_conditioned=lambda: use(layers.EdgeConditionedConv(P, Q, 2, 3), x(), graph(attributes=2)),
          edge_conditioned_mean=lambda: use(layers.EdgeConditionedConv(P, Q, 2, (3, 2), aggr="mean", root_weight=False),
                                            xs(), library.of_few_kinds()),
          rgcn=lambda: use(layers.RelationalConv(P, Q, 2), library.random(5, P), library.knowledge()),
          rgcn_bases=lambda: use(layers.RelationalConv(P, Q, 2, num_bases=2), library.random(5, P),
                                 library.knowledge()),
          rgcn_blocks=lambda: use(layers.RelationalConv(P, 4, 2, num_blocks=2, aggr="add"), library.random(5, P),
                                  library.knowledge()),
          gat=lambda: use(layers.GATConv(P, Q, 2), x(), graph()),
          gat_mean=lambda: use(layers.GATConv(P, Q, 2, concat=False), x(), graph()),
          gat_edges=lambda: use(layers.GATConv(P, Q, 2, edge_dim=2), x(), graph(attributes=2)),
          gat_two_sides=lambda: use(layers.GATConv(P, Q, 2, add_self_loops=False), x(), graph(outputs=5, edges=9),
                                    z=library.random(5, P)),
          gat_dropout=lambda: use(layers.GATConv(P, Q, 2, dropout=0.5), x(), graph()),
          gatv2=lambda: use(layers.GATv2Conv(P, Q, 2), x(), graph()),
          gatv2_mean=lambda: use(layers.GATv2Conv(P, Q, 2, concat=False), x(), graph()))


def _attention() -> None:
    mha = layers.MultiheadAttention
    named(mha=lambda: use(mha(P, 2), xs()), mha_cross=lambda: use(mha(P, 2, kdim=5), xs(), library.random(2, 7, 5)),
          mha_grouped=lambda: use(mha(P, 4, num_kv_heads=2), xs()),
          mha_dropout=lambda: use(mha(P, 2, dropout=0.5), xs()),
          mha_causal=lambda: use(mha(P, 2), xs(), keep=Causal()),
          mha_padded=lambda: use(mha(P, 2), xs(), keep=Padding(torch.arange(M) < torch.tensor([[4], [5]]))),
          mha_graph=lambda: use(mha(P, 2), x(), structure=graph()),
          mha_window=lambda: use(mha(P, 2), xs(), structure=Window(1)),
          **{f"non_local_{name}": lambda name=name: use(layers.NonLocalBlock(P, 2, name, axes=1), image(M))
             for name in layers.NonLocalBlock.FUNCTIONS})


def _grids() -> None:
    named(conv1d=lambda: use(layers.Conv1d(P, Q, 3, padding=1), image(M)),
          conv2d=lambda: use(layers.Conv2d(P, Q, 3, padding=1, stride=2), image(4, 3)),
          conv2d_grouped=lambda: use(layers.Conv2d(P, 4, 3, groups=2), image(4, 3)),
          conv3d=lambda: use(layers.Conv3d(P, Q, 2), image(2, 3, 2)),
          separable=lambda: use(layers.SeparableConv2d(P, Q, 3, padding=1), image(4, 3)),
          pool1d=lambda: use(layers.AvgPool1d(2), image(M)), pool2d=lambda: use(layers.AvgPool2d(2), image(4, 3)),
          pool_padded=lambda: use(layers.AvgPool2d(3, 2, 1), image(4, 3)),
          transposed=lambda: use(layers.ConvTranspose2d(P, Q, 3, 2, 1, 1), image(2, 3)),
          transposed_grouped=lambda: use(layers.ConvTranspose1d(P, 4, 2, groups=2), image(3)),
          pool3d=lambda: use(layers.AvgPool3d(2), image(2, 3, 2)),
          convlstm=lambda: use(layers.ConvLSTMCell(Cuboid(3), P, 2, peephole=True), xs()),
          dcrnn=lambda: use(layers.ConvGRUCell(Powers(1, "forward") | Powers(1, "backward"), P, 2), x(),
                            structure=graph()),
          gru_after=lambda: use(layers.ConvGRUCell(Shifts([-1, 0]), P, 2, reset="after"), xs(),
                                library.random(2, M, 2)))


def _expressions() -> None:
    dot = mechanisms.DotProduct(heads=2, dim=3)
    biased = dot.scaled() + RelativeBias(2)
    named(masked_by_graph=lambda: use(Conv(dot.masked(keep=graph()).softmax(), P, Q), x()),
          biased_window=lambda: use(Conv(biased.masked(keep=Window(2)).softmax(), P, Q, weight=LowRank(3)), xs()),
          window=lambda: use(Conv(dot.masked(keep=Window(2)).softmax(), P, Q), xs()),
          swin=lambda: use(Conv((dot.scaled() + RelativeBias((1, 2))).masked(keep=Window(1)).softmax(), P, Q),
                           xs(), structure=Grid((2, 3))),
          alibi=lambda: use(Conv((dot.scaled() + ALiBi()).masked(keep=Causal()).softmax(), P, 4,
                                 weight=HeadBlocks()), xs()),
          shaw_of_one=lambda: use(Conv(dot.scaled().softmax(), P, Q, weight=LowRank(3),
                                       relative_value=layers.RelativeValue(0)), xs()),
          projected_products=lambda: use(Conv(mechanisms.DotProduct(2, on="projected").scaled().softmax() | Shifts([1]),
                                              P, Q), xs()),
          shaw=lambda: use(Conv(dot.scaled().softmax(), P, Q, weight=LowRank(3),
                                relative_value=layers.RelativeValue(2)), xs()),
          mixed=lambda: use(Conv(dot.scaled().softmax() | Shifts([-1, 1]), P, Q, weight=[LowRank(3), Shared()]), xs()),
          on_graph_or_not=lambda: use(Conv(dot.masked(keep=STRUCTURE_IF_GIVEN).softmax(), P, Q), x(),
                                      structure=graph()),
          factors=lambda: use(Conv((dot * torch.randn(2, dtype=F64)).softmax() * nn.Parameter(torch.randn(2)), P, Q,
                                   weight=Separable(2)), xs()),
          summed_adjacency=lambda: use(Conv(Adjacency() + Adjacency("row") * 0.5, P, 4, weight=Grouped(2)), x(),
                                       structure=graph()),
          lightweight=lambda: use(Conv(Shifts([-1, 0, 1]), P, P, weight=Depthwise(heads=2, normalize="softmax")),
                                  library.random(2, 6, P)),
          depthwise=lambda: use(Conv(Cuboid((3, 3)), P, P, weight=Depthwise()), library.random(2, 6, P),
                                structure=Grid((2, 3))),
          users=lambda: use(Conv(Weighed(5), P, Q), x(), structure=graph()),
          users_options=lambda: use(Conv(Graded([1, 0, -2], {"first": 0.5, "second": 3.0}), P, Q), xs()),
          users_masked=lambda: use(Conv(Weighed(5) | dot.masked(keep=STRUCTURE).softmax(), P, Q), x(),
                                   structure=graph()))
    named(mapped_by_a_module=lambda: use(Conv((dot.scaled().map(nn.PReLU(init=0.4)) + ALiBi()).softmax(), P, Q), xs()))
    for name, activation in {"partial": partial(F.leaky_relu, negative_slope=0.3), "module": nn.LeakyReLU(0.3),
                             "trained": nn.PReLU(init=0.4), "silu": F.silu}.items():
        named(**{f"additive_{name}": lambda activation=activation: use(
            Conv(mechanisms.Additive(3, 2, activation=activation).softmax(), P, Q), xs())})
    named(pairs=lambda: use(Conv(mechanisms.Pair(nn.Sequential(nn.Linear(2 * P, 3), nn.ReLU(), nn.Linear(3, 2)), 2)
                                 .softmax(), P, Q), x()))


def _several_structures() -> None:
    dot = mechanisms.DotProduct(heads=2, dim=3).scaled()
    line = Shifts([-1, 1], structure="line")
    named(named_heads=lambda: use(Conv(dot.softmax() | line | Adjacency(structure="bonds"), P, Q), x(),
                                  structure={"line": Grid(M), "bonds": graph(weighted=True)}),
          named_mask=lambda: use(Conv(dot.masked(keep="bonds").softmax() | line, P, Q), xs(),
                                 structure={"line": Grid(M), "bonds": graph()}),
          named_bias=lambda: use(Conv(((dot + RelativeBias((2,))).masked(keep=Window((3,))).on("line")
                                       .masked(keep="bonds")).softmax(), P, Q), x(),
                                 structure={"line": Grid(M), "bonds": graph()}),
          named_relations=lambda: use(
              Conv(Chebyshev(2, structure="bonds") | Relations(2, structure="facts"), P, Q), library.random(5, P),
              structure={"facts": library.knowledge(), "bonds": graph(inputs=5, outputs=5, edges=9)}),
          named_grid_then_graph=lambda: use(
              Conv(Pool(2, 1, structure="line") @ Adjacency(structure="coarse"), P, Q), xs(),
              structure={"line": Grid(M), "coarse": graph(inputs=5, outputs=5, edges=9)}),
          named_users=lambda: use(Conv(Weighed(5).on("bonds") + Adjacency(structure="roads"), P, Q), x(),
                                  structure={"bonds": graph(), "roads": graph(edges=7)}))


def _blocks() -> None:
    block, sizes = layers.GraphNetwork, (P, 2, 3)
    widths: dict[str, Any] = {"edge": (4, 3), "node": (5, Q), "globals": 2}

    def attributes(edges: int = 13) -> tuple[Tensor, Graph, Tensor, Tensor]:
        return x(), graph(edges=edges), library.random(edges, 2), library.random(1, 3)

    named(graph_network=lambda: use(block(*sizes, **widths), *attributes()),
          graph_network_of_means=lambda: use(block(*sizes, **widths, aggregate="mean", readout="mean"), *attributes()),
          graph_network_of_neighbors=lambda: use(
              block(P, node=Q, neighbors=mechanisms.DotProduct(1, 3).masked(keep=STRUCTURE).softmax()), x(),
              graph()),
          graph_network_non_local=lambda: use(block.non_local(P, node=Q), x(), graph()),
          linear=lambda: use(layers.Linear(P, Q), xs()),
          linear_relu=lambda: use(layers.Linear(P, Q, activation="relu"), xs()),
          graph_pool_sum=lambda: use(layers.GraphPool(P), x(), Samples([4, 2])),
          graph_pool=lambda: use(layers.GraphPool(P, "mean"), x(), Samples([4, 2])),
          graph_pool_softmax=lambda: use(layers.GraphPool(P, "softmax"), x(), Samples([4, 2])),
          graph_pool_set2set=lambda: use(layers.GraphPool(P, "set2set"), x(), Samples([4, 2])))


def _several_inputs() -> None:
    dot = mechanisms.DotProduct(heads=2, dim=3).scaled()
    ends = (Incidence("sender") | Incidence("receiver")).of("nodes")
    of_edges = Incidence("receiver").transpose().of("edges")
    named(edge_update=lambda: use(Conv(ends | Identity().of("edges"), {"nodes": P, "edges": 2}, Q),
                                  {"nodes": x(), "edges": library.random(13, 2)}, structure=graph()),
          node_update=lambda: use(Conv(dot.masked(keep=STRUCTURE).softmax().of("nodes") | of_edges,
                                       {"nodes": P, "edges": 2}, Q, weight=[LowRank(3), Full()]),
                                  {"nodes": xs(), "edges": library.random(2, 13, 2)}, structure=graph()),
          edges_to_given_outputs=lambda: use(
              Conv(dot.softmax().on("all").of("nodes")
                   | mechanisms.Additive(3).masked(keep="near").softmax().of("others"),
                   {"nodes": P, "others": 2}, Q, other_channels=3),
              {"nodes": x(), "others": library.random(5, 2)}, z=library.random(4, 3),
              structure={"all": graph(outputs=4, edges=5), "near": graph(inputs=5, outputs=4, edges=9)}))


def over_specimens() -> dict[str, Make]:
    """A `Conv` over each specimen."""
    return {f"over_{name.replace(' ', '_')}": seeded(partial(layer_over, specimen))
            for name, specimen in SPECIMENS.items()}


def uses() -> dict[str, Make]:
    """Every named layer, and a `Conv` over every specimen."""
    return {**LAYERS, **over_specimens()}


def drawn_uses(step: int) -> dict[str, Make]:
    """Every named layer, and a `Conv` over one of so many specimens."""
    made = uses()
    return {name: made[name] for name in [*LAYERS, *drawn(over_specimens(), step)]}


def planned() -> dict[str, Make]:
    """Those of `uses` that a plan computes: all but linear layers, which have no structure to choose a path by."""
    return {name: make for name, make in uses().items() if not name.startswith("linear")}


def in_float32(make: Make) -> Use:
    """The same layer and arguments in float32, for which most native kernels are."""
    made = make()
    return dataclasses.replace(made, layer=made.layer.to(torch.float32)).mapped(
        lambda t: t.detach().to(torch.float32).requires_grad_() if t.is_floating_point() else t)


def _compat() -> None:
    edges, kinds = torch.tensor([[0, 1, 2, 2, 3, 1, 5], [1, 0, 3, 2, 3, 4, 0]]), torch.arange(7) % 2
    types = [("a", "to", "b"), ("b", "to", "a")]
    makers: dict[str, Make] = {
        "torch.MultiheadAttention": lambda: use(torch_layers.MultiheadAttention(P, 2, batch_first=True), *[xs()] * 3),
        "torch.TransformerEncoderLayer": lambda: use(
            torch_layers.TransformerEncoderLayer(P, 2, 5, dropout=0.0, batch_first=True), xs()),
        "torch.TransformerDecoderLayer": lambda: use(
            torch_layers.TransformerDecoderLayer(P, 2, 5, dropout=0.0, batch_first=True), xs(), xs()),
        "torch.Conv2d": lambda: use(torch_layers.Conv2d(P, Q, 3, padding=1), image(4, 3)),
        "pyg.GCNConv": lambda: use(pyg.GCNConv(P, Q), x(), edges),
        "pyg.GATConv": lambda: use(pyg.GATConv(P, Q, 2), x(), edges),
        "pyg.SAGEConv": lambda: use(pyg.SAGEConv(P, Q), x(), edges),
        "pyg.TransformerConv": lambda: use(pyg.TransformerConv(P, Q, 2), x(), edges),
        "pyg.RGCNConv": lambda: use(pyg.RGCNConv(P, Q, 2), x(), edges, kinds),
        "pyg.HGTConv": lambda: use(pyg.HGTConv(P, 4, (["a", "b"], types), 2), {"a": x(), "b": library.random(M, P)},
                                   dict.fromkeys(types, edges))}
    COMPAT.update({f"compat.{name}".replace(".", "_"): seeded(make) for name, make in makers.items()})


for _register in (_graphs, _attention, _grids, _expressions, _several_structures, _several_inputs, _blocks, _compat):
    _register()
