"""Packs of trees and block maps: read whole once, and kept in the cache directory.

A walk through a tree asks for one small record after the other, each of which would take a round trip.

Guarantee: what is returned is what the bucket has or had; the caller verifies it, and calls `forget` where it does not open.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Final

from blake3 import blake3

from ciuic.remote.objects.model import Objects, TooLargeObject
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.reading.patience import Patience
from ciuic.remote.reading.range_prefetch import RangePrefetch
from ciuic.repository.ids import Bytes

# Packs that are kept in memory: the last ones that were read, for a disk that takes no cache.
_MAX_MEMORY_BYTES: Final = 32 << 20
_MAX_DESCRIPTORS: Final = 64
_DIGEST_BYTES: Final = 32


class MetaPacks:
    """Meta packs of one space of a remote. May be used from several threads.

    Args:
        objects: Store of the space.
        cache: Cache of the space.
        patience: For requests without an answer.
        ranges: For packs that are too large to be read whole.
    """

    def __init__(
        self, objects: Objects, cache: CacheDirectory, patience: Patience, ranges: RangePrefetch
    ) -> None:
        self._objects = objects
        self._cache = cache
        self._patience = patience
        self._ranges = ranges
        # One pack is read at a time, which bounds the memory. All below is guarded by it.
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._large: set[str] = set()
        self._fetched: set[str] = set()
        self._anew = False

    def read_anew(self) -> None:
        """Read every pack from the bucket from now on, as a verification of the bucket has to."""
        with self._lock:
            self._anew = True

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Return bytes of a pack; fewer where it ends.

        Raises:
            NoSuchObject: there is no such pack.
            RemoteUnreachable: the store did not answer for too long.
        """
        with self._lock:
            if name not in self._large:
                found = self._kept(name, start, length)
                if found is None:
                    found = self._fetch(name, start, length)
                if found is not None:
                    return found
        return self._ranges.read(name, start, length)

    def forget(self, name: str) -> None:
        """Forget what is kept of a pack, so that it is read from the bucket again."""
        with self._lock:
            self._memory.pop(name, None)
            if name in self._files:
                os.close(self._files.pop(name)[0])
            self._cache.remove(_file_name(name))

    def close(self) -> None:
        """Close descriptors."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1][0])
            self._memory.clear()

    def _kept(self, name: str, start: int, length: int) -> Bytes | None:
        if self._anew and name not in self._fetched:
            return None
        if name in self._memory:
            self._memory.move_to_end(name)
            return memoryview(self._memory[name])[start : start + length]
        if name not in self._files:
            fd = self._cache.open(_file_name(name))
            if fd is None:
                return None
            size_bytes = _checked_size(fd, name)
            if size_bytes is None:
                os.close(fd)
                self._cache.remove(_file_name(name))
                return None
            self._files[name] = fd, size_bytes
            if len(self._files) > _MAX_DESCRIPTORS:
                os.close(self._files.popitem(last=False)[1][0])
        self._files.move_to_end(name)
        fd, size_bytes = self._files[name]
        return os.pread(fd, max(0, min(length, size_bytes - start)), start)

    def _fetch(self, name: str, start: int, length: int) -> Bytes | None:
        """Read the pack and keep it; None for one that is too large."""
        try:
            data = bytes(self._patience.of(lambda: self._objects.get(name)))
        except TooLargeObject:
            self._large.add(name)
            return None
        self._fetched.add(name)
        self._cache.store(_file_name(name), data + _digest(name, data))
        self._memory[name] = data
        while len(self._memory) > 1 and sum(map(len, self._memory.values())) > _MAX_MEMORY_BYTES:
            self._memory.popitem(last=False)
        return memoryview(data)[start : start + length]


def _file_name(name: str) -> str:
    return name.rpartition("/")[2]


def _digest(name: str, data: Bytes) -> bytes:
    digest = blake3(name.encode() + b"\0")
    digest.update(data)
    return digest.digest()


def _checked_size(fd: int, name: str) -> int | None:
    """Return the size of the pack in a cached file; None if the file decayed.

    Whole, because records of a remote that is not sealed have no seal of their own by which decay would show.
    """
    size_bytes = os.fstat(fd).st_size - _DIGEST_BYTES
    if size_bytes < 0:
        return None
    digest = blake3(name.encode() + b"\0")
    at = 0
    while at < size_bytes:
        data = os.pread(fd, min(1 << 20, size_bytes - at), at)
        if not data:
            return None
        digest.update(data)
        at += len(data)
    return size_bytes if os.pread(fd, _DIGEST_BYTES, size_bytes) == digest.digest() else None
