"""Result of a torture: a count of what was tried or checked, and every broken promise."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """Line of the table.

    ``name`` says what was counted ("snapshots checked"), ``count`` how many, ``failures`` holds one sentence
    for each broken promise. A torture that exercised nothing reports that as a failure too, because it would
    prove nothing.
    """

    name: str
    count: int
    failures: tuple[str, ...] = ()
