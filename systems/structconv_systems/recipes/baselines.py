"""What REINFORCE subtracts of a tour's length: that of a rollout, an exponential mean, or a mean of other samples."""

import abc
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Baseline", "Exponential", "Rollout", "Shared"]

#: (model, instances) -> the cost of what the model says at once, (B,).
Measure = Callable[[Any, Tensor], Tensor]


class Baseline(abc.ABC):
    """b(s) of instances s; sum (L - b) grad log p has the expectation of sum L grad log p, and less variance."""

    #: How many samples of each instance a batch has, one behind the other.
    copies = 1

    @abc.abstractmethod
    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        """b of the instances, (B,), of which samples cost so much, (B copies,); broadcasts to these."""

    def stepped(self, step: int, model: nn.Module) -> dict[str, float]:
        """Look at the model behind step number `step`, from 1; what it tells."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class Exponential(Baseline):
    """b = decay b + (1 - decay) mean L, one number for all instances, beginning with the first mean."""

    def __init__(self, decay: float) -> None:
        self.decay, self.mean = decay, float("nan")

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        mean = float(costs.mean())
        self.mean = mean if self.mean != self.mean else self.decay * self.mean + (1 - self.decay) * mean
        return costs.new_tensor(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Shared(Baseline):
    """b of a sample is the mean cost of the other samples of its instance (Kool, van Hoof and Welling 2019, Buy 4
    REINFORCE samples, get a baseline for free!)."""

    def __init__(self, copies: int) -> None:
        self.copies = copies

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        own = costs.view(-1, self.copies)
        return ((own.sum(-1, keepdim=True) - own) / (self.copies - 1)).flatten()


class Rollout(Baseline):
    """b(s) is the cost of what a frozen copy of the model says at once (Kool et al. 2019, section 4).

    After every `every` steps the model challenges the copy on instances of their own, and takes its place where it is
    better by a one-sided paired t-test; new instances are then drawn, so that none is chosen by them twice. Until the
    first challenge b is `Exponential`.

    Args:
        model: of which the first copy is.
        measure: see `Measure`.
        instances: (number) -> those of the challenge of that number.
        every, alpha, decay: see above.
    """

    def __init__(self, model: nn.Module, measure: Measure, instances: Callable[[int], Tensor], *, every: int,
                 alpha: float, decay: float) -> None:
        self.model, self.measure, self.instances = deepcopy(model).eval().requires_grad_(False), measure, instances
        self.every, self.alpha, self.mean, self.challenges, self.replaced = every, alpha, Exponential(decay), 0, 0

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        return self.measure(self.model, instances) if self.challenges else self.mean.value(instances, costs)

    def stepped(self, step: int, model: nn.Module) -> dict[str, float]:
        if step % self.every:
            return {}
        training = model.training
        instances = self.instances(self.replaced)
        costs, own = self.measure(model.eval(), instances), self.measure(self.model, instances)
        model.train(training)
        self.challenges += 1
        if better(costs, own, self.alpha):
            self.model.load_state_dict(model.state_dict())
            self.replaced += 1
        return {"replaced": float(self.replaced)}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "mean": self.mean.state_dict(), "challenges": self.challenges,
                "replaced": self.replaced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        self.challenges, self.replaced = state["challenges"], state["replaced"]


def better(costs: Tensor, others: Tensor, alpha: float) -> bool:
    """Whether costs (B,) are below others by a one-sided paired t-test at level alpha."""
    from scipy.stats import ttest_rel

    if torch.equal(costs, others):
        return False
    return bool(ttest_rel(costs.double().numpy(), others.double().numpy(), alternative="less").pvalue < alpha)
