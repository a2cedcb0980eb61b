"""What may change between two calls, over every named layer, in float64 and where numbers count in float32 too, and
over a layer on every specimen. A layer is held to one of so many changes, its neighbors to the others; with
STRUCTCONV_EVERY_TEST=1 (`make test-every`) each is held to all of them."""

import copy
from functools import partial

import pytest
import torch

from structconv.mechanisms import Given
from tests.support.calls import check_now
from tests.support.drawn import EVERY, drawn, part
from tests.support.layers import LAYERS, in_float32, over_specimens
from tests.support.mutations import MUTATIONS

#: Changes that native kernels, most of which are for float32, may see.
NUMBERS = {"a_result_in_place", "a_structure_behind_torch", "a_structure_in_place", "arguments_made_under_inference",
           "autocast_on_and_off", "batches_of_all_sizes", "batches_of_gradients", "first_used_under_jvp",
           "first_used_under_vmap", "first_used_without_gradients", "functional_call_with_others",
           "grad_modes_in_turn", "layouts_of_arguments", "layouts_of_parameters", "masks_in_place", "new_structures",
           "parameters_in_place", "recomputed_on_the_first_call", "requires_grad_toggled", "several_threads",
           "vmap_over_arguments", "vmap_over_parameters", "an_index_out_of_range"}
#: Changes for layers over a fixed basis, whose modules are like those of any other layer.
OF_VALUES = NUMBERS | {"a_layer_goes", "autocast_in_any_order", "between_layers_under_autocast", "deep_copies",
                       "dtypes_there_and_back", "fake_tensors_under_autocast", "forward_derivatives",
                       "meta_tensors_under_autocast", "parameters_parametrized", "second_derivatives"}
#: Of how many changes a named layer is held to one, and a layer over a specimen.
STEPS = (1, 1) if EVERY else (16, 43)


def check_changes(make, number, names, step):
    """One of so many changes, of those that concern a layer; each is made on a fresh one."""
    for name in [name for name in MUTATIONS if name in names][number % step::step]:
        with part(name):
            if MUTATIONS[name].concerns(make()):
                MUTATIONS[name].check(make())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("number", "name"), [*enumerate(LAYERS)])
def test_changes_of_a_layer(number, name):
    check_changes(LAYERS[name], number, MUTATIONS, STEPS[0])
    check_changes(partial(in_float32, LAYERS[name]), number, NUMBERS, STEPS[0])


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("number", "name"), [*enumerate(over_specimens())])
def test_changes_over_a_specimen(number, name):
    make = over_specimens()[name]
    check_changes(make, number, OF_VALUES if isinstance(make().layer.mechanism, Given) else MUTATIONS, STEPS[1])


@pytest.mark.parametrize("name", drawn(["conv2d", "gat", "rgcn", "biased_window"], 4))
def test_a_compiler_makes_one_graph(name):
    use = in_float32(LAYERS[name])
    expected = use()
    torch.compiler.reset()
    y = use.run(torch.compile(use.layer, fullgraph=True, backend="eager"))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", drawn(["users", "gat"], 2))
def test_compiled_submodules_take_part(name):
    """Each part in turn by torch.compile, in its place and in itself."""
    use, count = LAYERS[name](), []
    use()

    def backend(graph, _):
        count.append(graph)
        return graph.forward

    for owner in list(use.layer.modules()):
        for key, child in list(owner._modules.items()):
            if child is None or isinstance(child, torch.nn.ModuleList):
                continue
            torch.compiler.reset()
            owner._modules[key] = torch.compile(child, backend=backend)
            check_now(use, f"{key} compiled")
            owner._modules[key] = child
            check_now(use, f"{key} put back")
    torch.compiler.reset()
    compiled = copy.deepcopy(use.layer)
    compiled.compile(backend=backend)
    count.clear()
    torch.testing.assert_close(use.run(compiled), use(), rtol=1e-9, atol=1e-9)
    assert count
