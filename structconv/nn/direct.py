"""Small calls of common layers, straight to their kernel: `direct_of` an expression.

On few entries the way to a kernel (evaluate the expression, compute the key, find the plan) takes longer than the
kernel. For some expressions the kernel is known in advance. A `Direct` checks that a plan would give the same numbers,
and reads the parameters and the edges in each call. Only the last indices of a table of positions are stored between
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases import dense
from structconv.bases.algebra import draw_seed
from structconv.bases.entrywise import Normalized
from structconv.bases.linear import Concat
from structconv.bases.matrices import adjacency
from structconv.bases.pooling import Pooling
from structconv.bases.shift import Shift, ShiftTransposed
from structconv.bases.sparse import Sparse
from structconv.derived import Owner
from structconv.kernels.additive_attention import known as known_activation
from structconv.kernels.small_attention import few_attended, is_first, is_small, position_table
from structconv.kernels.sparse_attention import sorted_edges
from structconv.mechanisms.expression import Inputs
from structconv.mechanisms.given import Identity
from structconv.mechanisms.graphs import Adjacency
from structconv.mechanisms.grids import Cuboid, Pool
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN, Mask
from structconv.mechanisms.operations import Operation
from structconv.mechanisms.positions import ALiBi, RelativeBias
from structconv.mechanisms.scores import Additive, BiAffine, DotProduct, Projection
from structconv.planning import kernel as register
from structconv.planning.tuning import Autotuning
from structconv.primitives.dense_additive import FEW_OUTPUTS, StepInputs, additive_step
from structconv.primitives.functions import finite
from structconv.primitives.fused_attention import exact_attention, fused_attention
from structconv.primitives.images import convolve_images, convolve_transposed, window_means
from structconv.primitives.native.adjacency import Adjacency as Edges
from structconv.primitives.native.adjacency import adjacency_of, unchanged
from structconv.primitives.native.dispatch import NO_DROP, Drop, drop_of, kernels
from structconv.primitives.native.layer import (
    attend_by_dots,
    attend_by_pairs,
    attend_by_terms,
    convolve,
    convolve_with_self,
)
from structconv.primitives.native.node import is_direct
from structconv.primitives.products import linear
from structconv.structures.graph import Graph, listed_edges, looped
from structconv.structures.supports import Causal
from structconv.weights import Eye, Full, HeadBlocks, LowRank
from structconv.weights.base import Factor, plus

__all__ = ["FEW_ALONG_EDGES", "FEW_NUMBERS", "Direct", "DirectStep", "direct_of", "drawn", "dtypes_of_torch",
           "is_plain", "must_be_planned", "step_of"]

#: (layer, x, structure) -> y, or `None` if the call must be planned.
Direct = Callable[[Any, Tensor, Any], Tensor | None]
#: (layer, x or a `Cache` of it, outputs z) -> y, or `None` as above.
DirectStep = Callable[[Any, Any, Tensor], Tensor | None]
#: Errors of operators, torch's and ours, for tensors that do not fit.
REFUSED = (RuntimeError, ValueError)
#: Numbers of x and of y up to which a call is small.
FEW_NUMBERS = 1 << 16
#: Numbers of projected rows up to which a call along edges is small. For more, a plan chooses among the same kernels.
FEW_ALONG_EDGES = 3 << 19
#: The parameters of a linear layer.
_LINEAR = {"weight", "bias"}
#: A step of an expression: its name and its options.
_Step = tuple[str, dict[str, Any]]
_SOFTMAX: list[_Step] = [("normalize", {"kind": "softmax", "over": "inputs"})]
_MEAN: list[_Step] = [("normalize", {"kind": "sum", "over": "inputs"})]
_TRANSPOSE: list[_Step] = [("transpose", {})]
#: `Identity()` beside a mechanism of edges, and which of both parts it is.
_Beside = tuple[Identity, int]
#: Normalizations of a matrix that kernels compute from the edges.
_KINDS = (None, "sym", "row")
#: Entries of a convolution's kernel up to which the planner takes torch's convolution, with few exceptions at nearly
#: equal cost.
_USUAL = 49
_FLOATING = torch.float32, torch.float64, torch.bfloat16, torch.float16


def direct_of(root: Any) -> Direct | None:
    """Return the direct call of layers with this expression, if there is one."""
    if _is_named(root):
        return None
    if type(root) is Adjacency:
        return partial(_convolve, root, None) if root.normalize_by in _KINDS else None
    if type(root) is Identity:
        return partial(_project, root) if root.size == 1 else None
    if type(root) is Cuboid and (padding := _padding(root)) is not None:
        return partial(_convolve_image, root, padding, _is_usual(root))
    if type(root) is Cuboid and (pads := _pads(root)) is not None:
        return partial(_convolve_padded, root, *pads, _is_usual(root))
    if type(root) is Pool:
        return None if root.ndim is None else partial(_pool_image, root, True)
    if type(root) is not Operation:
        return None
    leaf, steps = root.mechanisms()[0], [(step.name, dict(step.options)) for step in root.steps]
    if root.join == "concat":
        return None if steps else _with_self(root)
    if root.join is not None:
        return _attention(root, steps) if root.join == "add" else None
    if type(leaf) is Cuboid:
        padding = _padding(leaf)
        return partial(_convolve_transposed, leaf, padding) if steps == _TRANSPOSE and padding is not None else None
    if type(leaf) is Pool:
        return partial(_pool_image, leaf, False) if steps == _MEAN and leaf.ndim is not None else None
    return _attention(root, steps)


def _is_named(root: Any) -> bool:
    """Return True if a call gives x or the structure of this expression by name."""
    return "_names" in root.__dict__ or "_reads" in root.__dict__


def _with_self(root: Operation) -> Direct | None:
    """The direct call of a mechanism of edges beside `Identity()`."""
    parts = root.mechanisms()
    own = next((i for i, part in enumerate(parts) if type(part) is Identity), 0)
    itself, near = parts[own], parts[1 - own]
    if len(parts) != 2 or type(itself) is not Identity or itself.size != 1:
        return None
    direct: Any = direct_of(near)
    if getattr(direct, "func", None) not in (_convolve, _attend_dots) or direct.args[-1] is not None:
        return None
    return partial(direct.func, *direct.args[:-1], (itself, own))


def _attention(root: Operation, steps: list[_Step]) -> Direct | None:
    """The direct call of a softmax of scores over the inputs, masked or not, with dropout or without."""
    leaf, scale, term = (root.mechanisms()[0], 1.0, None) if root.join is None else _with_term(root.mechanisms())
    p = steps.pop()[1]["p"] if steps and steps[-1][0] == "dropout" else 0.0
    modules = root._step_modules()
    if len(modules) > 1 or steps[-1:] != _SOFTMAX:
        return None
    mask: Any = modules[0] if modules else None
    if mask is not None and (type(mask) is not Mask or not mask._kept):
        return None
    reads, names, options = getattr(mask, "_mask", None), [name for name, _ in steps[:-1]], dict(steps)
    if type(leaf) is BiAffine and names == ["leaky_relu", "masked"]:
        whole = leaf.source and leaf.target and not leaf.bilinear and not leaf.constant and leaf._on == "projected"
        slope = options["leaky_relu"]["negative_slope"]
        return partial(_attend_edges, leaf, mask, slope, p) if whole and reads is STRUCTURE and slope >= 0 else None
    if type(leaf) is Additive and names == ["masked"] and leaf._on == "projected" and reads is STRUCTURE:
        name, slope = getattr(leaf.activation, "static_key", (None, 0.0))
        return partial(_attend_pairs, leaf, mask, slope, p) if name == "leaky_relu" else None
    if type(leaf) is not DotProduct or leaf.shared_by != 1 or not leaf.projects or leaf.rotary or leaf.feature:
        return None
    if term is None and names.count("scaled") == 1:
        names.remove("scaled")
        scale = options["scaled"]["scale"]
    if names not in ([], ["masked"]) or isinstance(scale, Tensor) or (reads is STRUCTURE and term is not None):
        return None
    if reads is STRUCTURE:
        return partial(_attend_dots, leaf, mask, scale, p, None)
    known = mask is None or reads is STRUCTURE_IF_GIVEN or type(reads) is Causal
    return partial(_attend_entries, leaf, mask, scale, p, term, Owner()) if known else None


def _with_term(parts: Any) -> tuple[Any, Any, Any]:
    """The dot product, its scale and the term of positions in a sum of the two; no dot product of another sum."""
    term = next((part for part in parts if type(part) in (ALiBi, RelativeBias)), None)
    leaf, scale = next((part for part in parts if part is not term), None), 1.0
    if type(leaf) is Operation and leaf.join is None and [step.name for step in leaf.steps] == ["scaled"]:
        scale, leaf = dict(leaf.steps[0].options)["scale"], leaf.mechanisms()[0]
    on_grid = isinstance(getattr(term, "clip", None), tuple)
    if len(parts) != 2 or type(leaf) is not DotProduct or term is None or on_grid:
        return None, 1.0, None
    return leaf, scale, term


def step_of(root: Any, direct: Any) -> DirectStep | None:
    """Return the direct call of layers with this expression for few outputs z of another x, if there is one; `direct`
    is what `direct_of` returns."""
    if getattr(direct, "func", None) is _attend_entries:
        return partial(_attend_others, direct)
    if type(root) is not Operation or root.join is not None or _is_named(root):
        return None
    leaf = root.mechanisms()[0]
    if type(leaf) is not Additive or leaf._on == "projected" or leaf.heads != 1 or (
            [(step.name, dict(step.options)) for step in root.steps] != _SOFTMAX):
        return None
    named = known_activation(leaf.activation)
    return None if named is None else partial(_attend_prepared, leaf, named[0])


def is_plain(layer: Any, basis: type, *parts: Any) -> bool:
    """Return True if no limit, setting or user's kernel asks for a plan, and calls of the parts are their `forward`."""
    own = layer.__dict__
    planned = (register.OF_USERS or Autotuning.enabled or private.any_autocast()) and must_be_planned(basis)
    return (own.get("path") is own.get("max_bytes") is own["_modules"].get("relative_value") is None
            and not planned and private.all_plain(*parts))


