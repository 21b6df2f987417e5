"""What a torture hands back: a count of what was tried or checked, and everything that went otherwise than promised."""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """One line of the table.

    ``name`` says what was counted ("snapshots checked"), ``count`` how many, ``failures`` holds one sentence for each
    promise that was broken; a torture that exercised nothing says so here too, because silence proves nothing.
    """

    name: str
    count: int
    failures: tuple[str, ...] = ()
