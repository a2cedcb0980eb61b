"""`NeighborLoader` and `LinkNeighborLoader`: mini-batches of a large graph, with PyTorch Geometric's arguments."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from structconv.arguments import check_constructor, plain
from structconv.data.checks import check_indices, check_loading, check_range, check_rows, check_times
from structconv.data.sources import PLAIN_EDGE, PLAIN_NODE, NeighborBatch, Source, source_of
from structconv.data.subgraphs import EdgeType, NodeType, Sampler, Subgraph
from structconv.errors import ConfigError, ShapeError, StructconvError, StructureError
from structconv.primitives.hashing import hash_bits
from structconv.primitives.sampling import random_below
from structconv.shapes import check_seed

__all__ = ["LinkNeighborLoader", "Loader", "NeighborBatch", "NeighborLoader", "input_nodes_of"]

_OWNER = "NeighborLoader"
#: Attributes of torch's `DataLoader` that have generators.
_DRAWING = frozenset(("batch_sampler", "generator", "sampler"))


class _Positions:
    """The positions of all seeds; each comes with the random number of its epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Any) -> Any:
        return key


class _Shuffled(RandomSampler):
    """All positions in random order, drawn when an epoch starts: torch's class draws another order when it ends, so
    that the epoch after one that stopped early would depend on how far workers were ahead."""

    def __iter__(self) -> Iterator[int]:
        generator = self.generator or torch.Generator().manual_seed(_number(None))
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()


class _Numbered:
    """The positions of a sampler, or with `batches` its lists of positions, each with a random number of the epoch, so
    that workers need no state. The number of a position that comes again is another, so that equal batches differ."""

    def __init__(self, positions: Any, generator: torch.Generator | None, batches: bool) -> None:
        self.positions, self.generator, self.batches = positions, generator, batches

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[Any]:
        epoch = _number(self.generator)
        if type(self.positions) in (_Shuffled, SequentialSampler):  # each position once
            for position in self.positions:
                yield epoch, position
            return
        seen: Counter[int] = Counter()
        for position in self.positions:
            keys = []
            try:
                for key in map(operator.index, position if self.batches else (position,)):
                    keys.append(((epoch + seen[key]) % 2**63, key))
                    seen[key] += 1
            except TypeError as error:
                raise ConfigError(_OWNER, "sampler must yield integers, batch_sampler lists of integers",
                                  repr(position)) from error
            yield keys if self.batches else keys[0]


def _number(generator: torch.Generator | None) -> int:
    """A random number from the generator, or from torch's own."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _named(constructor: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a loader so that errors of what loaders share name its class."""
    @functools.wraps(constructor)
    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            constructor(self, *args, **kwargs)
        except StructconvError as error:
            if error.owner == _OWNER:
                error.rename(type(self).__name__)
            raise

    return called


