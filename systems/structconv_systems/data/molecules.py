"""Molecules in a CSV file like MoleculeNet's: SMILES in one column, a measured value in another."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structconv.errors import DataError, nearest
from structconv.shapes import check_positive
from structconv.structures import Graph, batch
from structconv_systems.data.tables import finite_number
from structconv_systems.data.text import read_text
from structconv_systems.optional import require

__all__ = ["ATOM_CHANNELS", "BOND_CHANNELS", "Molecules", "descriptors", "fingerprints", "read_molecules"]

_ELEMENTS = ("B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Se", "Br", "I")
_DEGREES = _HYDROGENS = (0, 1, 2, 3, 4)
_CHARGES = (-1, 0, 1)
_ORBITALS = ("SP", "SP2", "SP3")
_BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")

#: Channels of an atom: one-hot element, degree, hydrogens, charge and hybridization; aromatic; in a ring.
ATOM_CHANNELS = sum(len(known) + 1 for known in (_ELEMENTS, _DEGREES, _HYDROGENS, _CHARGES, _ORBITALS)) + 2
#: Channels of a bond: one-hot type; conjugated; in a ring.
BOND_CHANNELS = len(_BONDS) + 1 + 2


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Molecules:
    """Molecules, each with a measured number.

    Attributes:
        smiles: the SMILES of each molecule, as in the file.
        atoms: (N, ATOM_CHANNELS) zeros and ones, without hydrogens.
        bonds: a graph of the atoms, each bond in both directions, with `edge_attr` (E, BOND_CHANNELS + reach - 1);
            after the bonds come pairs of atoms that are 2, 3, ... reach bonds apart.
        targets: (B,), float32.
        skipped: the lines whose SMILES cannot be read.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.data.molecules import ATOM_CHANNELS, Molecules
        >>> bonds = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, edge_attr=torch.ones(2, 4))
        >>> atoms = torch.zeros(2, ATOM_CHANNELS)
        >>> ethane = Molecules(smiles=("CC",), atoms=(atoms,), bonds=(bonds,), targets=torch.tensor([-1.4]))
        >>> x, graph = ethane.batch([0, 0])
        >>> x.shape[0], graph.num_edges
        (4, 4)
    """

    smiles: tuple[str, ...]
    atoms: tuple[Tensor, ...]
    bonds: tuple[Graph, ...]
    targets: Tensor
    skipped: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.smiles)

    def __repr__(self) -> str:
        return f"Molecules({len(self)} of {sum(map(len, self.atoms))} atoms, {len(self.skipped)} lines skipped)"

    def batch(self, samples: Sequence[int]) -> tuple[Tensor, Graph]:
        """The atoms (N, ATOM_CHANNELS) and the bonds of some of them, side by side."""
        return torch.cat([self.atoms[sample] for sample in samples]), batch([self.bonds[sample] for sample in samples])


def read_molecules(path: str | Path, *, smiles: str = "smiles", target: str, reach: int = 1,
                   skip_bad: bool = False) -> Molecules:
    r"""Read a CSV file, plain or gzipped, whose first line names the columns. Needs rdkit.

    Args:
        smiles, target: the names of the two columns that are read.
        reach: the most bonds between two atoms that are an edge; 1 for bonds alone.
        skip_bad: leave out molecules whose SMILES cannot be read, and say which in `Molecules.skipped`.

    Raises:
        ConfigError: rdkit is not installed, or `reach` is below 1.
        DataError: a column is missing or there twice; with the line, cells that are too few or too many, a SMILES that
            cannot be read, a target that is no finite number; no molecules; or `read_text` cannot read the file.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.molecules import read_molecules
        >>> path = Path(folder.name, "molecules.csv")
        >>> _ = path.write_text("smiles,solubility\nCCO,1.1\nc1ccccc1,-1.6\n")
        >>> molecules = read_molecules(path, target="solubility")
        >>> [len(atoms) for atoms in molecules.atoms]      # without hydrogens
        [3, 6]
    """
    check_positive("read_molecules", "reach", reach)
    chem, base = (require(f"rdkit.{module}", "read_molecules", "molecules") for module in ("Chem", "rdBase"))
    rows = _rows(path)
    names = next(rows)[1]
    columns = [_column(path, names, name) for name in (smiles, target)]
    known, skipped = [], []
    with base.BlockLogs():
        for line, cells in rows:
            if len(cells) != len(names):
                raise DataError(path, f"{len(names)} cells, one a column", len(cells), line=line)
            text, number = (cells[column] for column in columns)
            molecule = chem.MolFromSmiles(text)
            if molecule is not None and molecule.GetNumAtoms():
                edges = _bonds(molecule, chem.GetDistanceMatrix(molecule), reach)
                known.append((text, _atoms(molecule), edges, _number(path, line, number, target)))
            elif skip_bad:
                skipped.append(line)
            else:
                raise DataError(path, f"a molecule as SMILES in the column {smiles!r}", repr(text), line=line,
                                remedy="skip_bad leaves such lines out, and says how many there were.")
    if not known:
        raise DataError(path, "molecules after the line of names", f"{len(skipped)} that cannot be read" if skipped
                        else "no other line")
    texts, atoms, bonds, numbers = zip(*known, strict=True)
    return Molecules(smiles=texts, atoms=atoms, bonds=bonds, targets=torch.tensor(numbers), skipped=tuple(skipped))


def fingerprints(smiles: Sequence[str], *, radius: int = 2, size: int = 2048) -> Any:
    """Return folded Morgan fingerprints with counts, a NumPy array (B, size): neighborhoods of up to `radius` bonds.
    Needs rdkit.

    Example:

        >>> from structconv_systems.data.molecules import fingerprints
        >>> fingerprints(["CCO", "CCN"], size=64).shape
        (2, 64)
    """
    chem, generators = (require(f"rdkit.{module}", "fingerprints", "molecules")
                        for module in ("Chem", "Chem.rdFingerprintGenerator"))
    generator = generators.GetMorganGenerator(radius=radius, fpSize=size)
    return np.stack([generator.GetCountFingerprintAsNumPy(chem.MolFromSmiles(text)) for text in smiles])


def descriptors(smiles: Sequence[str]) -> Any:
    """Return RDKit's descriptors, a NumPy array (B, D) of float32, NaN where they are not finite. Needs rdkit."""
    chem, known = (require(f"rdkit.{module}", "descriptors", "molecules") for module in ("Chem", "Chem.Descriptors"))
    rows = [list(known.CalcMolDescriptors(chem.MolFromSmiles(text)).values()) for text in smiles]
    with np.errstate(over="ignore"):
        values = np.array(rows, dtype=np.float64).astype(np.float32)
    return np.where(np.isfinite(values), values, np.nan)


