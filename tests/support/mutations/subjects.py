"""What the changes share: which parameters, masks and structures a layer has, and others in their place."""

import copy

import torch
from torch import Tensor, nn

from structconv import Graph, KnowledgeGraph, Mechanism
from structconv.mechanisms.masks import Mask
from structconv.testing.use import Use


def owners(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module and the name of every parameter, each once."""
    actual = {id(p): (module, name) for module in layer.modules() for name, p in module._parameters.items()
             if p is not None}
    return list(actual.values())


def trains(use: Use) -> bool:
    return bool(owners(use.layer))


def has_graph(use: Use) -> bool:
    return any(isinstance(s, Graph | KnowledgeGraph) for s in use.structures)


def has_masks(use: Use) -> bool:
    return bool(masks(use.layer))


def of_the_package(layer: nn.Module) -> bool:
    """Whether all mechanisms are the package's, which say what they read, and make their parameters in `bind`."""
    mechanisms = [module for module in layer.modules() if isinstance(module, Mechanism)]
    return all(type(m).__module__.startswith("structconv.mechanisms") for m in mechanisms)


def masks(layer: nn.Module) -> list[Tensor]:
    """The tensors of the masks in a layer's expression."""
    return [t for module in layer.modules() if isinstance(module, Mask) for t in module.buffers(recurse=False)]


def other(t: Tensor) -> Tensor:
    """Other numbers near these, for masks and indices others that are as good."""
    if t.is_floating_point():
        return (t.detach() * 1.25 + 0.125).clone()
    return ~t if t.dtype == torch.bool else t.clone()


def own_structures(use: Use) -> Use:
    return use.on(copy.deepcopy)


def cast(use: Use, dtype: torch.dtype) -> Use:
    """The layer itself in another dtype, on arguments in it."""
    use.layer.to(dtype)
    return use.mapped(lambda t: t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t)


def has_random_numbers(use: Use) -> bool:
    return any("dropout" in repr(module) for module in use.layer.modules())


def refusal(use: Use) -> Exception | None:
    """The error that a call raises, if it does."""
    try:
        use()
    except (ValueError, RuntimeError, IndexError) as error:
        return error
    return None


def smooth(use: Use) -> bool:
    """Whether the result is a differentiable function of the layer's variables, without random numbers."""
    return bool(use.variables) and not has_random_numbers(use)
