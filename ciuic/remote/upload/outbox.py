"""Packs on their way to the store: several at once, each until it is stored or the uploader stops; their sizes; those not committed yet.

Guarantees: `Outbox.wait` returns only when every pack that was handed over is stored. A pack that the store did not
take is sent again, with pauses that grow to a minute, however long the network is away: the bytes are the
same, so a request whose reply was lost does no harm. Memory: `_MAX_WAITING_BYTES` and the pack being handed over.

A pack should take about eight seconds (`PackSize`): what is under way when the process is killed is sent again, and a
request for each pack costs money and a round trip. The size begins at 512 KiB and is at most a sixteenth of what
the process has stored, so that one which is killed again and again wastes little. Measured: 512 MiB over 12 MiB/s with 40
kills, by turns, sent 12 % twice where the size doubled from pack to pack, and 0.1 % so. Such small packs fit the socket's
buffer, which the kernel sends after the kill: a host that is lost wastes what is under way.

Packs that were stored and that no commit names yet are kept in a local file (`UncommittedPacks`). A commit names them so
that other hosts learn of them without a listing. If the file is lost, they find the packs when they list; nothing else
depends on it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from ciuic.errors import CiuicError
from ciuic.remote.format.documents import PackRefs
from ciuic.remote.format.names import PackRef, pack_name
from ciuic.remote.objects.model import NoSuchBucket, Objects, RemoteRefused, RemoteUnreachable
from ciuic.remote.objects.wrappers import steady_object_bytes
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackRecord
from ciuic.repository.notes import read_note, write_note

FIRST_PACK_BYTES: Final = 512 << 10
"""Size of the first pack of a process."""
LARGEST_PACK_BYTES: Final = 16 << 20
"""Largest pack: those that are filled, sent and copied by the client leave the uploader below 200 MiB."""
# Time that a pack should take.
_PACK_SECONDS: Final = 8.0
# Part of what was stored that one pack may have.
_PART_OF_STORED: Final = 16
# Weight of the newest pack in the smoothed rate.
_RATE_WEIGHT: Final = 0.3


class PackSize:
    """Size of the next pack in bytes; for several threads."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        """Begin; ``bytes_per_second`` is the limit of the rate, which small packs keep more evenly."""
        self._max_bytes = LARGEST_PACK_BYTES
        if bytes_per_second is not None:
            self._max_bytes = min(LARGEST_PACK_BYTES, steady_object_bytes(bytes_per_second))
        self._lock = threading.Lock()
        self._size_bytes = FIRST_PACK_BYTES
        self._stored_bytes = 0
        self._rate = 0.0

    @property
    def size_bytes(self) -> int:
        """Size at which the next pack is closed."""
        return self._size_bytes

    @property
    def bytes_per_second(self) -> float:
        """Smoothed rate of one connection; 0 before the first pack."""
        return self._rate

    def stored(self, size_bytes: int, seconds: float) -> None:
        """Note that a pack of this size was stored in this time."""
        rate = size_bytes / max(seconds, 1e-3)
        with self._lock:
            self._rate = rate if not self._rate else self._rate + _RATE_WEIGHT * (rate - self._rate)
            wanted = int(self._rate * _PACK_SECONDS)
            self._stored_bytes += size_bytes
            earned = self._stored_bytes // _PART_OF_STORED
            self._size_bytes = max(FIRST_PACK_BYTES, min(wanted, earned, self._max_bytes))


_MAX_WAITING_BYTES: Final = 48 << 20
"""Limit of packs that are being stored or wait for it."""
# More connections hardly help a single store; each holds a pack in memory.
_SENDING_THREADS: Final = 4
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
# With pauses that begin at half a second, half a minute.
_MAX_MISSING_BUCKET: Final = 6
_Result = TypeVar("_Result")


class Stopped(Exception):
    """The uploader was told to end."""


class ClosedPack(NamedTuple):
    """Pack that is ready to be stored."""

    ref: PackRef
    parts: Sequence[Bytes]
    size_bytes: int
    records: tuple[PackRecord, ...]


class Outbox:
    """Sender of packs. `hand_over` and `wait` belong to one thread."""

    def __init__(
        self,
        objects: Objects,
        stop: threading.Event,
        size: PackSize,
        *,
        problem: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            objects: Store.
            stop: Set when the uploader ends; then nothing is sent again.
            size: Told how long each pack took.
            problem: Told in words what sending waits for; with an empty text when it goes on.
            clock: Monotonic clock.
        """
        self._objects = objects
        self._stop = stop
        self._size = size
        self._problem = problem
        self._clock = clock
        self._packs: queue.SimpleQueue[ClosedPack | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._stored: list[ClosedPack] = []
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._send_all, name=f"outbox-{number}", daemon=True)
            for number in range(_SENDING_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def hand_over(self, pack: ClosedPack) -> None:
        """Send the pack; wait while too many are under way.

        Raises:
            Stopped: the uploader was told to end.
            CiuicError: the store refuses for good.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_go_on(pack.size_bytes))
            self._raise_failure()
            self._waiting_bytes += pack.size_bytes
        self._packs.put(pack)

    def wait(self) -> None:
        """Return when everything is stored. Raises like `hand_over`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._waiting_bytes)
            self._raise_failure()

    def take_stored(self) -> list[ClosedPack]:
        """Return the packs that were stored since the last call, without their bytes."""
        with self._changed:
            stored, self._stored = self._stored, []
            return stored

    def abandon(self) -> None:
        """End the threads; what waits is not sent any more, and requests under way are waited for."""
        with self._changed:
            self._failure = self._failure or Stopped()
        self.close()

    def close(self) -> None:
        """End the threads when everything that was handed over is settled."""
        for _ in self._threads:
            self._packs.put(None)
        for thread in self._threads:
            thread.join()

    def _may_go_on(self, size_bytes: int) -> bool:
        # A pack alone may be larger than the limit.
        return (
            self._failure is not None
            or not self._waiting_bytes
            or self._waiting_bytes + size_bytes <= _MAX_WAITING_BYTES
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send_all(self) -> None:
        while (pack := self._packs.get()) is not None:
            failure: BaseException | None = self._failure
            if failure is None:
                try:
                    self._send(pack)
                except (CiuicError, Stopped, OSError) as error:
                    failure = error
            with self._changed:
                if failure is None:
                    # Without the bytes, which are not needed any more.
                    self._stored.append(pack._replace(parts=()))
                self._waiting_bytes -= pack.size_bytes
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _send(self, pack: ClosedPack) -> None:
        def put() -> None:
            began = self._clock()
            self._objects.put(pack_name(pack.ref), pack.parts)
            self._size.stored(pack.size_bytes, self._clock() - began)

        persist(put, self._stop, self._problem)


def persist(
    request: Callable[[], _Result],
    stop: threading.Event,
    problem: Callable[[str], None] = lambda text: None,
) -> _Result:
    """Repeat a request until the store takes it, and return its result.

    Args:
        request: May be carried out several times.
        stop: Ends the repetition.
        problem: Told in words what is waited for, and with an empty text when it is over.

    Raises:
        Stopped: ``stop`` was set.
        NoSuchBucket: the bucket is missing for half a minute.
    """
    pause = _FIRST_PAUSE_SECONDS
    missing_bucket = 0
    told = False
    while True:
        if stop.is_set():
            raise Stopped
        try:
            result = request()
        # Credentials may be renewed and permissions mended while the uploader runs.
        except (RemoteUnreachable, RemoteRefused) as error:
            problem(error.message)
            told = True
        except NoSuchBucket as error:
            # A server that starts says so for some seconds, but a wrong name is none to wait for.
            missing_bucket += 1
            if missing_bucket > _MAX_MISSING_BUCKET:
                raise
            problem(error.message)
            told = True
        else:
            if told:
                problem("")
            return result
        stop.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


_UNCOMMITTED_FILE: Final = "uncommitted"


class _StoredUncommitted(msgspec.Struct, frozen=True, kw_only=True):
    packs: PackRefs


class UncommittedPacks:
    """Packs of this uploader that no commit names. For one thread."""

    def __init__(self, directory: str) -> None:
        """Read what an earlier process left in this directory of the uploader's own."""
        self._directory = directory
        note = read_note(directory, _UNCOMMITTED_FILE, _StoredUncommitted)
        self._refs: list[PackRef] = [] if note is None else [PackRef(ref) for ref in note.packs]

    @property
    def refs(self) -> tuple[PackRef, ...]:
        """The packs, oldest first."""
        return tuple(self._refs)

    def add(self, pack: ClosedPack) -> None:
        """Add a pack that was stored."""
        self._refs.append(pack.ref)
        self._write()

    def clear(self) -> None:
        """Forget them: a commit names them."""
        self._refs.clear()
        self._write()

    def _write(self) -> None:
        write_note(
            self._directory, _UNCOMMITTED_FILE, _StoredUncommitted(packs=tuple(self._refs)), durable=False
        )
