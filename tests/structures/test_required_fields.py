"""Required fields of each public structure: `None`, scalars and tensors of another dtype are refused by name."""

import inspect

import pytest
import torch

from structconv import structures
from structconv.errors import StructconvError
from structconv.structures import Graph, Grid, Support

EDGES, KEEP = torch.tensor([[0, 1], [1, 2]]), torch.ones(3, 3, dtype=torch.bool)
#: Right arguments of each public structure, and of the functions that make one.
REQUIRED = {
    "Blocks": {"size": 2}, "Causal": {}, "DenseMask": {"keep": KEEP}, "EdgeSupport": {"graph": Graph(EDGES)},
    "Global": {"entries": (0, 1)}, "Graph": {"edge_index": EDGES}, "Grid": {"shape": (2, 3)},
    "GridBatch": {"grids": (Grid(2), Grid(3))},
    "KnowledgeGraph": {"triples": torch.tensor([[0, 0, 1]]), "num_entities": 2, "relations": ("a",)},
    "Padding": {"keep": KEEP[0]}, "Samples": {"sizes": [2, 3]}, "StructureBatch": {"parts": (Grid(2),)},
    "Window": {"radius": 1}, "Graph.complete": {"num_nodes": 3}, "batch": {"structures": [Grid(2), Grid(3)]},
    "KnowledgeGraph.from_labels": {"triples": [("a", "r", "b")]}}
#: What no required field may be.
WRONG = {"None": None, "a scalar": torch.tensor(1.0), "floating numbers": torch.ones(2, 3), "a text": "abc",
         "complex numbers": torch.ones(2, 3, dtype=torch.complex64)}
#: A text is a sequence of names of one letter; layers make an EdgeSupport in each call, so that it checks nothing.
CASES = [(name, field, wrong) for name, arguments in REQUIRED.items() for field in arguments for wrong in WRONG
         if (field, wrong) != ("relations", "a text") and name != "EdgeSupport"]


def constructor(name):
    first, *rest = name.split(".")
    return getattr(getattr(structures, first), *rest) if rest else getattr(structures, first)


@pytest.mark.parametrize(("name", "field", "wrong"), CASES)
def test_a_required_field_of_another_type_is_refused_by_name(name, field, wrong):
    with pytest.raises(StructconvError, match=rf"{name.split('.')[0]}\b.*{field}"):
        constructor(name)(**{**REQUIRED[name], field: WRONG[wrong]})


@pytest.mark.parametrize("options", [{}, {"num_nodes": 3}, {"num_inputs": 3, "num_outputs": 4}])
def test_a_graph_of_known_size_needs_edges_too(options):
    with pytest.raises(StructconvError, match=r"Graph: edge_index must be a tensor of shape \(2, E\); got NoneType"):
        Graph(None, **options)


def test_a_window_without_an_axis_of_centers_is_refused():
    with pytest.raises(StructconvError, match=r"Window: center must have shape \(\.\.\., N\)"):
        structures.Window(1, center=torch.tensor(1.0))


def test_each_public_structure_and_each_required_field_is_among_them():
    classes = {name: cls for name in structures.__all__ if inspect.isclass(cls := getattr(structures, name))}
    assert set(classes) - {Support.__name__} <= set(REQUIRED)
    for name, cls in classes.items():
        needed = {parameter.name for parameter in inspect.signature(cls).parameters.values()
                  if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD}
        assert needed <= set(REQUIRED.get(name, ())), f"{name}: {needed}"
        if name in REQUIRED:
            cls(**REQUIRED[name])
