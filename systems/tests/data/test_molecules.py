"""Molecules in CSV files: the real ESOL, what is read of an atom and a bond, and every line that is wrong."""

import gzip
import math
import sys

import pytest
import torch

from structconv.errors import ConfigError, DataError
from structconv.structures import Graph
from structconv_systems.data.molecules import ATOM_CHANNELS, BOND_CHANNELS, descriptors, read_molecules

pytest.importorskip("rdkit")
HEAD = "name,smiles,y\n"


def read(path, **options):
    return read_molecules(path, target="y", **options)


def test_esol_has_its_published_counts(real):
    actual = read_molecules(real("molecules/delaney-processed.csv"), target="measured log solubility in mols per litre")
    assert len(actual) == 1128 and not actual.skipped
    assert (actual.targets.min(), actual.targets.max()) == (pytest.approx(-11.6), pytest.approx(1.58))
    assert actual.smiles[1] == "Cc1occc1C(=O)Nc2ccccc2" and actual.targets[1] == pytest.approx(-3.3)
    assert len(actual.atoms[1]) == 15 and actual.bonds[1].num_edges == 2 * 16
    groups = (13, 6, 6, 4, 4)
    for group in torch.cat(actual.atoms)[:, :sum(groups)].split(groups, 1):
        assert torch.equal(group.sum(1), torch.ones(len(group)))


def test_what_is_read_of_atoms_and_bonds(written):
    """C#N with a charged end, and benzene."""
    actual = read(written("a.csv", HEAD + "a,C#[NH+],1.5\nb,c1ccccc1,-2e1\n"))
    assert repr(actual) == "Molecules(2 of 8 atoms, 0 lines skipped)" and actual.targets.tolist() == [1.5, -20]
    carbon, nitrogen = actual.atoms[0].unbind()
    assert actual.atoms[0].shape == (2, ATOM_CHANNELS) and carbon.sum() == nitrogen.sum() == 5
    _, degrees, hydrogens, charges, orbitals, ring = nitrogen.split((13, 6, 6, 4, 4, 2))
    assert nitrogen.argmax() == 2 and carbon.argmax() == 1
    assert (degrees.argmax(), hydrogens.argmax(), charges.argmax(), orbitals.argmax()) == (1, 1, 2, 0)
    assert not ring.any()
    assert actual.bonds[0].edge_index.tolist() == [[0, 1], [1, 0]]
    assert actual.bonds[0].edge_attr.tolist() == [[0, 0, 1, 0, 0, 0, 0]] * 2
    assert actual.atoms[1][:, -2:].all() and actual.bonds[1].edge_attr.shape == (12, BOND_CHANNELS)
    assert torch.equal(actual.bonds[1].edge_attr, torch.tensor([0.0, 0, 0, 1, 0, 1, 1]).expand(12, -1))


def test_descriptors_are_those_of_rdkit_and_nan_if_not_finite():
    from rdkit.Chem.Descriptors import descList

    names, smiles = [name for name, _ in descList], ["CCO", "C[Hg]C", "[U]", "*", "C" * 200]
    actual = descriptors(smiles)
    assert actual.shape == (len(smiles), len(names)) and actual.dtype == "float32"
    assert actual[0, names.index("MolWt")] == pytest.approx(46.069, abs=1e-3)
    unknown = enumerate(("MaxPartialCharge", "BCUT2D_MWHI", "SPS", "Ipc"), 1)
    assert all(math.isnan(actual[row, names.index(name)]) for row, name in unknown)
    assert torch.from_numpy(actual[0]).isfinite().all() and not torch.from_numpy(actual).isinf().any()


def test_atoms_of_any_element_and_without_bonds(written):
    actual = read(written("a.csv", HEAD + "salt,[Na+].[Cl-],0\nmethane,C,1\n"))
    assert actual.atoms[0][:, 12].tolist() == [1, 0] and [graph.num_edges for graph in actual.bonds] == [0, 0]
    x, graph = actual.batch([1, 0, 1])
    assert x.shape == (4, ATOM_CHANNELS) and graph.samples.sizes()[0] == [1, 2, 1] and graph.num_edges == 0