def must_be_planned(basis: type) -> bool:
    """Return True if paths are timed, under autocast, and if a user's kernel may compute such a basis."""
    return bool(Autotuning.enabled or private.any_autocast() or (
        register.OF_USERS and any(issubclass(basis, kernel.types) for kernel in register.OF_USERS)))


def _weight_of(layer: Any) -> tuple[Any, type, Any, Any]:
    """The module of Theta, its kind, Theta where it is one parameter, and b."""
    weight, parameters = layer._modules["weight"], layer._parameters
    bias = parameters["bias"] if "bias" in parameters else layer.bias  # noqa: SIM401 - lazy
    return weight, type(getattr(weight, "kind", None)), weight._parameters.get("theta"), bias


# -- products with Theta, and images ------------------------------------------------------------------------------

def _project(leaf: Identity, layer: Any, x: Tensor, structure: Any) -> Tensor | None:
    """x Theta + b."""
    weight, kind, theta, bias = _weight_of(layer)
    if structure is not None or theta is None or kind is not Full or theta.shape[0] != 1:
        return None
    if x.dim() != 2 or x.shape[1] != theta.shape[1] or x.shape[0] * max(theta.shape) > FEW_NUMBERS:
        return None
    fits = x.dtype is torch.float32 and x.is_cpu and not layer._added
    if not fits or not is_plain(layer, dense.Identity, leaf, weight):
        return None
    theta = theta.squeeze(0)
    try:
        return x @ theta if bias is None else torch.addmm(bias, x, theta)
    except REFUSED:  # the plan says what does not fit
        return None


