"""Object store in memory for tests of the remote's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo
from ciuic.repository.ids import Bytes


class ObjectsInDict:
    """`Objects` over a dict; each object as bytes. Times are 0."""

    url = "memory://test"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.requests: list[str] = []

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self.requests.append("put")
        self.objects[name] = b"".join(data)

    def create(self, name: str, data: bytes) -> bool:
        self.requests.append("create")
        return self.objects.setdefault(name, data) is data

    def get(self, name: str) -> bytes:
        self.requests.append("get")
        return self._found(name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.requests.append("get_ranges")
        data = self._found(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        self.requests.append("tail")
        data = self._found(name)
        return len(data), data[max(0, len(data) - length) :]

    def info(self, name: str) -> ObjectInfo | None:
        self.requests.append("info")
        return ObjectInfo(name, len(self.objects[name]), 0) if name in self.objects else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.requests.append("list")
        for name in sorted(self.objects):
            if name.startswith(prefix) and name > after:
                yield ObjectInfo(name, len(self.objects[name]), 0)

    def delete(self, names: Iterable[str]) -> None:
        self.requests.append("delete")
        for name in names:
            self.objects.pop(name, None)

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _found(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError:
            raise NoSuchObject(name) from None
