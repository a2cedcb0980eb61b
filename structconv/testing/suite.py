"""`suite`: list the checks of a basis, a mechanism or a specimen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from structconv.bases.pairwise import Pairwise, nodes
from structconv.structures import Graph
from structconv.testing import checks, kernels, laws, layers, programs
from structconv.testing.specimens import Setup, Specimen, Subject, as_basis, as_specimen

__all__ = ["CHECKS", "Check", "suite"]

#: Every check by its name.
CHECKS: dict[str, Callable[[Specimen], None]] = {
    "contract": checks.check_contract, "reference": checks.check_reference, "adjoint": checks.check_adjoint,
    "gradcheck": checks.check_gradcheck, "entries": checks.check_entries, "paths": checks.check_paths,
    "kernels": kernels.check_kernels, "sizes": kernels.check_sizes, "absent": kernels.check_absent,
    "changes": kernels.check_changes, "blocks": checks.check_blocks, "batching": laws.check_batching,
    "dtypes": programs.check_dtypes, "noncontiguous": programs.check_noncontiguous, "copies": programs.check_copies,
    "permutation": laws.check_permutation, "translation": laws.check_translation, "blockwise": laws.check_blockwise,
    "masking": laws.check_masking, "samples": layers.of_specimen(layers.takes_samples, layers.check_samples),
    "cache": layers.of_specimen(layers.takes_prepared, layers.check_prepared),
    "output_positions": layers.of_specimen(layers.takes_positions, layers.check_positions),
    "compile": programs.check_compile, "export": programs.check_export,
}
_BY_TRAIT = {"permutes": ("permutation",), "translates": ("translation",), "blockwise": ("blockwise",),
             "resizes": ("sizes",), "masks": ("masking", "absent"), "compiles": ("compile",), "exports": ("export",)}


@dataclass(frozen=True)
class Check:
    """One check of one specimen; calling it raises `AssertionError` where the specimen fails.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.testing import Check, Specimen
        >>> check = Check(Specimen("mine", lambda: Dense(torch.randn(2, 4, 3, dtype=torch.float64))), "adjoint")
        >>> print(check)
        mine: adjoint
        >>> check()
    """

    specimen: Specimen
    name: str

    def __call__(self) -> None:
        CHECKS[self.name](self.specimen)

    def __str__(self) -> str:
        return f"{self.specimen.name}: {self.name}"


def suite(subject: Specimen | Subject) -> Iterator[tuple[str, Check]]:
    """The checks for a specimen, a basis, or a mechanism with its inputs, as (name, check) pairs.

    Every subject is put to: contract, reference, adjoint, gradcheck, entries, paths, kernels, batching (leading
    dimensions of x), dtypes, noncontiguous, copies; a mechanism also to samples, cache and output_positions, which its
    layer may refuse; expressions of scores to blocks, a mechanism on a graph to changes; and to what the specimen's
    traits promise.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.testing import suite
        >>> for name, check in suite(Dense(torch.randn(1, 4, 3, dtype=torch.float64))):
        ...     if name.endswith("reference"):
        ...         check()
    """
    specimen = as_specimen(subject)
    subject = specimen.subject()
    names = ["contract", "reference", "adjoint", "gradcheck", "entries", "paths"]
    names += ["blocks"] if any(isinstance(node, Pairwise) for node in nodes(as_basis(subject))) else []
    names += ["kernels"]
    graph = getattr(subject, "structure", None)
    names += ["changes"] if isinstance(graph, Graph) and graph.num_edges else []
    names += ["batching", "dtypes", "noncontiguous", "copies"]
    names += ["samples", "cache", "output_positions"] if isinstance(subject, Setup) else []
    names += [check for trait, checks in _BY_TRAIT.items() if trait in specimen.traits for check in checks]
    for name in names:
        check = Check(specimen, name)
        yield str(check), check