def _padding(leaf: Cuboid) -> list[int] | None:
    """Zeros on both sides of each axis; `None` if the padding is something else."""
    padding = [low for low, high in leaf.padding if low == high]
    usual = leaf.padding_mode in ("none", "zeros") and not any(leaf.offset) and len(padding) == leaf.ndim
    return padding if usual else None


def _pads(leaf: Cuboid) -> tuple[list[int], str] | None:
    """Other padding that `torch.nn.functional.pad` does: its amounts, those of the last axis first, and its mode."""
    if leaf.padding_mode is None or any(leaf.offset) or min(map(min, leaf.padding)) < 0:
        return None
    mode = "constant" if leaf.padding_mode in ("none", "zeros") else leaf.padding_mode
    return [amount for pair in reversed(leaf.padding) for amount in pair], mode


def _of_one(image: Tensor, direct: Callable[..., Tensor | None], option: Any = None) -> Tensor | None:
    """The result for an image without a batch, as that of a batch of one."""
    if image.layout is not torch.strided or type(image) is not Tensor:
        return None
    y = direct(image.unsqueeze(0), option)
    return None if y is None else y.squeeze(0)


def _convolve_image(leaf: Cuboid, padding: list[int], usual: bool, layer: Any, image: Tensor, _: Any
                    ) -> Tensor | None:
    """A convolution of images: what the planner takes for few numbers, and for usual kernels always."""
    parameters = layer._parameters
    kernel = parameters.get("weight")
    if image.dim() == len(padding) + 1:
        return _of_one(image, partial(_convolve_image, leaf, padding, usual, layer))
    if kernel is None or image.dim() != len(padding) + 2 or not (usual or image.numel() <= FEW_NUMBERS):
        return None
    bias = parameters["bias"] if "bias" in parameters else layer.bias  # noqa: SIM401 - lazy
    if image.shape[1] != layer.in_channels or kernel.shape[2:] != leaf.kernel_size or image.layout is not torch.strided:
        return None
    if image.dtype is not torch.float32 or not image.is_cpu or not is_plain(layer, Shift, leaf):
        return None
    try:
        return convolve_images(image, kernel, bias, leaf.stride, padding, leaf.dilation, layer.groups)
    except REFUSED:  # the plan computes it, or says what does not fit
        return None


