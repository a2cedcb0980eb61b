"""Names of structures and of x: select those that a part of an expression reads, and check that a call gives them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self, TypeVar, cast

from torch import Tensor

from structconv.errors import ConfigError, StructureError, text_of
from structconv.structures.graph import Graph
from structconv.structures.named import NamedStructures, Place, listed_names
from structconv.structures.relations import KnowledgeGraph
from structconv.structures.samples import Samples
from structconv.structures.supports import Support
from structconv.structures.values import FrozenValue

__all__ = ["Named", "all_named", "by_name", "called_on", "called_with", "check_name", "check_structure", "check_unread",
           "names_of_x", "names_structures", "reads_of"]

T = TypeVar("T")


class Named:
    """A part of an expression that reads a structure of the call: the only one, or the one whose name it has."""

    #: The name of the structure that it reads, in a call with several.
    _structure_name: str | None = None
    #: What it reads. Without "structure" in it, a call with a support (a mask of pairs) is refused.
    reads: Collection[str] = ("content", "structure")
    #: True if it passes the structures of a call to its parts unchanged.
    _passes_structures: bool = False

    def on(self, structure: str) -> Self:
        """A copy that reads the structure of this name, in calls with several; in an expression all parts and masks do
        so that have no name yet: `(DotProduct().masked(keep=Window((3, 3))).softmax() | Cuboid((3, 3))).on("pixels")`.
        """
        check_name(type(self).__name__, structure)
        twin: Any = copy.deepcopy(self)
        for part in twin.modules():
            if isinstance(part, Named) and part._structure_name is None and not part._passes_structures:
                part._structure_name = structure
        return cast(Self, twin)

    def output_structure(self, structure: Any) -> Any:
        """The structure of the outputs, where it leads to another one (a coarser grid)."""
        return structure

    def _own(self, structure: Any) -> Any:
        """The structure that it reads, of those of a call."""
        if type(structure) is not NamedStructures or self._passes_structures:
            return structure
        return structure.named(type(self).__name__, self._structure_name, "structure" in self.reads)

    def _own_inputs(self, inputs: Any) -> Any:
        """The inputs of this mechanism: of several structures its own."""
        if type(inputs[2]) is not NamedStructures or self._passes_structures:
            return inputs
        return inputs._replace(structure=self._own(inputs[2]))

    def _leads(self, structure: Any) -> Any:
        """Return the structures after this mechanism; its own one becomes the structure of its outputs."""
        own = self._own(structure)
        after = self.output_structure(own)
        if own is structure:
            return after
        return structure if after is own else structure.leading(self._structure_name, after)

    def _with_own_samples(self, structures: NamedStructures) -> NamedStructures:
        """Return the structures of a call, with the samples that its own structure sets."""
        return structures.at(self._samples_of(structures))

    def _samples_of(self, structures: NamedStructures) -> list[Place]:
        """Return the samples of inputs and outputs that its structure sets, if it is a batch."""
        ambiguous = self._structure_name is None and len(structures.by_name) > 1
        own = None if ambiguous else self._own(structures)
        if getattr(own, "samples", None) is None:
            return []
        return [Place(self._structure_name or next(iter(structures.by_name)), self._pairs_of(own))]

    def _pairs_of(self, structure: Any) -> Samples:
        """Return the samples within which the pairs (m, n) exist."""
        samples: Samples = structure.samples
        return samples

    def _keeps_entries(self) -> bool:
        """Return True if its outputs are the entries of its inputs for every structure."""
        return type(self).output_structure is Named.output_structure


def reads_of(part: Any) -> Collection[str]:
    """Return what a part reads; a module in the place of a mechanism may read everything."""
    return getattr(part, "reads", Named.reads)


def check_name(owner: str, structure: Any) -> str:
    """The name of a structure, if it is one."""
    if not isinstance(structure, str) or not structure:
        raise ConfigError(owner, "structure must be the name of a structure of the call", type(structure).__name__,
                          "The structure itself goes to the layer: layer(x, structure={name: graph, ...}).")
    return structure


def names_structures(mechanism: Any) -> bool:
    """Return True if a part of the expression names the structure that it reads."""
    return bool(_readers(mechanism))


def called_with(mechanism: Any, structure: Any) -> Any:
    """The structure for a mechanism from that of a call, or from its structures by name: a `StructureError` for a name
    in the expression that the call does not give, or one of the call that nothing reads."""
    readers = _readers(mechanism)
    by_name = structure if type(structure) is dict else {}
    if not readers and (structure is not by_name or len(by_name) == 1):
        return next(iter(by_name.values()), structure)
    if readers.keys() != by_name.keys():
        raise StructureError("Conv", "structure must have what the expression names, "
                             f"{listed_names(readers)}", listed_names(by_name) if structure is by_name
                             else type(structure).__name__, _remedy(readers, by_name, "have names by structure=NAME or "
                             "expression.on(NAME), calls by structure={NAME: graph, ...}."))
    for name, read in readers.items():
        if not read:
            check_unread(by_name[name])
    named = NamedStructures.of(by_name)
    return mechanism._own(mechanism._with_own_samples(named) if named.batched else named)


def check_structure(owner: str, structure: Any, call: str) -> None:
    """Raise `StructureError` if a tensor, such as z, is given in the place of the structure; `call` is how to give z.
    """
    if isinstance(structure, Tensor):
        raise StructureError(owner, "structure must be a structure, such as a Graph or a Grid",
                             f"a tensor of shape {text_of(structure.shape)}",
                             f"The outputs (queries) go by keyword: {call}.")


def check_unread(structure: Any, reads: Collection[str] = ()) -> None:
    """Raise `StructureError` if a structure that no part reads would have no effect. `reads`: what the expression
    reads; a single graph, which separates no samples, has no effect on attention."""
    filters = isinstance(structure, Support) and not isinstance(structure, Samples)
    unread = isinstance(structure, Graph | KnowledgeGraph) and structure.samples is None and "content" in reads
    if filters or unread or not isinstance(structure, FrozenValue | NamedStructures):
        expected = "structure must be one that some part of the expression reads"
        raise StructureError("Conv", expected, repr(structure) if filters else type(structure).__name__,
                             "Attention leaves pairs out by scores.masked(keep=STRUCTURE) in the expression.")


def _readers(mechanism: Any) -> dict[str, bool]:
    """The names in an expression, each with True if a part of this name reads a structure."""
    result: dict[str, bool] = {}
    for part in mechanism.modules():
        name = getattr(part, "_structure_name", None)
        if name is not None:
            result[name] = result.get(name, False) or "structure" in part.reads
    return result


def _remedy(named: Collection[str], called: Collection[str], how: str) -> str:
    missing, left = ([name for name in one if name not in other] for one, other in ((named, called), (called, named)))
    return f"Missing: {listed_names(missing)}; left over: {listed_names(left)}. Parts {how}"


# -- names of x: the input that each part of `|` reads ------------------------------------------------------------

def names_of_x(mechanism: Any) -> tuple[str | None, ...]:
    """The name of the x that each part of `|` reads, in order; `None` for one without a name, `ConfigError` for one
    with two."""
    return tuple(_name_of(part) for part in mechanism._branches())


def _name_of(part: Any) -> str | None:
    result = dict.fromkeys(name for module in part.modules() if (name := getattr(module, "_input_name", None)))
    if len(result) > 1:
        raise ConfigError("of", "each part of | must read one x", listed_names(result),
                          "Parts of one softmax, sum or product read the same x; only those of | may differ.")
    return next(iter(result), None)


def all_named(mixture: Any) -> tuple[str, ...]:
    """Return the names of a mixture's parts, each of which must have one."""
    names = names_of_x(mixture)
    if None in names:
        unnamed = [repr(part) for part, name in zip(mixture._branches(), names, strict=True) if name is None]
        raise ConfigError("Conv", "each part of | must name the x that it reads, as others do", ", ".join(unnamed),
                          "Say expression.of(NAME).")
    return cast("tuple[str, ...]", names)


def called_on(mechanism: Any, x: Any) -> Any:
    """Return x as a bound mechanism needs it: a tensor, or a dict by name if its parts read several, with exactly their
    names."""
    reads: tuple[str, ...] = mechanism.__dict__.get("_reads", ())
    if type(x) is not dict and not reads:
        return x
    if not reads and len(x) == 1:
        return next(iter(x.values()))
    inputs = by_name("Conv", "x", reads, x)
    return inputs if mechanism._reads_by_name else next(iter(inputs.values()))


def by_name(owner: str, argument: str, reads: Iterable[str], values: Mapping[str, T] | Any) -> Mapping[str, T]:
    """Return the arguments by name, after a check that the names are exactly those of the expression."""
    names = dict.fromkeys(reads)
    if not names or not isinstance(values, Mapping) or values.keys() != names.keys():
        present = values if isinstance(values, Mapping) else ()
        raise ConfigError(owner, f"{argument} must be a dict of what the expression names, {listed_names(names)}",
                          listed_names(present) if isinstance(values, Mapping) else type(values).__name__,
                          _remedy(names, present, "of | have names by expression.of(NAME), calls and layers by "
                                  f"{argument}={{NAME: ...}}."))
    return values
