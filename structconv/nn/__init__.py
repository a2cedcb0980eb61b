"""Layers: `Conv`, and the named layers of the literature as short constructors over it."""

from structconv.nn.attention import *
from structconv.nn.buffers import *
from structconv.nn.cache import *
from structconv.nn.composition import *
from structconv.nn.conv import *
from structconv.nn.graph_networks import *
from structconv.nn.graphs import *
from structconv.nn.grids import *
from structconv.nn.images import *
from structconv.nn.layer import *
from structconv.nn.linear import *
from structconv.nn.losses import *
from structconv.nn.pooling import *
from structconv.nn.recurrent import *
from structconv.nn.relative import *
from structconv.nn.transposed import *
from structconv.public_names import public_names

__all__ = public_names(globals())