def _convolve_padded(leaf: Cuboid, pads: list[int], mode: str, usual: bool, layer: Any, image: Tensor, _: Any
                     ) -> Tensor | None:
    """`_convolve_image` with padding that it does not do itself."""
    if (image.dim() - len(leaf.kernel_size) not in (1, 2) or image.dtype is not torch.float32 or not image.is_cpu
            or image.layout is not torch.strided or not is_plain(layer, Shift, leaf)):
        return None
    try:
        wide = F.pad(image, pads, mode)
    except REFUSED:  # as above
        return None
    return _convolve_image(leaf, [0] * len(leaf.kernel_size), usual, layer, wide, None)


def _convolve_transposed(leaf: Cuboid, padding: list[int], layer: Any, image: Tensor, extra: Any) -> Tensor | None:
    """A transposed convolution of images, with `extra` padding of its output."""
    parameters = layer._parameters
    kernel = parameters.get("weight")
    if image.dim() == len(padding) + 1:
        return _of_one(image, partial(_convolve_transposed, leaf, padding, layer), extra)
    if kernel is None or extra is None or image.dim() != len(padding) + 2 or image.layout is not torch.strided:
        return None
    bias = parameters["bias"] if "bias" in parameters else layer.bias  # noqa: SIM401 - lazy
    fits = image.shape[1] == layer.in_channels and image.dtype is torch.float32 and image.is_cpu
    if not fits or not is_plain(layer, ShiftTransposed, leaf):
        return None
    try:
        return convolve_transposed(image, kernel, bias, leaf.stride, padding, extra, layer.groups, leaf.dilation)
    except REFUSED:  # as above
        return None


