"""Stand-in for a pool of threads that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class InlinePool:
    """Stand-in for a pool: calls one after the other, and none whose result is not asked for."""

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, call: Callable[[_Argument], _Result], arguments: Iterable[_Argument]) -> Iterable[_Result]:
        """Yield the results, in order."""
        return map(call, arguments)
