"""`Bound`: a step of a prepared x whose plan and operands are found once, as keys and values are made once.

Whatever could make another plan or other operands right is asked in each step: if somebody is told of calls inside the
layer, if a module was exchanged or is in another mode, if plans may be others. Parameters `Prepared` watches itself.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from structconv import torch_private as private
from structconv.mechanisms.sight import sees_all
from structconv.planning.plan import Plan, era
from structconv.planning.problem import Call, Step

__all__ = ["Bound"]


class Bound:
    """The steps behind one that a layer took by this plan.

    Args:
        layer: whose step it was. run: (entry x) -> y.
    """

    def __init__(self, layer: Any, run: Step) -> None:
        self._run, self._layer, self._era, self._held = run, layer, era(), (layer.path, layer.max_bytes)
        self._modules = [(module, module.training) for module in
                         (*layer.modules(), *layer.mechanism.modules()) if not isinstance(module, nn.ModuleList)]
        self._places = [(module._modules, name, part) for module in layer.modules()
                        for name, part in module._modules.items()]

    @classmethod
    def of(cls, layer: Any, plan: Plan, call: Call, structure: Any) -> Self | None:
        """What binds such a step; `None` where masks may leave pairs out of a later one, or its kernel cannot."""
        alone = type(layer).forward is type(layer).computes
        if plan.bind is None or not alone or not sees_all(layer.mechanism, structure):
            return None
        run = plan.bind(call)
        return None if run is None else cls(layer, run)

    def __call__(self, x: Tensor) -> Tensor | None:
        """y (..., 1, Q) of the entry x, which is pending; `None` where it is to be computed as any call is."""
        if self._era != era() or (self._layer.path, self._layer.max_bytes) != self._held:
            return None
        for held, name, part in self._places:
            if held.get(name) is not part:
                return None
        for module, training in self._modules:
            if module.training is not training or private.intercepted(module):
                return None
        return self._run(x)
