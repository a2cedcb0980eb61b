"""Keys of `state_dict` are the names of parameters and persistent buffers, of every layer that there is."""

import pytest

from examples.literature import ROWS
from tests.support.layers import uses
from tests.support.mutations.states import check_names


@pytest.mark.parametrize("made", [{name: (lambda make=make: make().layer) for name, make in uses().items()},
                                  {name: row.build for name, row in ROWS.items()}], ids=["layers", "literature"])
def test_keys_are_names(made):
    for name, make in made.items():
        try:
            check_names(make())
        except AssertionError as error:
            raise AssertionError(name) from error