class Loader(DataLoader[Any]):
    """Samples a subgraph for each batch of `length` seeds, in the workers if there are some; see `NeighborLoader`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Arguments of the constructor that have a wrong type are named, in an error that names the class."""
        super().__init_subclass__(**options)
        check_constructor(cls)
        if "__init__" in cls.__dict__:
            cls.__init__ = _named(cls.__init__)  # type: ignore[method-assign]

    def __init__(self, source: Source, sampler_of_neighbors: Sampler, length: int, /, *,
                 transform: Callable[[Any], Any] | None, transform_sampler_output: Callable[[Any], Any] | None,
                 filter_per_worker: bool | None, seed: int | None, shuffle: bool | None = None, sampler: Any = None,
                 batch_sampler: Any = None, generator: torch.Generator | None = None, **options: Any) -> None:
        options.pop("dataset", None)
        options.pop("collate_fn", None)
        check_seed(type(self).__name__, 0 if seed is None else seed)
        check_loading(type(self).__name__, options, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler,
                      generator=generator)
        self.source, self.neighbor_sampler, self.transform = source, sampler_of_neighbors, transform
        self.transform_sampler_output, self._owning = transform_sampler_output, False
        self.filter_per_worker = not source.on_gpu() if filter_per_worker is None else filter_per_worker
        self.seed, own = seed, generator
        if seed is not None:  # one generator for the batches, and one from which torch seeds workers in each epoch
            own, generator = torch.Generator().manual_seed(seed), generator or torch.Generator().manual_seed(seed)
        positions = _Positions(length)
        if batch_sampler is not None:
            options["batch_sampler"] = _Numbered(batch_sampler, own, True)
        else:
            if sampler is None:
                shuffled = shuffle and length > 0
                sampler = _Shuffled(positions, generator=own) if shuffled else SequentialSampler(positions)
            options["sampler"] = _Numbered(sampler, own, options.get("batch_size", 1) is None)
        try:
            super().__init__(positions, collate_fn=self._collate, generator=generator,  # type: ignore[arg-type]
                             **options)
        except ValueError as error:
            raise ConfigError(type(self).__name__, "options must be those of torch.utils.data.DataLoader",
                              str(error).removesuffix(".")) from error

    def __getstate__(self) -> dict[str, Any]:
        """Copy the tensors that share a storage with the data, once: spawned workers can get each storage once.

        They only collate. They get no generator: the storage of its state is freed before they start.
        """
        if not self._owning:
            self.neighbor_sampler.own_storages()
            tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
            self.__dict__.update({name: value.clone() for name, value in tensors.items()})
            self._owning = True
        unread = _DRAWING if get_spawning_popen() is not None else ()
        return {name: value for name, value in vars(self).items() if name not in unread}

    def _collate(self, keys: Sequence[tuple[int, int]]) -> Any:
        try:
            positions = torch.tensor([position for _, position in keys], dtype=torch.int64)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise StructureError(type(self).__name__, f"sampler and batch_sampler must yield positions in "
                                 f"[0, {len(self.dataset)})", keys) from error  # type: ignore[arg-type]
        result = self._sample(positions, keys[0][0])
        return self._batch(result) if self.filter_per_worker else result

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.filter_per_worker else map(self._batch, batches)

    def __call__(self, index: Tensor | Sequence[int]) -> Any:
        """The batch of the seeds at some positions; with a seed it is that of the first epoch, in each call."""
        positions = check_indices(type(self).__name__, "index", index).long()
        if positions.dim() != 1:
            raise ShapeError(type(self).__name__, "index must have one dimension", tuple(positions.shape))
        own = self.generator if self.seed is None else torch.Generator().manual_seed(self.seed)
        return self._batch(self._sample(positions, _number(own)))

    def _sample(self, index: Tensor, epoch: int) -> Subgraph:
        """The subgraph of the seeds at some positions, a function of both arguments."""
        bits = hash_bits(torch.tensor(epoch), torch.arange(len(index)), index)
        try:
            return self._subgraph(index, int(bits.sum()))
        except IndexError:
            check_range(type(self).__name__, "positions in index, sampler or batch_sampler", index,
                        len(self.dataset))  # type: ignore[arg-type]
            raise

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        raise NotImplementedError

    def _batch(self, subgraph: Subgraph) -> Any:
        if self.transform_sampler_output is not None:
            subgraph = self.source.transformed(subgraph, self.transform_sampler_output)
        batch = self.source.select(subgraph)
        for name, kinds in (("batch", subgraph.groups), ("num_sampled_nodes", subgraph.num_sampled_nodes),
                            ("num_sampled_edges", subgraph.num_sampled_edges)):
            for kind, value in (kinds or {}).items():
                setattr(self.source.store(batch, kind), name, value)
            if kinds is None and not self.source.typed:
                setattr(batch, name, None)
        self._add_inputs(batch, subgraph.inputs)
        return batch if self.transform is None else self.transform(batch)

    def _add_inputs(self, batch: Any, inputs: dict[str, Any]) -> None:
        raise NotImplementedError


