"""What may change between two calls of a layer: each change gives what a fresh layer gives, or an error that says why.

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
from tests.support.mutations.register import MUTATIONS, Mutation, mutation

__all__ = ["FILES", "MUTATIONS", "Mutation", "mutation"]

#: Where the changes are.
FILES = (copies, layouts, modes, modules, options, parameters, precision, states, structures, transforms)
