"""Interface of an object store as the remote uses it: objects, their versions, errors, and how ranges and damaged replies are read.

A name is relative to the remote's prefix: parts of ``A-Z a-z 0-9 . _ -`` separated by single slashes, none
of which begins with a dot (`check_name`). A name is never the directory of another one: some stores keep
directories. Every operation of an implementation may be called from several threads at once. What comes from
a store may be hostile: no object of more than MAX_OBJECT_BYTES is read whole, and `group_versions` bounds what
is held of a name with very many versions: the oldest and the newest are kept, because what is written once is
the oldest version of its name.

What was read and does not verify is read again, over fresh connections, before it is called damaged
(`read_verified`). A bit that flips on the way, a body that was cut, or the page of a proxy looks like damage,
and the next reply is mostly sound. A connection may lead to the one bad server or proxy of many, so the next
read takes another.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple, Protocol, TypeVar

from ciuic.errors import CiuicError, Damaged, NotFound, NotPermitted
from ciuic.repository.errors import Archived, UnsupportedFormat
from ciuic.repository.identity import Bytes

MAX_OBJECT_BYTES = 128 << 20
"""Largest object that `Objects.get` returns; a pack has 64 MiB and a table."""
# Stores take 1,024 bytes with the prefix; file systems 255 a part.
_MAX_NAME_BYTES = 768
_MAX_PART_BYTES = 200
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*\Z")


class RemoteUnreachable(CiuicError):
    """The object store did not answer, or only with errors that may pass; the request may have been done."""


class CutReply(RemoteUnreachable):
    """The connection ended within the body of a reply."""


class NonsenseReply(RemoteUnreachable):
    """The reply does not come from an object store, but for example from a proxy."""


class NotAListing(NonsenseReply):
    """The answer to a listing request is no listing."""


class UntrustedStore(RemoteUnreachable):
    """The TLS certificate of the store is none for it, which asking again does not change."""


class RemoteFull(RemoteUnreachable):
    """The object store has no room for more, or the quota is used up."""


class RemoteRefused(NotPermitted):
    """The object store does not allow this request to these credentials."""


class RefusedBody(RemoteRefused):
    """The store, or a proxy before it, takes no body of this size."""


class ArchivedObject(RemoteRefused, Archived):
    """The object is there, in a storage class from which it cannot be read before it was thawed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is archived in the store: it cannot be read before it is thawed",
            hint="ciuic remote thaw ID fetches what a snapshot needs, and says when it will be ready",
        )
        self.name = name


class NoSuchObject(NotFound):
    """There is no object of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the remote has no object {name}")
        self.name = name


class NoSuchBucket(CiuicError):
    """There is no bucket of this name; nothing can be stored or read.

    Not `NotFound`: callers to whom an object or snapshot may be missing must not take the loss of all for it.
    """

    exit_code = NotFound.exit_code


class TooLargeObject(Damaged):
    """An object is larger than any that ciuic writes."""

    def __init__(self, name: str, size_bytes: int) -> None:
        super().__init__(
            f"the remote's object {name} has {size_bytes} bytes, at most {MAX_OBJECT_BYTES} are expected"
        )
        self.size_bytes = size_bytes


def is_name(name: str) -> bool:
    """Return whether the name may be an object's."""
    return (
        len(name) <= _MAX_NAME_BYTES
        and _NAME.match(name) is not None
        and all(len(part) <= _MAX_PART_BYTES for part in name.split("/"))
    )


def check_name(name: str) -> None:
    """Raise ValueError unless the name may be an object's."""
    if not is_name(name):
        raise ValueError(f"not the name of an object: {name[:100]!r}")


