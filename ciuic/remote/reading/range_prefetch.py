"""Read ranges of objects ahead of their use, several at the same time, in bounded memory.

A range that was announced is read by a thread of this module's own; one that was not, by the thread that asks for it.
A short one is read with what follows it, because small files lie beside one another in packs as in their directory.

Guarantees: at most ``memory_bytes`` and one range for each thread that reads are held. A range that was announced and is
never asked for delays others, and stops none.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ciuic.remote.objects.model import MERGE_GAP_BYTES, Objects
from ciuic.repository.identity import Bytes

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
