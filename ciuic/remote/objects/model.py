"""Interface of an object store, as the remote uses it, and its errors.

A name is relative to the remote's prefix: parts of ``A-Z a-z 0-9 . _ -`` separated by single slashes, none
of which begins with a dot (`check_name`). A name is never the directory of another one: some stores keep
directories. Every operation of an implementation may be called from several threads at once. What comes from
a store may be hostile: no object of more than MAX_OBJECT_BYTES is read whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ciuic.errors import CiuicError, Damaged, NotFound, NotPermitted
from ciuic.repository.errors import Archived
from ciuic.repository.ids import Bytes

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


class RemoteFull(RemoteUnreachable):
    """The object store has no room for more, or the quota is used up."""


class RemoteRefused(NotPermitted):
    """The object store does not allow this request to these credentials."""


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
