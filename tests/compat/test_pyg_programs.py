"""The kinds of programs that PyTorch Geometric's documentation has, on made-up data and on its data sets: with its
layers, with the import of the layers changed, and unchanged under `patch()`, they train to the same numbers.

Programs on data sets follow its examples, with fewer epochs. Random numbers of attention dropout and of sampled
neighborhoods differ: these programs have no attention dropout, and read whole neighborhoods.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from structconv.compat.pyg import patch

pytest.importorskip("torch_geometric")

NODES = """
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data

torch.manual_seed(0)
y = torch.arange(60) % 3
x = torch.randn(60, 8) + 2 * F.one_hot(y, 8)
source = torch.arange(60).repeat(4)
target = torch.where(torch.rand(240) < 0.8, (source + 3 * torch.randint(20, (240,))) % 60, torch.randint(60, (240,)))
edge_index = torch.stack([source, target])[:, source != target]
data = Data(x=x, edge_index=edge_index, y=y, train_mask=torch.arange(60) < 30)
"""
CITATION = NODES + """
from torch_geometric.nn import GATConv, GCNConv

class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(8, 16, cached=True), GCNConv(16, 3, cached=True)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GATConv(8, 4, heads=4), GATConv(16, 3, heads=1, concat=False)

    def forward(self, x, edge_index):
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)

numbers = []
for kind in (GCN, GAT):
    seed_everything(1)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(20):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
    numbers.append(float((model(data.x, data.edge_index).argmax(-1) == data.y).float().mean()))
"""
SAMPLED = NODES + """
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 3)])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = x.relu()
        return x

seed_everything(1)
model, numbers = SAGE(), []
loader = NeighborLoader(data, num_neighbors=[-1, -1], batch_size=10, input_nodes=data.train_mask)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[:batch.batch_size]
        loss = F.cross_entropy(out, batch.y[:batch.batch_size])
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
"""
GRAPHS = """
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

torch.manual_seed(0)
graphs = []
for i in range(24):
    nodes = 6 + i % 5
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    chords = torch.randint(nodes, (2, nodes if i % 2 else 1))
    edge_index = torch.cat([ring, ring.flip(0), chords, chords.flip(0)], 1)
    graphs.append(Data(x=torch.ones(nodes, 4), edge_index=edge_index, y=torch.tensor([i % 2])))

class GIN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GINConv(MLP([4, 16, 16])), GINConv(MLP([16, 16, 16]), train_eps=True)])
        self.mlp = MLP([16, 16, 2], norm=None, dropout=0.0)

    def forward(self, x, edge_index, batch, size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(global_add_pool(x, batch, size))

seed_everything(1)
model, numbers = GIN(), []
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    for batch in DataLoader(graphs, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch, batch.num_graphs), batch.y)
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
"""
LINKS = NODES + """
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(8, 16), GCNConv(16, 8)

    def encode(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)

seed_everything(1)
train, val, test = RandomLinkSplit(num_val=0.1, num_test=0.2, add_negative_train_samples=False)(data)
model, numbers = Net(), []
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(10):
    optimizer.zero_grad()
    z = model.encode(train.x, train.edge_index)
    negative = negative_sampling(train.edge_index, train.num_nodes, train.edge_label_index.size(1), method="sparse")
    index = torch.cat([train.edge_label_index, negative], dim=-1)
    label = torch.cat([train.edge_label, train.edge_label.new_zeros(negative.size(1))])
    loss = F.binary_cross_entropy_with_logits(model.decode(z, index), label)
    loss.backward()
    optimizer.step()
    numbers.append(float(loss))
with torch.no_grad():
    numbers += model.decode(model.encode(test.x, test.edge_index), test.edge_label_index).tolist()
"""
TYPED = """
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric import seed_everything
from torch_geometric.data import HeteroData
from torch_geometric.nn import HGTConv, SAGEConv, to_hetero

torch.manual_seed(0)
data = HeteroData()
data["author"].x, data["paper"].x = torch.randn(20, 6), torch.randn(30, 4)
data["paper"].y = torch.arange(30) % 3
data["author", "writes", "paper"].edge_index = torch.stack([torch.randint(20, (80,)), torch.randint(30, (80,))])
data["paper", "cites", "paper"].edge_index = torch.randint(30, (2, 60))
data = T.ToUndirected()(data)

class GNN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 3)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

class HGT(torch.nn.Module):
    def __init__(self, metadata):
        super().__init__()
        self.conv = HGTConv({"author": 6, "paper": 4}, 8, metadata, heads=2)
        self.lin = torch.nn.Linear(8, 3)

    def forward(self, x_dict, edge_index_dict):
        return {"paper": self.lin(self.conv(x_dict, edge_index_dict)["paper"])}

