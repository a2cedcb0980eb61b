"""Several structures in one call: each part of an expression reads the one whose name it has."""

import inspect

import pytest
import torch

from structconv import STRUCTURE, Adjacency, Chebyshev, ConfigError, Cuboid, ShapeError, StructureError, mechanisms
from structconv.mechanisms import (
    DotProduct,
    GaussianWindow,
    Identity,
    Incidence,
    Mechanism,
    Pool,
    Powers,
    Relations,
    Shifts,
    Uniform,
)
from structconv.nn import Conv, Conv2d, ConvGRUCell, OnGrid, compose
from structconv.structures import Causal, Graph, Grid, KnowledgeGraph, Padding, Samples, Window, batch
from structconv.testing.checks import same

F64, M, P, Q = torch.float64, 6, 4, 3
DOT = DotProduct(heads=2, dim=3).scaled()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def ring(size: int) -> Graph:
    m = torch.arange(size)
    return Graph(torch.stack([m, (m + 1) % size]), num_nodes=size, edge_weight=0.5 + numbers(size).abs())


def star(size: int) -> Graph:
    return Graph(torch.stack([torch.arange(1, size), torch.zeros(size - 1, dtype=torch.int64)]), num_nodes=size)


def facts(size: int) -> KnowledgeGraph:
    return KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2], [2, 0, 0]]), size, ("played", "genre"))


def conv(mechanism: Mechanism, **options) -> Conv:
    torch.manual_seed(0)
    return Conv(mechanism, P, Q, **options).to(F64)


