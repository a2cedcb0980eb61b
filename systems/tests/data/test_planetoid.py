"""The Planetoid reader: the real Cora, a synthetic set with gaps, damaged files and hostile pickles."""

import json
import os
import pickle
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from structconv.cli import main
from structconv.errors import DataError
from structconv_systems.data.pickles import read_array_pickle
from structconv_systems.data.planetoid import read_planetoid
from structconv_systems.recipes.register import RECIPES
from structconv_systems.train.config import resolve


def test_cora_has_its_published_counts(real):
    cora = read_planetoid(real("planetoid"))
    assert (cora.num_nodes, cora.num_features, cora.num_classes) == (2708, 1433, 7)
    assert cora.num_undirected_edges == 5278
    assert (len(cora.train), len(cora.validation), len(cora.test)) == (140, 500, 1000)
    assert cora.labels[cora.train].bincount().tolist() == [20] * 7
    assert cora.features.nnz == 49216
    source, target = cora.edge_index
    assert not (source == target).any()
    keys = source * cora.num_nodes + target
    assert len(keys.unique()) == len(keys)
    assert torch.equal(keys.sort().values, (target * cora.num_nodes + source).sort().values)


def test_test_rows_stand_where_the_index_puts_them(real):
    folder = real("planetoid")
    cora = read_planetoid(folder)
    listed = [int(word) for word in (folder / "ind.cora.test.index").read_text().split()]
    tx, ty = read_array_pickle(folder / "ind.cora.tx"), read_array_pickle(folder / "ind.cora.ty")
    for row in (0, 1, 500, 999):
        assert np.array_equal(cora.features[listed[row]].toarray()[0], tx[row].toarray()[0])
        assert cora.labels[listed[row]] == ty[row].argmax()