class ListingProgress:
    """Check that a listing brings each name once, with the memory of one name.

    The name that came as the 1st, 2nd, 4th, 8th, … is compared with those after it: a listing that goes round meets it again within
    twice its length (R. P. Brent, An improved Monte Carlo factorization algorithm, 1980).
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._number = 0
        self._mark = ""

    def check(self, name: str) -> None:
        """Take the next name. Raises NotAListing if it came before."""
        if name == self._mark:
            raise NotAListing(
                f"cannot list {self._prefix or 'objects'}: the pages that were answered begin again, and have no end",
                hint="a proxy may have answered in place of the store",
            )
        self._number += 1
        if not self._number & (self._number - 1):
            self._mark = name


class ObjectInfo(NamedTuple):
    """Line of a listing."""

    name: str
    size_bytes: int
    modified_ns: int
    """Time of the last change by the store's clock; UTC."""


class Reconnecting(Protocol):
    """Part of `Objects` that has connections."""

    def reconnect(self) -> None:
        """Make new connections for the reads that begin from now on."""


class Objects(Reconnecting, Protocol):
    """Object store with a prefix.

    Methods raise RemoteUnreachable after their own retries, and RemoteRefused. A request that raised
    RemoteUnreachable may have been carried out.
    """

    @property
    def url(self) -> str:
        """URL of the prefix for messages, without credentials."""

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object, in place of one that is there. Durable on return."""

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; durable on return.

        False if an object of this name exists. It may be this very one, stored by an earlier try whose
        reply was lost: a caller whom that concerns reads it and compares a nonce.
        """

    def get(self, name: str) -> bytes:
        """Return the whole object.

        Raises:
            NoSuchObject: there is none.
            TooLargeObject: it has more than MAX_OBJECT_BYTES.
        """

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length); a range is cut at the end of the object.

        Ranges that lie close together are read in one request, so a result may be a view that keeps its
        neighbours in memory.

        Raises:
            NoSuchObject: there is none.
        """

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes, or all of a smaller one.

        Raises:
            NoSuchObject: there is none.
        """

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none (or no bucket: HEAD does not tell)."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, ascending.

        Names are compared by their bytes, or part by part (SeaweedFS): both are the same within a directory,
        and wherever the names of directories have one length. With ``after`` only names that are greater by
        the same comparison. What is created meanwhile may be missing; what was there before the call is not.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; those that are not there are no error.

        After an error any of them may be deleted.
        """

    def close(self) -> None:
        """Close connections."""


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


MERGE_GAP_BYTES = 256 << 10
"""Bytes that are read in vain sooner than another request is made: 10 ms of a stream of 25 MiB/s."""
MAX_MERGED_BYTES = 16 << 20
"""Largest merged read. Longer ranges stay as they are."""


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return fewer (offset, length) that cover all of ``ranges``, ascending by offset.

    Every range lies whole in one of the results. Empty ranges are left out.

    Raises:
        ValueError: an offset or a length is negative.
    """
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if offset < 0 or length < 0:
            raise ValueError(f"not a range of bytes: offset {offset}, length {length}")
        if not length:
            continue
        if merged:
            start, size = merged[-1]
            end = max(start + size, offset + length)
            near = offset <= start + size + MERGE_GAP_BYTES and end - start <= MAX_MERGED_BYTES
            # What lies inside is merged at any size.
            if near or offset + length <= start + size:
                merged[-1] = (start, end - start)
                continue
        merged.append((offset, length))
    return merged


def slices_of(
    merged: Sequence[tuple[int, int]], bodies: Sequence[memoryview], ranges: Sequence[tuple[int, int]]
) -> list[Bytes]:
    """Return each range as a view of a body.

    Args:
        merged: what `merge_ranges` made of ``ranges``.
        bodies: bytes of each of these; shorter where the object ended.
        ranges: what is wanted.
    """
    starts = [start for start, _ in merged]
    found: list[Bytes] = []
    for offset, length in ranges:
        # The last one that begins at or before a range contains it: it was merged into that one, or began it.
        at = bisect_right(starts, offset) - 1
        found.append(bodies[at][offset - starts[at] :][:length] if length else b"")
    return found