numbers = []
for make in (lambda: to_hetero(GNN(), data.metadata()), lambda: HGT(data.metadata())):
    seed_everything(1)
    model = make()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x_dict, data.edge_index_dict)["paper"], data["paper"].y)
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
"""
EXPLAINED = CITATION + """
from torch_geometric.explain import Explainer, GNNExplainer

seed_everything(1)
model = GCN()
explainer = Explainer(model=model, algorithm=GNNExplainer(epochs=20), explanation_type="model",
                      node_mask_type="attributes", edge_mask_type="object",
                      model_config=dict(mode="multiclass_classification", task_level="node", return_type="raw"))
torch.manual_seed(2)
explanation = explainer(data.x, data.edge_index, index=7)
numbers = [*explanation.edge_mask.tolist(), *explanation.node_mask.flatten().tolist()]
"""
CORA = """
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric import seed_everything
from torch_geometric.datasets import Planetoid

dataset = Planetoid(ROOT, "Cora", transform=T.NormalizeFeatures())
data, numbers = dataset[0], []
"""
CORA_GCN = """
from torch_geometric.nn import GCNConv

class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(dataset.num_features, 16, cached=True)
        self.conv2 = GCNConv(16, dataset.num_classes, cached=True)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)
"""
CORA_GAT = """
from torch_geometric.nn import GATConv

class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(dataset.num_features, 8, 8)
        self.conv2 = GATConv(8 * 8, dataset.num_classes, heads=1, concat=False)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)
"""
TRAINED = """
seed_everything(1)
model = KIND()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(10):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    numbers.append(float(loss))
model.eval()
with torch.no_grad():
    out = model(data.x, data.edge_index)
numbers += out[data.test_mask].flatten().tolist()
"""
CORA_SAGE = CORA + """
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(dataset.num_features, 32), SAGEConv(32, dataset.num_classes)])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = x.relu_()
        return x

seed_everything(1)
model = SAGE()
train_loader = NeighborLoader(data, num_neighbors=[-1, -1], batch_size=35, input_nodes=data.train_mask)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[:batch.batch_size], batch.y[:batch.batch_size])
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
with torch.no_grad():
    numbers += model(data.x, data.edge_index)[data.test_mask].flatten().tolist()
"""
CORA_LINKS = CORA + """
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(dataset.num_features, 64), GCNConv(64, 32)

    def encode(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)

seed_everything(1)
train_data, val_data, test_data = T.RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True,
                                                    add_negative_train_samples=False)(data)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    optimizer.zero_grad()
    z = model.encode(train_data.x, train_data.edge_index)
    neg_edge_index = negative_sampling(train_data.edge_index, train_data.num_nodes,
                                       train_data.edge_label_index.size(1), method="sparse")
    edge_label_index = torch.cat([train_data.edge_label_index, neg_edge_index], dim=-1)
    edge_label = torch.cat([train_data.edge_label, train_data.edge_label.new_zeros(neg_edge_index.size(1))])
    loss = F.binary_cross_entropy_with_logits(model.decode(z, edge_label_index), edge_label)
    loss.backward()
    optimizer.step()
    numbers.append(float(loss))
with torch.no_grad():
    numbers += model.decode(model.encode(test_data.x, test_data.edge_index), test_data.edge_label_index).tolist()
"""
CORA_TYPED = CORA + """
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HGTConv, HeteroConv, SAGEConv, to_hetero

hetero = HeteroData()
hetero["paper"].x, hetero["word"].x = data.x, torch.eye(dataset.num_features)
hetero["paper", "cites", "paper"].edge_index = data.edge_index
hetero["paper", "has", "word"].edge_index = data.x.nonzero().t().contiguous()
hetero = T.ToUndirected()(hetero)

class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), dataset.num_classes)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

class HGT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_dict = torch.nn.ModuleDict({kind: torch.nn.Linear(dataset.num_features, 16)
                                             for kind in hetero.node_types})
        self.conv, self.lin = HGTConv(16, 16, hetero.metadata(), 2), torch.nn.Linear(16, dataset.num_classes)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.lin_dict[kind](x).relu_() for kind, x in x_dict.items()}
        return {"paper": self.lin(self.conv(x_dict, edge_index_dict)["paper"])}

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = HeteroConv({("paper", "cites", "paper"): GATConv(-1, dataset.num_classes),
                                ("word", "rev_has", "paper"): SAGEConv((-1, -1), dataset.num_classes)}, aggr="sum")

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)

for make in (lambda: to_hetero(SAGE(), hetero.metadata(), aggr="sum"), HGT, Mixed):
    seed_everything(1)
    model = make()
    with torch.no_grad():
        model(hetero.x_dict, hetero.edge_index_dict)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(3):
        optimizer.zero_grad()
        out = model(hetero.x_dict, hetero.edge_index_dict)["paper"]
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        numbers.append(float(loss))
    numbers += out[:100].flatten().tolist()