def test_a_changed_byte_is_an_error_that_names_the_file(tmp_path, real):
    for path in real("planetoid").glob("ind.cora.*"):
        shutil.copyfile(path, tmp_path / path.name)
    with open(tmp_path / "ind.cora.test.index", "a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"ind\.cora\.test\.index: expected SHA-256 297ce8.*--no-verify"):
        read_planetoid(tmp_path)
    assert read_planetoid(tmp_path, verify=False).num_nodes == 2708


def tiny(folder: Path, *, graph: dict[int, list[int]] | None = None) -> None:
    """Six numbered nodes and one gap: 3 in allx (1 in x), tests are nodes 5 and 3, node 4 is nowhere."""
    features = np.arange(1, 11, dtype="float32").reshape(5, 2)
    labels = np.eye(2, dtype="int32")[[0, 1, 0, 1, 1]]
    parts = {"allx": csr_matrix(features[:3]), "x": csr_matrix(features[:1]), "tx": csr_matrix(features[3:]),
             "ally": labels[:3], "y": labels[:1], "ty": labels[3:],
             "graph": defaultdict(list, graph or {0: [1, 1, 5], 1: [0], 2: [2], 5: [0]})}
    for part, value in parts.items():
        (folder / f"ind.tiny.{part}").write_bytes(pickle.dumps(value, protocol=4))
    (folder / "ind.tiny.test.index").write_text("5\n3\n")


def test_gaps_self_loops_and_duplicates(tmp_path):
    tiny(tmp_path)
    data = read_planetoid(tmp_path, "tiny")
    assert data.features.toarray().tolist() == [[1, 2], [3, 4], [5, 6], [9, 10], [0, 0], [7, 8]]
    assert data.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert (data.train.tolist(), data.validation.tolist(), data.test.tolist()) == ([0], [1, 2], [3, 5])
    assert data.edge_index.tolist() == [[0, 0, 1, 5], [1, 5, 0, 0]]


@pytest.mark.parametrize(("text", "message"), [
    ("3\n1000000000000\n", "at most half of the numbers from 3 to its highest left out; got 2 of 999999999998"),
    (f"3\n{10 ** 30}\n", "one node number a line; got '1000000"),
    ("3\n\u00b2\n", "one node number a line; got '\u00b2'"),
    ("3\n-5\n", "one node number a line; got '-5'"), ("", "text; got an empty file"),
    ("3\n5\n".encode("utf-16"), "text in UTF-8; got the byte 0xff")])
def test_test_numbers_that_cannot_be_are_named(tmp_path, written, text, message):
    tiny(tmp_path)
    written("ind.tiny.test.index", text)
    with pytest.raises(DataError, match=rf"ind\.tiny\.test\.index.*: expected .*{message}"):
        read_planetoid(tmp_path, "tiny")


@pytest.mark.parametrize(("bad", "said"), [(6, "0 to 6"), *((bad, repr(bad)) for bad in (
    "a", 1.5, None, True, 10 ** 30, [1]))])
def test_neighbors_that_are_no_nodes_are_refused(tmp_path, bad, said):
    tiny(tmp_path, graph={0: [1], 1: [0, bad]})
    with pytest.raises(DataError, match=rf"tiny\.graph: expected nodes from 0 to 5; got {re.escape(said)}"):
        read_planetoid(tmp_path, "tiny")


def test_a_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(DataError, match=r"ind\.cora\.x: expected this file; got no such file.*kimiyoung"):
        read_planetoid(tmp_path)


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_and_named_and_not_run(tmp_path, protocol, written):
    tiny(tmp_path)
    marker = tmp_path / "ran"
    written("ind.tiny.graph", pickle.dumps({0: Hostile(marker)}, protocol=protocol))
    with pytest.raises(DataError, match=rf"ind\.tiny\.graph.*{os.name}\.system"):
        read_planetoid(tmp_path, "tiny")
    assert not marker.exists()


@pytest.mark.parametrize("code", [b"cbuiltins\neval\n.", b"cnumpy\nload\n.", b"cnumpy\nndarray.tofile\n.",
                                  b"c__builtin__\ngetattr\n.", b"cscipy.sparse._csr\ncsr_array\n."])
def test_no_other_global_is_admitted(written, code):
    path = written("some.pickle", code)
    with pytest.raises(DataError, match="forbidden global"):
        read_array_pickle(path)


def test_a_truncated_pickle_is_named(written):
    path = written("some.pickle", pickle.dumps(np.arange(10), protocol=4)[:-20])
    with pytest.raises(DataError, match=r"some\.pickle: expected a pickle of arrays"):
        read_array_pickle(path)


def test_an_unsound_matrix_is_refused(tmp_path):
    tiny(tmp_path)
    matrix = csr_matrix(np.ones((3, 2), dtype="float32"))
    matrix.indices[0] = 7
    (tmp_path / "ind.tiny.allx").write_bytes(pickle.dumps(matrix, protocol=4))
    with pytest.raises(DataError, match=r"ind\.tiny\.allx: expected a sound CSR matrix"):
        read_planetoid(tmp_path, "tiny")


def test_any_data_set_of_the_format_trains_without_coras_goal(tmp_path, capsys):
    tiny(tmp_path)
    words = ["train", "cora-gcn", "--data", str(tmp_path), "--dataset", "tiny", "epochs=2", "seeds=1", "--json"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    head = json.loads(capsys.readouterr().out.splitlines()[-1])["headline"]
    assert head["published_effect"] is None
    assert head["published"] == "no figure on tiny"
    (tmp_path / "ind.tiny.graph").write_bytes((tmp_path / "ind.tiny.graph").read_bytes()[:-3])
    assert main(["resume", str(tmp_path / "run")]) == 3
    assert main([*words, "--out", str(tmp_path / "torn")]) == 3
    assert f"{tmp_path / 'ind.tiny.graph'}: expected a pickle of arrays" in capsys.readouterr().err
    assert not (tmp_path / "torn").exists()


@pytest.mark.parametrize(("name", "penalized"), [("cora-gcn", True), ("cora-cheb", True), ("cora-gat", False)])
def test_the_validation_loss_is_that_of_the_papers_rule(tmp_path, name, penalized):
    """With weight decay by Kipf and Welling, without it by Velickovic et al."""
    tiny(tmp_path)
    recipe = resolve(RECIPES[name].recipe, {"data": str(tmp_path), "dataset": "tiny", "verify": False, "seeds": 1})
    task = RECIPES[name].runner().jobs(recipe, None)[0].make()
    loss = torch.nn.functional.cross_entropy(task._outputs()[task.parts["val"]], task.labels[task.parts["val"]])
    assert (task.validate()["val_loss"] > loss.item() + 1e-6) == penalized
