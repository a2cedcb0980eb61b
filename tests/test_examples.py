"""Public names have an example in their docstring, which runs."""

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest
import torch

import structconv
from structconv import bases, compat, data, mechanisms, nn, ops, structures, weights
from structconv.compat import pyg, transformers
from structconv.compat import torch as compat_torch

HOMES = (structconv, bases, compat, compat_torch, data, mechanisms, nn, ops, pyg, structures, transformers, weights)
REFERENCE = "\n".join(page.read_text(encoding="utf-8")
                      for page in (Path(__file__).parents[1] / "docs" / "reference").glob("*.md"))


def public() -> Iterator[tuple[str, Any]]:
    """The names of the packages, and those that the reference describes; of the systems those that it lists."""
    modules = {home.__name__: home for home in HOMES}
    described = re.findall(r"automodule:: (structconv\.[\w.]+)$", REFERENCE, re.MULTILINE)
    modules |= {name: import_module(name) for name in described}
    for home, module in modules.items():
        yield from ((f"{home}.{name}", getattr(module, name)) for name in module.__all__)
    named = re.findall(r"auto(?:class|function):: (structconv\.[\w.]+)\.(\w+)$", REFERENCE, re.MULTILINE)
    systems = re.findall(r"automodule:: (structconv_systems\.[\w.]+)\n +:members:(.*)$", REFERENCE, re.MULTILINE)
    for home, members in systems:
        named += [(home, name) for name in re.findall(r"\w+", members) or import_module(home).__all__]
    yield from ((f"{home}.{name}", getattr(import_module(home), name)) for home, name in named)


NAMES = dict(public())
OBJECTS = dict({id(held): (name, held) for name, held in NAMES.items()}.values())
METHODS = {f"{name}.{part}": getattr(held, part) for name, held in OBJECTS.items() if inspect.isclass(held)
           for part in vars(held) if inspect.isroutine(getattr(held, part)) and not part.startswith("_")}
EXAMPLES = {name: held for name, held in {**OBJECTS, **METHODS}.items()
            if ">>>" in (held.__doc__ or "") and getattr(held, "__module__", "").startswith("structconv")}
#: Values and types of annotations, which have no docstring of their own.
NO_EXAMPLE = {"STRUCTURE", "STRUCTURE_IF_GIVEN", "NAME", "AnyStructure", "Structure"}


def test_public_names_have_an_example() -> None:
    assert not [name for name, held in NAMES.items()
                if ">>>" not in (held.__doc__ or "") and name.rpartition(".")[2] not in NO_EXAMPLE]


def test_arguments_of_docstrings_are_parameters_or_fields() -> None:
    """In all modules: the names before the colons of "Args:", unless the last parameter takes any name."""
    wrong = []
    for module in walk_packages(structconv.__path__, "structconv."):
        if ".core-" in module.name:                                     # the native binary
            continue
        for held in vars(import_module(module.name)).values():
            if not (inspect.isclass(held) or inspect.isfunction(held)) or held.__module__ != module.name:
                continue
            listed = re.search(r"(?m)^Args:\n((?: {4}.*\n?|\n)+)", inspect.cleandoc(held.__doc__ or ""))
            named = re.findall(r"(?m)^ {4}(\w+(?:, \w+)*): ", listed[1]) if listed else ()
            parameters = inspect.signature(held).parameters if named else {}
            fields = {name for kind in held.__mro__ for name in inspect.get_annotations(kind)} \
                if inspect.isclass(held) else set()
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                wrong += [f"{held.__qualname__}: {name}" for names in named for name in names.split(", ")
                          if name not in {*parameters, *fields}]
    assert not wrong


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {"torch": torch}, name, None, None)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)