def _pool_image(leaf: Pool, all_count: bool, layer: Any, image: Tensor, _: Any) -> Tensor | None:
    """The mean over windows of images, in a layer without Theta."""
    if image.dim() == len(leaf.window) + 1:
        return _of_one(image, partial(_pool_image, leaf, all_count, layer))
    if "weight" in layer._modules or layer._parameters or image.dim() != len(leaf.window) + 2:
        return None
    basis = Pooling if all_count else Normalized
    if (image.layout is not torch.strided or image.dtype is not torch.float32 or not image.is_cpu
            or not is_plain(layer, basis, leaf)):
        return None
    try:
        return window_means(image, leaf.window, leaf.stride, leaf.padding, all_count)
    except REFUSED:  # as above
        return None


def _is_usual(leaf: Cuboid) -> bool:
    """Return True for small kernels of odd sizes, except a single entry with a stride."""
    skips = leaf.size == 1 and max(leaf.stride) > 1
    return all(size % 2 for size in leaf.kernel_size) and leaf.size <= _USUAL and not skips


def dtypes_of_torch(direct: Direct | None) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which torch's own layer computes many numbers of a convolution as a plan would."""
    if not isinstance(direct, partial):
        return ()
    if direct.func is _convolve_transposed:
        return _FLOATING[max(direct.args[0].stride) == 1:]  # in the first we reverse the kernel
    return _FLOATING if direct.func is _convolve_image and direct.args[2] else ()


# -- graphs -------------------------------------------------------------------------------------------------------

def _convolve(leaf: Adjacency, beside: _Beside | None, layer: Any, x: Tensor, graph: Any) -> Tensor | None:
    """A^T x Theta + b over the edges of a graph, or A^T x Theta_0 + x Theta_1 + b with an identity `beside` it."""
    weight, kind, theta, bias = _weight_of(layer)
    if type(graph) is not Graph or theta is None or kind is not Full or x.dim() != 2 or layer._added:
        return None
    size, channels, outputs = theta.shape
    fits = x.shape == (graph.num_inputs, channels) and graph.num_inputs * max(channels, outputs) <= FEW_ALONG_EDGES
    if not fits or not is_direct(x, theta, bias):
        return None
    if beside is None:
        plain = size == 1 and is_plain(layer, Sparse, leaf, weight)
    else:
        itself, own = beside
        plain = (size == 2 and graph.num_outputs == graph.num_inputs and not must_be_planned(Sparse)
                 and is_plain(layer, Concat, leaf, itself, weight))
    prepared = _matrix(leaf, graph, x) if plain else None
    if prepared is None:
        return None
    edges, sums = prepared
    if beside is None:
        return convolve(edges, lambda x, theta, bias: plus(sums(x) @ theta.squeeze(0), bias), x, theta, bias,
                        channels <= outputs)
    return convolve_with_self(
        edges, lambda x, theta, bias: plus(sums(x) @ theta[1 - own] + x @ theta[own], bias), x, theta, bias, own)


def _matrix(leaf: Adjacency, graph: Graph, x: Tensor) -> tuple[Edges, Any] | None:
    """The edges as kernels read them, and A^T x by differentiable operators, which fail if the edges changed; only
    gradients need these."""
    graph = looped(graph) if leaf.self_loops else graph
    index, loops = listed_edges(graph)
    weights = graph.edge_weight if leaf.weighted else None
    if type(index) is not Tensor or (weights is not None and (
            type(weights) is not Tensor or weights.requires_grad or weights.dtype is not x.dtype or weights.dim() > 1)):
        return None
    edges = adjacency_of(index, graph.num_inputs, graph.num_outputs, loops=loops, square=graph.is_square,
                         normalize=cast("str | None", leaf.normalize_by), weights=weights)
    if edges is None or not torch.is_grad_enabled():
        return None if edges is None else (edges, None)
    return edges, unchanged(index, lambda x: adjacency(
        graph, leaf.normalize_by, x.dtype, leaf.weighted).analysis(x).squeeze(-3))


