"""Arguments that have changed places are errors that say so."""

import pytest
import torch

from structconv import ConfigError, Conv, Graph, Grid, ShapeError, StructureError
from structconv import nn as layers
from structconv.mechanisms import STRUCTURE, Adjacency, Context, Cuboid, DotProduct, Identity, Pool
from tests.support.layers import LAYERS

X, Z = torch.randn(6, 4), torch.randn(5, 4)
EDGES = torch.tensor([[0, 1, 5], [1, 2, 4]])
GRAPH, TWO_SIDES = Graph(EDGES, num_nodes=6), Graph(EDGES, num_inputs=6, num_outputs=5)
ATTENTION = DotProduct(2, 3).masked(keep=STRUCTURE).softmax()


@pytest.mark.parametrize(("error", "message", "call"), [
    *[(StructureError, r"structure must be a structure.*; got a tensor of shape \(5, 4\). .*by keyword: .*z=z", call)
      for call in (lambda: Conv(ATTENTION, 4, 3)(X, Z), lambda: Conv(ATTENTION, 4, 3).plan(X, Z),
                   lambda: Conv(ATTENTION, 4, 3).basis(X, Z), lambda: Conv(ATTENTION, 4, 3).calibrate(X, Z),
                   lambda: Conv(Cuboid(3), 4, 3)(X, Z), lambda: Conv(DotProduct().softmax(), 4, 3)(X, Z),
                   lambda: DotProduct(2, 3).bound(4).basis(X, Z))],
    (ConfigError, r"z must be a tensor; got Graph", lambda: Conv(ATTENTION, 4, 3)(X, z=GRAPH)),
    (ConfigError, r"z must be a tensor; got Grid", lambda: Conv(Cuboid(3), 4, 3)(X, z=Grid(6))),
    (ConfigError, r"key_value must be a tensor; got Graph. .*structure=", lambda: layers.MultiheadAttention(4, 2)(
        X, GRAPH)),
    (ConfigError, r"query must be a tensor; got Graph", lambda: layers.MultiheadAttention(4, 2)(GRAPH)),
    (ConfigError, r"z must be a tensor; got Graph", lambda: layers.GATConv(4, 3)(X, GRAPH, z=GRAPH)),
    (ConfigError, r"x must be a tensor; got Graph", lambda: Conv(ATTENTION, 4, 3)(GRAPH, X)),
    (StructureError, r"second argument must be a Graph; got Tensor", lambda: layers.GCNConv(4, 3)(GRAPH, X)),
    (StructureError, r"second argument must be a Graph; got Tensor", lambda: layers.GATConv(4, 3)(X, X)),
    (ConfigError, r"h must be a tensor; got Graph. .*structure=",
     lambda: layers.ConvGRUCell(Adjacency(), 4, 3)(X, GRAPH)),
    (ConfigError, r"pair \(h, c\); got Graph", lambda: layers.ConvLSTMCell(Adjacency(), 4, 3)(X, GRAPH)),
    (ConfigError, r"pair \(h, c\); got Tensor", lambda: layers.ConvLSTMCell(Adjacency(), 4, 3)(X, X)),
    (ShapeError, r"They are swapped", lambda: layers.MultiheadAttention(4, 2, kdim=5)(
        torch.randn(2, 6, 5), torch.randn(2, 7, 4))),
    (ShapeError, r"They are swapped", lambda: Conv(DotProduct(2, 3).softmax(), 4, 3, other_channels=5)(
        torch.randn(6, 5), z=torch.randn(6, 4))),
    (ShapeError, r"They are swapped", lambda: Conv(ATTENTION, 4, 3)(Z, TWO_SIDES, z=X)),
    (ShapeError, r"They are swapped", lambda: layers.GATConv(4, 3, add_self_loops=False)(Z, TWO_SIDES, z=X)),
])
def test_swapped_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_arguments_in_their_places():
    layer = Conv(ATTENTION, 4, 3)
    assert layer(X, TWO_SIDES, z=Z).shape == (5, 3) and layer(X, GRAPH, z=X).shape == (6, 3)
    assert Conv(DotProduct(2, 3).softmax(), 4, 3)(X, z=Z).shape == (5, 3)


@pytest.mark.parametrize("name", LAYERS)
def test_a_structure_in_the_place_of_x(name):
    use = LAYERS[name]()
    with pytest.raises((ConfigError, StructureError), match=r"must be (a|of type).*; got Graph"):
        use.layer(GRAPH, *use.args[1:], **use.kwargs)


@pytest.mark.parametrize("expression, structure", [
    (Cuboid(3), None), (Cuboid(3), Grid(6)), (Identity(), None), (Adjacency(), GRAPH), (Pool(2), None),
    (Cuboid(3) @ Cuboid(3), None), (Context(queries=3).softmax(), None)])
def test_a_z_of_other_entries_than_the_outputs_is_refused_and_not_ignored(expression, structure):
    layer = Conv(expression, 4, 3)
    own = layer(X, structure=structure)
    with pytest.raises(ShapeError, match=rf"z must have N={own.shape[-2]} entries.* M=6 entries of x; got \(5, 4\)"):
        layer(X, structure, z=Z)
    torch.testing.assert_close(layer(X, structure, z=X[:own.shape[-2]]), own)
