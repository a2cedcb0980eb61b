"""PyTorch Geometric's loaders by our samplers: its `NeighborSampler` in place, the others as classes of ours."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from structconv import data
from structconv.data.subgraphs import EdgeType, NodeType, Sampler
from structconv.errors import ConfigError
from structconv.primitives.sampling import InEdges

__all__ = ["LOADERS", "loader", "take_over"]

#: The loaders that need torch-sparse or METIS there.
LOADERS = ("ClusterData", "ClusterLoader", "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler",
           "GraphSAINTRandomWalkSampler", "HGTLoader")
#: Arguments that say where results are kept on the disk, how METIS works, or what is printed.
_UNUSED = frozenset(("save_dir", "filename", "log", "recursive", "sparse_format"))

_PLAIN: EdgeType = (None, None, None)


def take_over(replace: Callable[[Any, str, Any], None], counts: Counter[str]) -> None:
    """Replace how neighbors are drawn by `replace(owner, name, value)`; `counts` counts the samplers."""
    module = importlib.import_module("torch_geometric.sampler.neighbor_sampler")
    typing = importlib.import_module("torch_geometric.typing")
    ours = _Sampling(module)
    initialize = module.NeighborSampler.__init__

    @wraps(initialize)
    def init(sampler: Any, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation", category=UserWarning)
            initialize(sampler, *args, **options)
        counts["NeighborSampler"] += 1

    def sample(sampler: Any, seed: Any, seed_time: Any = None, **_: Any) -> Any:
        return ours.typed(sampler, seed, seed_time) if isinstance(seed, dict) else ours.plain(sampler, seed, seed_time)

    replace(module.NeighborSampler, "__init__", init)
    replace(module.NeighborSampler, "_sample", sample)
    for name in ("WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE"):
        replace(typing, name, True)


def loader(original: type, counts: Counter[str]) -> type:
    """Our loader of this name, with the arguments of theirs; `counts` counts those that are made."""
    ours, signature = getattr(data, original.__name__), inspect.signature(original)

    class Taken(ours):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            options = signature.bind(*args, **options).arguments
            others = options.pop("kwargs", {})
            for name in [name for name in options if name not in inspect.signature(ours).parameters]:
                if (value := options.pop(name)) != signature.parameters[name].default and name not in _UNUSED:
                    raise ConfigError(original.__name__, f"{name} must be left out under patch()", repr(value))
            super().__init__(**options, **others)
            counts[original.__name__] += 1

    Taken.__name__ = Taken.__qualname__ = original.__name__
    return Taken


class _Sampling:
    """Their sampler's edges and options for ours, and our subgraphs as their outputs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._edges: WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[EdgeType, InEdges]]] = WeakKeyDictionary()

    def plain(self, theirs: Any, seed: Tensor, seed_time: Tensor | None) -> Any:
        """Nodes and edges of one type."""
        graphs = {_PLAIN: (theirs.colptr, theirs.row, theirs.edge_time, theirs.node_time, theirs.edge_weight)}
        sampler = self._sampler(theirs, graphs, {None: theirs.num_nodes}, theirs.num_neighbors.get_mapped_values())
        sample = sampler.sample({None: seed.long()}, _random(), None if seed_time is None else {None: seed_time})
        rows, cols = _ends(theirs, sample.rows, sample.cols)
        nodes, edges = sample.num_sampled_nodes, sample.num_sampled_edges
        return self.module.SamplerOutput(
            node=sample.nodes[None], row=rows[_PLAIN], col=cols[_PLAIN], edge=sample.edges[_PLAIN],
            batch=None if sample.groups is None else sample.groups[None],
            num_sampled_nodes=None if nodes is None else nodes[None],
            num_sampled_edges=None if edges is None else edges[_PLAIN])

    def typed(self, theirs: Any, seed: dict[NodeType, Tensor], seed_time: dict[NodeType, Tensor] | None
              ) -> Any:
        """Nodes and edges of several types."""
        times, weights = theirs.edge_time or {}, theirs.edge_weight or {}
        graphs = {}
        for kind in theirs.edge_types:
            name = theirs.to_rel_type[kind]
            graphs[kind] = (theirs.colptr_dict[name], theirs.row_dict[name], times.get(name),
                          (theirs.node_time or {}).get(kind[0]), weights.get(name))
        fanouts = theirs.num_neighbors.get_mapped_values(theirs.edge_types)
        sampler = self._sampler(theirs, graphs, {kind: theirs.num_nodes[kind] for kind in theirs.node_types},
                                {theirs.to_edge_type[name]: numbers for name, numbers in fanouts.items()})
        sample = sampler.sample({kind: nodes.long() for kind, nodes in seed.items()}, _random(), seed_time)
        rows, cols = _ends(theirs, sample.rows, sample.cols)
        restored = getattr(theirs, "to_restored_edge_type", {})

        def renamed(values: Mapping[EdgeType, Any] | None) -> dict[EdgeType, Any] | None:
            return None if values is None else {restored.get(kind, kind): value for kind, value in values.items()}

        return self.module.HeteroSamplerOutput(
            node=sample.nodes, row=renamed(rows), col=renamed(cols), edge=renamed(sample.edges), batch=sample.groups,
            num_sampled_nodes=sample.num_sampled_nodes, num_sampled_edges=renamed(sample.num_sampled_edges))

    def _sampler(self, theirs: Any, graphs: Mapping[EdgeType, tuple[Any, ...]], num_nodes: Mapping[Any, int],
                 fanouts: Any) -> Sampler:
        tensors = tuple(value for values in graphs.values() for value in values)
        known = self._edges.get(theirs)
        if known is None or any(a is not b for a, b in zip(known[0], tensors, strict=True)):
            known = tensors, {kind: _in_edges(*values) for kind, values in graphs.items()}
            self._edges[theirs] = known
        kind = theirs.subgraph_type.value
        return Sampler(known[1], num_nodes, fanouts, replace=theirs.replace, disjoint=theirs.disjoint,
                       subgraph_type="induced" if kind == "induced" else "directional",
                       temporal_strategy=theirs.temporal_strategy)


def _random() -> int:
    """A seed from torch's generator, as PyTorch Geometric's samples depend on it."""
    return int(torch.empty((), dtype=torch.int64).random_())


def _ends(theirs: Any, rows: Any, cols: Any) -> tuple[Any, Any]:
    return (cols, rows) if theirs.sample_direction == "backward" else (rows, cols)


def _in_edges(indptr: Tensor, sources: Tensor, edge_times: Tensor | None, node_times: Tensor | None,
              weights: Tensor | None) -> InEdges:
    """Their edges by target, as ours."""
    dtype = torch.int32 if indptr.dtype is sources.dtype is torch.int32 else torch.int64
    of_edges, of_nodes = (None if t is None else t.cpu().long().contiguous() for t in (edge_times, node_times))
    return InEdges(indptr.to(dtype).contiguous(), sources.to(dtype).contiguous(), None, of_edges, of_nodes,
                   None if weights is None else weights.detach().cpu().double().contiguous())
