"""Objects in this process's memory, for tests: stores of one name share their objects."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence

from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, check_name
from ciuic.repository.identity import Bytes


class _Bucket:
    """Objects of one name, with the names in order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.names: list[str] = []

    def store(self, name: str, data: bytes) -> None:
        """Store under the lock, which the caller holds."""
        if name not in self.objects:
            insort(self.names, name)
        self.objects[name] = (data, time.time_ns())


_BUCKETS: dict[str, _Bucket] = {}
_BUCKETS_LOCK = threading.Lock()


class MemoryObjects:
    """Objects below a prefix of a bucket in memory."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        with _BUCKETS_LOCK:
            self._bucket = _BUCKETS.setdefault(bucket, _Bucket())
        self._url = f"memory://{bucket}" + (f"/{prefix}" if prefix else "")
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self._url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object."""
        check_name(name)
        with self._bucket.lock:
            self._bucket.store(self._prefix + name, b"".join(data))

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        check_name(name)
        with self._bucket.lock:
            if self._prefix + name in self._bucket.objects:
                return False
            self._bucket.store(self._prefix + name, bytes(data))
            return True

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        return self._find(name)[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        data = self.get(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        data = self.get(name)
        return len(data), data[max(0, len(data) - length) :]

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""
        try:
            data, modified_ns = self._find(name)
        except NoSuchObject:
            return None
        return ObjectInfo(name, len(data), modified_ns)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, as they were at the first step."""
        wanted = self._prefix + prefix
        with self._bucket.lock:
            names = self._bucket.names
            start = max(bisect_left(names, wanted), bisect_right(names, self._prefix + after) if after else 0)
            found = []
            for at in range(start, len(names)):
                if not names[at].startswith(wanted):
                    break
                data, modified_ns = self._bucket.objects[names[at]]
                found.append(ObjectInfo(names[at][len(self._prefix) :], len(data), modified_ns))
        yield from found

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        for name in names:
            check_name(name)
            with self._bucket.lock:
                if self._bucket.objects.pop(self._prefix + name, None) is not None:
                    del self._bucket.names[bisect_left(self._bucket.names, self._prefix + name)]

    def reconnect(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Keep the objects for the next one of this name."""

    def _find(self, name: str) -> tuple[bytes, int]:
        check_name(name)
        with self._bucket.lock:
            try:
                return self._bucket.objects[self._prefix + name]
            except KeyError:
                raise NoSuchObject(name) from None


def forget_bucket(bucket: str) -> None:
    """Drop a bucket's objects; stores that have it open keep them."""
    with _BUCKETS_LOCK:
        _BUCKETS.pop(bucket, None)
