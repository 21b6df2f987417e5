"""Packs of a remote as a source of records for readers of chunks, which reads ranges ahead of their use in bounded memory.

A range that was announced is read by a thread of this module's own; one that was not, by the thread that asks for it.
A short one is read with what follows it, because small files lie beside one another in packs as in their directory.
Packs of trees and block maps are read whole once, and kept: a walk through a tree asks for one small record after the
other, each of which would take a round trip (`MetaPacks`).

Guarantees: in a sealed remote every byte that is returned was authenticated; elsewhere readers compare it with the chunk's
id, as they do in any case. A kept pack that does not open is forgotten and read again. At most ``memory_bytes`` and one range
for each thread that reads are held ahead. A range that was announced and is never asked for delays others, and stops none.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from blake3 import blake3

from ciuic.errors import Damaged, NotFound
from ciuic.remote.object_names import PackRef, pack_name, split_ref
from ciuic.remote.objects.model import MERGE_GAP_BYTES, ArchivedObject, Objects, TooLargeObject, read_verified
from ciuic.remote.pack import PackLayout
from ciuic.remote.reading.cache_directory import CacheDirectory
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.identity import Bytes
from ciuic.repository.model import ChunkLocation

DEFAULT_THREADS: Final = 8
DEFAULT_MEMORY_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 1 << 20
"""Size of a read for a short range: 256 small files, and 20 ms of a stream of 50 MiB/s."""
MAX_RANGE_BYTES: Final = 8 << 20
"""Size up to which announced ranges that lie close together are read as one."""
# Ranges at least as long as this are read alone.
_SHORT_BYTES: Final = 256 << 10
# Announcements are advice: no more of them are kept than a large batch makes.
_MAX_QUEUED: Final = 4096


class _Body:
    """Bytes of one range that was read, or is being read."""

    __slots__ = ("data", "error", "is_read", "left", "length", "name", "start", "used")

    def __init__(self, name: str, start: int, length: int) -> None:
        self.name: Final = name
        self.start: Final = start
        self.length = length
        self.data: Bytes | None = None
        self.error: BaseException | None = None
        self.left = length
        """Bytes that were not asked for yet."""
        self.is_read = False
        """True if some of it was asked for."""
        self.used = 0

    @property
    def is_done(self) -> bool:
        return self.data is not None or self.error is not None

    def has(self, name: str, start: int, length: int) -> bool:
        return self.name == name and self.start <= start and start + length <= self.start + self.length

    def extend(self, name: str, start: int, length: int) -> bool:
        """Add a range that follows closely, before this one is read; False where it does not."""
        end = self.start + self.length
        near = name == self.name and self.start <= start <= end + MERGE_GAP_BYTES
        if not near or start + length - self.start > MAX_RANGE_BYTES:
            return False
        self.length = max(self.length, start + length - self.start)
        self.left = self.length
        return True


class RangePrefetch:
    """Ranges of objects. May be used from several threads.

    Args:
        objects: Store.
        threads: Announced ranges that are read at the same time.
        memory_bytes: Limit of what is held; half of it is for what was announced and not yet asked for.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        threads: int = DEFAULT_THREADS,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._objects = objects
        self._threads = threads
        self._memory_bytes = memory_bytes
        self._changed = threading.Condition()
        # All below is guarded by it.
        self._bodies: dict[str, list[_Body]] = {}
        self._queue: deque[_Body] = deque()
        self._held_bytes = 0
        self._unread_bytes = 0
        self._reading = 0
        self._uses = 0
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def announce(self, name: str, start: int, length: int) -> None:
        """Begin to read a range of the object, which `read` asks for later."""
        with self._changed:
            if self._closed or self._find(name, start, length) or len(self._queue) >= _MAX_QUEUED:
                return
            if any(body.has(name, start, length) for body in self._queue):
                return
            if not (self._queue and self._queue[-1].extend(name, start, length)):
                self._queue.append(_Body(name, start, _extended(length)))
            self._begin_queued()

    def read(self, name: str, start: int, length: int) -> Bytes:
        """Return the bytes of the range; fewer where the object ends.

        Raises:
            NoSuchObject: there is no such object.
            RemoteUnreachable: the store did not answer for too long.
        """
        with self._changed:
            body = self._find(name, start, length)
            if body is None:
                body = self._take_over(name, start, length)
                mine = True
            else:
                mine = False
                while not body.is_done:
                    self._changed.wait()
            if not mine:
                return self._part(body, start, length)
        self._fetch(body)
        with self._changed:
            return self._part(body, start, length)

    def forget(self, name: str) -> None:
        """Drop what was read of the object, so that it is read again."""
        with self._changed:
            for body in [body for body in self._bodies.get(name, ()) if body.is_done]:
                self._remove(body)

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now, or asked for."""
        with self._changed:
            return self._held_bytes

    def close(self) -> None:
        """Forget everything, and end the threads."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._bodies.clear()

    def _find(self, name: str, start: int, length: int) -> _Body | None:
        return next((body for body in self._bodies.get(name, ()) if body.has(name, start, length)), None)

    def _take_over(self, name: str, start: int, length: int) -> _Body:
        """Return a new body, which the caller reads: waiting for its turn in the queue could wait for ever."""
        for queued in self._queue:
            if queued.has(name, start, length):
                self._queue.remove(queued)
                break
        else:
            queued = _Body(name, start, _extended(length))
        queued.is_read = True
        # What was announced and never asked for would otherwise keep others from being read ahead.
        self._make_room(queued.length, also_unread=True)
        self._add(queued)
        return queued

    def _add(self, body: _Body) -> None:
        self._bodies.setdefault(body.name, []).append(body)
        self._held_bytes += body.length
        if not body.is_read:
            self._unread_bytes += body.length

    def _remove(self, body: _Body) -> None:
        bodies = self._bodies.get(body.name, [])
        if body not in bodies:
            return
        bodies.remove(body)
        if not bodies:
            del self._bodies[body.name]
        self._held_bytes -= body.length
        if not body.is_read:
            self._unread_bytes -= body.length

    def _make_room(self, length: int, *, also_unread: bool) -> None:
        """Drop what was used longest ago, until ``length`` more bytes are within the limit."""
        over = self._held_bytes + length - self._memory_bytes
        if over <= 0:
            return
        done = [body for bodies in self._bodies.values() for body in bodies if body.is_done]
        done.sort(key=lambda body: (not body.is_read, body.used))
        for body in done:
            if over <= 0 or not (body.is_read or also_unread):
                return
            self._remove(body)
            over -= body.length

    def _begin_queued(self) -> None:
        while self._queue and self._reading < self._threads:
            length = self._queue[0].length
            # One range at least, however long: it could never begin otherwise.
            if self._unread_bytes and self._unread_bytes + length > self._memory_bytes // 2:
                return
            body = self._queue.popleft()
            self._make_room(length, also_unread=False)
            self._add(body)
            self._reading += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="remote-read")
            self._pool.submit(self._fetch_queued, body)

    def _fetch_queued(self, body: _Body) -> None:
        try:
            self._fetch(body)
        finally:
            with self._changed:
                self._reading -= 1
                if not self._closed:
                    self._begin_queued()

    def _fetch(self, body: _Body) -> None:
        """Read the range of the body; an error is kept for those who ask for it."""
        data: Bytes | None = None
        error: BaseException | None = None
        try:
            (data,) = self._objects.get_ranges(body.name, [(body.start, body.length)])
        except BaseException as failure:
            error = failure
        with self._changed:
            body.data, body.error = data, error
            self._uses += 1
            body.used = self._uses
            self._changed.notify_all()

    def _part(self, body: _Body, start: int, length: int) -> Bytes:
        if not body.is_read:
            body.is_read = True
            # Of one that was dropped meanwhile nothing is counted any more.
            if body in self._bodies.get(body.name, ()):
                self._unread_bytes -= body.length
        if body.error is not None:
            # The next one who asks tries again.
            self._remove(body)
            raise body.error
        assert body.data is not None
        self._uses += 1
        body.used = self._uses
        body.left -= length
        if body.left <= 0:
            self._remove(body)
        if not self._closed:
            self._begin_queued()
        at = start - body.start
        return memoryview(body.data)[at : at + length]


