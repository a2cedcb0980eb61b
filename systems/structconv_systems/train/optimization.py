"""A step of gradient descent: gradients of several batches, clipped, at the scheduled rate, with averaged weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from structconv_systems.train.options import Trained
from structconv_systems.train.schedules import Plateau, rate

__all__ = ["Optimization"]

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class Optimization:
    """An optimizer with everything that surrounds it; its state is a tree that checkpoints can hold.

    A step whose loss or gradient is not finite changes nothing and says ``skipped``; one without samples changes
    nothing.

    Args:
        model: the model to train.
        options: the options of training.
        higher: if True, a greater validation figure is better, for the plateau.

    Example:

        >>> from structconv_systems.train.optimization import Optimization
        >>> from structconv_systems.train.options import Trained
        >>> class Line(Trained):
        ...     name = "line"
        >>> model = torch.nn.Linear(2, 1)
        >>> optimization = Optimization(model, Line(learning_rate=0.1))
        >>> loss = model(torch.ones(4, 2)).square().sum()
        >>> sorted(optimization.step(1, [(loss, 4.0)]))
        ['loss']
    """

    def __init__(self, model: nn.Module, options: Trained, *, higher: bool = False) -> None:
        self.options = options
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind = _OPTIMIZERS[options.optimizer]
        self.optimizer: torch.optim.Optimizer = kind(self.parameters, lr=options.learning_rate,
                                                     weight_decay=options.weight_decay)
        self.averages = [parameter.detach().clone() for parameter in self.parameters] if options.ema else []
        self.plateau = Plateau(higher=higher)

    def step(self, number: int, losses: Iterable[tuple[Tensor, float]]) -> dict[str, float]:
        """Take step `number`, from 1, by the (sum of losses, divisor) of its batches."""
        self.optimizer.zero_grad(set_to_none=True)
        total, count, first = 0.0, 0.0, 0.0
        for loss, weight in losses:
            if not weight:
                continue
            first = first or weight
            (loss / first).backward()
            total, count = total + loss.item(), count + weight
        if not count:
            return {}
        norm = self._gradients(first / count)
        if not (torch.isfinite(norm) and total - total == 0):
            return {"skipped": 1.0}
        options = self.options
        share = rate(options.schedule, number, options.steps, options.warmup) * self.plateau.share
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * share
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.parameters, strict=False):
                average.lerp_(parameter, 1 - min(options.ema, (1 + number) / (10 + number)))
        return {"loss": total / count}

    def validated(self, figure: float) -> None:
        """Update the plateau with the figure of a validation."""
        if self.options.schedule == "plateau":
            self.plateau.update(figure)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Enter a context in which the model has the averaged weights, if there are any."""
        own = [parameter.detach().clone() for parameter in self.parameters] if self.averages else []
        _assign(self.parameters, self.averages)
        try:
            yield
        finally:
            _assign(self.parameters, own)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "averages": self.averages, "plateau": self.plateau.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["averages"]) != len(self.averages):
            raise ValueError(f"averages of {len(state['averages'])} weights, not of {len(self.averages)}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.averages = [average.to(parameter.device)
                         for average, parameter in zip(state["averages"], self.parameters, strict=False)]
        self.plateau.load(state["plateau"])

    def _gradients(self, share: float) -> Tensor:
        """Scale and clip the gradients, and return their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if share != 1:
            for gradient in gradients:
                gradient.mul_(share)
        norm = nn.utils.get_total_norm(gradients)
        if self.options.clip:
            nn.utils.clip_grads_with_norm_(self.parameters, self.options.clip, norm)
        return norm


@torch.no_grad()
def _assign(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=False):
        parameter.copy_(value)
