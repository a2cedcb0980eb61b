"""Mechanisms: modules (x, z, structure) -> basis, which a layer binds to its channels."""

from structconv.mechanisms.context import *
from structconv.mechanisms.dynamic import *
from structconv.mechanisms.edge_network import *
from structconv.mechanisms.encodings import *
from structconv.mechanisms.expression import *
from structconv.mechanisms.given import *
from structconv.mechanisms.graphs import *
from structconv.mechanisms.grids import *
from structconv.mechanisms.masks import *
from structconv.mechanisms.mixture import *
from structconv.mechanisms.operations import *
from structconv.mechanisms.positions import *
from structconv.mechanisms.rotary import *
from structconv.mechanisms.scores import *
from structconv.public_names import public_names

__all__ = public_names(globals())
