"""The one rule for what was read and does not verify: it is read again, over fresh connections, before it is called damaged.

A bit that flips on the way, a body that was cut, or the page of a proxy looks like damage, and the next reply is mostly sound. A
connection may lead to the one bad server or proxy of many, so the next read takes another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.objects.model import Reconnecting
from ciuic.repository.errors import UnsupportedFormat

READS: Final = 3
"""Reads after which what does not verify is damaged."""

_Result = TypeVar("_Result")


def read_verified(
    objects: Reconnecting,
    read: Callable[[], _Result],
    *,
    also: tuple[type[CiuicError], ...] = (),
) -> _Result:
    """Return the result of ``read``, which reads and verifies; where that fails it is called again, `READS` times in all.

    Args:
        objects: Store that is read.
        read: Raises Damaged or UnsupportedFormat for what does not verify: the number of a version has no check of its own.
        also: Further errors that a spoilt reply may cause.

    Raises:
        Damaged, UnsupportedFormat: no read verified; the error of the last one.
    """
    errors: tuple[type[CiuicError], ...] = (Damaged, UnsupportedFormat, *also)
    for _ in range(READS - 1):
        try:
            return read()
        except errors:
            objects.reconnect()
    return read()
