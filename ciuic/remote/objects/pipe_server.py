"""Serve the objects of a directory over stdin and stdout: the far end of an ``ssh://`` remote.

Guarantees: what a reply confirms is durable, as `DirectoryObjects` has it. Of a client that vanishes nothing stays but
whole objects, and the process ends. With ``append_only`` no object is deleted or replaced: whoever has the key of a host
can add, and take nothing away; nor can he add objects of rounds (``gc/``), by which a collector deletes. With ``max_bytes`` nothing is stored that would make the directory larger than that. Memory is bounded whatever a client sends and whether or not it reads the replies: no
frame is read while `_MAX_OPEN` requests have no answer, and of bodies `_HELD_BYTES` are held each way, or one longer one.

Leaves to sshd who may connect, and to `pipe_protocol` what the bytes mean.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from ciuic import __version__
from ciuic.errors import CiuicError, Damaged
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    ObjectInfo,
    RemoteFull,
    RemoteRefused,
    RemoteUnreachable,
)
from ciuic.remote.objects.pipe_protocol import (
    ALIVE,
    ALIVE_SECONDS,
    BODY,
    IDLE_SECONDS,
    MAGIC,
    MAX_FRAME_BYTES,
    MESSAGE,
    PAGE,
    VERSION,
    Reply,
    Request,
    decode_request,
    error_reply,
    pieces,
    read_exactly,
    read_frame,
    write_frame,
)
from ciuic.repository.identity import Bytes
from ciuic.system.disk import open_locked
from ciuic.units import format_size

_ROUND: Final = re.compile("(?:repositories/[^/]*/)?gc/")
"""Objects of rounds, of the remote and of a repository in it (docs/remote-format.md, section 2)."""
_WORKERS: Final = 8
_MAX_OPEN: Final = 16
"""Requests without an answer beyond which no frame is read; twice the workers, so that these do not wait for the line."""
_HELD_BYTES: Final = 32 << 20
"""Bodies that are held each way: two of the largest packs, so that one is on its way while another is synced."""
_COMPARED_BYTES: Final = 1 << 20
_MAX_LISTINGS: Final = 16
_BLOCK_BYTES: Final = 4096
"""Room that the smallest object takes: a client must not fill the disk with a million of them."""
_FULL_SECONDS: Final = 10.0
"""Time for which a full directory counts as full without another look."""
_SMALL_BYTES: Final = 64 << 10
_STORED_NAME: Final = ".stored"
"""No name of an object."""
_STORED: Final = struct.Struct("=Qd")
"""Bytes that are stored, deletions since the last count left out, and the time of that count (seconds since 1970)."""


def serve(
    directory: str,
    read_fd: int,
    write_fd: int,
    *,
    append_only: bool = False,
    max_bytes: int | None = None,
    idle_seconds: float = IDLE_SECONDS,
) -> None:
    """Serve until the client ends the stream, or asks for nothing for long.

    Args:
        directory: Absolute path; made, where it is missing, when a client asks for that.
        read_fd: Where requests come from.
        write_fd: Where replies go to; nothing else may write there.
        append_only: Refuse to delete and to replace.
        max_bytes: Refuse what would make the objects of the directory take more, objects and directories in whole blocks of
            4 KiB; objects of at most 64 KiB that are no packs have a sixty-fourth on top, a megabyte at least. It may be exceeded by what all clients have under way at a moment.
        idle_seconds: Time without a request after which it ends.

    Raises:
        Damaged: what came is no request. The client then sees the stream end.
    """
    _Server(directory, read_fd, write_fd, append_only, max_bytes, idle_seconds).run()


class _Room:
    """Room for so much at a time; what alone is more waits until it is empty."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self.held = 0

    def take(self, amount: int) -> None:
        """Wait until there is room for this amount."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + amount <= self._limit)
            self.held += amount

    def give_back(self, amount: int) -> None:
        """Make room for others."""
        with self._changed:
            self.held -= amount
            self._changed.notify_all()


class _Quota:
    """Bytes that the objects of a directory may take, counted in a file of it that all servers of the directory share."""

    def __init__(self, objects: DirectoryObjects, directory: str, limit: int) -> None:
        self._objects, self._directory, self._limit = objects, directory, limit

    def take(self, name: str, length: int) -> None:
        """Count an object that is going to be stored.

        Raises:
            RemoteFull: It would make the directory larger than the limit.
        """
        # With a block for each directory above it, which may have to be made.
        size_bytes, limit = _on_disk(length) + name.count("/") * _BLOCK_BYTES, self._limit
        if length <= _SMALL_BYTES and "packs" not in name.split("/"):
            # Whoever is to remove snapshots adds to a log and to a round first.
            limit += max(limit // 64, _SMALL_BYTES * 16)
        fd = open_locked(f"{self._directory}/{_STORED_NAME}", wait=True)
        try:
            found, now = os.pread(fd, _STORED.size, 0), time.time()
            stored, counted_at = _STORED.unpack(found) if len(found) == _STORED.size else (limit, 0.0)
            # Others delete as well. Who has no room and asks on must not have the directory walked for each request.
            if stored + size_bytes > limit and not 0 <= now - counted_at < _FULL_SECONDS:
                stored, counted_at = self._count(), now
            fits = stored + size_bytes <= limit
            os.pwrite(fd, _STORED.pack(stored + size_bytes * fits, counted_at), 0)
        finally:
            os.close(fd)
        if not fits:
            raise RemoteFull(
                f"the limit of {self._directory} on the server, {format_size(self._limit)}, is reached",
                hint="remove old snapshots with ciuic prune --remote, by a key that may delete, or have the limit raised",
            )

    def _count(self) -> int:
        stored, before = 0, [""]
        for info in self._objects.list(""):
            above = info.name.split("/")[:-1]
            # In the order of their names those of a directory lie side by side.
            made = sum(above[: at + 1] != before[: at + 1] for at in range(len(above)))
            stored, before = stored + _on_disk(info.size_bytes) + made * _BLOCK_BYTES, above
        return stored


def _on_disk(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES or _BLOCK_BYTES


class _Server:
    """One client's connection."""

    def __init__(
        self,
        directory: str,
        read_fd: int,
        write_fd: int,
        append_only: bool,
        max_bytes: int | None,
        idle_seconds: float,
    ) -> None:
        self._directory = directory
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._append_only = append_only
        self._max_bytes = max_bytes
        self._idle_seconds = idle_seconds
        self._objects: DirectoryObjects | None = None
        self._quota: _Quota | None = None
        self._sending = threading.Lock()
        # Apart: a body that waits for a worker must not take the room that the workers wait for.
        self._bodies = _Room(_HELD_BYTES)
        self._answers = _Room(_HELD_BYTES)
        self._open = _Room(_MAX_OPEN)
        """Requests that were received, in part or whole, and not answered."""
        self._ended = threading.Event()
        self._paging = threading.Lock()
        self._listings: dict[tuple[str, str], Iterator[ObjectInfo]] = {}
        """Listings of which a page was sent, by prefix and last name."""

    def run(self) -> None:
        """Answer requests until the stream ends."""
        os.write(self._write_fd, MAGIC)
        alive = threading.Thread(target=self._keep_alive, name="alive", daemon=True)
        alive.start()
        workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="request")
        try:
            for received in self._received():
                workers.submit(self._answer, *received)
        finally:
            # What was received whole is done to its end; who asked for it is no longer told.
            workers.shutdown(wait=True)
            self._ended.set()
            alive.join()
            if self._objects is not None:
                self._objects.close()

    def _received(self) -> Iterator[tuple[int, Request, bytearray]]:
        """Yield each request with its body, once that is whole."""
        # The one request whose body is on its way.
        waiting: tuple[int, Request] | None = None
        body = bytearray()
        while (frame := read_frame(self._read)) is not None:
            if frame.kind == MESSAGE:
                request = decode_request(frame.payload)
                if not 0 <= request.body_bytes <= MAX_OBJECT_BYTES or (request.body_bytes and waiting):
                    raise Damaged(f"a request with {request.body_bytes} bytes came out of turn")
                self._open.take(1)
                if not request.body_bytes:
                    yield frame.number, request, bytearray()
                    continue
                self._bodies.take(request.body_bytes)
                waiting, body = (frame.number, request), bytearray()
            elif frame.kind == BODY:
                if (
                    waiting is None
                    or frame.number != waiting[0]
                    or not 0 < len(frame.payload) <= waiting[1].body_bytes - len(body)
                ):
                    raise Damaged("a part of a body came out of turn")
                # One buffer: a client may send two bytes in a frame, and an object for each costs fifteen times that.
                body += frame.payload
                if len(body) == waiting[1].body_bytes:
                    yield *waiting, body
                    waiting, body = None, bytearray()

    def _answer(self, number: int, request: Request, body: bytearray) -> None:
        parts: Sequence[Bytes] = ()
        room = 0
        try:
            try:
                room = self._longest_answer(request)
                if room:
                    self._answers.take(room)
                reply, parts = self._call(request, body)
                reply.body_bytes = sum(len(part) for part in parts)
            except CiuicError as error:
                reply = error_reply(error)
            except ValueError as error:
                reply = error_reply(RemoteRefused(str(error)))
            except OSError as error:
                reply = error_reply(RemoteUnreachable(f"{self._directory}: {error.strerror or error}"))
            finally:
                self._bodies.give_back(len(body))
                body.clear()
            payload = msgspec.msgpack.encode(reply)
            if len(payload) > MAX_FRAME_BYTES:
                payload = msgspec.msgpack.encode(error_reply(RemoteRefused("the reply is too long")))
                parts = ()
            self._send(number, MESSAGE, payload)
            for piece in pieces(parts):
                self._send(number, BODY, piece)
        except OSError:
            # The client is gone: the reader sees the end as well.
            self._ended.set()
        finally:
            parts = ()
            if room:
                self._answers.give_back(room)
            self._open.give_back(1)

    def _longest_answer(self, request: Request) -> int:
        """Return the most bytes that the body of the answer may have."""
        match request.operation:
            case "get":
                info = self._objects.info(request.name) if self._objects else None
                return min(info.size_bytes, MAX_OBJECT_BYTES) if info else 0
            case "ranges":
                wanted = sum(length for _, length in request.ranges)
                if wanted > MAX_OBJECT_BYTES or min(map(min, request.ranges), default=0) < 0:
                    raise RemoteRefused(f"ranges of {wanted} bytes are too much for one request")
                return wanted
            case "tail":
                return min(max(0, request.length), MAX_OBJECT_BYTES)
        return 0

    def _call(self, request: Request, body: bytearray) -> tuple[Reply, Sequence[Bytes]]:
        name = request.name
        if request.operation == "open":
            return self._opened(request), ()
        objects = self._objects
        if objects is None:
            raise RemoteRefused("the first request has to be open")
        match request.operation:
            case "put":
                self._refuse_round(name)
                self._take_room(name, body)
                self._put(objects, name, body)
            case "create":
                self._refuse_round(name)
                self._take_room(name, body)
                return Reply(created=objects.create(name, body)), ()
            case "get":
                return Reply(), [objects.get(name)]
            case "ranges":
                read = objects.get_ranges(name, request.ranges)
                return Reply(lengths=[len(part) for part in read]), read
            case "tail":
                size_bytes, data = objects.tail(name, self._longest_answer(request))
                return Reply(size_bytes=size_bytes), [data]
            case "info":
                info = objects.info(name)
                if info is not None:
                    return Reply(found=True, size_bytes=info.size_bytes, modified_ns=info.modified_ns), ()
            case "list":
                page = self._page(objects, name, request.after)
                return Reply(infos=[(info.name, info.size_bytes, info.modified_ns) for info in page]), ()
            case "delete":
                if self._append_only:
                    raise RemoteRefused(
                        f"cannot delete from {self._directory}: this key may only add objects",
                        hint="delete with another key, or on the server itself",
                    )
                objects.delete(request.names)
        return Reply(), ()

    def _opened(self, request: Request) -> Reply:
        if request.length != VERSION:
            raise RemoteRefused(
                f"ciuic {__version__} on the server speaks version {VERSION} of this protocol, not {request.length}",
                hint="install the same version of ciuic on both machines",
            )
        self._objects = DirectoryObjects(self._directory, make=request.make)
        if self._max_bytes is not None:
            self._quota = _Quota(self._objects, self._directory, self._max_bytes)
        return Reply(program=__version__, directory=self._directory, append_only=self._append_only)

    def _refuse_round(self, name: str) -> None:
        """Refuse what only a collector stores, where nothing may be deleted: hosts believe what rounds say is gone."""
        if self._append_only and _ROUND.match(name):
            raise RemoteRefused(
                f"cannot create {name} in {self._directory}: this key may not collect",
                hint="collect with another key, or on the server itself",
            )

    def _take_room(self, name: str, body: bytearray) -> None:
        if self._quota is not None:
            self._quota.take(name, len(body))

    def _put(self, objects: DirectoryObjects, name: str, body: bytearray) -> None:
        if not self._append_only:
            objects.put(name, [body])
        # The reply of an earlier try may have been lost.
        elif not objects.create(name, body) and not _has(objects, name, body):
            raise RemoteRefused(
                f"cannot replace {name} in {self._directory}: this key may only add objects",
                hint="replace it with another key, or on the server itself",
            )

    def _page(self, objects: DirectoryObjects, prefix: str, after: str) -> list[ObjectInfo]:
        """Return the next page of a listing; fewer than `PAGE` at its end."""
        with self._paging:
            infos = self._listings.pop((prefix, after), None)
        if infos is None:
            infos = objects.list(prefix, after=after)
        page = [info for _, info in zip(range(PAGE), infos, strict=False)]
        if len(page) == PAGE:
            with self._paging:
                self._listings[prefix, page[-1].name] = infos
                if len(self._listings) > _MAX_LISTINGS:
                    self._listings.pop(next(iter(self._listings)))
        return page

    def _keep_alive(self) -> None:
        """Send a frame now and then while a request is open."""
        while not self._ended.wait(ALIVE_SECONDS):
            if self._open.held:
                try:
                    self._send(0, ALIVE, b"")
                except OSError:
                    return

    def _send(self, number: int, kind: int, payload: Bytes) -> None:
        with self._sending:
            write_frame(self._write_fd, number, kind, payload)

    def _read(self, length: int) -> bytes:
        """Return so many bytes; fewer at the end, and when nothing came for long: the client may be gone without a word."""
        return read_exactly(
            self._read_fd,
            length,
            lambda silent_seconds: not (self._ended.is_set() or silent_seconds > self._idle_seconds),
        )


def _has(objects: DirectoryObjects, name: str, data: bytearray) -> bool:
    """Return whether an object that nobody replaces has this content; it is not held a second time."""
    info = objects.info(name)
    with memoryview(data) as view:
        return (
            info is not None
            and info.size_bytes == len(data)
            and all(
                objects.get_ranges(name, [(at, _COMPARED_BYTES)])[0] == view[at : at + _COMPARED_BYTES]
                for at in range(0, len(data), _COMPARED_BYTES)
            )
        )
