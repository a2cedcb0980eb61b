"""Options of the recipes on time series."""

from dataclasses import dataclass
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, OnFiles, check_shares, option

__all__ = ["Series", "Traffic"]


@dataclass(frozen=True, kw_only=True)
class Series(OnFiles, seeds=3, steps=1200, learning_rate=9e-3, schedule="cosine", warmup=50, clip=5.0):
    """Cinar et al. (2017, 2018)."""

    name = "series"
    folder = "traffic"
    where = "Los-loop is at github.com/lehaifeng/T-GCN, data/los_speed.csv; any CSV of series goes."
    published = "period-aware below plain attention"
    reads = ("file", "test")
    effect: ClassVar = Effect(claim="absolute error, plain over period-aware attention", figure="test_mae",
                              higher=False, ratio=True, pairs=(("period-aware", "attention"),))
    presets: ClassVar = {
        "quick": {"history": 300, "patch": 12, "hidden": 32, "steps": 300, "validate_every": 150,
                  "checkpoint_every": 50, "seeds": 1, "stride": 12, "learning_rate": 1e-2}}
    file: str = option("los_speed.csv", "CSV, plain or gzipped: a line of names, then a line for each time")
    test: str = option("", "CSV with test data of any series; empty: the last times of file")
    missing: str = option("zero", "missing readings: nan, or zero (nan and zeros)", choices=("nan", "zero"))
    train: float = option(0.7, "share of the times for training: the first ones", minimum=0.05, below=1)
    valid: float = option(0.1, "share of the times for validation; the rest is for testing", minimum=0.01, below=1)
    history: int = option(324, "input readings of a forecast; more than a period is best", minimum=1)
    period: int = option(288, "readings in a period, for the seasonal forecast; 0: no period", minimum=0)
    horizon: int = option(12, "forecast readings", minimum=1)
    patch: int = option(3, "readings in the patch that is one entry; divides history and horizon", minimum=1)
    hidden: int = option(64, "channels of the states", minimum=1)
    heads: int = option(4, "blocks of channels, each with its own period", minimum=1)
    dropout: float = option(0.0, "share of hidden units dropped", minimum=0, below=1)
    gaps: float = option(0.2, "share of the input readings removed, in half of the training samples and in the last "
                         "column", minimum=0, below=0.95)
    gap: int = option(12, "consecutive readings in a gap", minimum=1)
    batch_size: int = option(128, "histories in a batch", minimum=1)
    stride: int = option(3, "times between the starts of two forecasts in validation, and with gaps", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, self.train, self.valid)
        for name in ("history", "horizon"):
            if getattr(self, name) % self.patch:
                raise ConfigError(self.name, f"patch must divide {name}={getattr(self, name)}", self.patch)
        if self.hidden % self.heads:
            raise ConfigError(self.name, f"heads must divide hidden={self.hidden}", self.heads)


@dataclass(frozen=True, kw_only=True)
class Traffic(OnFiles, seeds=3, steps=700, learning_rate=2e-2, rates=("without-graph=4e-2",), schedule="cosine",
              warmup=20, clip=5.0, validate_every=100, checkpoint_every=100):
    """Li et al. (2018)."""

    name = "dcrnn"
    folder = "traffic"
    where = ("Los-loop is at github.com/lehaifeng/T-GCN, data/los_speed.csv; its graph and where its sensors stand at "
             "github.com/liyaguang/DCRNN, data/sensor_graph; any CSV of series goes.")
    # Table 1, from memory, unchecked.
    published = ("MAE 2.77, 3.15, 3.60 at 15, 30, 60 min on the whole of METR-LA; of its best baseline, FC-LSTM, 3.44, "
                 "3.77, 4.37")
    reads = ("file", "adjacency", "locations", "test")
    effect: ClassVar = Effect(
        claim="absolute error, the best baseline over DCRNN", figure="test_mae", higher=False, ratio=True,
        pairs=tuple(("dcrnn", name) for name in ("without-graph", "linear", "last-value", "time-of-day")),
        published=(3.44 + 3.77 + 4.37) / (2.77 + 3.15 + 3.60))
    presets: ClassVar = {
        "quick": {"seeds": 1, "hidden": 16, "layers": 1, "steps": 200, "validate_every": 100, "checkpoint_every": 50,
                  "stride": 12, "learning_rate": 1e-2, "rates": (), "sampling": 10.0},
        "paper": {"seeds": 1, "hidden": 64, "layers": 2, "batch_size": 64, "steps": 37500, "validate_every": 375,
                  "checkpoint_every": 375, "learning_rate": 1e-2, "rates": (), "sampling": 2000.0, "stride": 1,
                  "missing": "zero"}}
    file: str = option("los_speed.csv", "CSV, plain or gzipped: a line of names, then a line for each time")
    adjacency: str = option("metr_la_adj_mx.pkl", "the graph: a CSV of S x S weights, or DCRNN's pickle")
    locations: str = option("metr_la_graph_sensor_locations.csv", "CSV of the positions of the sensors, for the map; "
                            "empty: positions are computed from the graph")
    test: str = option("", "CSV with test data of the same sensors; empty: the last times of file")
    missing: str = option("none", "missing readings: nan, zero (nan and zeros), or none",
                          choices=("none", "nan", "zero"))
    train: float = option(0.7, "share of the times for training: the first ones", minimum=0.05, below=1)
    valid: float = option(0.1, "share of the times for validation; the rest is for testing", minimum=0.01, below=1)
    history: int = option(12, "input readings of a forecast", minimum=1)
    horizon: int = option(12, "forecast readings", minimum=1)
    period: int = option(288, "readings in a day, so that the time of day is an input; 0: it is no input", minimum=0)
    walk: int = option(2, "longest walk on the graph, in steps", minimum=0)
    hidden: int = option(32, "channels of a state", minimum=1)
    layers: int = option(1, "layers of cells in the encoder and in the decoder", minimum=1)
    sampling: float = option(50.0, "tau of scheduled sampling: the decoder reads observed values with probability "
                             "tau / (tau + exp(step / tau)); 0: never", minimum=0)
    batch_size: int = option(16, "histories in a batch, of all sensors", minimum=1)
    stride: int = option(3, "times between the starts of two forecasts in validation", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, self.train, self.valid)