"""
CORA_EXPLAINED = CORA + CORA_GCN + TRAINED.replace("KIND", "GCN") + """
from torch_geometric.explain import Explainer, GNNExplainer

explainer = Explainer(model=model, algorithm=GNNExplainer(epochs=10), explanation_type="model",
                      node_mask_type="attributes", edge_mask_type="object",
                      model_config=dict(mode="multiclass_classification", task_level="node", return_type="raw"))
torch.manual_seed(2)
explanation = explainer(data.x, data.edge_index, index=10)
numbers += [*explanation.edge_mask.tolist(), *explanation.node_mask.sum(-1).tolist()]
"""
MOLECULES = """
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import MoleculeNet
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

dataset = MoleculeNet(ROOT, "ESOL")

class GIN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GINConv(MLP([dataset.num_features, 32, 32])), GINConv(MLP([32, 32, 32]))])
        self.mlp = MLP([32, 32, 2], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch, batch_size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(global_add_pool(x, batch, batch_size))

seed_everything(1)
model, numbers = GIN().double(), []  # in float32 PyTorch Geometric differs from itself with the edges reversed
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in DataLoader(dataset, batch_size=128, shuffle=True):
    optimizer.zero_grad()
    out = model(batch.x.double(), batch.edge_index, batch.batch, batch.num_graphs)
    loss = F.cross_entropy(out, (batch.y.flatten() > -3).long())
    loss.backward()
    optimizer.step()
    numbers += [float(loss), *out.flatten().tolist()]
"""
#: Examples of PyTorch Geometric, and the data set of each.
ON_DATA = {
    "GCN on Cora": CORA + CORA_GCN + TRAINED.replace("KIND", "GCN"),
    "GAT on Cora": CORA + CORA_GAT + TRAINED.replace("KIND", "GAT"), "GraphSAGE on Cora": CORA_SAGE,
    "link prediction on Cora": CORA_LINKS, "papers and words of Cora": CORA_TYPED,
    "GNNExplainer on Cora": CORA_EXPLAINED, "GIN on ESOL": MOLECULES}
PROGRAMS = {"GCN and GAT on a citation graph": CITATION, "GraphSAGE with NeighborLoader": SAMPLED,
            "GIN on graphs": GRAPHS, "link prediction": LINKS, "typed nodes: to_hetero and HGT": TYPED,
            "GNNExplainer": EXPLAINED}
#: What our module has; the other names stay PyTorch Geometric's.
OURS = {"GATConv", "GCNConv", "GINConv", "HGTConv", "SAGEConv", "global_add_pool"}


@pytest.fixture(scope="module")
def root(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of data sets as PyTorch Geometric lays them out."""
    root = tmp_path_factory.mktemp("datasets")
    for folder, name, pattern in (("planetoid", "Cora", "ind.cora.*"), ("molecules", "esol", "delaney-processed.csv")):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for file in (data_dir / folder).glob(pattern):
            shutil.copy(file, raw)
    return str(root)


def run(program: str, root: str | None = None) -> list[float]:
    """Run the text of a program, and return its numbers."""
    names: dict[str, object] = {"__name__": "__main__", "ROOT": root}
    exec(compile(program, "<program>", "exec"), names)
    return names["numbers"]


def with_our_imports(program: str) -> str:
    """The program with the layers imported from here."""
    lines = []
    for line in program.splitlines():
        if line.startswith("from torch_geometric.nn import "):
            imported = [name.strip() for name in line.removeprefix("from torch_geometric.nn import ").split(",")]
            theirs = [name for name in imported if name not in OURS]
            lines.append("from structconv.compat.pyg import " + ", ".join(name for name in imported if name in OURS))
            line = "from torch_geometric.nn import " + ", ".join(theirs) if theirs else ""
        lines.append(line)
    return with_our_loader("\n".join(lines))


def with_our_loader(program: str) -> str:
    """The program with our loader: PyTorch Geometric's needs pyg-lib or torch-sparse."""
    return program.replace("from torch_geometric.loader import NeighborLoader",
                           "from structconv.data import NeighborLoader")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_with_the_same_numbers(name: str) -> None:
    _compare(PROGRAMS[name])


@pytest.mark.parametrize("name", ON_DATA)
def test_an_example_on_its_data_ends_with_the_same_numbers(name: str, root: str) -> None:
    if "ESOL" in name:
        pytest.importorskip("rdkit", reason="PyTorch Geometric reads molecules by rdkit")
    _compare(ON_DATA[name], root)


def _compare(program: str, root: str | None = None) -> None:
    expected = torch.tensor(run(with_our_loader(program), root))
    imported = torch.tensor(run(with_our_imports(program), root))
    with patch() as report:
        patched = torch.tensor(run(program, root))
    assert report.replaced
    torch.testing.assert_close(imported, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(patched, expected, atol=2e-4, rtol=2e-4)
