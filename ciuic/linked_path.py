"""Paths of directories that may be thousands of levels deep, kept while they wait on a stack.

Guarantee: a path longer than any that the kernel takes (PATH_MAX) costs its last name and a link to the path above, and is put
together when somebody asks for it. Kept whole, 2,048 levels of long names take half a gigabyte.
"""

from __future__ import annotations

from typing import Final

MAX_KEPT_BYTES: Final = 4096
"""A path up to this length is kept as it is."""


class LinkedPath:
    """A path. `above` is the one of the directory that it is in; `path` without it is kept whole, however long."""

    __slots__ = ("_above", "_text")

    def __init__(self, path: bytes, above: LinkedPath | None = None) -> None:
        is_long = above is not None and len(path) > MAX_KEPT_BYTES
        self._above = above if is_long else None
        self._text = path.rpartition(b"/")[2] if is_long else path

    def __bytes__(self) -> bytes:
        """The whole path."""
        names: list[bytes] = []
        at = self
        while at._above is not None:
            names.append(at._text)
            at = at._above
        return b"/".join([at._text, *reversed(names)]) if names else at._text
