"""Where a directory lies in a root: its name, and a link to the directory above.

Guarantee: a directory costs its own name in memory, however deep it lies. Full paths would cost the square of the depth: the
owner of a root with 9,003 levels of names of 250 bytes had a capture hold 3.4 GB of them.
"""

from __future__ import annotations

import resource
from typing import Final

from ciuic.spill import Spill

MAX_DEPTH: Final = 2048
"""Levels of directories below a root that are captured. A path of PATH_MAX (4,096) bytes has 2,047 components at most; what lies
deeper is reached only by changing directory step by step, and only programs that mean harm are known to make it. It is
reported as not readable."""
_SPARE_DESCRIPTORS: Final = 256
"""Of the limit, for everything but the levels of a walk: packs, index, temporary files, the descriptors handed in."""
MAX_SHOWN_BYTES: Final = 4096
"""Of a path in a message. Of a longer one the end is shown."""


def depth_limit() -> int:
    """The levels that this process can walk: each costs one descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DEPTH if soft == resource.RLIM_INFINITY else max(1, min(MAX_DEPTH, soft - _SPARE_DESCRIPTORS))


class Place:
    """A directory of a root."""

    __slots__ = ("depth", "name", "parent")

    def __init__(self, parent: Place | None = None, name: bytes = b"") -> None:
        self.parent = parent
        """None for the root."""
        self.name = name
        self.depth: int = parent.depth + 1 if parent is not None else 0

    def path_of(self, name: bytes = b"") -> bytes:
        """Path relative to the root of ``name`` in this directory, for messages; of a long one only the end."""
        parts = [name] if name else []
        length, at = len(name), self
        while at.parent is not None:
            parts.append(at.name)
            length += 1 + len(at.name)
            at = at.parent
            if length > MAX_SHOWN_BYTES:
                parts.append(b"...")
                break
        return b"/".join(reversed(parts))


class MetDirectories:
    """Where the directories of a root were met in a walk, by inode number."""

    def __init__(self, spill: Spill, root_ino: int) -> None:
        self._root_ino = root_ino
        self._met = spill.numbers()

    def put(self, ino: int, parent_ino: int, name: bytes) -> None:
        self._met.put(ino, parent_ino.to_bytes(8, "big") + name)

    def names(self, ino: int) -> tuple[bytes, ...] | None:
        """The names that lead from the root to it; None where it was not met."""
        names: list[bytes] = []
        while ino != self._root_ino:
            found = self._met.get(ino)
            if found is None or len(names) > MAX_DEPTH:
                return None
            names.append(found[8:])
            ino = int.from_bytes(found[:8], "big")
        return tuple(reversed(names))
