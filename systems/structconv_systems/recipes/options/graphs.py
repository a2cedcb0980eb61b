"""Options of the recipes on citation graphs and on molecules."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv_systems.recipes.options.base import Effect, InFolder, OnFiles, check_shares, option

__all__ = ["Cora", "CoraCheb", "CoraGAT", "CoraGCN", "Molecules"]


#: Accuracy of a network that reads the words alone: Velickovic et al. (2018), table 2 (from memory, unchecked).
_PERCEPTRON = {"cora": 55.1, "citeseer": 46.5, "pubmed": 71.4}


def _over_words(group: str, figure: float) -> Effect:
    return Effect(claim="accuracy over a network without the graph, points", figure="test_accuracy",
                  pairs=((group, "mlp"),), published=figure - _PERCEPTRON["cora"])


@dataclass(frozen=True, kw_only=True)
class Cora(InFolder, seeds=10):
    """Options of the three Cora recipes.

    Attributes:
        figures: those of the paper, by data set.
        baselines: those of the baseline in table 2 of Velickovic et al. (2018), by data set.
    """

    figures: ClassVar[Mapping[str, str]]
    baselines: ClassVar[Mapping[str, float]] = _PERCEPTRON
    effect: ClassVar[Effect]
    folder = "planetoid"
    reads = ("dataset",)
    where = "The files are in the folder data of github.com/kimiyoung/planetoid."
    presets: ClassVar = {"quick": {"seeds": 1, "epochs": 60}}
    dataset: str = option("cora", "NAME of the files ind.NAME.*: any data set in the Planetoid format")
    verify: bool = option(True, "compare the files with their published SHA-256")
    learning_rate: float = option(0.01, "learning rate of Adam", minimum=0, below=1e38)
    weight_decay: float = option(5e-4, "L2 penalty", minimum=0)
    epochs: int = option(200, "epochs, at most", minimum=1)

    @property
    def paper(self) -> str:
        return self.figures.get(self.dataset.lower(), f"no figure on {self.dataset}")

    @property
    def expected(self) -> Effect:
        """Over `baselines`; by direction only on another data set, and if the paper has no gain."""
        name = self.dataset.lower()
        gain = float(self.figures[name].split()[0]) - self.baselines[name] if name in self.figures else 0.0
        return dataclasses.replace(self.effect, published=gain or None)

    def files(self, *keys: str) -> list[Path]:
        return [file for file in sorted(Path(self.data).iterdir()) if file.name.startswith(f"ind.{self.dataset}.")]


@dataclass(frozen=True, kw_only=True)
class CoraGCN(Cora):
    """Kipf and Welling (2017), section 5.2."""

    name = "cora-gcn"
    effect: ClassVar = _over_words("cora-gcn", 81.5)
    # Table 2, checked against public listings of the paper's results.
    figures: ClassVar = {"cora": "81.5 on Cora", "citeseer": "70.3 on Citeseer", "pubmed": "79.0 on Pubmed"}
    published = figures["cora"]
    hidden: int = option(16, "units of the first layer", minimum=1)
    dropout: float = option(0.5, "share of inputs and hidden units dropped", minimum=0, below=1)
    window: int = option(10, "validation losses in the average of early stopping", minimum=1)


@dataclass(frozen=True, kw_only=True)
class CoraCheb(CoraGCN):
    """Kipf and Welling (2017), table 3: Chebyshev filter with K = 2, three polynomials."""

    name = "cora-cheb"
    effect: ClassVar = _over_words("cora-cheb", 81.2)
    # From memory, unchecked.
    figures: ClassVar = {"cora": "81.2 on Cora", "citeseer": "69.6 on Citeseer", "pubmed": "73.8 on Pubmed"}
    published = figures["cora"]
    order: int = option(2, "highest degree of the Chebyshev polynomials", minimum=0)


@dataclass(frozen=True, kw_only=True)
class CoraGAT(Cora, learning_rate=0.005, epochs=2000):
    """Velickovic et al. (2018), section 3.3."""

    name = "cora-gat"
    effect: ClassVar = Effect(claim="accuracy over GCN, points", figure="test_accuracy",
                              pairs=(("cora-gat", "gcn"),), published=83.0 - 81.5)
    baselines: ClassVar = {"cora": 81.5, "citeseer": 70.3, "pubmed": 79.0}
    # Table 2, from memory, unchecked.
    figures: ClassVar = {"cora": "83.0 ± 0.7 on Cora", "citeseer": "72.5 ± 0.7 on Citeseer",
                         "pubmed": "79.0 ± 0.3 on Pubmed"}
    published = figures["cora"]
    heads: int = option(8, "attention heads of the first layer", minimum=1)
    hidden: int = option(8, "channels of each head", minimum=1)
    dropout: float = option(0.6, "share of inputs, hidden units and attention dropped", minimum=0, below=1)
    patience: int = option(100, "validations without a better loss or accuracy before stopping", minimum=1)


_READOUTS = ("sum", "mean", "max", "softmax", "set2set")


@dataclass(frozen=True, kw_only=True)
class Molecules(OnFiles, seeds=10, steps=2500, optimizer="adamw", weight_decay=0.05, ema=0.99, learning_rate=1.5e-3,
                schedule="cosine", warmup=100, validate_every=100):
    """Gilmer et al. (2017), on a data set of MoleculeNet (Wu et al. 2018)."""

    name = "molecules"
    folder = "molecules"
    where = "ESOL is at github.com/deepchem/deepchem, datasets/delaney-processed.csv; any CSV with SMILES goes."
    published = ("0.58 on ESOL, of a random forest 1.07; 1.15 and 2.03 on FreeSolv; 0.719 and 0.876 on Lipophilicity "
                 "(MoleculeNet)")
    reads = ("file", "test")
    effect: ClassVar = Effect(
        claim="RMSE, the better random forest over message passing", figure="test_rmse", higher=False, ratio=True,
        pairs=(("molecules", "random-forest"), ("molecules", "random-forest-descriptors")), published=1.07 / 0.58)
    #: RMSE of message passing and of a random forest in Wu et al. (2018), by file and column; from memory, unchecked.
    errors: ClassVar = {("delaney-processed.csv", "measured log solubility in mols per litre"): (0.58, 1.07),
                        ("FreeSolv.csv", "expt"): (1.15, 2.03), ("Lipophilicity.csv", "exp"): (0.719, 0.876)}
    further: ClassVar = (("file=FreeSolv.csv", "target=expt"), ("file=Lipophilicity.csv", "target=exp"), ("members=5",))
    presets: ClassVar = {
        "quick": {"channels": 32, "edge_hidden": 32, "steps": 600, "warmup": 50, "checkpoint_every": 100, "seeds": 1,
                  "learning_rate": 3e-3},
        "paper": {"channels": 100, "edge_hidden": 100, "message_steps": 5, "readout_steps": 10, "batch_size": 16,
                  "steps": 10_000, "learning_rate": 1e-3}}
    file: str = option("delaney-processed.csv", "CSV, plain or gzipped: a line of names, then a line for each molecule")
    test: str = option("", "another such file for testing; empty: the molecules that train and valid leave")
    smiles: str = option("smiles", "column of the molecules")
    target: str = option("measured log solubility in mols per litre", "column of the predicted numbers")
    skip_bad: bool = option(False, "skip molecules whose SMILES cannot be read; a warning counts them")
    train: float = option(0.8, "share of the molecules for training, drawn by the seed", minimum=0.01, below=1)
    valid: float = option(0.1, "share for validation; the rest is for testing", minimum=0.01, below=1)
    channels: int = option(64, "channels of the states of atoms", minimum=1)
    edge_hidden: int = option(64, "hidden units of the edge network, which computes a matrix for each bond", minimum=1)
    reach: int = option(7, "atoms exchange messages over at most this many bonds", minimum=1, below=100)
    message_steps: int = option(3, "rounds of messages", minimum=1)
    readout: str = option("set2set", f"readout of the atoms: {', '.join(_READOUTS)}", choices=_READOUTS)
    readout_steps: int = option(3, "steps of set2set", minimum=1)
    members: int = option(1, "models that differ in their first weights, whose mean is the prediction", minimum=1)
    dropout: float = option(0.1, "share of hidden units dropped after the readout", minimum=0, below=1)
    batch_size: int = option(32, "molecules in a batch", minimum=1)

    @property
    def expected(self) -> Effect:
        """The published effect on its data; by direction only on others."""
        errors = None if self.test else self.errors.get((self.file, self.target))
        return dataclasses.replace(self.effect, published=errors and errors[1] / errors[0])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, self.train, self.valid)