#: An expression with names, what it is of two bases of one structure each, and the structures of a sample of a size.
CASES = {
    "heads": (DOT.softmax() | Shifts([-1, 1], structure="line") | Adjacency(structure="bonds"),
              [(DOT.softmax(), None), (Shifts([-1, 1]), "line"), (Adjacency(), "bonds")],
              lambda size: {"line": Grid(size), "bonds": ring(size)}),
    "a mask beside shifts": (DOT.masked(keep="bonds").softmax() | Shifts([1], structure="line"),
                             [(DOT.masked(keep=STRUCTURE).softmax(), "bonds"), (Shifts([1]), "line")],
                             lambda size: {"line": Grid(size, periodic=True), "bonds": ring(size)}),
    "polynomials and relations": (Chebyshev(2, structure="bonds") | Relations(2, structure="facts"),
                                  [(Chebyshev(2), "bonds"), (Relations(2), "facts")],
                                  lambda size: {"bonds": star(size), "facts": facts(size)}),
    "a window on a grid": (DOT.masked(keep=Window((3, 3))).softmax().on("pixels") | Adjacency(structure="bonds"),
                           [(DOT.masked(keep=Window((3, 3))).softmax(), "pixels"), (Adjacency(), "bonds")],
                           lambda size: {"pixels": Grid((2, size // 2)), "bonds": ring(size)}),
    "edges and causes": (Incidence("sender", structure="bonds") | Incidence("receiver", structure="bonds")
                         | Shifts([0, 1], structure="line"),
                         [(Incidence("sender"), "bonds"), (Incidence("receiver"), "bonds"), (Shifts([0, 1]), "line")],
                         lambda size: {"line": Grid(size), "bonds": ring(size)}),
    "positions": (Uniform(1).normalize("sum") | GaussianWindow(2.0) | Adjacency(structure="a") | Powers(1).on("b"),
                  [(Uniform(1).normalize("sum"), None), (GaussianWindow(2.0), None), (Adjacency(), "a"),
                   (Powers(1), "b")], lambda size: {"a": ring(size), "b": star(size)}),
}


def joined(mechanism):
    """What `|` joins."""
    if getattr(mechanism, "join", None) != "concat":
        return [mechanism]
    return [part for operand in mechanism.operands for part in joined(operand)]


@pytest.mark.parametrize("case", CASES)
def test_each_part_reads_its_own_structure(case):
    expression, parts, structures = CASES[case]
    x, given, layer = numbers(M, P), structures(M), conv(expression)
    held = joined(layer.mechanism)
    for (single, name), part in zip(parts, held, strict=True):
        twin = single.bound(P).to(F64)
        twin.load_state_dict(part.state_dict())
        expected = twin.basis(x, structure=None if name is None else given[name]).dense(F64)
        only = {key: given[key] for key in given if key == name}
        same(part.basis(x, structure=only or None).dense(F64), expected, repr(part))
    expected = torch.cat([part.basis(x, structure={k: s for k, s in given.items() if k == name} or None).dense(F64)
                        for part, (_, name) in zip(held, parts, strict=True)])
    same(layer.basis(x, structure=given).dense(F64), expected, "the whole")
    same(layer(x, structure=given), torch.einsum("kmn,mp,kpq->nq", expected, x, layer.weight.theta) + layer.bias, "y")
    assert layer.plan(x, structure=given) is layer.plan(x, structure=dict(reversed(given.items())))


def test_what_a_grid_pools_a_graph_joins():
    layer = conv(Pool(2, structure="line") @ Adjacency("row", structure="coarse"))
    x, coarse = numbers(2, M, P), ring(3)
    expected = conv(Adjacency("row"))(x.unflatten(1, (3, 2)).mean(2), structure=coarse)
    same(layer(x, structure={"line": Grid(M), "coarse": coarse}), expected, "pooled, then joined")
    again = conv(Pool(2, structure="line") @ Shifts([1], structure="line") @ Adjacency("row", structure="coarse"))
    shifted = torch.cat([torch.zeros(2, 1, P, dtype=F64), x.unflatten(1, (3, 2)).mean(2)[:, :-1]], 1)
    same(again(x, structure={"line": Grid(M), "coarse": coarse}), conv(Adjacency("row"))(shifted, structure=coarse),
         "the line behind a pooling is the coarse one")


def test_a_structure_that_is_no_batch_is_that_of_each_sample():
    layer = conv(CASES["heads"][0])
    x, line = numbers(2 * M, P), Grid(M)
    given = {"line": line, "bonds": batch([ring(M), ring(M)])}
    expected = [layer(part, structure={"line": line, "bonds": ring(M)}) for part in x.split(M)]
    same(layer(x, structure=given), torch.cat(expected), "one line for both")
    with pytest.raises(StructureError, match="as many entries in 'line' as in 'bonds'"):
        layer(x, structure={"line": line, "bonds": batch([ring(M + 1), ring(M - 1)])})
    with pytest.raises(StructureError, match=r"as many samples; got \{'line': 3, 'bonds': 2\}"):
        layer(x, structure={"line": batch([Grid(4)] * 3), "bonds": batch([ring(M)] * 2)})


def test_padding_by_name_leaves_inputs_out_beside_a_graph():
    layer = conv(DOT.masked(keep="padding").softmax() | Adjacency(structure="bonds"))
    keep, x, small = torch.arange(M) < 4, numbers(M, P), ring(4)
    bonds = Graph(small.edge_index, num_nodes=M, edge_weight=small.edge_weight)
    y = layer(x, structure={"padding": Padding(keep), "bonds": bonds})
    single = layer(x[:4], structure={"padding": Padding(keep[:4]), "bonds": small})
    same(y[:4], single, "padded")
    x[4:] = torch.nan
    same(layer(x, structure={"padding": Padding(keep), "bonds": bonds})[:4], single, "nothing leaks")
    both = batch([small, ring(2)])
    with_padding = layer(numbers(M, P), structure={"padding": Padding(keep), "bonds": both})
    same(with_padding[:4], layer(numbers(M, P)[:4], structure={"padding": Padding(keep[:4]), "bonds": small}),
         "batched")


def test_a_mask_of_positions_by_name_starts_anew_in_each_sample():
    layer = conv(DOT.masked(keep="order").softmax() | Adjacency(structure="bonds"))
    xs = [numbers(size, P) for size in (3, 5)]
    for mask in (Causal(), Window(1)):
        single = [layer(x, structure={"order": mask, "bonds": ring(len(x))}) for x in xs]
        both = {"order": mask, "bonds": batch([ring(3), ring(5)])}
        same(layer(torch.cat(xs), structure=both), torch.cat(single), repr(mask))


def test_names_that_do_not_fit_are_told():
    layer, x = conv(CASES["heads"][0]), numbers(M, P)
    line, bonds = Grid(M), ring(M)
    for given, text in {
        None: "'line', 'bonds'; got NoneType. Missing: 'line', 'bonds'; left over: none",
        (("line", line),): "got 'line'. Missing: 'bonds'; left over: none",
        (("line", line), ("bonds", bonds), ("more", bonds)): "Missing: none; left over: 'more'",
        (("lines", line), ("bonds", bonds)): "Missing: 'line'; left over: 'lines'",
    }.items():
        with pytest.raises(StructureError, match=text):
            layer(x, structure=given if given is None else dict(given))
    with pytest.raises(StructureError, match=r"got Graph\. Missing"):
        layer(x, structure=bonds)
    with pytest.raises(StructureError, match="'bonds' must be a structure; got Tensor"):
        layer(x, structure={"line": line, "bonds": torch.ones(3)})
    with pytest.raises(ShapeError, match="M=6"):
        layer(x[:5], structure={"line": line, "bonds": bonds})
    with pytest.raises(StructureError, match="Missing"):
        Adjacency(structure="bonds").basis(x, structure=bonds)
    with pytest.raises(StructureError, match="some part of the expression reads"):
        conv(DOT.softmax().on("order") | Adjacency(structure="bonds"))(
            x, structure={"order": Causal(), "bonds": bonds})


def test_without_a_name_the_only_structure_is_read():
    x, bonds, line = numbers(M, P), ring(M), Grid(M)
    plain, partly = conv(Adjacency() | Shifts([1])), conv(Adjacency(structure="bonds") | DOT.masked(keep=STRUCTURE))
    same(conv(Adjacency())(x, structure={"bonds": bonds}), conv(Adjacency())(x, structure=bonds), "one entry")
    same(partly(x, structure={"bonds": bonds}),
         conv(Adjacency() | DOT.masked(keep=STRUCTURE))(x, structure=bonds), "one name")
    with pytest.raises(StructureError, match="expression names, none; got 'bonds', 'line'"):
        plain(x, structure={"bonds": bonds, "line": line})
    named = conv(Adjacency(structure="bonds") | Powers(1, structure="roads") | Shifts([1]))
    with pytest.raises(StructureError, match=r"Shifts: it must name the structure.*got 'bonds', 'roads'"):
        named(x, structure={"bonds": bonds, "roads": bonds})
    masked = conv(Adjacency(structure="bonds") | Powers(1, structure="roads") | DOT.masked(keep=STRUCTURE).softmax())
    with pytest.raises(StructureError, match="must name the structure"):
        masked(x, structure={"bonds": bonds, "roads": bonds})


def test_every_mechanism_of_a_structure_takes_its_name():
    reading = {name for name in mechanisms.__all__ if inspect.isclass(kind := getattr(mechanisms, name))
               and issubclass(kind, Mechanism) and kind.__init__ is not Mechanism.__init__
               and "structure" in inspect.signature(kind).parameters}
    assert reading >= {"Adjacency", "Chebyshev", "Powers", "Relation", "Relations", "Walks", "Incidence", "Shifts",
                       "Cuboid", "Pool", "RelativeBias", "EdgeBias"}
    for text in ("", 3, ring(3)):
        with pytest.raises(ConfigError, match="must be the name of a structure"):
            Adjacency(structure=text)
    assert repr(Adjacency(structure="bonds").masked(keep="roads")) == (
        "Adjacency(structure='bonds').masked(keep='roads')")


def test_on_names_what_has_no_name():
    expression = (Adjacency() | Adjacency(structure="roads") | DOT.masked(keep=STRUCTURE).softmax()).on("bonds")
    x, given = numbers(M, P), {"bonds": ring(M), "roads": star(M)}
    explicit = Adjacency(structure="bonds") | Adjacency(structure="roads") | DOT.masked(keep="bonds").softmax()
    same(conv(expression)(x, structure=given), conv(explicit)(x, structure=given), "on")


def test_layers_over_layers():
    x, given = numbers(M, P), {"line": Grid(M), "bonds": ring(M)}
    first = conv(Shifts([1, 2], "circular", structure="line"), bias=False)
    second = Conv(Shifts([0, 1], "circular"), Q, 2, bias=False).to(F64)
    both = compose(first, Conv(Adjacency(structure="bonds"), Q, 2, bias=False).to(F64))
    assert both(x, structure=given).shape == (M, 2)
    merged = compose(first, Conv(Shifts([0, 1], "circular", structure="line"), Q, 2, bias=False).to(F64))
    assert merged(x, structure={"line": Grid(M)}).shape == (M, 2)
    kept = compose(first, second)
    same(kept(x, structure={"line": Grid(M)}), second(first(x, structure={"line": Grid(M)})), "an unnamed second")
    kept = compose(first, Conv(Identity().on("line"), Q, 2, bias=False).to(F64))
    assert kept(x, structure={"line": Grid(M)}).shape == (M, 2)
    cell = ConvGRUCell(Adjacency(structure="bonds") | Shifts([1], structure="line"), P, Q).to(F64)
    assert cell(x, structure=given).shape == (M, Q)


def test_an_image_has_no_structure_beside_its_grid():
    image = numbers(1, P, 3, 3)
    with pytest.raises(ConfigError, match="no structure beside its grid"):
        Conv(Cuboid((3, 3)), P, Q).to(F64)(image, structure={"pixels": Grid((3, 3))}, axes=2)
    with pytest.raises(StructureError, match="Missing: 'pixels'"):
        OnGrid(Conv(Cuboid((3, 3), structure="pixels"), P, Q), 2).to(F64)(image)
    assert Conv2d(P, Q, 3).to(F64)(image).shape == (1, Q, 1, 1)


def test_nested_tensors_have_named_batches():
    layer = conv(DOT.softmax() | Adjacency(structure="bonds") | Shifts([1], structure="line"))
    xs = [numbers(3, P), numbers(5, P)]
    nested = torch.nested.as_nested_tensor(xs, layout=torch.jagged)
    given = {"bonds": batch([ring(3), ring(5)]), "line": Samples([3, 5])}
    for y, x in zip(layer(nested, structure=given).unbind(), xs, strict=True):
        same(y, layer(x, structure={"bonds": ring(len(x)), "line": Grid(len(x))}), "nested")
    for wrong in ({"bonds": batch([ring(5), ring(3)]), "line": Samples([5, 3])}, {"bonds": ring(8), "line": Grid(8)}):
        with pytest.raises(StructureError, match="batches of the samples of x"):
            layer(nested, structure=wrong)
