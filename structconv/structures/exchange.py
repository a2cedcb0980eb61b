"""`Exchange`: graphs from and to NetworkX, pandas, SciPy, torch's sparse tensors, PyTorch Geometric's data and DGL."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from structconv.errors import ConfigError, StructureError

__all__ = ["MAKERS", "Exchange", "floating", "require", "samples_of"]

#: Constructors that samples.py, which imports this file, puts here: "samples" from sizes (B,), "starts" from the first
#: entry of each sample and the number of all (B + 1,), "batch" for a graph with samples.
MAKERS: dict[str, Callable[..., Any]] = {}
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class Exchange:
    """The conversions of a `Graph`. Everywhere A (M, N) is the matrix with A[m, n] the weight of m -> n.

    Weights that come as integers or booleans become `torch.get_default_dtype()`; indices become int64.
    """

    if TYPE_CHECKING:
        edge_index: Tensor
        edge_weight: Tensor | None
        edge_attr: Tensor | None
        samples: Any
        num_inputs: int
        num_outputs: int

        def __init__(self, edge_index: Tensor, *, num_nodes: int | None = None, edge_weight: Tensor | None = None,
                     edge_attr: Tensor | None = None, num_inputs: int | None = None,
                     num_outputs: int | None = None, samples: Any = None) -> None: ...

    @classmethod
    def from_networkx(cls, graph: Any, weight: str = "weight", attr: str = "edge_attr") -> Self:
        """From any NetworkX graph; entry i is the i-th of `graph.nodes`.

        An undirected edge becomes both directions, a loop one edge; parallel edges are kept. Where any edge has the
        attribute `weight` the graph is weighted, and edges without it weigh 1, as in NetworkX. Lists of numbers under
        `attr` become `edge_attr` (E, A). Both have torch's default dtype, which `torch.set_default_dtype` changes,
        because Python's numbers have none. A directed graph whose nodes have NetworkX's attribute `bipartite`, and
        whose edges all lead from 0 to 1, is bipartite: nodes with 0 are the inputs, those with 1 the outputs. O(E).

        Raises:
            StructureError: some edges have the attribute `attr`, and others not; or attributes are not numbers.
        """
        _check_source("Graph.from_networkx", "a graph of NetworkX", graph, "is_directed", "nodes")
        side = dict(graph.nodes(data="bipartite"))
        bipartite = (graph.is_directed() and len(side) > 0 and {0, 1}.issuperset(side.values())
                     and all(side[a] == 0 and side[b] == 1 for a, b in graph.edges()))
        number = {node: i for i, node in enumerate(graph.nodes)}
        if bipartite:
            number = {node: i for part in (0, 1)
                      for i, node in enumerate(node for node in graph.nodes if side[node] == part)}
        edges = [(number[a], number[b], data) for a, b, data in graph.edges(data=True)]
        if not graph.is_directed():
            edges = [edge for a, b, data in edges
                     for edge in (((a, b, data), (b, a, data)) if a != b else ((a, b, data),))]
        index = torch.tensor([edge[:2] for edge in edges], dtype=torch.int64).reshape(-1, 2).T.contiguous()
        weights, rows = ([data.get(name) for _, _, data in edges] for name in (weight, attr))
        edge_weight = edge_attr = None
        if any(w is not None for w in weights):
            edge_weight = _rows_of(weight, [1.0 if w is None else w for w in weights])
        if any(row is not None for row in rows):
            if any(row is None for row in rows):
                raise StructureError("Graph.from_networkx", f"every edge, or none, must have the attribute {attr!r}",
                                     f"{sum(row is None for row in rows)} without")
            edge_attr = _rows_of(attr, rows)
        outputs = sum(side.values()) if bipartite else len(number)
        return cls(index, num_inputs=len(number) - outputs if bipartite else outputs, num_outputs=outputs,
                   edge_weight=edge_weight, edge_attr=edge_attr)

    def to_networkx(self, weight: str = "weight", attr: str = "edge_attr") -> Any:
        """Convert to a `networkx.DiGraph`, or to a `MultiDiGraph` if an edge occurs twice. Edges keep their order.

        Nodes are 0 to N-1. A bipartite graph has its inputs first, 0 to M-1, then its outputs, M to M+N-1; NetworkX's
        node attribute `bipartite` is 0 for inputs and 1 for outputs. Attributes of edges are lists of numbers under
        `attr`. `from_networkx` turns it back, edges by their sources. Needs networkx. O(M + N + E), on the CPU.
        """
        networkx = require("networkx", "Graph.to_networkx")
        sources, targets = self.edge_index.tolist()
        repeated = len(set(zip(sources, targets, strict=True))) < len(sources)
        graph = networkx.MultiDiGraph() if repeated else networkx.DiGraph()
        offset = 0
        if self.num_inputs == self.num_outputs:
            graph.add_nodes_from(range(self.num_inputs))
        else:
            offset = self.num_inputs
            graph.add_nodes_from(range(offset), bipartite=0)
            graph.add_nodes_from(range(offset, offset + self.num_outputs), bipartite=1)
        fields: dict[str, list[Any]] = {}
        if self.edge_weight is not None:
            fields[weight] = self._weights(None).tolist()
        if self.edge_attr is not None:
            fields[attr] = self.edge_attr.tolist()
        graph.add_edges_from((m, n + offset, {name: values[e] for name, values in fields.items()})
                             for e, (m, n) in enumerate(zip(sources, targets, strict=True)))
        return graph

    @classmethod
    def from_pandas(cls, frame: Any, source: str = "source", target: str = "target", *, weight: str = "weight",
                    edge_attr: Sequence[str] | str | None = None, nodes: Any = None, num_nodes: int | None = None
                    ) -> Self:
        """From a `pandas.DataFrame` with a row for each edge, in its order.

        Args:
            source, target: the columns of both ends: positions 0, 1, ..., or labels where `nodes` has them.
            weight: the column of weights, if there is one of this name.
            edge_attr: the columns of attributes (E, A), or one column's name (E,); by default "edge_attr_0" and so on,
                as `to_pandas` names them, or "edge_attr". They must share a dtype.
            nodes: the labels of all nodes in their order; of a bipartite graph a tuple, those of inputs and of outputs.
            num_nodes: how many nodes there are; by default what `to_pandas` notes in `frame.attrs`, or one more than
                the last position.

        Raises:
            StructureError: a column that is not there, or of no numbers; a label that `nodes` does not have.

        O(E).
        """
        owner = "Graph.from_pandas"
        _check_source(owner, "a pandas.DataFrame", frame, "attrs", "columns")
        noted = dict(frame.attrs.get("structconv", {}))
        if edge_attr is None:
            own = [f"edge_attr_{a}" for a in range(noted.get("attributes", 0))] or [
                name for name in frame.columns if isinstance(name, str) and name.startswith("edge_attr_")]
            edge_attr = "edge_attr" if not own and "edge_attr" in frame.columns else own
        names = [edge_attr] if isinstance(edge_attr, str) else list(edge_attr)
        missing = [name for name in (source, target, *names) if name not in frame.columns]
        if missing:
            raise StructureError(owner, f"frame must have the columns {', '.join(map(repr, missing))}",
                                 ", ".join(map(repr, frame.columns)))
        sizes = (noted.get("num_inputs"), noted.get("num_outputs")) if num_nodes is None else (num_nodes, num_nodes)
        if nodes is not None:
            labels = nodes if isinstance(nodes, tuple) else (nodes, nodes)
            ends = [_numbered(owner, frame[name], own) for name, own in zip((source, target), labels, strict=True)]
            sizes = len(labels[0]), len(labels[1])
        else:
            ends = [_column(owner, frame, name, "nodes=") for name in (source, target)]
            if any(end.is_floating_point() for end in ends):
                raise StructureError(owner, "positions of nodes must be integers", str(ends[0].dtype),
                                     "Give the labels of all nodes: nodes=labels.")
        index = torch.stack([end.long() for end in ends])
        both = None if None not in sizes else int(index.max()) + 1 if index.numel() else 0
        values = [_column(owner, frame, name) for name in names]
        attributes = None if not names else values[0] if isinstance(edge_attr, str) else torch.stack(values, -1)
        weights = floating(_column(owner, frame, weight)) if weight in frame.columns else None
        samples = MAKERS["samples"](torch.tensor(noted["samples"])) if "samples" in noted and nodes is None else None
        return cls(index, num_inputs=sizes[0] if both is None else both, num_outputs=sizes[1] if both is None else both,
                   edge_weight=weights, edge_attr=attributes, samples=samples)

    def to_pandas(self, source: str = "source", target: str = "target", weight: str = "weight") -> Any:
        """To a `pandas.DataFrame` with a row for each edge, in input order; `from_pandas` turns it back.

        Its columns are both ends, "weight" where the graph is weighted, and "edge_attr_0", ... of attributes (E, A), or
        "edge_attr" of (E,). How many nodes there are, and the samples of a batch, are in `frame.attrs`, which pandas
        keeps in copies and Parquet files, not in CSV files. Needs pandas; on the CPU, without gradients. O(E A).

        Raises:
            StructureError: weights or attributes that samples of a batch have each for themselves; samples of a
                bipartite graph.
        """
        pandas, attributes = require("pandas", "Graph.to_pandas"), self.edge_attr
        columns: dict[str, Any] = dict(zip((source, target), _numbers(self.edge_index), strict=True))
        noted: dict[str, Any] = {"num_inputs": self.num_inputs, "num_outputs": self.num_outputs}
        if self.edge_weight is not None:
            columns[weight] = _numbers(self._weights(None))
        if attributes is not None:
            if attributes.dim() > 2:
                raise StructureError("Graph.to_pandas", "edge_attr must have shape (E, A) or (E,)",
                                     tuple(attributes.shape))
            rows = _numbers(attributes)
            if rows.ndim == 1:
                columns["edge_attr"] = rows
            else:
                columns |= {f"edge_attr_{a}": row for a, row in enumerate(rows.T)}
                noted["attributes"] = rows.shape[1]
        if self.samples is not None:
            inputs, outputs = self.samples.sizes()
            if inputs != outputs:
                raise StructureError("Graph.to_pandas", "samples must have as many inputs as outputs",
                                     f"{inputs} and {outputs}")
            noted["samples"] = inputs
        frame = pandas.DataFrame(columns)
        frame.attrs["structconv"] = noted
        return frame

    @classmethod
    def from_scipy(cls, matrix: Any) -> Self:
        """From a SciPy sparse matrix or array A (M, N) of any format; stored entries, zeros too, are edges. O(E)."""
        if not hasattr(matrix, "tocoo") or len(matrix.shape) != 2:
            raise StructureError("Graph.from_scipy", "matrix must be a sparse matrix or array (M, N)",
                                 f"{type(matrix).__name__} {getattr(matrix, 'shape', '')}".strip())
        coo = matrix.tocoo()
        index = torch.stack([torch.as_tensor(coo.row).long(), torch.as_tensor(coo.col).long()])
        try:
            values = torch.as_tensor(coo.data)
        except TypeError as error:
            raise StructureError("Graph.from_scipy", "matrix must hold numbers of a dtype that torch has",
                                 str(coo.data.dtype), "Convert it, for example matrix.astype(float).") from error
        return cls._from_matrix(index, values, *coo.shape)

    def to_scipy(self) -> Any:
        """To a `scipy.sparse.coo_array` A (M, N), duplicates kept, ones where unweighted. Needs scipy. O(E)."""
        sparse = require("scipy.sparse", "Graph.to_scipy")
        source, target = self.edge_index.cpu().numpy()
        values = self._weights(None).detach().cpu().numpy()
        return sparse.coo_array((values, (source, target)), shape=(self.num_inputs, self.num_outputs))

    @classmethod
    def from_torch_sparse(cls, matrix: Tensor) -> Self:
        """From a torch sparse tensor A (M, N) in COO, CSR or CSC; gradients reach its values. O(E).

        Duplicates of an uncoalesced COO tensor are kept, unless it requires a gradient: torch hands out differentiable
        values of coalesced tensors only, in which duplicates are added up.
        """
        if not isinstance(matrix, Tensor) or matrix.layout not in _LAYOUTS or matrix.dim() != 2:
            got = f"{matrix.layout} {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else type(matrix).__name__
            raise StructureError("Graph.from_torch_sparse", "matrix must be a COO, CSR or CSC tensor (M, N)", got)
        if matrix.layout == torch.sparse_coo:
            matrix = matrix.coalesce() if matrix.requires_grad else matrix
            keeps = not matrix.is_coalesced()
            index, values = (matrix._indices(), matrix._values()) if keeps else (matrix.indices(), matrix.values())
        elif matrix.layout == torch.sparse_csr:
            index = torch.stack([_expand(matrix.crow_indices()), matrix.col_indices()])
            values = matrix.values()
        else:
            index = torch.stack([matrix.row_indices(), _expand(matrix.ccol_indices())])
            values = matrix.values()
        return cls._from_matrix(index.long(), values, *matrix.shape)

    def to_torch_sparse(self, layout: torch.layout = torch.sparse_csr, dtype: torch.dtype | None = None) -> Tensor:
        """To a torch sparse tensor A (M, N), ones of `dtype` where unweighted.

        COO keeps edge order and duplicates; CSR and CSC sort the edges and add duplicates up. O(E log E).
        """
        if layout not in _LAYOUTS:
            raise ConfigError("Graph.to_torch_sparse", "layout must be torch.sparse_coo, _csr or _csc", layout)
        coo = torch.sparse_coo_tensor(self.edge_index, self._weights(dtype), (self.num_inputs, self.num_outputs),
                                      check_invariants=False)
        return coo if layout == torch.sparse_coo else coo.coalesce().to_sparse(layout=layout)

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """Convert any object with PyTorch Geometric's attribute names; PyTorch Geometric itself is not imported.

        Reads `edge_index` and, where present, `edge_weight`, `edge_attr` and `num_nodes`. Tensors are shared. A batch,
        which has `ptr`, or the `batch` of each node, gives a `batch` of graphs, whose samples stay separate.

        Raises:
            StructureError: `edge_index` is missing, or the nodes of a graph in a `batch` are not consecutive.
        """
        index = getattr(data, "edge_index", None)
        if index is None:
            raise StructureError("Graph.from_data", "data must have an edge_index", type(data).__name__)
        starts, nodes = getattr(data, "ptr", None), getattr(data, "num_nodes", None)
        weight, attr = floating(getattr(data, "edge_weight", None)), getattr(data, "edge_attr", None)
        if starts is not None and (graph := MAKERS["batch"](cls, index, starts, nodes, weight, attr)) is not None:
            return cast("Self", graph)
        samples = samples_of(data)
        return cls(index, num_nodes=samples.num_inputs if nodes is None and samples is not None else nodes,
                   edge_weight=weight, edge_attr=attr, samples=samples)

    def to_data(self) -> Any:
        """Convert to a `torch_geometric.data.Data`. Tensors are shared; needs torch_geometric.

        A batch becomes a `Data` with the `batch` of each node and the `ptr` to the first of each graph.

        Raises:
            StructureError: the graph is bipartite, which needs a `HeteroData`, or its weights are (B, E), one set for
                each sample.
        """
        if self.num_inputs != self.num_outputs:
            raise StructureError("Graph.to_data", f"M={self.num_inputs} must be N", self.num_outputs,
                                 "A HeteroData holds bipartite graphs: data['a', 'to', 'b'].edge_index.")
        library, fields = require("torch_geometric.data", "Graph.to_data", "tools"), dict[str, Any]()
        if self.edge_weight is not None:
            self._weights(None)
            fields["edge_weight"] = self.edge_weight
        if self.edge_attr is not None:
            fields["edge_attr"] = self.edge_attr
        if self.samples is not None:
            sizes = torch.tensor(self.samples.sizes()[0], device=self.edge_index.device)
            fields["batch"] = torch.repeat_interleave(sizes)
            fields["ptr"] = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return library.Data(edge_index=self.edge_index, num_nodes=self.num_inputs, **fields)

    @classmethod
    def from_hetero_data(cls, data: Any) -> dict[str, Self]:
        """From a `torch_geometric.data.HeteroData`: a graph for each type of edges, for example "paper__cites__paper".

        The inputs of a graph are the M nodes of its first type, the outputs the N nodes of its last type, also if both
        types are the same. Tensors are shared. Pass a layer the graphs that its expression names:
        `layer(x, structure={name: graphs[name]})`.
        """
        _check_source("Graph.from_hetero_data", "a HeteroData", data, "edge_types", "node_types")
        result: dict[str, Self] = {}
        for kind in data.edge_types:
            edges, sizes = data[kind], [data[kind[at]].num_nodes for at in (0, -1)]
            result["__".join(kind)] = cls(edges.edge_index, num_inputs=sizes[0], num_outputs=sizes[1],
                                         edge_weight=getattr(edges, "edge_weight", None),
                                         edge_attr=getattr(edges, "edge_attr", None))
        return result

    @classmethod
    def from_dgl(cls, graph: Any, weight: str = "weight", attr: str = "edge_attr") -> Self:
        """From a DGL graph with one type of edges; DGL itself is not imported. Tensors of edges are shared.

        Edges come in the order of their numbers. `graph.edata[weight]`, if there, becomes `edge_weight`, and
        `graph.edata[attr]` becomes `edge_attr`. A graph between two types of nodes is bipartite; one that
        `dgl.batch` made is a `batch`, whose samples stay separate. A block of DGL, as its loaders yield, is bipartite.
        Of a graph with several types of edges give one: `Graph.from_dgl(graph["follows"])`.

        Raises:
            StructureError: there are several types of edges, or a batch is bipartite.
        """
        _check_source("Graph.from_dgl", "a DGLGraph", graph, "canonical_etypes", "edges")
        kinds = graph.canonical_etypes
        if len(kinds) != 1:
            raise StructureError("Graph.from_dgl", "the graph must have one type of edges", kinds,
                                 f"Give one of them: graph[{kinds[0][1]!r}]." if kinds else "")
        source, _, target = kinds[0]
        samples = None
        if graph.batch_size > 1:
            if source != target:
                raise StructureError("Graph.from_dgl", "a batch must be of one type of nodes", (source, target),
                                     "Convert the graphs of dgl.unbatch(graph), then structconv.batch them.")
            samples = MAKERS["samples"](graph.batch_num_nodes())
        return cls(torch.stack(graph.edges(order="eid")), num_inputs=graph.num_src_nodes(source),
                   num_outputs=graph.num_dst_nodes(target), edge_weight=floating(graph.edata.get(weight)),
                   edge_attr=graph.edata.get(attr), samples=samples)

    def to_dgl(self, weight: str = "weight", attr: str = "edge_attr") -> Any:
        """To a `dgl.DGLGraph`; needs dgl. Edges keep their order; tensors of edges are shared.

        A bipartite graph has node types "inputs" and "outputs". A batch becomes a batch of DGL.

        Raises:
            StructureError: weights are (B, E), one set for each sample; a batch is bipartite, or the edges of its
                samples do not follow one another.
        """
        library = require("dgl", "Graph.to_dgl", "")
        edges = tuple(self.edge_index)
        if self.num_inputs == self.num_outputs:
            graph = library.graph(edges, num_nodes=self.num_inputs)
        else:
            graph = library.heterograph({("inputs", "to", "outputs"): edges},
                                        {"inputs": self.num_inputs, "outputs": self.num_outputs})
        if self.edge_weight is not None:
            self._weights(None)
            graph.edata[weight] = self.edge_weight
        if self.edge_attr is not None:
            graph.edata[attr] = self.edge_attr
        if self.samples is not None:
            sizes, device = self.samples.sizes()[0], self.edge_index.device
            owner = self.samples.members(device)[0][self.edge_index[0].long()]
            if self.num_inputs != self.num_outputs or bool((owner.diff() < 0).any()):
                raise StructureError("Graph.to_dgl", "a batch must be square, the edges of a sample after those before",
                                     "one that is bipartite" if self.num_inputs != self.num_outputs else "others",
                                     "Convert each graph, then dgl.batch them.")
            graph.set_batch_num_nodes(torch.tensor(sizes, device=device))
            graph.set_batch_num_edges(owner.bincount(minlength=len(sizes)))
        return graph

    @classmethod
    def _from_matrix(cls, index: Tensor, weight: Tensor | None, inputs: int, outputs: int) -> Self:
        return cls(index, num_inputs=inputs, num_outputs=outputs, edge_weight=floating(weight))

    def _weights(self, dtype: torch.dtype | None) -> Tensor:
        """Return one weight for each edge; raise `StructureError` if each sample of a batch has its own weights."""
        if self.edge_weight is not None and self.edge_weight.dim() > 1:
            raise StructureError("Graph", "edge_weight must be one number an edge for another library",
                                 tuple(self.edge_weight.shape), "dataclasses.replace(graph, edge_weight=weight[i]).")
        if self.edge_weight is None:
            return torch.ones(self.edge_index.shape[1], dtype=dtype, device=self.edge_index.device)
        return self.edge_weight.to(dtype)


def require(module: str, owner: str, extra: str = "graph") -> Any:
    """Import a module, of an extra of the package or of none, or raise `ConfigError` with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        requirement = f"'structconv[{extra}]'" if extra else package
        raise ConfigError(owner, f"{package} must be installed", str(error),
                          f"Install it with: pip install {requirement}.") from error


