"""Options of the recipe on molecules."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.sequences import OnFiles
from structconv_systems.train.config import option
from structconv_systems.train.effect import Effect

__all__ = ["Molecules"]

_READOUTS = ("sum", "mean", "max", "softmax", "set2set")


@dataclass(frozen=True, kw_only=True)
class Molecules(OnFiles):
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
    seeds: int = 10
    steps: int = 2500
    optimizer: str = "adamw"
    weight_decay: float = 0.05
    ema: float = 0.99
    learning_rate: float = 1.5e-3
    schedule: str = "cosine"
    warmup: int = 100
    validate_every: int = 100

    @property
    def expected(self) -> Effect:
        """The published effect on its data; by direction only on others."""
        errors = None if self.test else self.errors.get((self.file, self.target))
        return dataclasses.replace(self.effect, published=errors and errors[1] / errors[0])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train + self.valid >= 1:
            raise ConfigError(self.name, "train and valid must leave something for the test",
                              f"{self.train} and {self.valid}")
