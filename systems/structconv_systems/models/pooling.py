"""Sequences pooled to one entry each, with weights by position, content or relations, and then classified."""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from structconv.mechanisms import Context, DotProduct, Learned, Mechanism, Pool
from structconv.nn import Conv, Linear
from structconv.shapes import check_choice

__all__ = ["POOLINGS", "PoolingClassifier", "pooling"]

POOLINGS = ("spatial", "context", "self-attention")


def pooling(name: str, length: int, *, dim: int = 32) -> Mechanism:
    """The weights a_m of the one output y = sum_m a_m x_m Theta, K = 1, N = 1, as an expression; they sum to one.

    - "spatial": softmax_m(t_m), a number for each of the `length` places, whatever stands there.
    - "context": softmax_m(<theta, x_m>), theta a learned query: what stands there, wherever it is.
    - "self-attention": the mean over n of softmax_m(<W_q x_n + b, W_k x_m> / sqrt(dim)): each entry asks.

    Raises:
        ConfigError: an unknown one.

    Example:

        >>> from structconv_systems.models.pooling import POOLINGS, pooling
        >>> POOLINGS
        ('spatial', 'context', 'self-attention')
        >>> pooling(POOLINGS[0], length=10)
        Learned(10, 1).softmax(over='inputs')
    """
    check_choice("pooling", "name", name, POOLINGS)
    if name == "spatial":
        return Learned(length, 1).softmax()
    if name == "context":
        return Context(1).softmax()
    return DotProduct(1, dim, bias=True).scaled().softmax() @ Pool(length)


class PoolingClassifier(nn.Module):
    """W relu(norm(sum_m a_m x_m Theta)): raw entries are pooled, so that the weights alone choose among them.

    A network before the pooling could do the work of the weights, by setting the irrelevant entries to zero.

    Args:
        name, length, dim: see `pooling`. in_channels: P. classes: number of logits. channels: channels of the pooled
            entry.

    Calling it: x (B, N, P), N the length -> (B, classes). By context and by self-attention the logits do not depend on
    the order of the entries.

    Fleuret, EE-559 Deep learning, lecture 13.1.

    Example:

        >>> from structconv_systems.models.pooling import PoolingClassifier
        >>> model = PoolingClassifier("context", length=10, in_channels=6, classes=3, channels=8, dim=4).eval()
        >>> model(torch.randn(2, 10, 6)).shape
        torch.Size([2, 3])
    """

    def __init__(self, name: str, length: int, in_channels: int, classes: int, *, channels: int = 64,
                 dim: int = 32) -> None:
        super().__init__()
        self.pool = Conv(pooling(name, length, dim=dim), in_channels, channels)
        self.norm, self.classify = nn.LayerNorm(channels), Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classify(F.relu(self.norm(self.pool(x).squeeze(-2)))))

    def weights(self, x: Tensor) -> Tensor:
        """a (B, N) of entries (B, N, P)."""
        return self.pool.basis(x).dense()[..., 0, :, 0].expand(x.shape[:-1])

    def attention(self, x: Tensor) -> Tensor:
        """Return the weights of self-attention before pooling, (B, N, N): row m, column n."""
        first = cast(Mechanism, cast(nn.ModuleList, self.pool.mechanism.operands)[0])
        return first.basis(x).dense().squeeze(-3)