def _extended(length: int) -> int:
    return WINDOW_BYTES if length < _SHORT_BYTES else length


# Packs that are kept in memory: the last ones that were read, for a disk that takes no cache.
_MAX_MEMORY_BYTES: Final = 32 << 20
_MAX_DESCRIPTORS: Final = 64
_DIGEST_BYTES: Final = 32


class MetaPacks:
    """Meta packs of one space of a remote. May be used from several threads.

    Args:
        objects: Store of the space.
        cache: Cache of the space.
        ranges: For packs that are too large to be read whole.
    """

    def __init__(self, objects: Objects, cache: CacheDirectory, ranges: RangePrefetch) -> None:
        self._objects = objects
        self._cache = cache
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
            data = bytes(self._objects.get(name))
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


# A layout holds the key of its pack: deriving it takes 30 us.
_MAX_LAYOUTS: Final = 1024


class RemotePacks:
    """`PackSource` of one space of a remote. May be used from several threads.

    Args:
        objects: Store of the space.
        sealer: Seals of it.
        ref: Function that returns the pack of a number in locations, or raises NotFound.
        ranges: Reader of data packs.
        meta: Reader of meta packs.
        on_archived: Called with the name of a pack that cannot be read before it is thawed.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        ref: Callable[[int], PackRef],
        ranges: RangePrefetch,
        meta: MetaPacks,
        *,
        on_archived: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._ref = ref
        self._ranges = ranges
        self._meta = meta
        self._on_archived = on_archived
        self._layouts: dict[PackRef, PackLayout] = {}

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Return the stored bytes of the record at this offset; none where the pack ends before its end."""
        layout = self._layout(number)
        wanted_bytes = length + layout.seal.tag_bytes

        def read() -> bytes:
            data = self._bytes(layout, offset, wanted_bytes)
            try:
                if len(data) < wanted_bytes:
                    raise _CutShort
                return layout.open_record(offset, length, data)
            except (_CutShort, Damaged):
                self._forget(layout)
                raise

        try:
            return read_verified(self._objects, read)
        except _CutShort:
            return b""
        except Damaged as error:
            raise _unreadable(error) from None

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        """Read neighbouring records with one request: the byte at ``start`` + n of the pack to the n-th of the target.

        A record that does not open leaves zeros in the target.
        """
        layout = self._layout(number)
        data = memoryview(self._bytes(layout, start, len(target) + layout.seal.tag_bytes))
        for location in records:
            at = location.offset - start
            if not self._open(layout, location, data[at:], target[at : at + location.stored_bytes]):
                return at
        return len(target)

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        """Read neighbouring records with one request, each into its target, as far as the pack goes."""
        layout = self._layout(number)
        start, (last, _) = records[0][0].offset, records[-1]
        length = last.offset + last.stored_bytes + layout.seal.tag_bytes - start
        data = memoryview(self._bytes(layout, start, length))
        for location, target in records:
            if not self._open(layout, location, data[location.offset - start :], target):
                return

    def will_need(self, number: int, offset: int, length: int) -> None:
        """Begin to read a range of a data pack, which reads of its records follow."""
        layout = self._layout(number)
        if split_ref(layout.ref)[0] == "data":
            self._ranges.announce(layout.name, offset, length + layout.seal.tag_bytes)

    def descriptor(self, number: int) -> int:
        """Raise NotFound: a pack of a remote is no file."""
        raise NotFound("a pack of a remote is no file")

    def close(self) -> None:
        """Do nothing: other readers use what is open here as well."""

    def _layout(self, number: int) -> PackLayout:
        ref = self._ref(number)
        layout = self._layouts.get(ref)
        if layout is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts = {}
            layout = self._layouts[ref] = PackLayout(self._sealer, ref, pack_name(ref))
        return layout

    def _bytes(self, layout: PackLayout, offset: int, length: int) -> Bytes:
        if split_ref(layout.ref)[0] == "meta":
            return self._meta.read(layout.name, offset, length)
        try:
            return self._ranges.read(layout.name, offset, length)
        except ArchivedObject:
            self._on_archived(layout.name)
            raise

    def _forget(self, layout: PackLayout) -> None:
        """Forget what is kept of a pack, so that the bucket is read again."""
        self._ranges.forget(layout.name)
        if split_ref(layout.ref)[0] == "meta":
            self._meta.forget(layout.name)

    def _open(
        self, layout: PackLayout, location: ChunkLocation, data: memoryview, target: memoryview
    ) -> bool:
        """Write the record at the beginning of ``data`` to the target; False where the pack ends before its end."""
        end = location.stored_bytes + layout.seal.tag_bytes
        if len(data) < end:
            return False
        try:
            layout.seal.open_into(location.offset, data[:end], target)
        except Damaged:
            # It matches no id then, except by content that is right: readers ask for it once more, alone.
            target[:] = bytes(len(target))
        return True


class _CutShort(Damaged):
    """A pack ends before the end of a record."""

    def __init__(self) -> None:
        super().__init__("the pack ends before the end of the record")


def _unreadable(error: Damaged) -> OSError:
    return OSError(errno.EBADMSG, error.message)