#: The arguments of the layers, and what a docstring calls their sizes.
EDGES = torch.tensor([[0, 1, 2, 3, 1], [1, 2, 0, 1, 3]])
GRAPH = structures.Graph(EDGES, num_nodes=4, edge_attr=torch.arange(10.0).view(5, 2) / 10)
FACTS = structures.KnowledgeGraph(torch.stack([EDGES[0], torch.tensor([0, 0, 1, 1, 1]), EDGES[1]], -1), 4, ("a", "b"))
WINDOW = {"kernel_size": (3, 2), "stride": (2, 1), "dilation": (1, 2), "padding": (1, 0)}
VOLUME = {"kernel_size": (3, 2, 1), "stride": (2, 1, 1), "dilation": (1, 2, 1), "padding": (1, 0, 0)}
LINE = {"kernel_size": (3,), "stride": (2,), "dilation": (2,), "padding": (1,)}
SLOPE = {"heads": 2, "negative_slope": 0.3}
#: Of each layer with an "Equals" line: the expression, the layer, the sizes in the expression, its structure.
EQUAL = {
    "GCNConv": ("Conv(Adjacency(self_loops=True), P, Q)", {}, GRAPH),
    "ChebConv": ("Conv(Chebyshev(K - 1), P, Q)", {"K": 3}, GRAPH),
    "DiffusionConv": ('Conv(Powers(K - 1, walk="forward") | Powers(K - 1, walk="backward"), P, Q)', {"K": 3}, GRAPH),
    "EdgeConditionedConv": ("Conv(EdgeNetwork(edge_channels, hidden) | Identity(), P, Q, weight=[Full(), Full()])",
                            {"edge_channels": 2, "hidden": 5}, GRAPH),
    "RelationalConv": ("Conv(Relations(num_relations) | Identity(), P, Q, weight=[Full(), Full()])",
                       {"num_relations": 2}, FACTS),
    "GATConv": ('Conv(BiAffine(heads, bilinear=False, on="projected").leaky_relu(negative_slope).masked(keep=STRUCTURE)'
                ".softmax(), P, heads * Q, weight=HeadBlocks())", SLOPE, GRAPH),
    "GATv2Conv": ('Conv(Additive(heads=heads, activation=LeakyReLU(negative_slope), on="projected")'
                  ".masked(keep=STRUCTURE).softmax(), P, heads * Q, weight=HeadBlocks())", SLOPE, GRAPH),
    "Linear": ("Conv(Identity(), P, Q)", {}, None),
    "MultiheadAttention": ("Conv(DotProduct(heads, D).scaled().softmax(), P, P, weight=LowRank(D))", {}, None),
    "NonLocalBlock": ("Conv(DotProduct(1, inner).softmax(), C, C, weight=LowRank(inner))", {"inner": 2}, None),
    **{f"Conv{len(sizes['stride'])}d": ("Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q)", sizes, None)
       for sizes in (LINE, WINDOW, VOLUME)},
    "SeparableConv2d": ("Conv(Cuboid(kernel_size, stride, dilation, padding), P, Q, weight=DepthwiseSeparable())",
                        WINDOW, None),
    **{f"AvgPool{axes}d": ("Conv(Pool(kernel_size, stride), C, C, weight=Eye(), bias=False)",
                           {"kernel_size": (2, 3, 2)[:axes], "stride": (2, 1, 1)[:axes]}, None) for axes in (1, 2, 3)},
    **{f"ConvTranspose{len(sizes['stride'])}d":
       ("Conv(Cuboid(kernel_size, stride, dilation, padding).transpose(), P, Q)", sizes, None)
       for sizes in (LINE, WINDOW, VOLUME)},
}


#: Layers that no single expression is: what is around a layer, several layers, or a function.
NOT_ONE = {"Attributes", "Cache", "Conv", "ConvGRUCell", "ConvLSTMCell", "GraphNetwork", "GraphPool", "GroupPool",
           "Layer", "OnGrid", "RelativeValue", "StructureBuffer"}
NAMED = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)} - NOT_ONE


def test_named_layers_say_what_they_equal_and_are_drawn() -> None:
    drawn = (Path(__file__).parents[1] / "docs" / "reference" / "pictures.md").read_text(encoding="utf-8")
    equal = re.compile(r"^    Equals\b.*`Conv\(", re.MULTILINE)
    assert not {name for name in NAMED if not equal.search(getattr(nn, name).__doc__)}
    assert not {name for name in NAMED if f"`{name}`" not in drawn}


def equal_layer(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The named layer, and the expression with its parameters."""
    expression, sizes, _ = EQUAL[name]
    names = {each: getattr(home, each) for home in (structconv, mechanisms, weights) for each in home.__all__}
    names |= {"LeakyReLU": torch.nn.LeakyReLU, "P": 6, "Q": 3, "C": 6, "D": 3, "heads": 2, **sizes}
    other, make = eval(expression, names), getattr(nn, name)            # of the table, not of the docstring
    if name == "MultiheadAttention":
        layer = make(6, 2, bias=False)                                  # biases are said to be added
        other.register_parameter("bias", None)
    elif name == "NonLocalBlock":
        layer = make(6, **sizes, zero_init=False)
    else:
        layer = make(**sizes) if name.startswith("AvgPool") else make(6, 3, **sizes)
    state = {key.removeprefix("conv."): tensor for key, tensor in layer.state_dict().items()}
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):  # torch's weight (Q, P, ...)
        state["weight.theta"] = state.pop("weight").reshape(3, 6, -1).permute(2, 1, 0)
    other.load_state_dict(state)
    return layer, other


def test_the_table_has_every_layer_and_what_its_docstring_says() -> None:
    assert EQUAL.keys() == NAMED
    said = {name: " ".join(getattr(nn, name).__doc__.split()).replace(") .", ").") for name in NAMED}
    assert not {name for name, (expression, *_) in EQUAL.items() if f"`{expression}`" not in said[name]}


@pytest.mark.parametrize("name", EQUAL)
def test_a_layer_equals_the_expression_that_its_docstring_names(name: str) -> None:
    layer, other = equal_layer(name)
    structure = EQUAL[name][2]
    if structure is not None:
        x = torch.randn(4, 6)
        looped = structure.with_self_loops() if name.startswith("GAT") else structure
        torch.testing.assert_close(layer(x, structure), other(x, looped), atol=1e-5, rtol=0)
    elif name in ("Linear", "MultiheadAttention"):
        x = torch.randn(2, 5, 6)
        torch.testing.assert_close(layer(x), other(x), atol=1e-5, rtol=0)
    else:
        axes = next((int(digit) for digit in name if digit.isdigit()), 2)
        image = torch.randn(2, 6, *(7, 6, 5)[:axes])
        y = layer(image)
        grid = structures.Grid(tuple(y.shape[2:] if "Transpose" in name else image.shape[2:]))
        x = image.flatten(2).mT
        expected = other(x, structure=grid).mT.reshape(y.shape)
        torch.testing.assert_close(y, image + expected if name == "NonLocalBlock" else expected, atol=1e-5, rtol=0)
