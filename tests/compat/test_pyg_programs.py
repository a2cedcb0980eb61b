"""The kinds of programs that PyTorch Geometric's documentation has, on made-up data and on its data sets: with its
layers, with the import of the layers changed, and unchanged under `patch()`, they train to the same numbers.

The programs follow its examples, with fewer epochs. Random numbers of attention dropout and of sampled
neighborhoods differ: these programs have no attention dropout, and read whole neighborhoods.
"""

import shutil
from pathlib import Path

import pytest
import torch

from structconv.compat.pyg import patch

pytest.importorskip("torch_geometric")

#: What a program begins with: `data` or `graphs`, how many `inputs` and `classes` they have, and its `numbers`.
MADE_UP = """
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric import seed_everything
from torch_geometric.data import Data

torch.manual_seed(0)
y = torch.arange(60) % 3
x = torch.randn(60, 8) + 2 * F.one_hot(y, 8)
source = torch.arange(60).repeat(4)
target = torch.where(torch.rand(240) < 0.8, (source + 3 * torch.randint(20, (240,))) % 60, torch.randint(60, (240,)))
edge_index = torch.stack([source, target])[:, source != target]
train = torch.arange(60) < 30
data, inputs, classes, numbers = Data(x=x, edge_index=edge_index, y=y, train_mask=train, test_mask=~train), 8, 3, []
"""
CORA = """
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from torch_geometric import seed_everything
from torch_geometric.datasets import Planetoid

dataset = Planetoid(ROOT, "Cora", transform=T.NormalizeFeatures())
data, inputs, classes, numbers = dataset[0], dataset.num_features, dataset.num_classes, []
"""
MADE_UP_GRAPHS = """
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data

torch.manual_seed(0)
graphs, inputs, least, dtype, size, numbers = [], 4, 0, torch.float32, 4, []
for i in range(24):
    nodes = 6 + i % 5
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    chords = torch.randint(nodes, (2, nodes if i % 2 else 1))
    edge_index = torch.cat([ring, ring.flip(0), chords, chords.flip(0)], 1)
    graphs.append(Data(x=torch.ones(nodes, 4), edge_index=edge_index, y=torch.tensor([i % 2])))
"""
MOLECULES = """
import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import MoleculeNet

graphs = MoleculeNet(ROOT, "ESOL")  # in float32 PyTorch Geometric differs from itself with the edges reversed
inputs, least, dtype, size, numbers = graphs.num_features, -3, torch.float64, 128, []
"""
GCN = """
from torch_geometric.nn import GCNConv

class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(inputs, 16, cached=True), GCNConv(16, classes, cached=True)

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index, edge_weight).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge_weight)
"""
GAT = """
from torch_geometric.nn import GATConv

class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GATConv(inputs, 8, 8), GATConv(8 * 8, classes, heads=1, concat=False)

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
SAGE = """
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv

class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(inputs, 32), SAGEConv(32, classes)])

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i < len(self.convs) - 1:
                x = x.relu_()
        return x

seed_everything(1)
model = SAGE()
train_loader = NeighborLoader(data, num_neighbors=[-1, -1], batch_size=15, input_nodes=data.train_mask)
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
LINKS = """
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(inputs, 64), GCNConv(64, 32)

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
TYPED = """
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HGTConv, HeteroConv, SAGEConv, to_hetero

hetero = HeteroData()
hetero["paper"].x, hetero["word"].x = data.x, torch.eye(inputs)
hetero["paper", "cites", "paper"].edge_index = data.edge_index
hetero["paper", "has", "word"].edge_index = data.x.nonzero().t().contiguous()
hetero = T.ToUndirected()(hetero)

class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), classes)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

class HGT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_dict = torch.nn.ModuleDict({kind: torch.nn.Linear(inputs, 16)
                                             for kind in hetero.node_types})
        self.conv, self.lin = HGTConv(16, 16, hetero.metadata(), 2), torch.nn.Linear(16, classes)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {kind: self.lin_dict[kind](x).relu_() for kind, x in x_dict.items()}
        return {"paper": self.lin(self.conv(x_dict, edge_index_dict)["paper"])}

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = HeteroConv({("paper", "cites", "paper"): GATConv(-1, classes),
                                ("word", "rev_has", "paper"): SAGEConv((-1, -1), classes)}, aggr="sum")

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
EXPLAINED = GCN + TRAINED.replace("KIND", "GCN") + """
from torch_geometric.explain import Explainer, GNNExplainer

explainer = Explainer(model=model, algorithm=GNNExplainer(epochs=10), explanation_type="model",
                      node_mask_type="attributes", edge_mask_type="object",
                      model_config=dict(mode="multiclass_classification", task_level="node", return_type="raw"))
torch.manual_seed(2)
explanation = explainer(data.x, data.edge_index, index=10)
numbers += [*explanation.edge_mask.tolist(), *explanation.node_mask.sum(-1).tolist()]
"""
GIN = """
from torch_geometric.loader import DataLoader
from torch_geometric.nn import MLP, GINConv, global_add_pool

class GIN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GINConv(MLP([inputs, 32, 32])), GINConv(MLP([32, 32, 32]), train_eps=True)])
        self.mlp = MLP([32, 32, 2], norm=None, dropout=0.5)

    def forward(self, x, edge_index, batch, batch_size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.mlp(global_add_pool(x, batch, batch_size))

seed_everything(1)
model = GIN().to(dtype)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in DataLoader(graphs, batch_size=size, shuffle=True):
    optimizer.zero_grad()
    out = model(batch.x.to(dtype), batch.edge_index, batch.batch, batch.num_graphs)
    loss = F.cross_entropy(out, (batch.y.flatten() > least).long())
    loss.backward()
    optimizer.step()
    numbers += [float(loss), *out.flatten().tolist()]
"""
KINDS = {"GCN": GCN + TRAINED.replace("KIND", "GCN"), "GAT": GAT + TRAINED.replace("KIND", "GAT"),
         "GraphSAGE with NeighborLoader": SAGE, "link prediction": LINKS, "GNNExplainer": EXPLAINED,
         "to_hetero, HGT and HeteroConv": TYPED}
#: Each program, and its data.
PROGRAMS = {f"{name} on {place}": begin + program for place, begin in (("made-up data", MADE_UP), ("Cora", CORA))
            for name, program in KINDS.items()}
PROGRAMS |= {"GIN on made-up graphs": MADE_UP_GRAPHS + GIN, "GIN on ESOL": MOLECULES + GIN}
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
def test_a_program_ends_with_the_same_numbers(name: str, request: pytest.FixtureRequest) -> None:
    if "ESOL" in name:
        pytest.importorskip("rdkit", reason="PyTorch Geometric reads molecules by rdkit")
    program, root = PROGRAMS[name], None if "made-up" in name else request.getfixturevalue("root")
    expected = torch.tensor(run(with_our_loader(program), root))
    imported = torch.tensor(run(with_our_imports(program), root))
    with patch() as report:
        patched = torch.tensor(run(program, root))
    assert report.replaced
    torch.testing.assert_close(imported, expected, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(patched, expected, atol=2e-4, rtol=2e-4)