def test_pairs_that_are_further_apart_are_edges_if_asked_for(written):
    """Butane and a separate ion: pairs by their bonds apart, none between the parts."""
    path = written("a.csv", HEAD + "a,CCCC.[Na+],0\nb,O,1\n")
    (graph, single), (bonds, _) = read(path, reach=3).bonds, read(path).bonds
    assert graph.num_edges == 2 * (3 + 2 + 1) and single.edge_attr.shape == (0, BOND_CHANNELS + 2)
    assert torch.equal(graph.edge_index[:, :6], bonds.edge_index)
    assert torch.equal(graph.edge_attr[:6, :BOND_CHANNELS], bonds.edge_attr) and not graph.edge_attr[:6, -2:].any()
    for (m, n), apart in zip(graph.edge_index[:, 6:].T.tolist(), graph.edge_attr[6:].tolist(), strict=True):
        assert apart == [0] * BOND_CHANNELS + [abs(m - n) == 2, abs(m - n) == 3]
    with pytest.raises(ConfigError, match="reach"):
        read(path, reach=0)


def test_a_batch_is_its_molecules_side_by_side(written):
    actual = read(written("a.csv", HEAD + "a,CC,0\nb,C=CO,1\n"))
    x, graph = actual.batch([1, 0])
    assert torch.equal(x, torch.cat([actual.atoms[1], actual.atoms[0]]))
    assert isinstance(graph, Graph) and graph.edge_index.tolist() == [[0, 1, 1, 2, 3, 4], [1, 2, 0, 1, 4, 3]]


def test_cells_with_commas_and_lines_and_gzip(written):
    text = '\ufeff' + HEAD.replace("\n", "\r\n") + '"2,4-D",  CC ,1\r\n\r\n"a\nb",CCC\tpropane,2\r\n'
    plain = read(written("a.csv", text))
    path = written("b.csv", gzip.compress(text.encode()))
    assert plain.smiles == read(path).smiles == ("CC", "CCC\tpropane") and plain.targets.tolist() == [1, 2]


def test_bad_molecules_are_skipped_if_asked_for(written, capfd):
    path = written("a.csv", HEAD + "a,CC,0\nb,C(,x\nc,,3\nd,C1CC,3\ne,CCC,5\n")
    actual = read(path, skip_bad=True)
    assert actual.skipped == (3, 4, 5) and actual.targets.tolist() == [0, 5]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text, message", [
    *[(f"{HEAD}a,CC,1\nb,{bad},2\n", r"a\.csv, line 3: expected a molecule as SMILES in the column 'smiles'; got "
       r"'\S*'\. skip_bad leaves such lines out")
      for bad in ("C(", "C1CC", "hello", "", "c1cccc1", "é", "CC(C)(C)(C)C")],
    *[(f"{HEAD}a,CC,{bad}\n", r"a\.csv, line 2: expected a finite number in the column 'y'; got '\S*'\.")
      for bad in ("", "x", "nan", "inf", "1e39", "1_0", "１", "0x1")],
    ("name,smiles,z\na,CC,1\n", r"a\.csv, line 1: expected a column 'y'; got 'name', 'smiles', 'z'\."),
    ("name,smile,y\na,CC,1\n", r"a\.csv, line 1: expected a column 'smiles'; .* Did you mean 'smile'\?"),
    ("smiles,smiles,y\nCC,CC,1\n", r"a\.csv, line 1: expected a column 'smiles'; got 2 of them\."),
    (f"{HEAD}a,CC\n", r"a\.csv, line 2: expected 3 cells, one a column; got 2\."),
    (f"{HEAD}a,CC,1\nb,CC,1,2\n", r"a\.csv, line 3: expected 3 cells, one a column; got 4\."),
    (f'{HEAD}"a\nb",CC,1\nc,C(,1\n', r"a\.csv, line 4: expected a molecule"),
    (f'{HEAD}"a,CC,1\n', r"a\.csv, line 2: expected cells with commas between them; got unexpected end of data\."),
    (HEAD, r"a\.csv: expected molecules after the line of names; got no other line\."),
    ("\n", r"a\.csv: expected text; got white space alone\."),
    ("", r"a\.csv: expected text; got an empty file\.")])
def test_a_wrong_line_is_named(written, text, message):
    with pytest.raises(DataError, match=message):
        read(written("a.csv", text))


def test_all_molecules_bad(written):
    with pytest.raises(DataError, match="expected molecules after the line of names; got 2 that cannot be read"):
        read(written("a.csv", HEAD + "a,C(,1\nb,),2\n"), skip_bad=True)


def test_without_rdkit(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit.Chem", None)
    with pytest.raises(ConfigError, match=r"rdkit must be installed.*pip install 'structconv-systems\[molecules\]'"):
        read(written("a.csv", HEAD))
