"""Structures: which entries there are, and what relates them."""

from torch.serialization import add_safe_globals as _add_safe_globals

from structconv.public_names import public_names
from structconv.structures import masks as _masks
from structconv.structures import output_positions as _outputs
from structconv.structures import samples as _samples
from structconv.structures.batching import *
from structconv.structures.collating import *
from structconv.structures.graph import *
from structconv.structures.grid import *
from structconv.structures.relations import *
from structconv.structures.samples import *
from structconv.structures.supports import *

__all__ = public_names(globals())

# The classes that `torch.load(weights_only=True)` may build: values of tensors, numbers and names, which run no code.
_add_safe_globals([Blocks, Causal, DenseMask, EdgeSupport, Global, Graph, Grid, GridBatch, KnowledgeGraph, Padding,
                   Samples, StructureBatch, Window, _masks.And, _masks.Not, _masks.Or, _masks.Transposed, _outputs.At,
                   _outputs.OutputPositions, _samples.EachWithin, _samples.Within])
