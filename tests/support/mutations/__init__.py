"""What may change between two calls of a layer: each change gives what a fresh layer gives, or an error that says why.

A change is a function of a fresh use of the layer, in one of the files here.
"""

from importlib import import_module
from pkgutil import iter_modules

from tests.support.mutations.register import MUTATIONS as MUTATIONS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
