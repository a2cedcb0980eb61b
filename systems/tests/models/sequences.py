"""What tests of models over sequences share: pairs of token sequences, padded, and what must hold of a model."""

import torch
from safetensors.torch import load, save
from torch.nn import functional as F

from structconv.structures import Graph

BEGIN, END = 1, 2
WORDS = 13


def batch(lengths, *, begin=False, seed=0):
    """Random words of these lengths, (B, L) padded with 0, with a mark in front and behind where they `begin`."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, WORDS, (length,), generator=generator) for length in lengths]
    if begin:
        rows = [torch.cat([torch.tensor([BEGIN]), row, torch.tensor([END])]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def pairs():
    """Sources and targets of three lengths."""
    return batch((7, 3, 5)), batch((4, 6, 2), begin=True, seed=1)


def trained(model, loss, steps, rate=1e-2, until=0.0):
    """The losses of steps of Adam, the last of which is below `until` of the first where that is reached."""
    optimizer, losses = torch.optim.Adam(model.parameters(), rate), []
    for _ in range(steps):
        losses.append(loss())
        if losses[-1] < until * losses[0]:
            break
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [actual.item() for actual in losses]


def check_learns(model, loss, steps, rate=1e-2, until=0.1, stop=None):
    """The loss falls below a part of the first; it is trained on until it is below `stop` of it."""
    losses = trained(model, loss, steps, rate, until if stop is None else stop)
    assert losses[-1] < until * losses[0], f"the loss fell from {losses[0]} to {losses[-1]} in {steps} steps"


def check_overfits(model, source, target, steps=150, stop=None):
    """The loss of a small batch falls below a part of the first."""
    check_learns(model, lambda: F.cross_entropy(
        model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=0), steps, stop=stop)


def check_says_what_it_learned(model, source, target):
    """It overfits, and its most probable words are then those of the batch."""
    check_overfits(model, source, target, stop=0.03)
    actual = greedy(model, source, target.shape[1] - 1)
    assert torch.equal(actual[target != 0], target[target != 0])


def check_exported_with_any_batch(model):
    """The numbers of words are those of the example."""
    source, target = batch((2, 4, 3)), batch((1, 2, 1), begin=True, seed=1)
    samples = torch.export.Dim("samples")
    program = torch.export.export(model, (source, target), dynamic_shapes=({0: samples}, {0: samples})).module()
    torch.testing.assert_close(program(source[:2], target[:2]), model(source[:2], target[:2]), rtol=1e-5, atol=1e-5)


def check_alone(model, source, target):
    """A sentence alone has the logits that it has in a padded batch, and the same gradient of a source word."""
    together = model(source, target)
    for i, (own, words) in enumerate(zip(source, target, strict=True)):
        own, words = own[own != 0], words[words != 0]
        torch.testing.assert_close(together[i, :len(words)], model(own[None], words[None])[0], rtol=1e-5, atol=1e-5)


def check_padding_has_no_gradient(model, source, target, embedding):
    """What stands in padding changes nothing: its vector has no share in any logit of a word."""
    with torch.no_grad():
        before = model(source, target)
        embedding.weight[0] += 3
        after = model(source, target)
    for i, words in enumerate(target):
        torch.testing.assert_close(after[i, :int((words != 0).sum())], before[i, :int((words != 0).sum())])


def check_causal(model, source, target):
    """Words to come change no logit."""
    other = target.clone()
    other[:, 3:] = 4 + other[:, 3:] % 9
    torch.testing.assert_close(model(source, target)[:, :3], model(source, other)[:, :3])


def check_steps(model, source, target):
    """Step by step the logits are those of the whole call, also of samples that go on as others."""
    whole, order = model(source, target), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        decoding = model.begin(source)
        for t in range(2):
            torch.testing.assert_close(decoding.step(target[:, t]), whole[:, t], rtol=1e-5, atol=1e-5)
        decoding.reorder(order)
        for t in range(2, target.shape[1]):
            actual = decoding.step(target[order, t])
            torch.testing.assert_close(actual, whole[order, t], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def greedy(model, source, length):
    """The most probable words, one after the other."""
    decoding, words = model.begin(source), [torch.full((len(source),), BEGIN)]
    for _ in range(length):
        words.append(decoding.step(words[-1]).argmax(-1))
    return torch.stack(words, 1)


def check_in_any_order(model, x, order, starts, steps):
    """Bodies of (B, T, N, C) that come in another order move as they did, and their pairs have the same logits."""
    graph, many = Graph.complete(len(order)), len(x)
    actual, other = model(x, graph, starts, steps), model(x[:, :, order], graph, starts, steps)
    torch.testing.assert_close(other.states, actual.states[..., order, :], rtol=1e-4, atol=1e-4)
    matrix = torch.zeros(2, many, len(order), len(order), 2)
    for place, logits in enumerate((actual.logits, other.logits)):
        matrix[place][:, graph.source, graph.target] = logits
    torch.testing.assert_close(matrix[1], matrix[0][:, order][:, :, order], rtol=1e-4, atol=1e-4)


def check_saved(model, fresh, *inputs):
    """A new model with the numbers of a file computes the same."""
    assert not torch.equal(fresh(*inputs), model(*inputs))
    fresh.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(fresh(*inputs), model(*inputs))