def _check_source(owner: str, expected: str, value: Any, *attributes: str) -> None:
    """Raise `StructureError` unless another library's object has these attributes."""
    if not all(hasattr(value, name) for name in attributes):
        raise StructureError(owner, f"the argument must be {expected}", type(value).__name__)


def samples_of(data: Any) -> Any:
    """Return the `Samples` of a batch of graphs; `None` for a single graph."""
    starts, owner = getattr(data, "ptr", None), getattr(data, "batch", None)
    if starts is not None:
        return MAKERS["starts"](starts.cpu())
    if owner is None:
        return None
    if bool((owner.diff() < 0).any()):
        raise StructureError("Graph.from_data", "batch must name the graph of each node, those of one after those of "
                             "the other", "one that is not sorted", "Sort the nodes: order = data.batch.argsort().")
    return MAKERS["samples"](torch.bincount(owner, minlength=getattr(data, "num_graphs", None) or 0))


def floating(weight: Tensor | None) -> Tensor | None:
    """Return the weights in a floating dtype: integers and booleans in the default one. Complex weights are returned
    unchanged, and `Graph` refuses them."""
    real = weight is None or weight.is_floating_point() or weight.is_complex()
    return weight if weight is None or real else weight.to(torch.get_default_dtype())


def _column(owner: str, frame: Any, name: str, remedy: str = "") -> Tensor:
    """The numbers of a column of a data frame."""
    if not len(frame) and (remedy or frame[name].dtype == object):  # of no edges, whatever their dtype
        return torch.empty(0, dtype=torch.int64)
    try:
        return torch.tensor(frame[name].to_numpy(copy=True))
    except TypeError as error:
        raise StructureError(owner, f"column {name!r} must hold numbers", str(frame[name].dtype),
                             "Give the labels of all nodes: nodes=labels." if remedy else "") from error


