"""What may change between two calls of a layer: each change gives what a fresh layer gives, or an error that says why.

    import pytest
    from structconv.testing.use import Use
    from tests.support.mutations import mutations

    @pytest.mark.parametrize("check", mutations(lambda: Use(MyLayer(4).double(), (x, graph))), ids=str)
    def test_my_layer(check):
        check()

A change is a function of a fresh use of the layer, in one of the files here.
"""

from __future__ import annotations

from tests.support.mutations import (
    copies,
    layouts,
    modes,
    modules,
    options,
    parameters,
    precision,
    states,
    structures,
    transforms,
)
from tests.support.mutations.register import MUTATIONS, Check, Mutation, mutation, mutations

__all__ = ["FILES", "MUTATIONS", "Check", "Mutation", "mutation", "mutations"]

#: Where the changes are.
FILES = (copies, layouts, modes, modules, options, parameters, precision, states, structures, transforms)
