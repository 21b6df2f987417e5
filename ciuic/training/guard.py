"""What must not be interrupted by what a signal leads to."""

from __future__ import annotations

from collections.abc import Callable


class Guard:
    """While it is entered, signals only leave word; ``left`` is called when it is not any more."""

    def __init__(self) -> None:
        self.depth = 0
        self.left: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.depth -= 1
        if not self.depth and error is None:
            self.left()