def _edges(graph: Any, x: Tensor, channels: int, width: int) -> tuple[Edges, Callable[[], tuple[Any, Any]]] | None:
    """The edges among the entries x (M, P) as kernels read them, and a function that returns both layouts, or raises an
    error if the edges changed."""
    if type(graph) is not Graph or x.dim() != 2 or x.shape[1] != channels:
        return None
    nodes = x.shape[0]
    if nodes * width > FEW_ALONG_EDGES or type(listed_edges(graph)[0]) is not Tensor:
        return None
    edges = sorted_edges(graph, nodes, nodes)
    return None if edges is None else (edges.adjacency, edges.layouts)


def drawn(p: float, layer: Any, heads: int) -> Drop:
    """The dropout of a call, with the numbers that the expression would draw."""
    return drop_of(p, draw_seed(), heads) if p and layer.training else NO_DROP


def _attend_edges(leaf: BiAffine, mask: Any, slope: float, p: float, layer: Any, x: Tensor, graph: Any
                  ) -> Tensor | None:
    """GAT's attention among the entries of a graph, the heads side by side."""
    weight, kind, theta, bias = _weight_of(layer)
    source, target = leaf._parameters.get("vector_source"), leaf._parameters.get("vector_target")
    if kind is not HeadBlocks or theta is None or source is None or target is None or layer._added:
        return None
    heads, channels, depth = theta.shape
    if not is_direct(x, theta, source, target, bias) or not is_plain(layer, Normalized, leaf, mask, weight):
        return None
    prepared = _edges(graph, x, channels, heads * depth)
    if prepared is None:
        return None
    drop = drawn(p, layer, heads) if p else NO_DROP
    return attend_by_terms(*prepared, x, theta, source, target, bias, slope, drop)


def _attend_pairs(leaf: Additive, mask: Any, slope: float, p: float, layer: Any, x: Tensor, graph: Any
                  ) -> Tensor | None:
    """GATv2's attention among the entries of a graph, the heads side by side."""
    weight, kind, theta, bias = _weight_of(layer)
    to, vector = leaf._modules["target"], leaf._parameters.get("vector")
    if type(to) is not Projection or kind is not HeadBlocks or theta is None or vector is None or layer._added:
        return None
    matrix, offset = to._parameters.get("weight"), to._parameters.get("bias")
    if matrix is None or offset is None:
        return None
    heads, channels, depth = theta.shape
    if not is_direct(x, theta, matrix, offset, vector, bias) or not is_plain(
            layer, Normalized, leaf, mask, weight, to):
        return None
    prepared = _edges(graph, x, channels, 2 * heads * depth)
    if prepared is None:
        return None
    drop = drawn(p, layer, heads) if p else NO_DROP
    return attend_by_pairs(*prepared, x, theta, matrix, offset, vector, bias, slope, drop)