def _numbered(owner: str, column: Any, labels: Any) -> Tensor:
    """The positions of a column's labels among all labels."""
    numbers = torch.tensor(require("pandas", owner).Index(labels).get_indexer(column))
    if bool((numbers < 0).any()):
        unknown = column[(numbers < 0).numpy()].iloc[0]
        raise StructureError(owner, "nodes must have every label of an edge", f"none for {unknown!r}")
    return numbers


def _rows_of(name: str, rows: list[Any]) -> Tensor:
    """The attributes of edges: numbers, or lists, arrays or tensors of as many numbers each."""
    dtype = torch.get_default_dtype()
    try:
        if any(isinstance(row, Tensor) for row in rows):
            return torch.stack([torch.as_tensor(row, dtype=dtype) for row in rows])
        return torch.tensor([row if isinstance(row, list | tuple) or hasattr(row, "__array__") else float(row)
                             for row in rows], dtype=dtype)
    except (RuntimeError, TypeError, ValueError) as error:
        raise StructureError("Graph.from_networkx", f"the attribute {name!r} of each edge must hold as many numbers",
                             str(error)) from error


def _numbers(t: Tensor) -> Any:
    """Return a NumPy array; bfloat16, which NumPy lacks, as float32."""
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()


def _expand(indptr: Tensor) -> Tensor:
    """Expand the row pointers of a compressed layout, (rows + 1,), into the row of each slot, (E,)."""
    return torch.repeat_interleave(torch.arange(indptr.shape[0] - 1, device=indptr.device), indptr.diff())
