"""Copies of a layer: shallow, deep, pickled, replicas."""

import dataclasses
import pickle

import torch
from torch import Tensor, nn

from structconv.testing.checks import same
from structconv.testing.use import Use
from tests.support.calls import check_now, with_tensors
from tests.support.mutations.register import mutation
from tests.support.mutations.subjects import other, trains


@mutation(trains)
def deep_copies(use: Use) -> None:
    use()
    twin, loaded = use.copied(), None
    check_now(twin, "a deep copy", use)
    with torch.no_grad():
        for p in twin.layer.parameters():
            p.copy_(other(p))
    check_now(twin, "a deep copy with other parameters")
    check_now(use, "the original of a deep copy")
    try:
        loaded = dataclasses.replace(use, layer=pickle.loads(pickle.dumps(twin.layer)))
    except (AttributeError, pickle.PicklingError):
        return  # a function of the author's that pickle cannot name
    check_now(loaded, "unpickled", twin)


@mutation(trains)
def replicas(use: Use) -> None:
    """As DataParallel makes them: parameters are plain attributes that are no leaves."""
    use()
    given = {name: nn.Parameter(other(p)) for name, p in use.layer.named_parameters()}
    twin = dataclasses.replace(use, layer=_replica(use.layer, {name: 1 * p for name, p in given.items()}, "", {}))
    expected = with_tensors(use.layer, given)
    y = twin()
    same(y.detach(), dataclasses.replace(use, layer=expected)().detach(), "a replica")
    gradients = torch.autograd.grad(y.square().sum(), list(given.values()), allow_unused=True)
    assert any(g is not None for g in gradients)
    with torch.no_grad():
        for _ in range(2):
            again = _replica(use.layer, {name: -p for name, p in given.items()}, "", {})
            reference = with_tensors(use.layer, {name: -p for name, p in given.items()})
            same(dataclasses.replace(use, layer=again)(), dataclasses.replace(use, layer=reference)().detach(),
                 "a new replica")
    check_now(use, "the original of replicas")


def _replica(module: nn.Module, given: dict[str, Tensor], prefix: str, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        twin = made[id(module)] = module._replicate_for_data_parallel()
        for name, p in module._parameters.items():
            if p is None:
                twin._parameters[name] = None
            else:
                setattr(twin, name, given[prefix + name])
        for name, part in module._modules.items():
            twin._modules[name] = None if part is None else _replica(part, given, f"{prefix}{name}.", made)
    return made[id(module)]
