"""Interface of an object store, as the remote uses it, and its errors.

A name is relative to the remote's prefix, never empty, without a leading slash. Every operation of an
implementation may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ciuic.errors import CiuicError, NotFound, NotPermitted


class RemoteUnreachable(CiuicError):
    """The object store did not answer, or only with errors that may pass; the request may have been done."""


class RemoteRefused(NotPermitted):
    """The object store does not allow this request to these credentials."""


class NoSuchObject(NotFound):
    """There is no object of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the remote has no object {name}")
        self.name = name


class ObjectInfo(NamedTuple):
    """Line of a listing."""

    name: str
    size_bytes: int
    modified_ns: int
    """Time of the last change by the store's clock; UTC."""


class Objects(Protocol):
    """Object store with a prefix.

    Methods raise RemoteUnreachable after their own retries, and RemoteRefused. A request that raised
    RemoteUnreachable may have been carried out.
    """

    @property
    def url(self) -> str:
        """URL of the prefix for messages, without credentials."""

    def put(self, name: str, data: Sequence[bytes | memoryview]) -> None:
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
        """

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (offset, length); a range may be cut at the end of the object.

        Raises:
            NoSuchObject: there is none.
        """

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes, or all of a smaller one.

        Raises:
            NoSuchObject: there is none.
        """

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, ascending by the bytes of their names.

        With ``after`` only names that are greater. What is created meanwhile may be missing; what was
        there before the call is not.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects; those that are not there are no error."""

    def close(self) -> None:
        """Close connections."""
