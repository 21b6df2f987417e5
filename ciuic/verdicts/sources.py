"""Sources of a verdict: a file and its directory, of a snapshot or as they are now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

MAX_NAMES = 1 << 16
"""Limit of the names of one directory that a verdict looks at."""


class FileSource(ABC):
    """One file, read by ranges."""

    name: bytes
    """Name in its directory."""
    size_bytes: int
    identity: bytes
    """Id that equal content has, and content that differs has not; empty if it is not known."""
    is_committed: bool = False
    """True if its writer stored it as a whole, from memory: holes and zeros are its data."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range, fewer if the file ends before.

        Raises:
            Damaged: the repository cannot give them.
            OSError: the disk failed.
        """

    @abstractmethod
    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between two offsets, ascending, that were never written, or that are zeros."""

    @abstractmethod
    def doubt(self) -> str:
        """Return why a complete structure proves nothing of this file, such as an open writer; empty for no reason."""

    @abstractmethod
    def mixture(self) -> str:
        """Return why it may be a mixture of two versions, which only checksums disprove; empty for no reason."""


class DirectorySource(ABC):
    """A directory with what is in it. Names that lead elsewhere (symbolic links) are not followed."""

    path: bytes
    """Absolute path."""
    holds_state: bool = False
    """True for the top of a training state, stored as a whole."""

    @abstractmethod
    def names(self) -> list[bytes]:
        """Return the names in the directory, sorted; at most `MAX_NAMES`."""

    @abstractmethod
    def file(self, name: bytes) -> FileSource | None:
        """Return the regular file of this name; None if there is none."""

    @abstractmethod
    def directory(self, name: bytes) -> DirectorySource | None:
        """Return the directory of this name; None if there is none."""

    def has(self, name: bytes) -> bool:
        """Return whether there is a file or a directory of this name."""
        return self.file(name) is not None or self.directory(name) is not None

    def below(self, relative: bytes) -> FileSource | None:
        """Return the regular file at a relative path that a document names; None for a path that leads out of the directory."""
        *above, name = relative.split(b"/")
        at: DirectorySource | None = self
        for part in above:
            if at is None or part in (b"", b".", b".."):
                return None
            at = at.directory(part)
        return None if at is None or name in (b"", b".", b"..") else at.file(name)
