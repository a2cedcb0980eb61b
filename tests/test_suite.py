"""The generic suite over every basis and mechanism of the package."""

import inspect

import pytest
import torch

from structconv import Adjacency, Basis, Graph, Mechanism
from structconv.bases.pairwise import nodes
from structconv.nn.expressed import Expressed
from structconv.testing import CHECKS, Setup, suite
from structconv.testing.programs import larger
from tests.support.drawn import EVERY, part
from tests.support.layers import LAYERS
from tests.support.library import SPECIMENS

#: Laws that tests/test_batches.py and tests/test_decoding.py hold over the same specimens, refusals named.
OF_LAYERS = {"samples", "cache", "output_positions"}
#: One of so many specimens is put to each of these checks; with STRUCTCONV_EVERY_TEST=1 every one to all.
STEPS = {"kernels": 9, "compile": 32, "export": 24, "sizes": 5, "blocks": 4, "dtypes": 4, "noncontiguous": 4,
         "copies": 4, "paths": 3, "gradcheck": 3, "batching": 2, "adjoint": 2, "absent": 2,
         "permutation": 2}


@pytest.mark.parametrize(("number", "name"), [*enumerate(SPECIMENS)])
def test_specimen(number, name):
    """Each check begins at another specimen, so that those that one leaves out are put to others."""
    for _, check in suite(SPECIMENS[name]):
        step = 1 if EVERY else STEPS.get(check.name, 1)
        if check.name not in OF_LAYERS and (number + [*CHECKS].index(check.name)) % step == 0:
            with part(check.name):
                check()


def _subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def test_every_basis_and_mechanism_is_in_some_specimen_or_layer():
    subjects = [specimen.subject() for specimen in SPECIMENS.values()]
    used = {type(module) for subject in subjects if isinstance(subject, Setup)
            for module in subject.mechanism.modules()}
    layers = [module for make in LAYERS.values() for module in make().layer.modules()]
    used |= {type(part) for module in layers for part in (
        module.mechanism.modules() if isinstance(module, Expressed) else [module])}
    used |= {type(node) for specimen in SPECIMENS.values() for node in nodes(specimen.basis())}
    places = ("structconv.bases.", "structconv.mechanisms.")
    there = {cls for base in (Basis, Mechanism) for cls in _subclasses(base)
             if cls.__module__.startswith(places) and not inspect.isabstract(cls) and not cls.__name__.startswith("_")}
    missing = sorted(cls.__name__ for cls in there - used if not any(issubclass(other, cls) for other in there - {cls}))
    assert not missing, f"no specimen or layer has {', '.join(missing)}"


def test_programs_are_checked_on_a_batch_of_two_structures_that_differ():
    """A leak between samples of one structure may not show: a read of the other sample's row gives the same number."""
    graph, x = Graph(torch.tensor([[0, 0, 1], [1, 2, 2]]), num_nodes=3), torch.randn(3, 4)
    one, pair, _ = larger(Setup(Adjacency(), x, structure=graph))
    assert one.structure is graph
    assert pair.structure.edge_index[:, 3:].sub(3).T.tolist() == [[2, 1], [2, 0], [1, 0]]