def _attend_dots(leaf: DotProduct, mask: Any, scale: float | None, p: float, beside: _Beside | None, layer: Any,
                 x: Tensor, graph: Any) -> Tensor | None:
    """Scaled dot-product attention among the entries of a graph, the heads side by side; plus x Theta where an identity
    is `beside` it."""
    weight, kind, theta, bias = _weight_of(layer)
    query, key, root = leaf._modules["query"], leaf._modules["key"], None
    modules: list[Any] = [leaf, mask, query, key, weight]
    if beside is not None:
        if weight._modules.keys() != {"0", "1"}:
            return None
        itself, own = beside
        of_own, weight = weight._modules[str(own)], weight._modules[str(1 - own)]
        modules += [itself, of_own, weight]
        kind, theta = type(getattr(weight, "kind", None)), weight._parameters.get("theta")
        root = of_own._parameters.get("theta")
        if root is None or root.shape[0] != 1 or type(getattr(of_own, "kind", None)) is not Full:
            return None
    if kind is not HeadBlocks or theta is None or layer._added:
        return None
    projections = _projections(query, key)
    if projections is None:
        return None
    q, q_bias, k, k_bias = projections
    if not is_direct(x, q, q_bias, k, k_bias, theta, root, bias):
        return None
    if must_be_planned(Normalized) or not is_plain(layer, Normalized if root is None else Concat, *modules):
        return None
    heads, channels, depth = theta.shape
    if heads != leaf.heads or q.shape != k.shape or q.shape[1] != channels:
        return None
    if root is not None and tuple(root.shape[1:]) != (channels, heads * depth):
        return None
    prepared = _edges(graph, x, channels, 2 * len(q) + heads * depth)
    if prepared is None:
        return None
    number = (len(q) // heads) ** -0.5 if scale is None else scale
    drop = drawn(p, layer, heads) if p else NO_DROP
    y = attend_by_dots(*prepared, x, q, q_bias, k, k_bias, theta, None, bias, heads, number, drop)
    return y if root is None else torch.addmm(y, x, root.squeeze(0))


def _projections(query: Any, key: Any) -> tuple[Any, Any, Any, Any] | None:
    """The weight and bias of queries and of keys; `None` if a projection or one of its parameters was replaced."""
    if type(query) is not Projection or type(key) is not Projection:
        return None
    of_query: Any = query._parameters
    of_key: Any = key._parameters
    if of_query.keys() != _LINEAR or of_key.keys() != _LINEAR:
        return None
    return of_query["weight"], of_query["bias"], of_key["weight"], of_key["bias"]


# -- attention of all pairs ---------------------------------------------------------------------------------------

def _attend_prepared(leaf: Additive, activation: str, layer: Any, cache: Any, z: Tensor) -> Tensor | None:
    """Additive attention of few outputs z (B, N, P') to a prepared x (B, M, P), which Theta leaves as it is."""
    (weight, kind, _, bias), to = _weight_of(layer), leaf._modules["target"]
    if type(cache) is Tensor or type(to) is not Projection or kind is not Eye or layer._added:
        return None
    (matrix, offset), vector = private.weight_and_bias(to), leaf._parameters.get("vector")
    if vector is None or cache.layer is not layer or not cache.structure is cache.pending is None:
        return None
    x = cache.x
    if not is_direct(z, x, matrix, offset, vector, bias) or not is_plain(layer, Normalized, leaf, weight, to):
        return None
    fits = x.dim() == z.dim() == 3 and z.shape[0] == x.shape[0] and z.shape[2] == matrix.shape[1]
    if not fits or not 0 < z.shape[1] <= FEW_OUTPUTS:
        return None
    cache.check()
    keys, (samples, entries, channels) = cache.of(leaf.keys), x.shape
    shared = (samples,), (samples, 1, entries, channels)  # with calls that take a plan
    inputs = cache.reused.of((keys, x, vector), shared, lambda: StepInputs.of(
        keys.flatten(0, -3).transpose(0, 1), x.transpose(0, 1), vector.expand(samples, -1), activation))
    q = linear(z, matrix, offset).transpose(0, 1)
    return plus(additive_step(q, inputs).transpose(0, 1), bias) if inputs is not None and inputs.take(q) else None


def _attend_others(direct: Any, layer: Any, x: Any, z: Tensor) -> Tensor | None:
    """`_attend_entries` of outputs z that are not among x."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or z.is_nested:
        return None
    if z.dim() != x.dim() or z.shape[:-2] != x.shape[:-2] or not 0 < z.numel() <= FEW_NUMBERS:
        return None
    y: Tensor | None = direct(layer, x, None, z)
    return y


def _attend_entries(leaf: DotProduct, mask: Mask | None, scale: float | None, p: float, term: Any, owner: Owner,
                    layer: Any, x: Tensor, structure: Any, z: Tensor | None = None) -> Tensor | None:
    """Multi-head attention of few entries to themselves, with a term of their positions or none, or of z to x: by one
    kernel, or by that of all pairs between products."""
    if x.dim() not in (2, 3) or x.numel() > FEW_NUMBERS:
        return None
    if structure is not None and (type(structure) is not Causal or mask is None or type(mask._mask) is Causal):
        return None
    query, key, heads = leaf._modules["query"], leaf._modules["key"], leaf.heads
    projections = _projections(query, key)
    if projections is None:
        return None
    q, q_bias, k, k_bias = projections
    weight, kind, value, bias = _weight_of(layer)
    modules: list[Any] = [leaf, weight, query, key]
    modules += () if mask is None else (mask,)
    modules += () if term is None else (term,)

    added = output = None  # the bias of values, and O
    if kind is LowRank:
        by_values, by_output = weight._modules.get("value"), weight._modules.get("output")
        if type(by_values) is not Factor or type(by_output) is not Factor or weight.kind.shared_by != 1:
            return None
        added = layer._parameters.get("value_bias")
        value, output = by_values._parameters.get("weight"), cast("Any", by_output._parameters.get("weight"))
        if value is None or output is None or (layer._added and added is None and layer.value_bias is not None):
            return None
        modules += (by_values, by_output)
        channels = value.shape[0] // heads
    elif kind is Full or kind is HeadBlocks:
        if value is None or layer._added or len(value) != heads or not is_first(value, x, kind is Full):
            return None
        channels = value.shape[2]
    else:
        return None

    # by one kernel for few entries, else by that of all pairs between products
    causal, depth = structure is not None or (mask is not None and type(mask._mask) is Causal), len(q) // heads
    small = z is None and not (p and layer.training) and is_small(x.shape[-2], depth, channels)
    if not small and (output is None or term is not None or len(q) != len(value) or (causal and z is not None)):
        return None
    if x.dtype is not torch.float32 or not x.is_cpu or kernels() is None or not is_plain(layer, Normalized, *modules):
        return None
    table, index = (None, None) if term is None else position_table(term.forward(Inputs(x, x)), x, owner)
    tensors, others = (x, q, q_bias, k, k_bias, value, added, output, bias, table), x if z is None else z
    if not is_direct(*tensors, z) or (table is not None and table.shape[-3] not in (1, heads)):
        return None
    if others.shape[-1] != q.shape[-1] or not x.shape[-1] == k.shape[-1] == value.shape[1]:
        return None
    number = depth ** -0.5 if scale is None else scale
    if small:
        return few_attended(tensors, index, heads, number, causal, kind is Full)
    return _attend_by_products(tensors, others, heads, number, causal, drawn(p, layer, heads) if p else NO_DROP)


def _attend_by_products(tensors: Any, others: Tensor, heads: int, scale: float, causal: bool, drop: Drop
                        ) -> Tensor | None:
    """The attention of `others` to x, by the kernel of all pairs between products; `None` if there is no such kernel,
    or if a value that is not finite may have reached an earlier output."""
    x, q, q_bias, k, k_bias, value, added, output, bias, _ = tensors
    added = None if added is None else added.flatten()
    of_values = None if drop[0] else added  # weights that are dropped do not sum to one: it is added after them
    q, k, v = [linear(rows if x.dim() == 3 else rows.unsqueeze(0), weight, b).unflatten(-1, (heads, -1)).transpose(1, 2)
               for rows, weight, b in ((others, q, q_bias), (x, k, k_bias), (x, value, of_values))]
    if drop[0]:
        dropped = exact_attention(q, k, v, None, causal, scale, drop)
        if dropped is None:
            return None
        y, exact = dropped, True
    else:
        y, exact = fused_attention(q, k, v, None, causal, scale)
    if causal and not exact and not finite(y[..., -1:, :]):
        return None
    y = y.transpose(1, 2).flatten(2)
    y = linear(y if added is None or not drop[0] else y + added, output, bias)
    return y if x.dim() == 3 else y.squeeze(0)
