"""Arenas of a writer client and their state of ownership."""

from __future__ import annotations

import errno
import weakref
from typing import Final

from ciuic.training.device.arena import Arena
from ciuic.training.free_resources import memory_left

GROWTH_FACTOR: Final = 1.125
"""Factor by which a new arena exceeds the requested size, so that a state that grows a little needs no second
one.
"""


class Slot:
    """An arena and its state of ownership."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arena: Arena | None = None
        self.known_to_writer = False
        self.save = 0
        """Number of the save for which the writer holds the arena; 0 if it does not."""
        self.staged: weakref.ref[memoryview] | None = None
        """Weak reference to the memory that the caller staged here and will submit later; while it is alive
        the slot is not free.
        """
        self.reserved = False
        """True while the caller is filling the arena."""
        self.layout: object = None
        """Cache of the caller that is valid for this arena only."""

    @property
    def is_free(self) -> bool:
        """True if neither the writer nor the caller uses the arena."""
        return not (self.save or self.reserved) and (self.staged is None or self.staged() is None)


def allocate_arena(size_bytes: int) -> Arena:
    """Allocate an arena.

    Raises:
        OSError: ENOMEM, also where filling the arena would invoke the out-of-memory killer.
    """
    # Checked beforehand: pages are allocated when they are first written to, and there is no error to handle
    # then: the out-of-memory killer would end the trainer.
    left = memory_left()
    if left is not None and size_bytes > left:
        raise OSError(
            errno.ENOMEM,
            f"not enough memory for a copy of the state: {size_bytes >> 20} MiB, {left >> 20} MiB are free",
        )
    return Arena(size_bytes)
