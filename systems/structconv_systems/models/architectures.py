"""Convolution, recurrence and self-attention as the layer of one model, and the cost of each layer."""

import math
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from structconv import ConfigError, DotProduct, LowRank, Shifts
from structconv.nn import Conv, Linear
from structconv.shapes import check_choice, check_divides, check_positive
from structconv_systems.models.blocks import Block, Stack, Tokens
from structconv_systems.models.recurrent import Recurrent

__all__ = ["ARCHITECTURES", "Cost", "Recurrence", "SequenceClassifier", "dilated_layers", "layer_of", "predicted"]

ARCHITECTURES = ("convolution", "dilated", "recurrence", "attention")


class Recurrence(nn.Module):
    """h_n = GRU(h_(n-1), x_n), x (B, N, C) -> (B, N, C), with the interface of `layer_of`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.out_channels = channels
        self.states = Recurrent(nn.GRU, channels, channels)

    def forward(self, x: Tensor, structure: None = None) -> Tensor:
        return cast(Tensor, self.states(x, x.new_ones(x.shape[:2]))[0])


def layer_of(architecture: str, channels: int, *, kernel: int = 5, heads: int = 1, depth: int = 0) -> Any:
    """One layer (B, N, C) -> (B, N, C).

    - "convolution": the shifts by 0 ... k - 1, so that an entry sees itself and the k - 1 before it.
    - "dilated": the shifts by 0, k^l ... (k - 1) k^l, for l = depth layers below it (van den Oord et al. 2016).
    - "recurrence": a GRU (Cho et al. 2014).
    - "attention": softmax_m(<W_q x_n, W_k x_m> / sqrt(D)) over all entries, D = C / heads (Vaswani et al. 2017).

    Raises:
        ConfigError: an unknown one, or heads that do not divide the channels.

    Example:

        >>> from structconv_systems.models.architectures import layer_of
        >>> [layer_of(name, 8)(torch.randn(2, 20, 8)).shape for name in ("convolution", "recurrence")]
        [torch.Size([2, 20, 8]), torch.Size([2, 20, 8])]
    """
    check_choice("layer_of", "architecture", architecture, ARCHITECTURES)
    if architecture in ("convolution", "dilated"):
        step = 1 if architecture == "convolution" else kernel ** depth
        return Conv(Shifts([step * k for k in range(check_positive("layer_of", "kernel", kernel))], padding="zeros"),
                    channels, channels)
    if architecture == "recurrence":
        return Recurrence(channels)
    dim = check_divides("layer_of", "heads", heads, "channels", channels)
    return Conv(DotProduct(heads, dim).scaled().softmax(), channels, channels, weight=LowRank(dim))


class SequenceClassifier(nn.Module):
    """Logits W h_N of the last entry h_N, after blocks x + layer(norm x), x + network(norm x) of one architecture.

    Args:
        architecture, kernel, heads: see `layer_of`. vocabulary: number of tokens; sinusoidal positions are added.
        classes: number of logits. channels: C; the networks have 2 C hidden units. layers: number of blocks.

    Calling it: tokens (B, N) -> (B, classes). With L convolutions of width k the logits depend on the last
    L (k - 1) + 1 tokens alone, on k^L where they are dilated; with GRUs or attention on all.

    Zhang et al., Dive into Deep Learning, section 10.6; Vaswani et al. (2017), section 4.

    Example:

        >>> from structconv_systems.models.architectures import SequenceClassifier
        >>> model = SequenceClassifier("attention", vocabulary=10, classes=4, channels=8)
        >>> model(torch.randint(0, 10, (3, 20))).shape
        torch.Size([3, 4])
    """

    def __init__(self, architecture: str, vocabulary: int, classes: int, *, channels: int = 64, layers: int = 2,
                 kernel: int = 5, heads: int = 2) -> None:
        super().__init__()
        check_positive("SequenceClassifier", "layers", layers)
        self.tokens = Tokens(vocabulary, channels, positions="sinusoidal", dropout=0.0)
        self.stack = Stack([Block(layer_of(architecture, channels, kernel=kernel, heads=heads, depth=depth), None,
                                  hidden=2 * channels, dropout=0.0, norm="pre") for depth in range(layers)])
        self.classify = Linear(channels, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stack(self.tokens(tokens, self.tokens.table(tokens.shape[-1])))
        return cast(Tensor, self.classify(x[:, -1]))


def dilated_layers(entries: int, kernel: int) -> int:
    """Return the least L with k^L >= n: L dilated layers of width k connect the first of n entries with the last.
    """
    layers = 1
    while kernel ** layers < entries:
        layers += 1
    return layers


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a layer for n entries of d channels.

    Attributes:
        flops: flops of its products; a multiplication and an addition count as two.
        sequential: number of products that must run one after the other.
        path: number of layers, or steps within one, between the first and the last entry.

    Example:

        >>> from structconv_systems.models.architectures import predicted
        >>> predicted("attention", 50, 64, kernel=5).path, predicted("recurrence", 50, 64, kernel=5).path
        (1, 50)
    """

    flops: int
    sequential: int
    path: int


def predicted(architecture: str, entries: int, channels: int, *, kernel: int) -> Cost:
    """Predict the cost as in table 1 of Vaswani et al. (2017), with the constants of `layer_of`: O(k n d^2) flops of
    both convolutions, O(n d^2) and O(n^2 d); O(1), O(n) and O(1) sequential products; paths of O(n / k), O(log_k n) if
    dilated, O(n) and O(1).

    Example:

        >>> from structconv_systems.models.architectures import predicted
        >>> predicted("attention", 100, 8, kernel=5).flops > predicted("attention", 10, 8, kernel=5).flops
        True
    """
    check_choice("predicted", "architecture", architecture, ARCHITECTURES)
    if kernel < 2:
        raise ConfigError("predicted", "kernel must be at least 2, so that paths end", kernel)
    n, d = entries, channels
    if architecture in ("convolution", "dilated"):
        path = math.ceil((n - 1) / (kernel - 1)) if architecture == "convolution" else dilated_layers(n, kernel)
        return Cost(flops=2 * kernel * n * d * d, sequential=1, path=path)
    if architecture == "recurrence":
        return Cost(flops=6 * n * d * (2 * d + 1), sequential=n, path=n)
    return Cost(flops=8 * n * d * d + 4 * n * n * d, sequential=1, path=1)
