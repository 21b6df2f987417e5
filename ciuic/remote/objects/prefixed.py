"""Objects below a further prefix: the room that a repository with an identity of its own has in a remote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ciuic.remote.objects.model import ObjectInfo, Objects, check_name
from ciuic.repository.ids import Bytes


class PrefixedObjects:
    """Objects whose names begin with a prefix, which is left out of them. `close` closes the others too."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        """Take a prefix without the slash at its end."""
        check_name(prefix)
        self._objects = objects
        self._prefix = f"{prefix}/"

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return f"{self._objects.url}/{self._prefix[:-1]}"

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        self._objects.put(self._prefix + name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        return self._objects.create(self._prefix + name, data)

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._objects.get(self._prefix + name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        return self._objects.get_ranges(self._prefix + name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        return self._objects.tail(self._prefix + name, length)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        found = self._objects.info(self._prefix + name)
        return found and found._replace(name=name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``."""
        start = len(self._prefix)
        for info in self._objects.list(self._prefix + prefix, after=after and self._prefix + after):
            yield info._replace(name=info.name[start:])

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        self._objects.delete(self._prefix + name for name in names)

    def reconnect(self) -> None:
        """Make new connections for reads."""
        self._objects.reconnect()

    def close(self) -> None:
        """Close the objects."""
        self._objects.close()
