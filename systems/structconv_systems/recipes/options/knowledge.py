"""Options of the recipes on knowledge graphs."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, InFolder, OnFiles, option

__all__ = ["Links", "RGCNEntities", "RGCNLinks", "TypedWalks"]


@dataclass(frozen=True, kw_only=True)
class RGCNEntities(InFolder, seeds=10):
    """Schlichtkrull et al. (2018), section 5.1."""

    name = "rgcn-entities"
    folder = "kg/aifb"
    where = "AIFB is at github.com/tkipf/relational-gcn, rgcn/data/aifb; any such RDF with TSV of classes goes."
    learning = "loss"
    published = "95.83 on AIFB"  # Table 2, from memory, unchecked
    effect: ClassVar = Effect(claim="accuracy over a network without types of relations, points",
                              figure="test_accuracy", pairs=(("rgcn-entities", "without-types"),))
    reads = ("facts", "train", "test")
    presets: ClassVar = {"quick": {"seeds": 3}}
    tuning: ClassVar = {"held_out": 0.2}
    facts: str = option("aifb_stripped.nt.gz", "N-Triples, plain or gzipped")
    train: str = option("trainingSet.tsv", "TSV: entities, and their classes in a column label...")
    test: str = option("testSet.tsv", "TSV of the same columns")
    leaks: tuple[str, ...] = option(("affiliation", "employs"), "relations that give the class away, a,b,c: IRIs, or "
                                    "their ends; they are removed")
    hidden: int = option(16, "channels between the two layers", minimum=1)
    bases: int = option(0, "bases of the second layer's weights; 0: a matrix for each relation", minimum=0)
    dropout: float = option(0.0, "share of hidden units dropped", minimum=0, below=1)
    relation_dropout: float = option(0.4, "share of relations left out of each step in the group relation-dropout",
                                     minimum=0, below=1)
    held_out: float = option(0.0, "share of the training entities that are held out for validation; tune: 0.2",
                             minimum=0, below=1)
    epochs: int = option(50, "steps, each over all training entities", minimum=1)
    learning_rate: float = option(0.01, "learning rate of Adam", minimum=0, below=1e38)
    weight_decay: float = option(0.0, "L2 penalty of the first layer", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Links(OnFiles, schedule="cosine"):
    """Options of the recipes that predict links."""

    folder = "kg"
    where = "Kinship is at github.com/TimDettmers/ConvE, kinship.tar.gz; any triples go."
    reads = ("triples", "test")
    triples: str = option("kinship.tar.gz", "a folder with train, valid and test, or a tar archive of one")
    test: str = option("", "another folder or archive, for its test triples; empty: the same")
    unseen: str = option("error", "names in no training triple: error, or admit (they are numbered after the others)")
    batch_size: int = option(512, "triples in a batch; each is a query for its tail and one for its head", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unseen not in ("error", "admit"):
            raise ConfigError(self.name, "unseen must be error or admit", repr(self.unseen))

    def _files_at(self, path: Path) -> list[Path]:
        return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else super()._files_at(path)


@dataclass(frozen=True, kw_only=True)
class RGCNLinks(Links, batch_size=256, seeds=3, steps=2000, learning_rate=1e-2, validate_every=50):
    """Schlichtkrull et al. (2018), section 5.2."""

    name = "rgcn-links"
    published = "MRR 24.8 above 19.1 on FB15k-237"
    effect: ClassVar = Effect(claim="MRR of R-GCN over DistMult, points", figure="test_mrr", published=24.8 - 19.1,
                              pairs=(("rgcn", "distmult"), ("rgcn", "distmult-tuned")))
    further: ClassVar = (("triples=nations.tar.gz",), ("triples=umls.tar.gz", "distmult_channels=128",
                          "distmult_dropout=0.5", "rates=distmult-tuned=3e-2"))
    presets: ClassVar = {"quick": {"steps": 800, "seeds": 1}}
    channels: int = option(64, "channels D of entities and relations", minimum=1)
    layers: int = option(1, "layers of the encoder", minimum=1)
    bases: int = option(2, "bases of the layers' weights; 0: a matrix for each relation", minimum=0)
    dropout: float = option(0.7, "share of the entities' channels dropped", minimum=0, below=1)
    distmult_channels: int = option(64, "channels D of the DistMult baseline", minimum=1)
    distmult_dropout: float = option(0.3, "share of the baseline's entity channels dropped", minimum=0, below=1)


@dataclass(frozen=True, kw_only=True)
class TypedWalks(Links, batch_size=4096, seeds=3, steps=200, learning_rate=3e-2, validate_every=20):
    """Andreoli (2019), section 2.2."""

    name = "walks"
    published = "no figure; MRR of ConvE 83 on Kinship"
    effect: ClassVar = Effect(
        claim="MRR of walks over single relations, points", figure="test_mrr", pairs=(("walks", "relations"),))
    further: ClassVar = (("triples=nations.tar.gz",), ("triples=umls.tar.gz",))
    presets: ClassVar = {"quick": {"steps": 40, "seeds": 1, "validate_every": 20}}
    sparsity: float = option(0.5, "L1 penalty of the weights of walks: a step shrinks each by this times the learning "
                             "rate", minimum=0, below=1)
