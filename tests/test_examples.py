"""Public names have an example in their docstring, which runs."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import structconv
from structconv import bases, data, mechanisms, nn, ops, structures, weights

HOMES = (structconv, bases, data, mechanisms, nn, ops, structures, weights)
NAMES = {f"{home.__name__}.{name}": getattr(home, name) for home in HOMES for name in home.__all__}
EXAMPLES = {name: held for name, held in NAMES.items() if ">>>" in (held.__doc__ or "")}
#: Values and types of annotations, which have no docstring of their own.
NO_EXAMPLE = {"STRUCTURE", "STRUCTURE_IF_GIVEN", "AnyStructure", "Structure"}


def test_public_names_have_an_example() -> None:
    assert not [name for name in NAMES.keys() - EXAMPLES.keys() if name.rpartition(".")[2] not in NO_EXAMPLE]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {"torch": torch}, name, None, None)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)


#: Layers with an "Equals" line, the sizes in it, and a structure.
EDGES = torch.tensor([[0, 1, 2, 3, 1], [1, 2, 0, 1, 3]])
GRAPH = structures.Graph(EDGES, num_nodes=4, edge_attr=torch.ones(5, 2))
FACTS = structures.KnowledgeGraph(torch.stack([EDGES[0], torch.tensor([0, 0, 1, 1, 1]), EDGES[1]], -1), 4, ("a", "b"))
LAYERS = [(nn.GCNConv, {}, GRAPH), (nn.ChebConv, {"K": 3}, GRAPH), (nn.DiffusionConv, {"K": 3}, GRAPH),
          (nn.EdgeConditionedConv, {"edge_channels": 2, "hidden": 5}, GRAPH),
          (nn.RelationalConv, {"num_relations": 2}, FACTS)]


#: Layers that no single expression is: what is around a layer, several layers, or a function.
NOT_ONE = {"Attributes", "Cache", "Conv", "ConvGRUCell", "ConvLSTMCell", "GraphNetwork", "GraphPool", "GroupPool",
           "Layer", "OnGrid", "RelativeValue", "StructureBuffer"}
NAMED = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)} - NOT_ONE


def test_named_layers_say_what_they_equal_and_are_drawn() -> None:
    drawn = (Path(__file__).parents[1] / "docs" / "reference" / "pictures.md").read_text(encoding="utf-8")
    equal = re.compile(r"^    Equals\b.*`Conv\(", re.MULTILINE)
    assert not {name for name in NAMED if not equal.search(getattr(nn, name).__doc__)}
    assert not {name for name in NAMED if f"`{name}`" not in drawn}


@pytest.mark.parametrize("kind, sizes, structure", LAYERS, ids=[kind.__name__ for kind, _, _ in LAYERS])
def test_a_layer_equals_the_expression_that_its_docstring_names(kind, sizes, structure) -> None:
    (expression,) = re.findall(r"Equals `(Conv\(.+\))`", kind.__doc__)
    names = {name: getattr(home, name) for home in (structconv, mechanisms, weights) for name in home.__all__}
    layer, x = kind(6, 3, **sizes), torch.randn(4, 6)
    other = eval(expression, names | {"P": 6, "Q": 3, **sizes})
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, structure), layer(x, structure))
