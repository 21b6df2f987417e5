"""Objects of a process that is killed after a number of requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from ciuic.remote.objects.model import ObjectInfo, Objects
from ciuic.repository.identity import Bytes


class Killed(BaseException):
    """SIGKILL. Not an Exception: no handler may catch it."""


class DyingObjects:
    """Objects of a process that is killed after a number of requests: no later one is carried out."""

    def __init__(self, objects: Objects, requests: int) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._left = requests

    @property
    def url(self) -> str:
        return self._objects.url

    def _live(self) -> Objects:
        with self._lock:
            if not self._left:
                raise Killed
            self._left -= 1
        return self._objects

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self._live().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        return self._live().create(name, data)

    def get(self, name: str) -> bytes:
        return self._live().get(name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        return self._live().get_ranges(name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        return self._live().tail(name, length)

    def info(self, name: str) -> ObjectInfo | None:
        return self._live().info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return self._live().list(prefix, after=after)

    def delete(self, names: Iterable[str]) -> None:
        # Some stores delete one at a time, and a bulk request may be carried out in part.
        for name in names:
            self._live().delete([name])

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass
