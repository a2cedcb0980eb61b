"""A user's own basis works with the layer, the algebra and the suite, without touching the package."""

import pytest
import torch

from structconv import ConfigError, Conv, DotProduct, Mechanism, ShapeError, StructureError, conv
from structconv.bases import Basis, Identity, Score, value
from structconv.structures import Causal, Grid, Samples, Window
from structconv.testing import Setup, Specimen, suite

F64 = torch.float64


class Haar(Basis):
    """The Haar wavelet transform of n = 2^j entries: matrix k keeps the coefficients of scale k."""

    def __init__(self, n: int) -> None:
        self.num_inputs = self.num_outputs = n
        self.size = n.bit_length()

    num_inputs = num_outputs = size = 0

    def dense(self, dtype=None):
        n, rows = self.num_inputs, [torch.ones(1, self.num_inputs)]
        for scale in range(self.size - 1):
            width = n >> scale
            wave = torch.cat([torch.ones(width // 2), -torch.ones(width // 2)])
            rows.append(torch.block_diag(*[wave.unsqueeze(0)] * (1 << scale)))
        rows = [(row.double() / row.double().norm(dim=-1, keepdim=True)) for row in rows]
        return torch.stack([row.mT @ row for row in rows]).to(dtype or torch.get_default_dtype())


class HaarTransform(Mechanism):
    """`Haar` over the entries of x."""

    def __init__(self, scales: int) -> None:
        super().__init__()
        self.scales = scales

    size = property(lambda self: self.scales)

    def forward(self, inputs):
        if inputs.num_inputs != 1 << (self.scales - 1):
            raise ShapeError("HaarTransform", f"x must have M={1 << (self.scales - 1)} entries", inputs.num_inputs)
        return Haar(inputs.num_inputs)


SUITE = [*suite(Haar(8)), *suite(Specimen("haar mechanism", lambda: Setup(
    HaarTransform(4).bound(3, 2), torch.randn(8, 3, dtype=F64))))]


@pytest.mark.parametrize("check", [pytest.param(check, id=name.replace(" ", "_")) for name, check in SUITE])
def test_suite(check):
    check()


def test_algebra_of_values():
    haar, a = Haar(8), Haar(8).dense(F64)
    x = torch.randn(8, 2, dtype=F64)
    eye = torch.eye(8, dtype=F64)
    i = torch.arange(8)
    keep = i[:, None] <= i
    for basis, dense in [
            (haar | Identity(8), torch.cat([a, eye[None]])), (haar @ haar, (a[:, None] @ a[None]).flatten(0, 1)),
            (haar + Identity(8), a + eye), (2.0 * haar, 2 * a), (haar * haar, a * a),
            (haar.outer(Identity(8, size=2)), (a[:, None] * eye.expand(2, 8, 8)).flatten(0, 1)),
            (haar.masked(keep=Causal()), a * keep), (haar.map(torch.square), a * a), (haar.transpose(), a.mT),
            (haar.masked(keep=Causal()).normalize("count"), a * keep / keep.sum(0))]:
        torch.testing.assert_close(basis.dense(F64), dense)
        torch.testing.assert_close(basis.analysis(x), dense.mT @ x)


@value
class Half(Basis):
    """Sums of two entries side by side."""

    entries: int
    size = 1
    num_inputs = property(lambda self: self.entries)
    num_outputs = property(lambda self: (self.entries + 1) // 2)

    def dense(self, dtype=None):
        n = torch.arange(self.num_outputs)
        return (torch.arange(self.entries)[:, None] // 2 == n).to(dtype or torch.get_default_dtype())[None]


class Halve(Mechanism):
    reads = ("structure",)

    def forward(self, inputs):
        return Half(inputs.num_inputs)


class HalveWhatIsThere(Halve):
    def output_structure(self, structure):
        if isinstance(structure, Samples):
            return Samples([(size + 1) // 2 for size in structure.sizes()[0]])
        return Grid((structure.num_entries + 1) // 2) if isinstance(structure, Grid) else structure


def test_other_outputs_than_inputs_are_told_by_output_structure():
    x, batch = torch.randn(9, 3), Samples([4, 5])
    layer = Conv(HalveWhatIsThere() @ HalveWhatIsThere(), 3, 2)
    torch.testing.assert_close(layer(x, structure=batch), torch.cat([layer(x[:4]), layer(x[4:])]))
    image = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(image, axes=1), layer(image.mT).mT)
    for mechanism, structure, options in ((Halve() @ Halve(), batch, {}), (Halve(), None, {"axes": 1}),
                                          (2.0 * Halve(), None, {"axes": 1})):
        with pytest.raises(ShapeError, match="by output_structure"):
            Conv(mechanism, 3, 2)(image[0] if options else x, structure=structure, **options)


@value
class OfOneSide(Score):
    """s_km, or t_kn with `of` "target": one number for each input, or for each output, alone."""

    s: torch.Tensor
    others: int
    of: str = "source"
    size = property(lambda self: self.s.shape[-2])
    num_inputs = property(lambda self: self.s.shape[-1] if self.of == "source" else self.others)
    num_outputs = property(lambda self: self.others if self.of == "source" else self.s.shape[-1])
    batch_shape = property(lambda self: self.s.shape[:-2])

    def evaluate(self, pairs):
        return pairs.source(self.s) if self.of == "source" else pairs.target(self.s)


class NoPairs(OfOneSide):
    """Wrong on purpose: numbers of entries, not of pairs."""

    def evaluate(self, pairs):
        return self.s


@pytest.mark.parametrize("of", ["source", "target"])
def test_a_score_of_one_side_alone_is_expanded(of):
    def basis():
        return OfOneSide(torch.linspace(-1, 1, 12, dtype=F64).view(2, 6), 6, of)

    whole = basis().s.unsqueeze(-1 if of == "source" else -2).expand(2, 6, 6)
    torch.testing.assert_close(basis().dense(), whole)
    for make in (basis, lambda: basis().softmax(), lambda: basis().masked(keep=Grid(6).graph()).softmax()):
        for name, check in suite(Specimen(f"scores of {of}", make)):
            if not name.endswith("copies"):
                check()


def test_scores_of_vectors_are_combined_pair_by_pair():
    @value
    class Cosine(Score):
        source: torch.Tensor
        target: torch.Tensor
        size = property(lambda self: self.source.shape[-3])
        num_inputs = property(lambda self: self.source.shape[-2])
        num_outputs = property(lambda self: self.target.shape[-2])

        def evaluate(self, pairs):
            return pairs.combine(lambda s, t: torch.cosine_similarity(s, t, dim=-1), self.source, self.target)

    source, target = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    expected = torch.cosine_similarity(source.unsqueeze(-2), target.unsqueeze(-3), dim=-1)
    torch.testing.assert_close(Cosine(source, target).dense(), expected)
    graph = Grid(6).graph()
    along = Cosine(source, target).masked(keep=graph)
    connected = torch.zeros(6, 6, dtype=torch.bool)
    connected[graph.source, graph.target] = True
    torch.testing.assert_close(along.dense(), expected * connected)
    x, theta = torch.randn(6, 3), torch.randn(2, 3, 5)
    weights = expected.masked_fill(~connected, float("-inf")).softmax(-2)
    torch.testing.assert_close(conv(x, along.softmax(), theta), torch.einsum("kmn,mp,kpq->nq", weights, x, theta))


def test_a_dense_without_the_axis_of_heads_is_refused():
    @value
    class Flat(Basis):
        heads: int
        size = property(lambda self: self.heads)
        num_inputs = num_outputs = 6

        def dense(self, dtype=None):
            return torch.eye(6, dtype=dtype)

    for heads in (1, 2):
        with pytest.raises(ShapeError, match=rf"Flat: dense must return \(..., K={heads}, M=6, N=6\); got \(6, 6\)"):
            conv(torch.randn(6, 5), Flat(heads), torch.randn(heads, 5, 7))


def test_a_dense_of_booleans_counts_as_zeros_and_ones():
    @value
    class Table(Basis):
        table: torch.Tensor
        size = 1
        num_inputs = num_outputs = property(lambda self: self.table.shape[-1])

        def dense(self, dtype=None):
            return self.table[None]

    table, x = torch.rand(4, 4) > 0.5, torch.randn(4, 3)
    torch.testing.assert_close(Table(table).analysis(x)[0], table.to(x.dtype).mT @ x)


def test_a_score_without_evaluate_is_abstract():
    @value
    class Typo(Score):
        entries: int
        size = 1
        num_inputs = num_outputs = property(lambda self: self.entries)

        def evalute(self, pairs):
            return pairs.source_index() - pairs.target_index()

    @value
    class OfTheWholeMatrix(Score):
        s: torch.Tensor
        size = 1
        num_inputs = num_outputs = property(lambda self: self.s.shape[-1])

        def dense(self, dtype=None):
            return self.s[None]

    for make in (lambda: Typo(4), lambda: OfTheWholeMatrix(torch.eye(4))):
        with pytest.raises(TypeError, match=r"(?i)abstract class (Typo|OfTheWholeMatrix) .*\bevaluate\b"):
            make()


@value
class Gaps(Score):
    """m - n, without any tensor."""

    entries: int
    size = 1
    num_inputs = num_outputs = property(lambda self: self.entries)

    def evaluate(self, pairs):
        return (pairs.source_index() - pairs.target_index()).to(pairs.dtype).expand(1, *pairs.shape)


def test_a_score_without_tensors_is_one_of_the_cpu():
    n = torch.arange(4.0)
    torch.testing.assert_close(Gaps(4).dense()[0], n[:, None] - n)
    x, theta = torch.randn(4, 3), torch.randn(1, 3, 5)
    basis = Gaps(4).masked(keep=Window(1)).softmax()
    torch.testing.assert_close(conv(x, basis, theta), basis.dense()[0].mT @ x @ theta[0])


def test_entries_of_another_shape_are_refused():
    basis = NoPairs(torch.zeros(2, 3), 5)
    with pytest.raises(ShapeError, match=r"^NoPairs: evaluate must return .* \(..., K=2, 3, 5\); got \(2, 3\)"):
        basis.softmax().dense()


@pytest.mark.parametrize("mask", [None, Window(1)])
def test_a_score_without_the_axis_of_heads_is_refused_even_if_the_batch_has_as_many_samples(mask):
    @value
    class Product(Score):
        s: torch.Tensor
        size = property(lambda self: self.s.shape[-3])
        num_inputs = num_outputs = property(lambda self: self.s.shape[-2])
        batch_shape = property(lambda self: self.s.shape[:-3])

        def evaluate(self, pairs):
            return pairs.combine(lambda s, t: (s * t).sum(-1), self.s, self.s)[:, 0]

    scores = Product(torch.randn(2, 2, 6, 3))
    with pytest.raises(ShapeError, match=r"^Product: evaluate .*, \(2, 2, .*\), for batch_shape is \(2,\); got \(2, "):
        (scores if mask is None else scores.masked(keep=mask)).softmax().dense()


@pytest.mark.parametrize(("wrong", "got"), [(torch.ones(1, 6, 5), r"\(1, 6, 5\)"), (None, "NoneType"), ([1], "list")])
def test_a_dense_of_another_shape_is_refused(wrong, got):
    @value
    class Wrong(Basis):
        size, num_inputs, num_outputs = 1, 6, 6

        def dense(self, dtype=None):
            return wrong

    with pytest.raises(ShapeError, match=rf"^Wrong: dense must return a tensor \(..., K=1, M=6, N=6\); got {got}"):
        conv(torch.randn(6, 5), Wrong(), torch.randn(1, 5, 7))


def test_a_size_that_is_a_method_is_refused():
    with pytest.raises(ConfigError, match=r"^Twice: size must be a property; got a method. Write @property above it"):
        class Twice(Mechanism):
            def size(self):
                return 2


class Inner(Mechanism):
    """A mechanism that uses another one, in three ways."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = DotProduct(dim=3), how

    def forward(self, inputs):
        basis = {"call": self.inner, "evaluate": self.inner.evaluate, "forward": self.inner.forward}[self.how](inputs)
        return basis.dense().tanh()


def test_a_mechanism_calls_another_one():
    x = torch.randn(5, 4)
    layer = Conv(Inner("call"), 4, 4)
    inner = layer.mechanism.inner
    a = ((x @ inner.key.weight.mT) @ (x @ inner.query.weight.mT).mT).tanh()
    torch.testing.assert_close(layer(x), a.mT @ x @ layer.weight().dense()[0] + layer.bias)
    for how in ("evaluate", "forward"):
        with pytest.raises(AttributeError, match=r"has still to compute.* calls it as a module, self.inner\(inputs\)"):
            Conv(Inner(how), 4, 4)(x)


def test_a_basis_of_another_size_is_the_fault_of_the_mechanism():
    class Wrong(Mechanism):
        def forward(self, inputs):
            return torch.zeros(inputs.num_inputs + 1, inputs.num_outputs)

    with pytest.raises(ShapeError, match=r"the basis must have as many inputs as x has entries, M=5; got M=6 in Dense"):
        Conv(Wrong(), 4, 4)(torch.randn(5, 4))


class Closeness(Mechanism):
    """-|m - n| as a tensor, of the outputs that are asked for; `reads` says that their positions are heeded."""

    has_scores, batching = True, "offsets"

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def forward(self, inputs):
        n = inputs.positions_of_outputs() if "positions" in self.reads else torch.arange(inputs.num_outputs)
        return -(torch.arange(inputs.num_inputs).unsqueeze(-1) - n).abs().to(inputs.dtype)


def test_a_term_that_is_a_tensor_and_positions():
    x = torch.randn(6, 4)
    layer = Conv((DotProduct(dim=3) + Closeness(("content", "positions"))).softmax(), 4, 4)
    torch.testing.assert_close(layer(x, z=x[3:5], positions=3), layer(x)[3:5])
    cache = layer.prepare(x[:5])
    torch.testing.assert_close(layer.step(cache, x[5:]), layer(x)[5:])
    layer = Conv((DotProduct(dim=3) + Closeness(("content",))).softmax(), 4, 4)
    for call in (lambda: layer(x, z=x[3:5], positions=3), lambda: layer.step(layer.prepare(x[:5]), x[5:])):
        with pytest.raises(StructureError, match=r"other entries than inputs; got M=6.* name .positions. in reads"):
            call()
