"""The parts of a data set; the test part cannot be read before the final evaluation."""

from collections.abc import Collection, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["Parts", "TestReadEarly", "final_evaluation"]

V = TypeVar("V", bound=Sized)
_FINAL: ContextVar[bool] = ContextVar("final evaluation", default=False)


class TestReadEarly(RuntimeError):
    """The test part was read while a model was trained or chosen.

    Example:

        >>> from structconv_systems.train.parts import Parts
        >>> Parts({"train": [1, 2], "test": [3]})["test"]
        Traceback (most recent call last):
        structconv_systems.train.parts.TestReadEarly: the part 'test' is read before the final evaluation
    """

    __test__ = False  # pytest collects classes by such names


class Parts(Mapping[str, V]):
    """Data by the name of its part: ``train``, ``val``, ``test``.

    Reading a part that tests raises `TestReadEarly`, except within `final_evaluation`.

    Args:
        parts: the data by part.
        tests: the names of the parts that test.
        of: what is counted, for `sizes`.

    Example:

        >>> from structconv_systems.train.parts import Parts, final_evaluation
        >>> parts = Parts({"train": [1, 2], "val": [3], "test": [4]})
        >>> parts["val"]
        [3]
        >>> with final_evaluation():
        ...     parts["test"]
        [4]
        >>> parts.sizes
        'train 2, val 1, test 1 samples'
    """

    def __init__(self, parts: Mapping[str, V], tests: Collection[str] = ("test",), *, of: str = "samples") -> None:
        self._parts, self._tests, self._of = dict(parts), frozenset(tests), of

    @property
    def sizes(self) -> str:
        """The size of each part, in words; empty if there are none."""
        sizes = ", ".join(f"{part} {len(data):,}" for part, data in self._parts.items())
        return f"{sizes} {self._of}" if sizes else ""

    def __getitem__(self, part: str) -> V:
        if part in self._tests and not _FINAL.get():
            raise TestReadEarly(f"the part {part!r} is read before the final evaluation")
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@contextmanager
def final_evaluation() -> Iterator[None]:
    """Enter a context in which test parts may be read: the weights are chosen.

    Example:

        >>> from structconv_systems.train.parts import Parts, final_evaluation
        >>> parts = Parts({"train": [1, 2], "test": [3]})
        >>> with final_evaluation():
        ...     parts["test"]
        [3]
    """
    token = _FINAL.set(True)
    try:
        yield
    finally:
        _FINAL.reset(token)
