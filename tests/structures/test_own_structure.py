"""A structure of the user's: in batches and loaders, and under the laws of the suite."""

import copy

import pytest
import torch
from torch import Tensor

from structconv import Conv, Dense, DotProduct, Mechanism, Samples, StructureError, batch, unbatch
from structconv.structures import StructureBatch, membership
from structconv.structures.values import FrozenValue, structure
from structconv.testing import CHECKS, Setup, Specimen, suite

F64 = torch.float64


@structure()
class Tree(FrozenValue):
    """The parent of each node; that of the root is the root itself."""

    parent: Tensor

    @property
    def num_entries(self):
        return self.parent.shape[0]

    def relabeled(self, source, target):
        return Tree(source.argsort()[self.parent[source]])


@structure()
class Forest(FrozenValue):
    """Trees that make their batches themselves."""

    parent: Tensor
    sizes: tuple[int, ...] = ()

    num_inputs = num_outputs = property(lambda self: self.parent.shape[0])
    samples = property(lambda self: Samples(self.sizes) if self.sizes else None)

    @classmethod
    def batched(cls, structures):
        sizes = tuple(tree.num_inputs for tree in structures)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return cls(torch.cat([tree.parent + start for tree, start in zip(structures, starts, strict=True)]), sizes)

    @property
    def parts(self):
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return tuple(Forest(part - start) for part, start in zip(self.parent.split(self.sizes), starts, strict=True))


def test_a_batch_of_structures_says_how_it_becomes_one():
    with pytest.raises(AttributeError, match=r"no attribute 'parent'. To .* define batched\(\) and parts in"):
        _ = batch([Tree(torch.tensor([0])), Tree(torch.tensor([0, 0]))]).parent


def test_a_structure_prints_its_fields():
    tree = Tree(torch.tensor([0, 0]))
    assert repr(tree) == "Tree(parent=int64(2,))" and repr(batch([tree])).startswith("StructureBatch(Tree(parent=")


class Parent(Mechanism):
    """To each node its parent."""

    reads = ("structure",)

    def forward(self, inputs):
        own = torch.nn.functional.one_hot(inputs.structure.parent, inputs.num_inputs)
        return Dense(own.T[None].to(inputs.dtype))


class ParentOfAll(Parent):
    """`Parent`, computed for a whole batch in one call."""

    batching = "structure"


PARENTS = [torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1]), torch.tensor([2, 0, 2])]
EXPRESSIONS = {
    "alone": Parent, "beside attention": lambda: Parent() | DotProduct(2, 3).scaled().softmax(),
    "times scores": lambda: (DotProduct(1, 3) * Parent()).normalize("count"), "composed": lambda: Parent() @ Parent(),
    "named": lambda: Parent().on("tree")}


@pytest.mark.parametrize("kind", [Tree, Forest])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_batch_equals_single_calls(name, kind):
    layer = Conv(EXPRESSIONS[name](), 4, 3, dtype=F64)
    trees, xs = [kind(parent) for parent in PARENTS], [torch.randn(len(parent), 4, dtype=F64) for parent in PARENTS]

    def called(x, tree):
        return layer(x, structure={"tree": tree} if name == "named" else tree)

    together = batch(trees)
    for actual, x, tree in zip(unbatch(called(torch.cat(xs), together), trees), xs, trees, strict=True):
        torch.testing.assert_close(actual, called(x, tree))
    assert isinstance(together, StructureBatch if kind is Tree else Forest)
    assert together.samples.sizes() == ([4, 2, 3], [4, 2, 3])
    assert membership(trees).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]


def test_a_mechanism_may_read_the_batch_that_the_class_made():
    layer, forests = Conv(ParentOfAll(), 4, 3, dtype=F64), [Forest(parent) for parent in PARENTS]
    xs = [torch.randn(len(parent), 4, dtype=F64) for parent in PARENTS]
    y = layer(torch.cat(xs), structure=batch(forests))
    torch.testing.assert_close(y, torch.cat([layer(x, structure=one) for x, one in zip(xs, forests, strict=True)]))


def test_a_batch_moves_and_is_copied():
    together = batch([Tree(parent) for parent in PARENTS])
    for twin in (together.to("cpu"), copy.deepcopy(together)):
        assert twin.samples.sizes() == together.samples.sizes() and repr(twin).startswith("StructureBatch(")


def setup():
    torch.manual_seed(0)
    return Setup((Parent() | DotProduct(2, 3).softmax()).bound(4, 3).to(F64), torch.randn(4, 4, dtype=F64), None,
                 Tree(PARENTS[0]))


@pytest.mark.parametrize("check", [check for _, check in suite(Specimen("tree", setup, {"permutes", "blockwise"}))],
                         ids=str)
def test_the_suite_takes_it(check):
    check()


@structure()
class Orchard(Forest):
    """A forest that can be relabeled."""

    def relabeled(self, source, target):
        return Orchard(source.argsort()[self.parent[source]])


class ParentOfFirst(Parent):
    """Wrong on purpose: reads in each sample of a batch the parents of the first one."""

    batching = "structure"

    def forward(self, inputs):
        trees = inputs.structure.parts if inputs.structure.sizes else (inputs.structure,)
        own = torch.nn.functional.one_hot(trees[0].parent, trees[0].num_inputs)
        return Dense(torch.block_diag(*[own.T] * len(trees))[None].to(inputs.dtype))


@pytest.mark.parametrize("check", ["samples", "blockwise"])
def test_a_mechanism_that_reads_the_structure_of_another_sample_fails_its_check(check):
    def made(mechanism):
        return Specimen("orchard", lambda: Setup(mechanism.bound(4, 3), torch.randn(4, 4, dtype=F64), None,
                                                 Orchard(PARENTS[0])), {"blockwise"})

    CHECKS[check](made(ParentOfAll()))
    with pytest.raises(AssertionError, match="batch"):
        CHECKS[check](made(ParentOfFirst()))


@structure()
class Uncounted(FrozenValue):
    number: int


@structure()
class Batches(FrozenValue):
    number: int
    num_entries = property(lambda self: self.number)
    samples = property(lambda self: Samples([self.number]))


@structure()
class WithoutSamples(FrozenValue):
    number: int
    num_entries = property(lambda self: self.number)

    @classmethod
    def batched(cls, structures):
        return structures[0]


@pytest.mark.parametrize(("value", "message"), [
    (Uncounted(3), "got Uncounted. A structure of your own is made by @structure"),
    (Batches(3), "Batches must have a classmethod batched"),
    (WithoutSamples(3), "WithoutSamples.batched: the batch must have samples")])
def test_what_cannot_join_a_batch_is_told(value, message):
    with pytest.raises(StructureError, match=message):
        batch([value, value])


def test_a_structure_that_cannot_be_relabeled_is_told():
    made = Specimen("forest", lambda: Setup(Parent().bound(4, 3), torch.randn(4, 4, dtype=F64), None,
                                            Forest(PARENTS[0])), {"permutes"})
    check = dict(suite(made))["forest: permutation"]
    with pytest.raises(AssertionError, match=r"give its class a method relabeled\(source, target\)"):
        check()
