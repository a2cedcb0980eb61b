"""Node classification by GCN and GAT, as PyTorch Geometric's documentation has it: a program that knows no structconv.

Run it as it is, or on structconv's layers by changing the import of the layers to `from structconv.compat.pyg import
GATConv, GCNConv`, or unchanged under `structconv.compat.pyg.patch()`, which `--patch` does here::

    python examples/pyg_citation.py --data FOLDER --patch

FOLDER has the files ind.cora.*; without it the graph is made up.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv, GCNConv


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, cached=True)
        self.conv2 = GCNConv(hidden_channels, out_channels, cached=True)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


class GAT(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, heads=8):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


def made_up(nodes=200, classes=4, features=32):
    """Papers of few classes that mostly cite their own; three words of each class are frequent in its papers."""
    torch.manual_seed(0)
    y = torch.arange(nodes) % classes
    words = torch.rand(nodes, features) < 0.1 + 0.4 * (torch.arange(features) % classes == y[:, None])
    source = torch.arange(nodes).repeat(3)
    own = source % classes + classes * torch.randint(nodes // classes, source.shape)
    target = torch.where(torch.rand(source.shape) < 0.8, own, torch.randint(nodes, source.shape))
    edges = torch.stack([source, target])[:, source != target]
    return words.float(), torch.cat([edges, edges.flip(0)], 1), y, torch.arange(nodes) < 40, torch.arange(nodes) >= 40


def read(folder):
    """Cora as Planetoid has it."""
    from structconv_systems.data.planetoid import read_planetoid

    data = read_planetoid(folder, "cora")
    x, nodes = torch.from_numpy(data.features.toarray()), torch.arange(data.num_nodes)
    x = x / x.sum(-1, keepdim=True).clamp(min=1)
    return x, data.edge_index, data.labels, torch.isin(nodes, data.train), torch.isin(nodes, data.test)


def train(net, data, epochs, seed=0):
    """The losses of all steps, and the share of the nodes of the test that is right in the end."""
    x, edge_index, y, known, tested = data
    torch.manual_seed(seed)
    model = net(x.shape[1], 8, int(y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[known], y[known])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    right = (model(x, edge_index).argmax(-1) == y)[tested]
    return losses, right.float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="a folder with ind.cora.*")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--patch", action="store_true", help="run on structconv's layers")
    args = parser.parse_args()
    report = None
    if args.patch:
        from structconv.compat.pyg import patch

        report = patch()
    data = read(args.data) if args.data else made_up()
    for net in (GCN, GAT):
        start = time.perf_counter()
        losses, accuracy = train(net, data, args.epochs)
        print(f"{net.__name__}: loss {losses[0]:.4f} to {losses[-1]:.4f}, accuracy {accuracy:.3f}, "
              f"{time.perf_counter() - start:.1f} s")
    if report is not None:
        print(report)


if __name__ == "__main__":
    main()
