"""Versions of objects: what a bucket with versioning keeps of names that were deleted or overwritten.

`group_versions` bounds what a hostile bucket can make us hold: of a name with very many versions the oldest and the
newest are kept, because what is written once is the oldest version of its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple, Protocol

from ciuic.repository.ids import Bytes

MAX_KEPT_VERSIONS: Final = 200
"""Limit of the versions of one name that are held and tried: half of them the oldest, half the newest."""


class Version(NamedTuple):
    """Version of an object, or the mark of its deletion."""

    name: str
    id: str
    """Name of the version for the store."""
    size_bytes: int
    modified_ns: int
    """Time at which it was stored, by the store's clock, which a user of the bucket cannot choose; UTC."""
    digest: str
    """Mark of the content by the store (ETag): equal for equal contents that were sent in one piece."""
    is_current: bool
    is_deletion: bool = False


class NameVersions(NamedTuple):
    """Versions of one name."""

    name: str
    total: int
    """Number of versions, without marks of deletion."""
    versions: tuple[Version, ...]
    """Versions with different contents, the oldest first; at most `MAX_KEPT_VERSIONS`."""
    current: Version | None
    """Version that a plain GET returns; None where the name is deleted."""


class ObjectVersions(Protocol):
    """Versions of the objects of one remote. May be used by several threads.

    Methods raise RemoteUnreachable after their own retries, and RemoteRefused.
    """

    @property
    def url(self) -> str:
        """URL of the prefix for messages, without credentials."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Version]:
        """Yield all versions and marks of deletion of names that begin with ``prefix``.

        Names ascend as in `Objects.list`, those of one name follow each other, and its versions come newest first.
        """

    def read(self, version: Version, offset: int, length: int) -> Bytes:
        """Return bytes of a version; fewer where it ends.

        Raises:
            NoSuchObject: the version is gone.
        """

    def lock(self, version: Version, until_ns: int) -> None:
        """Have the store refuse to delete the version before this time (ns since 1970); never shortens a lock.

        Raises:
            RemoteRefused: the bucket has no locks, or these credentials may not set them.
        """

    def delete_marks(self, name: str) -> None:
        """Delete a name as `Objects.delete` does: its versions stay."""

    def close(self) -> None:
        """Close connections."""


def group_versions(versions: Iterable[Version], before_ns: int | None = None) -> Iterator[NameVersions]:
    """Yield the versions of each name; memory is bounded however many there are.

    Args:
        versions: As `ObjectVersions.list` yields them.
        before_ns: Leave out what was stored at this time or later (ns since 1970); None for nothing.
    """
    for name, several in groupby(versions, key=lambda version: version.name):
        newest: list[Version] = []
        oldest: deque[Version] = deque(maxlen=MAX_KEPT_VERSIONS // 2)
        current: Version | None = None
        total = 0
        for version in several:
            if version.is_deletion:
                continue
            if version.is_current:
                current = version
            if before_ns is not None and version.modified_ns >= before_ns:
                continue
            total += 1
            (newest if len(newest) < MAX_KEPT_VERSIONS // 2 else oldest).append(version)
        different: dict[tuple[str, int], Version] = {}
        for version in (*reversed(oldest), *reversed(newest)):
            # The oldest of equal ones, at its place in time: a copy that was stored again changes nothing.
            different.setdefault((version.digest, version.size_bytes), version)
        yield NameVersions(name, total, tuple(different.values()), current)
