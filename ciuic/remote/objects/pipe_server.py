"""Serve the objects of a directory over stdin and stdout: the far end of an ``ssh://`` remote.

Guarantees: what a reply confirms is durable, as `DirectoryObjects` has it. Of a client that vanishes nothing stays but
whole objects, and the process ends. With ``append_only`` no object is deleted or replaced: whoever has the key of a host
can add, and take nothing away. At most `_WORKERS` requests are served at a time, and two bodies are held.

Leaves to sshd who may connect, and to `pipe_protocol` what the bytes mean.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ciuic import __version__
from ciuic.errors import CiuicError, Damaged
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    ObjectInfo,
    Objects,
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
    encode,
    error_reply,
    head,
    pieces,
    read_frame,
)
from ciuic.repository.identity import Bytes
from ciuic.system.poll import readable

_WORKERS: Final = 8
_HELD_BODIES: Final = 2
"""Bodies that were received and are being stored: the next one is on its way while the last one is synced."""
_MAX_LISTINGS: Final = 16


def serve(
    directory: str,
    read_fd: int,
    write_fd: int,
    *,
    append_only: bool = False,
    idle_seconds: float = IDLE_SECONDS,
) -> None:
    """Serve until the client ends the stream, or asks for nothing for long.

    Args:
        directory: Absolute path; made, where it is missing, when a client asks for that.
        read_fd: Where requests come from.
        write_fd: Where replies go to; nothing else may write there.
        append_only: Refuse to delete and to replace.
        idle_seconds: Time without a request after which it ends.

    Raises:
        Damaged: what came is no request. The client then sees the stream end.
    """
    _Server(directory, read_fd, write_fd, append_only, idle_seconds).run()


class _Server:
    """One client's connection."""

    def __init__(
        self, directory: str, read_fd: int, write_fd: int, append_only: bool, idle_seconds: float
    ) -> None:
        self._directory = directory
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._append_only = append_only
        self._idle_seconds = idle_seconds
        self._objects: Objects | None = None
        self._sending = threading.Lock()
        self._bodies = threading.Semaphore(_HELD_BODIES)
        self._open = 0
        """Requests that were received, in part or whole, and not answered."""
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._listings: dict[tuple[str, str], Iterator[ObjectInfo]] = {}
        """Listings of which a page was sent, by prefix and last name."""

    def run(self) -> None:
        """Answer requests until the stream ends."""
        self._write(MAGIC)
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

    def _received(self) -> Iterator[tuple[int, Request, list[bytes]]]:
        """Yield each request with its body, once that is whole."""
        # The one request whose body is on its way, and the bytes that are missing.
        waiting: tuple[int, Request] | None = None
        body: list[bytes] = []
        missing = 0
        while (frame := read_frame(self._read)) is not None:
            if frame.kind == MESSAGE:
                request = decode_request(frame.payload)
                if not 0 <= request.body_bytes <= MAX_OBJECT_BYTES or (request.body_bytes and waiting):
                    raise Damaged(f"a request with {request.body_bytes} bytes came out of turn")
                with self._counting:
                    self._open += 1
                if not request.body_bytes:
                    yield frame.number, request, []
                    continue
                # Not before the last but one is stored: memory is bounded whatever a client sends.
                self._bodies.acquire()
                waiting, body, missing = (frame.number, request), [], request.body_bytes
            elif frame.kind == BODY:
                if waiting is None or frame.number != waiting[0] or not 0 < len(frame.payload) <= missing:
                    raise Damaged("a part of a body came out of turn")
                body.append(frame.payload)
                missing -= len(frame.payload)
                if not missing:
                    yield *waiting, body
                    waiting = None

    def _answer(self, number: int, request: Request, body: list[bytes]) -> None:
        parts: Sequence[Bytes] = ()
        try:
            try:
                reply, parts = self._call(request, body)
                reply.body_bytes = sum(len(part) for part in parts)
            except CiuicError as error:
                reply = error_reply(error)
            except ValueError as error:
                reply = error_reply(RemoteRefused(str(error)))
            except OSError as error:
                reply = error_reply(RemoteUnreachable(f"{self._directory}: {error.strerror or error}"))
            finally:
                if body:
                    self._bodies.release()
            payload = encode(reply)
            if len(payload) > MAX_FRAME_BYTES:
                payload = encode(error_reply(RemoteRefused("the reply is too long")))
                parts = ()
            self._send(number, MESSAGE, payload)
            for piece in pieces(parts):
                self._send(number, BODY, piece)
        except OSError:
            # The client is gone: the reader sees the end as well.
            self._ended.set()
        finally:
            with self._counting:
                self._open -= 1

    def _call(self, request: Request, body: list[bytes]) -> tuple[Reply, Sequence[Bytes]]:
        """Return the result of a request: the reply and its body."""
        name = request.name
        if request.operation == "open":
            return self._opened(request), ()
        objects = self._objects
        if objects is None:
            raise RemoteRefused("the first request has to be open")
        match request.operation:
            case "put":
                self._put(objects, name, body)
            case "create":
                return Reply(created=objects.create(name, b"".join(body))), ()
            case "get":
                return Reply(), [objects.get(name)]
            case "ranges":
                wanted = sum(length for _, length in request.ranges)
                if (
                    len(request.ranges) > PAGE
                    or wanted > MAX_OBJECT_BYTES
                    or min(map(min, request.ranges), default=0) < 0
                ):
                    raise RemoteRefused(
                        f"{len(request.ranges)} ranges of {wanted} bytes are too much for one request"
                    )
                read = objects.get_ranges(name, request.ranges)
                return Reply(lengths=[len(part) for part in read]), read
            case "tail":
                size_bytes, data = objects.tail(name, min(max(0, request.length), MAX_OBJECT_BYTES))
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
        return Reply(program=__version__, directory=self._directory, append_only=self._append_only)

    def _put(self, objects: Objects, name: str, body: list[bytes]) -> None:
        if not self._append_only:
            objects.put(name, body)
            return
        data = b"".join(body)
        if objects.create(name, data):
            return
        # The reply of an earlier try may have been lost.
        if objects.get(name) != data:
            raise RemoteRefused(
                f"cannot replace {name} in {self._directory}: this key may only add objects",
                hint="replace it with another key, or on the server itself",
            )

    def _page(self, objects: Objects, prefix: str, after: str) -> list[ObjectInfo]:
        """Return the next page of a listing; fewer than `PAGE` at its end."""
        with self._counting:
            infos = self._listings.pop((prefix, after), None)
        if infos is None:
            infos = objects.list(prefix, after=after)
        page = [info for _, info in zip(range(PAGE), infos, strict=False)]
        if len(page) == PAGE:
            with self._counting:
                self._listings[prefix, page[-1].name] = infos
                if len(self._listings) > _MAX_LISTINGS:
                    self._listings.pop(next(iter(self._listings)))
        return page

    def _keep_alive(self) -> None:
        """Send a frame now and then while a request is open."""
        while not self._ended.wait(ALIVE_SECONDS):
            if self._open:
                try:
                    self._send(0, ALIVE, b"")
                except OSError:
                    return

    def _send(self, number: int, kind: int, payload: Bytes) -> None:
        with self._sending:
            self._write(head(number, kind, len(payload)))
            self._write(payload)

    def _write(self, data: Bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def _read(self, length: int) -> bytes:
        """Return so many bytes; fewer at the end, and when nothing came for long: the client may be gone without a word."""
        parts = []
        last = time.monotonic()
        while length:
            if not readable(self._read_fd, 1.0):
                if self._ended.is_set() or time.monotonic() - last > self._idle_seconds:
                    break
                continue
            part = os.read(self._read_fd, length)
            if not part:
                break
            last = time.monotonic()
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