class NeighborLoader(Loader):
    """Mini-batches of seeds with their sampled neighbors, of a graph that is too large for whole passes.

    For each batch of seeds, hop 1 draws `num_neighbors[0]` edges into each seed, hop 2 `num_neighbors[1]` edges into
    each node that hop 1 added, and so on. Arguments, attributes of the batches and their order are those of PyTorch
    Geometric's `NeighborLoader`. Neither pyg-lib nor torch-sparse is needed, nor PyTorch Geometric itself.

    Args:
        data: PyTorch Geometric's `Data` or `HeteroData` with an `edge_index`, or a `Graph`.
        num_neighbors: edges per node for each hop, -1 for all; or a mapping from types of edges to such lists, or
            PyTorch Geometric's `NumNeighbors`.
        input_nodes: the seeds: indices, a mask, or none for all nodes; of typed nodes a type, or a pair of type and
            indices.
        input_time: the time of each seed; by default that of the node. Needs `time_attr`.
        replace: draw with replacement.
        subgraph_type: "directional" (the drawn edges), "bidirectional" (these in both directions) or "induced" (all
            edges between the drawn nodes).
        disjoint: each seed has a subgraph of its own; `batch` says which. With times this is always so.
        temporal_strategy: "uniform", or "last": the latest edges that are not too late, of positive weight.
        time_attr: an integer attribute of nodes or edges: no neighbor is later than its seed.
        weight_attr: an attribute of edges: edges are drawn with probabilities proportional to it, one of weight 0
            only by -1.
        transform: a function that is called with each batch.
        transform_sampler_output: a function of PyTorch Geometric's `SamplerOutput` or `HeteroSamplerOutput`, which is
            called for each batch of `Data` or `HeteroData` before features are read, and returns such an output.
        is_sorted: edges are sorted by target, and those of a target by time: the edges are then not copied, and may
            be memory-mapped.
        filter_per_worker: whether workers read the features; by default unless data lies on a GPU.
        neighbor_sampler: that of another loader of this data, whose sorted edges and options of sampling are shared.
        directed: False is "induced".
        features: of the nodes of a `Graph`, by name, each with N rows; they may be memory-mapped.
        input_id: what each batch has as `input_id`, by default the positions of its seeds.
        seed: equal seeds give equal batches, for any number of workers; torch's own generator is not used. By default
            `generator` decides, or torch's own.
        options: those of `torch.utils.data.DataLoader`, such as `batch_size`, `shuffle` and `num_workers`.

    Yields:
        `Data` or `HeteroData` for such, and a `NeighborBatch` for a `Graph`. Each has `n_id`, `e_id`, `batch_size`,
        `input_id`, `num_sampled_nodes`, `num_sampled_edges` and, if disjoint, `batch`. Seeds come first.

    Cost: a batch grows with the sampled edges, and not with the graph.

    Raises:
        ConfigError: for an unknown option, or data of another kind.
        StructureError: if an edge or a seed is out of range.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import NeighborLoader
        >>> graph = Graph(torch.tensor([[1, 2, 3, 3], [0, 0, 1, 2]]), num_nodes=4)
        >>> loader = NeighborLoader(graph, num_neighbors=[2, 1], batch_size=2, features={"x": torch.randn(4, 8)})
        >>> first, second = loader
        >>> first.n_id, first.num_sampled_nodes, first.num_sampled_edges
        (tensor([0, 1, 2, 3]), [2, 2, 0], [3, 1])
        >>> first.features["x"].shape
        torch.Size([4, 8])

    Reference: Hamilton, Ying and Leskovec, *Inductive representation learning on large graphs*, 2017, algorithm 2.
    """

    def __init__(self, data: Any, num_neighbors: Any,
                 input_nodes: Any = None, input_time: Tensor | None = None, replace: bool = False,
                 subgraph_type: Any = "directional", disjoint: bool = False, temporal_strategy: str = "uniform",
                 time_attr: str | None = None, weight_attr: str | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: Any = None, directed: bool = True, *,
                 features: Mapping[str, Tensor] | None = None, input_id: Tensor | None = None,
                 seed: int | None = None, **options: Any) -> None:
        if input_time is not None and time_attr is None:
            raise ConfigError(_OWNER, "input_time needs time_attr", None)
        source = source_of(data, features)
        self.data, self.input_nodes = data, input_nodes
        self.input_type, self.seeds, self.input_id = input_nodes_of(source, input_nodes, input_id)
        times = check_rows(_OWNER, "input_time", input_time, len(self.seeds), "the seeds")
        self.input_time = check_times(_OWNER, "input_time", times)
        sampler = _sampler(neighbor_sampler, source, num_neighbors, (time_attr, weight_attr, is_sorted),
                           replace=replace, disjoint=disjoint, subgraph_type=subgraph_type if directed else "induced",
                           temporal_strategy=temporal_strategy)
        super().__init__(source, sampler, len(self.seeds), transform=transform,
                         transform_sampler_output=transform_sampler_output, filter_per_worker=filter_per_worker,
                         seed=seed, **options)

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        times = None if self.input_time is None else self.input_time[index]
        result = self.neighbor_sampler.sample({self.input_type: self.seeds[index]}, seed,
                                             None if times is None else {self.input_type: times})
        result.inputs = {"input_id": index if self.input_id is None else self.input_id[index], "seed_time": times,
                        "batch_size": len(index)}
        return result

    def _add_inputs(self, batch: Any, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            setattr(self.source.store(batch, self.input_type), name, value)


class LinkNeighborLoader(Loader):
    """Mini-batches of pairs of nodes with their sampled neighbors, for link prediction.

    As `NeighborLoader`, with the ends of edges as seeds. Arguments and attributes of the batches are those of PyTorch
    Geometric's `LinkNeighborLoader`.

    Args:
        data, num_neighbors: see `NeighborLoader`, and so for all arguments that are not named here.
        edge_label_index: (2, L), the pairs; by default all edges. Of typed edges a type, or a pair of a type and this.
        edge_label: (L,), their labels. With binary negative samples 0 is reserved for these: labels that begin at 0
            are increased by 1.
        edge_label_time: (L,), their times. Needs `time_attr`.
        neg_sampling: "binary" (pairs of random nodes with label 0), "triplet" (random targets), a mapping with mode,
            amount, src_weight and dst_weight, or PyTorch Geometric's `NegativeSampling`. Edges of the graph are not
            excluded.
        neg_sampling_ratio: the amount of binary negative samples.

    Yields:
        Batches as of `NeighborLoader`, with `edge_label_index`, `edge_label` and `edge_label_time`, or for triplets
        with `src_index`, `dst_pos_index` and `dst_neg_index`, which are positions in `n_id`.

    Example:

        >>> from structconv import Graph
        >>> from structconv.data import LinkNeighborLoader
        >>> graph = Graph(torch.tensor([[1, 2, 3, 3], [0, 0, 1, 2]]), num_nodes=4)
        >>> loader = LinkNeighborLoader(graph, [-1], batch_size=2, neg_sampling="binary", seed=0)
        >>> batch = next(iter(loader))
        >>> batch.edge_label, batch.n_id[batch.edge_label_index][:, :2]
        (tensor([1., 1., 0., 0.]), tensor([[1, 2],
                [0, 0]]))
    """

    def __init__(self, data: Any, num_neighbors: Any,
                 edge_label_index: Any = None, edge_label: Tensor | None = None, edge_label_time: Tensor | None = None,
                 replace: bool = False, subgraph_type: Any = "directional", disjoint: bool = False,
                 temporal_strategy: str = "uniform", neg_sampling: Any = None, neg_sampling_ratio: float | None = None,
                 time_attr: str | None = None, weight_attr: str | None = None,
                 transform: Callable[[Any], Any] | None = None,
                 transform_sampler_output: Callable[[Any], Any] | None = None, is_sorted: bool = False,
                 filter_per_worker: bool | None = None, neighbor_sampler: Any = None, directed: bool = True, *,
                 features: Mapping[str, Tensor] | None = None, input_id: Tensor | None = None,
                 seed: int | None = None, **options: Any) -> None:
        if (edge_label_time is None) != (time_attr is None):
            raise ConfigError("LinkNeighborLoader", "edge_label_time and time_attr need each other",
                              "only one of them")
        source = source_of(data, features)
        self.data, self.edge_label_index = data, edge_label_index
        self.input_type, self.pairs = _input_edges(source, edge_label_index)
        if ratio := plain(neg_sampling_ratio):
            self.negatives: _Negatives | None = _Negatives({"mode": "binary", "amount": ratio}, "neg_sampling_ratio")
        else:
            self.negatives = None if neg_sampling is None else _Negatives(neg_sampling)
        pairs = self.pairs.shape[1], "the pairs"
        self.labels = check_rows(_OWNER, "edge_label", edge_label, *pairs)
        if self.labels is not None and self.negatives is not None:
            if self.negatives.mode == "triplet":
                raise ConfigError("LinkNeighborLoader", "triplets have no labels: edge_label must be None",
                                  tuple(self.labels.shape))
            if len(self.labels) and self.labels.min() == 0:
                self.labels = self.labels + 1
        times = check_rows(_OWNER, "edge_label_time", edge_label_time, *pairs)
        self.times = check_times(_OWNER, "edge_label_time", times)
        self.input_id = check_rows(_OWNER, "input_id", input_id, *pairs)
        sampler = _sampler(neighbor_sampler, source, num_neighbors, (time_attr, weight_attr, is_sorted),
                           replace=replace, disjoint=disjoint, subgraph_type=subgraph_type if directed else "induced",
                           temporal_strategy=temporal_strategy)
        if self.negatives is not None:
            self.ends = [_Endpoint(source.num_nodes(kind), weights, sampler.node_times.get(kind), stream)
                         for stream, (kind, weights) in enumerate(zip((self.input_type[0], self.input_type[2]),
                                                                      self.negatives.weights, strict=True))]
        super().__init__(source, sampler, self.pairs.shape[1], transform=transform,
                         transform_sampler_output=transform_sampler_output, filter_per_worker=filter_per_worker,
                         seed=seed, **options)

    def _subgraph(self, index: Tensor, seed: int) -> Subgraph:
        source, target = self.pairs[:, index]
        times = None if self.times is None else self.times[index]
        labels = None if self.labels is None else self.labels[index]
        positive = len(index)
        source_times = target_times = times
        if self.negatives is not None:
            count = math.ceil(positive * self.negatives.amount)
            copies = 1 + math.ceil(self.negatives.amount)
            every = None if times is None else times.repeat(copies)[:positive + count]
            target_times = every
            limits = None if every is None else every[positive:]
            target = torch.cat([target, self.ends[1].draw(count, seed, limits)])
            if self.negatives.mode == "binary":
                source_times = every
                source = torch.cat([source, self.ends[0].draw(count, seed, limits)])
                labels = torch.ones(positive) if labels is None else labels
                labels = torch.cat([labels, labels.new_zeros(count, *labels.shape[1:])])
        result, (of_source, of_target) = self._ends(source, target, source_times, target_times, seed)
        if result.groups is not None:
            owner = torch.cat([torch.arange(len(ends)) % positive for ends in (source, target)])
            result.groups = {kind: owner[groups] for kind, groups in result.groups.items()}
        result.inputs = {"input_id": index if self.input_id is None else self.input_id[index]}
        if self.negatives is not None and self.negatives.mode == "triplet":
            result.inputs |= {"src_index": of_source, "dst_pos_index": of_target[:positive],
                             "dst_neg_index": of_target[positive:].view(-1, positive).t().squeeze(-1)
                             if positive else of_target[positive:], "seed_time": times}
        else:
            result.inputs |= {"edge_label_index": torch.stack([of_source, of_target]), "edge_label": labels,
                             "edge_label_time": source_times}
        return result

    def _ends(self, source: Tensor, target: Tensor, source_times: Tensor | None, target_times: Tensor | None, seed: int
              ) -> tuple[Subgraph, tuple[Tensor, Tensor]]:
        """The subgraph of both ends of pairs, and the positions of the ends in it."""
        kinds = self.input_type[0], self.input_type[2]
        same, disjoint = kinds[0] == kinds[1], self.neighbor_sampler.disjoint
        parts = [torch.cat([source, target])] if same else [source, target]
        positions = [torch.arange(len(part)) for part in parts]
        if not disjoint:
            parts, positions = map(list, zip(*(part.unique(return_inverse=True) for part in parts), strict=True))
        times: dict[NodeType, Tensor] | None = None
        if source_times is not None and target_times is not None:
            times = ({kinds[0]: torch.cat([source_times, target_times])} if same
                     else {kinds[0]: source_times, kinds[1]: target_times})
        result = self.neighbor_sampler.sample(dict(zip(kinds, parts, strict=False)), seed, times)
        if same:
            return result, (positions[0][:len(source)], positions[0][len(source):])
        return result, (positions[0], positions[1])

    def _add_inputs(self, batch: Any, inputs: dict[str, Any]) -> None:
        kinds = self.input_type[0], self.input_type[2]
        of_target = {"dst_pos_index", "dst_neg_index"}
        for name, value in inputs.items():
            owners: tuple[Any, ...] = (self.input_type,)
            if "dst_pos_index" in inputs and name != "input_id":
                owners = kinds if name == "seed_time" else (kinds[name in of_target],)
            for owner in owners:
                setattr(self.source.store(batch, owner), name, value)


class _Negatives:
    """The kind and the number of negative samples, from the argument `name`: "binary", "triplet", a mapping with the
    keys mode, amount, src_weight and dst_weight, or PyTorch Geometric's `NegativeSampling`."""

    def __init__(self, sampling: Any, name: str = "neg_sampling") -> None:
        if isinstance(sampling, str):
            sampling = {"mode": sampling}
        read = (sampling.get if isinstance(sampling, Mapping)
                else lambda name, default=None: getattr(sampling, name, default))
        mode, amount = read("mode"), plain(read("amount", 1))
        self.mode, self.amount = str(getattr(mode, "value", mode)), amount
        self.weights = read("src_weight"), read("dst_weight")
        if self.mode not in ("binary", "triplet"):
            raise ConfigError("LinkNeighborLoader", "neg_sampling must be 'binary' or 'triplet'", self.mode)
        if type(amount) not in (int, float) or not 0 < amount < 2 ** 31 or (
                self.mode == "triplet" and amount != math.ceil(amount)):
            raise ConfigError("LinkNeighborLoader", f"{name} must have a positive amount of negative samples, an "
                              "integer for triplets", repr(amount))


class _Endpoint:
    """Nodes from which negative samples are drawn, by their weights and, with times, not later than a given time.
    `stream` makes the draws of two ends independent."""

    def __init__(self, num_nodes: int, weights: Tensor | None, times: Tensor | None, stream: int) -> None:
        self.num_nodes, self.stream, self.nodes = num_nodes, stream, None
        if weights is not None:
            self._check(weights)
            weights = weights.detach().cpu().double()
            weights = weights / weights.max()  # so that the sum is finite
            self.nodes = weights.nonzero().flatten()
        if times is not None:
            candidates = torch.arange(num_nodes) if self.nodes is None else self.nodes
            self.nodes = candidates[times[candidates].argsort(stable=True)]
        self.size = num_nodes if self.nodes is None else len(self.nodes)
        self.times = None if times is None else times[self.nodes]
        self.sums = None if weights is None else weights[self.nodes].cumsum(0)

    def _check(self, weights: Any) -> None:
        owner, name = "LinkNeighborLoader", "src_weight and dst_weight of neg_sampling"
        if not isinstance(weights, Tensor):
            raise ConfigError(owner, f"{name} must be tensors", type(weights).__name__)
        if weights.shape != (self.num_nodes,):
            raise ShapeError(owner, f"{name} must have the shape ({self.num_nodes},)", tuple(weights.shape))
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not bool((weights > 0).any()):
            raise ConfigError(owner, f"{name} must be finite and not negative, and some positive", weights.tolist())

    def draw(self, count: int, seed: int, limits: Tensor | None) -> Tensor:
        """Draw `count` nodes, each not later than its limit, or the earliest if none is early enough."""
        positions, stream = torch.arange(count), torch.tensor(self.stream)
        valid = torch.full((count,), self.size)
        if self.times is not None and limits is not None:
            valid = torch.searchsorted(self.times, limits, right=True).clamp(min=1)
        if self.sums is None:
            chosen = random_below(valid, seed, stream, positions)
        else:
            bits = hash_bits(torch.tensor(seed), stream, positions).double() * 2.0**-32
            chosen = torch.searchsorted(self.sums, bits * self.sums[valid - 1], right=True).clamp(max=valid - 1)
        return chosen if self.nodes is None else self.nodes[chosen]


def _sampler(shared: Any, source: Source, num_neighbors: Any, read: tuple[str | None, str | None, bool],
             **options: Any) -> Sampler:
    """Return the sampler of another loader, or a new one."""
    sizes = {kind: source.num_nodes(kind) for kind in source.node_types}
    if shared is None:
        return Sampler(source.relations(*read), sizes, num_neighbors, **options)
    if not isinstance(shared, Sampler) or shared.num_nodes != sizes or [*shared.relations] != source.edge_types:
        raise ConfigError(_OWNER, "neighbor_sampler must be that of another loader of the same data", repr(shared))
    return shared


def input_nodes_of(source: Source, seeds: Any, input_id: Tensor | None) -> tuple[NodeType, Tensor, Tensor | None]:
    """Type, seeds, and what each batch names them by."""
    kind = PLAIN_NODE
    if source.typed:
        kind, seeds = seeds if isinstance(seeds, (tuple, list)) and len(seeds) == 2 else (seeds, None)
        if not isinstance(kind, str) or kind not in source.node_types:
            raise ConfigError(_OWNER, f"input_nodes must be a type out of {source.node_types}, or a pair of a type and "
                              "nodes", repr(kind))
    size = source.num_nodes(kind)
    if seeds is None:
        return kind, torch.arange(size), check_rows(_OWNER, "input_id", input_id, size, "the seeds")
    nodes = check_indices(_OWNER, "input_nodes", seeds, masks=True).cpu()
    if nodes.dim() != 1:
        raise ShapeError(_OWNER, "input_nodes must have one dimension", tuple(nodes.shape))
    mask = nodes.dtype is torch.bool
    if mask and len(nodes) != size:
        raise ShapeError(_OWNER, f"input_nodes, as a mask, must have the length N={size}", tuple(nodes.shape))
    nodes = nodes.nonzero().flatten() if mask else nodes.long()
    check_range(_OWNER, "seeds in input_nodes", nodes, size)
    ids = check_rows(_OWNER, "input_id", input_id, len(nodes), "the seeds")
    return kind, nodes, nodes if mask and ids is None else ids


def _input_edges(source: Source, edges: Any) -> tuple[EdgeType, Tensor]:
    """Type and pairs (2, L)."""
    kind = PLAIN_EDGE
    if source.typed:
        if isinstance(edges, (tuple, list)) and edges and isinstance(edges[0], str):
            edges = edges, None
        pair = isinstance(edges, (tuple, list)) and len(edges) == 2 and isinstance(edges[0], (tuple, list))
        kind = tuple(edges[0]) if pair else ()
        if len(kind) == 2:  # two types of nodes, as PyTorch Geometric reads them
            between = [known for known in source.edge_types if (known[0], known[2]) == kind]
            kind = between[0] if len(between) == 1 else kind if edges[1] is None else (kind[0], "to", kind[1])
        if len(kind) != 3 or {kind[0], kind[2]} - {*source.node_types}:
            raise ConfigError(_OWNER, f"edge_label_index must be a type out of {source.edge_types}, or a pair of a "
                              "type and edges", repr(edges))
        edges = edges[1]
    pairs = check_indices(_OWNER, "edge_label_index", source.edge_index(kind) if edges is None else edges)
    pairs = torch.Tensor.as_subclass(pairs, Tensor).cpu().long()
    if pairs.dim() != 2 or pairs.shape[0] != 2:
        raise ShapeError(_OWNER, "edge_label_index must have shape (2, L)", tuple(pairs.shape))
    for end, nodes in ((kind[0], pairs[0]), (kind[2], pairs[1])):
        check_range(_OWNER, "nodes in edge_label_index", nodes, source.num_nodes(end))
    return kind, pairs