def _rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the stripped cells of each row that has cells."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    line = 1
    try:
        for cells in reader:
            if cells:
                yield line, [cell.strip() for cell in cells]
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(path, "cells with commas between them", error, line=line) from None


def _column(path: str | Path, names: list[str], name: str) -> int:
    if names.count(name) != 1:
        got = f"{names.count(name)} of them" if name in names else ", ".join(map(repr, names))
        raise DataError(path, f"a column {name!r}", got, line=1, remedy=nearest(name, names))
    return names.index(name)


def _number(path: str | Path, line: int, cell: str, target: str) -> float:
    try:
        return finite_number(cell)
    except ValueError:
        raise DataError(path, f"a finite number in the column {target!r}", repr(cell), line=line) from None


def _one_of(value: Any, known: Sequence[Any]) -> list[bool]:
    """Return the one-hot code of a value; the last entry is for unknown values."""
    return [value == one for one in known] + [value not in known]


def _atoms(molecule: Any) -> Tensor:
    """Return the channels of the atoms, (N, ATOM_CHANNELS)."""
    return torch.tensor([[
        *_one_of(atom.GetSymbol(), _ELEMENTS), *_one_of(atom.GetDegree(), _DEGREES),
        *_one_of(atom.GetTotalNumHs(), _HYDROGENS), *_one_of(atom.GetFormalCharge(), _CHARGES),
        *_one_of(atom.GetHybridization().name, _ORBITALS), atom.GetIsAromatic(), atom.IsInRing()]
        for atom in molecule.GetAtoms()], dtype=torch.float32)


def _bonds(molecule: Any, distances_NN: Any, reach: int) -> Graph:
    bonds = list(molecule.GetBonds())
    ends = torch.tensor([(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in bonds], dtype=torch.int64)
    kinds = torch.tensor([[*_one_of(bond.GetBondType().name, _BONDS), bond.GetIsConjugated(), bond.IsInRing()]
                          for bond in bonds], dtype=torch.float32).view(-1, BOND_CHANNELS)
    index, distances = ends.view(-1, 2).T, torch.from_numpy(distances_NN)
    pairs = ((distances > 1) & (distances <= reach)).nonzero().T
    apart = distances[pairs[0], pairs[1]].long().unsqueeze(-1) == torch.arange(2, reach + 1)
    return Graph(torch.cat([index, index.flip(0), pairs], 1), num_nodes=molecule.GetNumAtoms(),
                 edge_attr=torch.block_diag(torch.cat([kinds, kinds]), apart.float()))
