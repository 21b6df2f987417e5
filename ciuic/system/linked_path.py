"""Compact paths of directories that may be thousands of levels deep, for stacks of directories.

Guarantee: a path longer than any that the kernel takes (PATH_MAX) costs its last name and a reference to the path above, and is
joined on request. Stored completely, the paths of 2,048 levels of long names take half a gigabyte.
"""

from __future__ import annotations

from typing import Final

MAX_KEPT_BYTES: Final = 4096
"""Length up to which a path is stored completely."""


class LinkedPath:
    """A path. ``above`` is the path of its directory; a path without ``above`` is stored completely, however long."""

    __slots__ = ("_above", "_text")

    def __init__(self, path: bytes, above: LinkedPath | None = None) -> None:
        is_long = above is not None and len(path) > MAX_KEPT_BYTES
        self._above = above if is_long else None
        self._text = path.rpartition(b"/")[2] if is_long else path

    def __bytes__(self) -> bytes:
        """Return the complete path."""
        if self._above is None:
            return self._text
        names: list[bytes] = []
        at = self
        while at._above is not None:
            names.append(at._text)
            at = at._above
        return b"/".join([at._text, *reversed(names)])
