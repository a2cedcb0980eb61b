"""Operators along edges in 16 bits: inputs and results are stored in 16 bits, sums are in float32.

The law: an error is at most a few roundings of the sum of the absolute terms, however many terms there are. A sum in 16
bits breaks it, since its error grows with the number of terms; so does a factor that is rounded where it is large.
"""

import pytest
import torch
from torch import Tensor

from tests.primitives import edge_operators
from tests.primitives.edge_operators import OPERATORS, Edges, Operator
from tests.support.drawn import drawn

#: Roundings of the sum of absolute terms: of the result, and of what the backward pass reads of the forward.
ROUNDINGS = 2
#: Of T_3 of a recurrence, whose steps each read the stored result of the step before.
OF_STEPS = 4
#: Inputs, outputs and edges, a third of which have one output.
SIZES = (24, 16, 900)
SHAPES = [(2, 16, 4), (1, 4, 16)]
STORED = [name for name, operator in OPERATORS.items() if 16 in operator.bits]


def jacobian(y: Tensor, t: Tensor) -> Tensor:
    """(numbers of y, numbers of t)."""
    actual = []
    for rows in torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape).split(64):
        part = torch.autograd.grad(y, t, rows, is_grads_batched=True, retain_graph=True, allow_unused=True)[0]
        actual.append(y.new_zeros(len(rows), t.numel()) if part is None else part.flatten(1))
    return torch.cat(actual)


def pulled(y: Tensor, t: Tensor, terms: Tensor) -> Tensor:
    """|dy/dt|^T terms."""
    return (jacobian(y, t).abs().T @ terms.flatten()).view(t.shape)


def of_products(operator: Operator, edges: Edges, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The absolute terms of an operator that is linear in each input, and of its gradients."""
    y = operator.reference(edges, *inputs)
    forward = torch.stack([(jacobian(y, t).abs() @ t.detach().abs().flatten()).view(y.shape) for t in inputs])
    return [forward.amax(0), *(pulled(y, t, grad.abs()) for t in inputs)]


def of_attention(operator: Operator, edges: Edges, inputs: list[Tensor], grad: Tensor,
                 monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The absolute terms of y = sum_e w_e v_e, w the softmax of scores s(inputs), and of its gradients."""
    seen: dict[str, Tensor] = {}
    softmax, weighed = edge_operators.softmax, edge_operators.weighed

    def see_scores(g, scores, drop=None):
        seen.update(scores=scores, weights=softmax(g, scores, drop))
        return seen["weights"]

    def see_values(g, weights, values):
        seen.update(values=values)
        return weighed(g, weights, values)

    with monkeypatch.context() as patched:
        patched.setattr(edge_operators, "softmax", see_scores)
        patched.setattr(edge_operators, "weighed", see_values)
        operator.reference(edges, *inputs)
    scores, weights, grad = seen["scores"], seen["weights"].detach(), grad.abs()
    if "values" in seen:
        values = seen["values"].detach().abs()
        forward, of_weights = weighed(edges, weights, values), (grad[edges.target] * values[edges.source]).sum(-1).T
        of_values = torch.zeros_like(values).index_add(0, edges.source, weights.T.unsqueeze(-1) * grad[edges.target])
    else:
        forward, of_weights = weights, grad
    means = torch.zeros(len(weights), edges.n, dtype=grad.dtype).index_add(1, edges.target, weights * of_weights)
    of_scores = weights * (of_weights + means[:, edges.target])
    actual = [pulled(scores, t, of_scores) for t in inputs]
    if "values" in seen:
        actual = [a + pulled(seen["values"], t, of_values) for a, t in zip(actual, inputs, strict=True)]
    return [forward, *actual]


def roundings(name: str, dtype: torch.dtype, shift: float, shape: tuple[int, int, int],
              monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest error of the result and of each gradient, in roundings of the sum of the absolute terms."""
    operator = OPERATORS[name]
    edges = operator.edges(*SIZES)
    inputs = [(t.detach() + shift).to(dtype).requires_grad_(t.requires_grad)
              for t in operator.tensors(edges, *shape, torch.float32)]
    if operator.constant:
        inputs[0] = (inputs[0] * SIZES[0] / SIZES[2]).detach()
    exact = [t.detach().double().requires_grad_() for t in inputs]
    y = operator.reference(edges, *exact)
    grad = (torch.randn(y.shape) + shift).to(dtype)
    terms = (of_attention(operator, edges, exact, grad.double(), monkeypatch) if operator.drops
             else of_products(operator, edges, exact, grad.double()))
    actual = operator.call(edges, *inputs)
    kept = [number for number, t in enumerate(inputs) if t.requires_grad]
    got = [actual, *torch.autograd.grad(actual, [inputs[at] for at in kept], grad.to(actual.dtype),
                                       materialize_grads=True)]
    right = [y, *torch.autograd.grad(y, [exact[at] for at in kept], grad.double(), materialize_grads=True)]
    unit, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return [float(((a.detach().double() - b.detach()).abs() / (unit * t.detach() + least)).max())
            for a, b, t in zip(got, right, [terms[0], *(terms[1 + at] for at in kept)], strict=True)]


@pytest.mark.parametrize("name", drawn(STORED, 5))
def test_an_error_is_a_few_roundings_of_the_terms(path, name, monkeypatch):
    """Also of terms of one sign, of which a sum in 16 bits loses most."""
    number = STORED.index(name)
    for dtype, shift in ((torch.bfloat16, number % 2), (torch.float16, 1 - number % 2)):
        actual = roundings(name, dtype, float(shift), SHAPES[number % 2], monkeypatch)
        assert max(actual) <= (OF_STEPS if name.startswith("recurrence") else ROUNDINGS)
