"""Path of a directory in a root: its name, and a link to the path of its parent.

Guarantees: a directory costs its own name in memory, however deep it is. Full paths would cost the square of
the depth: a root with 9,003 levels of names of 250 bytes made a capture hold 3.4 GB of them.
"""

from __future__ import annotations

import resource
from typing import Final

from ciuic.system.spill import Spill

# Levels of directories below a root that are captured. A path of PATH_MAX (4,096) bytes has 2,047 components
# at most; deeper directories are reached only by changing directory step by step, and only hostile programs
# are known to create them. They are reported as not readable.
MAX_DEPTH: Final = 2048
# Descriptors of the limit that the walk leaves for packs, index, temporary files and the descriptors that
# were passed in.
_SPARE_DESCRIPTORS: Final = 256
# Longest path in a message. Of a longer one the end is shown.
MAX_SHOWN_BYTES: Final = 4096


def depth_limit() -> int:
    """Return the number of levels that this process can walk: each costs one descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DEPTH if soft == resource.RLIM_INFINITY else max(1, min(MAX_DEPTH, soft - _SPARE_DESCRIPTORS))


class DirectoryPath:
    """Path of a directory of a root, as a linked list of names."""

    __slots__ = ("depth", "name", "parent")

    def __init__(self, parent: DirectoryPath | None = None, name: bytes = b"") -> None:
        self.parent = parent
        """Path of the parent; None for the root."""
        self.name = name
        self.depth: int = parent.depth + 1 if parent is not None else 0

    def path_of(self, name: bytes = b"") -> bytes:
        """Return the path of `name` in this directory, relative to the root, for messages.

        A long path is cut to its end.
        """
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
    """Directories that a walk has met, by inode number."""

    def __init__(self, spill: Spill, root_ino: int) -> None:
        self._root_ino = root_ino
        self._met = spill.numbers()

    def put(self, ino: int, parent_ino: int, name: bytes) -> None:
        """Note a directory, its parent and its name."""
        self._met.put(ino, parent_ino.to_bytes(8, "big") + name)

    def names(self, ino: int) -> tuple[bytes, ...] | None:
        """Return the names that lead from the root to a directory; None where it was not met."""
        names: list[bytes] = []
        while ino != self._root_ino:
            found = self._met.get(ino)
            if found is None or len(names) > MAX_DEPTH:
                return None
            names.append(found[8:])
            ino = int.from_bytes(found[:8], "big")
        return tuple(reversed(names))
