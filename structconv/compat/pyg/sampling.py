"""PyTorch Geometric's loaders by our samplers: its `NeighborSampler` in place, the others as classes of ours."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from structconv import data
from structconv.data.sources import PLAIN_EDGE, PLAIN_NODE, sampler_output
from structconv.data.subgraphs import EdgeType, Sampler
from structconv.errors import ConfigError
from structconv.primitives.sampling import InEdges

__all__ = ["LOADERS", "loader", "take_over"]

#: The loaders that need torch-sparse or METIS there.
LOADERS = ("ClusterData", "ClusterLoader", "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler",
           "GraphSAINTRandomWalkSampler", "HGTLoader")
#: Arguments that say where results are kept on the disk, how METIS works, or what is printed.
_UNUSED = frozenset(("save_dir", "filename", "log", "recursive", "sparse_format"))


def take_over(replace: Callable[[Any, str, Any], None], counts: Counter[str], made: Callable[[Any], Any]) -> None:
    """Replace how neighbors are drawn by `replace(owner, name, value)`; `counts` counts the samplers, and pickle makes
    them by `made(class)`, where it then sets their attributes."""
    module = importlib.import_module("torch_geometric.sampler.neighbor_sampler")
    typing = importlib.import_module("torch_geometric.typing")
    initialize = module.NeighborSampler.__init__

    @wraps(initialize)
    def init(sampler: Any, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation", category=UserWarning)
            initialize(sampler, *args, **options)
        counts["NeighborSampler"] += 1

    def reduce(sampler: Any, protocol: Any) -> tuple[Any, ...]:
        return made, (type(sampler),), sampler.__dict__

    replace(module.NeighborSampler, "__init__", init)
    replace(module.NeighborSampler, "__reduce_ex__", reduce)
    replace(module.NeighborSampler, "_sample", _sample)
    for name in ("WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE"):
        replace(typing, name, True)


@cache
def loader(name: str) -> type:
    """Our loader of this name, with the arguments of theirs; its `counts` count those that are made."""
    original = getattr(importlib.import_module("torch_geometric.loader"), name)
    ours, signature = getattr(data, name), inspect.signature(original)

    class Loader(ours):  # type: ignore[misc, valid-type]
        counts: ClassVar[Counter[str]] = Counter()

        def __init__(self, *args: Any, **options: Any) -> None:
            options = signature.bind(*args, **options).arguments
            others = options.pop("kwargs", {})
            for name in [name for name in options if name not in inspect.signature(ours).parameters]:
                if (value := options.pop(name)) != signature.parameters[name].default and name not in _UNUSED:
                    raise ConfigError(original.__name__, f"{name} must be left out under patch()", repr(value))
            super().__init__(**options, **others)
            Loader.counts[original.__name__] += 1

    Loader.__name__ = Loader.__qualname__ = name
    return Loader


def __getattr__(name: str) -> type:
    """The classes of loaders, by which pickle finds them in a worker."""
    if name in LOADERS:
        return loader(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: Their samplers, with the tensors of their edges, and the same edges in our form.
_EDGES: WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[EdgeType, InEdges]]] = WeakKeyDictionary()


def _sample(theirs: Any, seed: Any, seed_time: Any = None, **_: Any) -> Any:
    """Draw neighbors with the edges and the options of their sampler; return PyTorch Geometric's output."""
    typed, graphs = isinstance(seed, dict), {}
    if typed:
        times, weights = theirs.edge_time or {}, theirs.edge_weight or {}
        for kind in theirs.edge_types:
            name = theirs.to_rel_type[kind]
            graphs[kind] = (theirs.colptr_dict[name], theirs.row_dict[name], times.get(name),
                            (theirs.node_time or {}).get(kind[0]), weights.get(name))
        num_nodes = {kind: theirs.num_nodes[kind] for kind in theirs.node_types}
        mapped = theirs.num_neighbors.get_mapped_values(theirs.edge_types)
        fanouts: Any = {theirs.to_edge_type[name]: numbers for name, numbers in mapped.items()}
    else:
        graphs[PLAIN_EDGE] = theirs.colptr, theirs.row, theirs.edge_time, theirs.node_time, theirs.edge_weight
        num_nodes, fanouts = {PLAIN_NODE: theirs.num_nodes}, theirs.num_neighbors.get_mapped_values()
        seed, seed_time = {PLAIN_NODE: seed}, None if seed_time is None else {PLAIN_NODE: seed_time}
    tensors = tuple(value for values in graphs.values() for value in values)
    known = _EDGES.get(theirs)
    if known is None or any(a is not b for a, b in zip(known[0], tensors, strict=True)):
        known = _EDGES[theirs] = tensors, {kind: _in_edges(*values) for kind, values in graphs.items()}
    sampler = Sampler(known[1], num_nodes, fanouts, replace=theirs.replace, disjoint=theirs.disjoint,
                      subgraph_type="induced" if theirs.subgraph_type.value == "induced" else "directional",
                      temporal_strategy=theirs.temporal_strategy)
    number = int(torch.empty((), dtype=torch.int64).random_())  # their samples depend on torch's generator too
    sample = sampler.sample({kind: nodes.long() for kind, nodes in seed.items()}, number, seed_time)
    if theirs.sample_direction == "backward":
        sample.rows, sample.cols = sample.cols, sample.rows
    restored = getattr(theirs, "to_restored_edge_type", {})
    for name in ("rows", "cols", "edges", "num_sampled_edges") if restored else ():
        values = getattr(sample, name)
        if values is not None:
            setattr(sample, name, {restored.get(kind, kind): value for kind, value in values.items()})
    return sampler_output(sample, typed)


def _in_edges(indptr: Tensor, sources: Tensor, edge_times: Tensor | None, node_times: Tensor | None,
              weights: Tensor | None) -> InEdges:
    """Their edges by target in our form."""
    dtype = torch.int32 if indptr.dtype is sources.dtype is torch.int32 else torch.int64
    of_edges, of_nodes = (None if t is None else t.cpu().long().contiguous() for t in (edge_times, node_times))
    return InEdges(indptr.to(dtype).contiguous(), sources.to(dtype).contiguous(), None, of_edges, of_nodes,
                   None if weights is None else weights.detach().cpu().double().contiguous())
