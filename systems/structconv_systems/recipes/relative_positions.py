"""Relative positions (Shaw et al. 2018): BLEU by clipping, by side, and beside other encodings of positions."""

from functools import partial

from structconv import Causal, LowRank
from structconv.mechanisms import STRUCTURE_IF_GIVEN, ALiBi, DotProduct, Mechanism, RelativeBias, RelativeKey, Rotary
from structconv.nn import Conv, RelativeValue
from structconv_systems.models.transformer import Transformer as Model
from structconv_systems.plots import curves_png
from structconv_systems.recipes.base import Finished, Job, Run, Study
from structconv_systems.recipes.options.sequences import RelativePositions
from structconv_systems.recipes.translation import translation_jobs

__all__ = ["RUNNER", "attention", "network"]

_CLIP = 16


def network(recipe: RelativePositions, vocabulary: int, row: str) -> Model:
    """Build the Transformer of a row of the tables; self-attention has the positions, except in ``sinusoidal``."""
    return Model(vocabulary, channels=recipe.channels, layers=recipe.layers, heads=recipe.heads, hidden=recipe.hidden,
                 dropout=recipe.dropout, norm=recipe.norm, recompute=recipe.recompute,
                 positions="sinusoidal" if row == "sinusoidal" else "none",
                 encoder_mechanism=partial(_layer, recipe, row, STRUCTURE_IF_GIVEN),
                 decoder_mechanism=partial(_layer, recipe, row, Causal()))


def attention(row: str, heads: int, dim: int) -> tuple[Mechanism, int | None]:
    """Return the scores of a row, and the clipping of its relative values, if any."""
    product = DotProduct(heads, dim)
    plain = product.scaled()
    if row.startswith("clip-"):
        clip = int(row.removeprefix("clip-"))
        return (product + RelativeKey(clip)).scaled(), clip
    rows: dict[str, tuple[Mechanism, int | None]] = {
        "keys": ((product + RelativeKey(_CLIP)).scaled(), None), "values": (plain, _CLIP), "neither": (plain, None),
        "sinusoidal": (plain, None), "t5": (plain + RelativeBias(_CLIP, buckets="log"), None),
        "alibi": (plain + ALiBi(), None), "rotary": (DotProduct(heads, dim, rotary=Rotary()).scaled(), None)}
    return rows[row]


def _layer(recipe: RelativePositions, row: str, keep: object, layer: int) -> Conv:
    dim = recipe.channels // recipe.heads
    scores, clip = attention(row, recipe.heads, dim)
    return Conv(scores.masked(keep=keep).softmax(), recipe.channels, recipe.channels, weight=LowRank(dim),
                relative_value=None if clip is None else RelativeValue(clip))


def _jobs(recipe: RelativePositions, run: Run | None) -> list[Job]:
    return translation_jobs(recipe, run, {row: partial(network, recipe, row=row) for row in recipe.rows})


def _finish(recipe: RelativePositions, finished: Finished) -> None:
    """Draw BLEU by clipping, and of the other rows."""
    means = {row: figures["test_bleu"]["mean"] for row, figures in finished.groups.items()}
    clips = sorted(int(row.removeprefix("clip-")) for row in means if row.startswith("clip-")) or [0]
    ends = [clips[0], clips[-1]]
    curves = {row: (ends, [bleu, bleu]) for row, bleu in means.items() if not row.startswith("clip-")}
    curves["both sides"] = clips, [means.get(f"clip-{clip}", float("nan")) for clip in clips]
    finished.run.draw("clipping.png", curves_png(curves, x_label="offsets are clipped at", y_label="BLEU"),
                      "Test BLEU, mean over seeds, by the greatest offset; level lines: models without that option.")


RUNNER = Study(jobs=_jobs, columns={"test_bleu": "BLEU", "test_perplexity": "perplexity"}, finish=_finish).runner
