"""Frames and messages by which objects are served over a pipe, as over ``ssh HOST ciuic remote serve --stdio DIR``.

The server begins with `MAGIC`; what a login shell prints before it is skipped. Then both sides send frames: 12 bytes
of head (number of the request, kind, length), and at most `MAX_FRAME_BYTES`. A request is a frame MESSAGE with a
`Request` in msgpack, followed by frames BODY with as many bytes as it announces; the answer is a `Reply` of the same
form and number. Frames of different numbers interleave, but the client finishes one body before it begins the next one,
so that the server can bound what it holds. The server reads no further request while too many have no answer or replies are not read: a
client takes replies while it sends. While a request is open the server sends a frame ALIVE every `ALIVE_SECONDS`, so
that a slow disk is not taken for a dead connection.

The first request is ``open`` with the version that the client speaks; the server refuses one that it does not.

References:
    docs/remote-format.md, section Objects over a pipe
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.model import (
    NonsenseReply,
    NoSuchObject,
    RemoteFull,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
)
from ciuic.structs import decode_msgpack
from ciuic.system.poll import readable

VERSION: Final = 1
MAGIC: Final = b"\0ciuic-objects\n"
MAX_NOISE_BYTES: Final = 64 << 10
"""Most that a login shell may print before `MAGIC`."""
HEAD: Final = struct.Struct(">IB3xI")
"""Number of the request, kind of the frame, bytes that follow."""
MESSAGE: Final = 1
BODY: Final = 2
ALIVE: Final = 3
MAX_FRAME_BYTES: Final = 1 << 20
"""A listing of a page, with names of the greatest length, fits."""
PIECE_BYTES: Final = 256 << 10
"""Bytes of a body that are sent in one frame: 1 s at 2 Mbit/s, for which others wait."""
PAGE: Final = 1000
"""Most names in a listing, of a deletion, and ranges of a read."""
ALIVE_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 900.0
"""Time without a request after which a server ends: its client may be gone without a word."""

Operation = Literal["open", "put", "create", "get", "ranges", "tail", "info", "list", "delete"]


class Frame(NamedTuple):
    """Piece of a stream: a message, a part of a body, or a sign of life of a request."""

    number: int
    kind: int
    payload: bytes


class Request(msgspec.Struct, omit_defaults=True):
    """Call of an operation of `Objects`."""

    operation: Operation
    name: str = ""
    """Object; for ``list`` the prefix."""
    after: str = ""
    # Checked before anything is made of them: a frame has room for 500,000.
    ranges: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=PAGE)] = []
    length: int = 0
    """Bytes that ``tail`` asks for; with ``open`` the version of the protocol."""
    names: Annotated[list[str], msgspec.Meta(max_length=PAGE)] = []
    make: bool = False
    """Make the directory where it is missing; with ``open``."""
    body_bytes: int = 0


class Reply(msgspec.Struct, omit_defaults=True):
    """Result of a request."""

    error: str = ""
    """Name of a class of `ERRORS`; empty after success."""
    message: str = ""
    hint: str = ""
    created: bool = False
    size_bytes: int = 0
    modified_ns: int = 0
    found: bool = False
    """True if there is such an object; after ``info``."""
    infos: list[tuple[str, int, int]] = []
    lengths: list[int] = []
    """Bytes of each range, which lie in the body one after the other; after ``ranges``."""
    body_bytes: int = 0
    program: str = ""
    """Version of ciuic on the server; this and what follows after ``open``."""
    directory: str = ""
    append_only: bool = False


ERRORS: Final[dict[str, Callable[[Reply, str], CiuicError]]] = {
    "NoSuchObject": lambda reply, name: NoSuchObject(name),
    "TooLargeObject": lambda reply, name: TooLargeObject(name, reply.size_bytes),
    "DamagedRemote": lambda reply, name: DamagedRemote(name, reply.message),
    "RemoteRefused": lambda reply, name: RemoteRefused(reply.message, hint=reply.hint),
    "RemoteFull": lambda reply, name: RemoteFull(reply.message, hint=reply.hint),
    "RemoteUnreachable": lambda reply, name: RemoteUnreachable(reply.message, hint=reply.hint),
}
"""Errors that a server names, and how the client raises them again."""


def decode_request(payload: bytes) -> Request:
    """Return the request of a frame.

    Raises:
        Damaged: it is none.
    """
    try:
        return decode_msgpack(payload, Request)
    except msgspec.DecodeError as error:
        raise Damaged(f"not a request for objects: {error}") from None


def decode_reply(payload: bytes) -> Reply:
    """Return the reply of a frame.

    Raises:
        NonsenseReply: it is none.
    """
    try:
        return decode_msgpack(payload, Reply)
    except msgspec.DecodeError as error:
        raise NonsenseReply(f"what was answered is no reply of ciuic remote serve: {error}") from None


def error_reply(error: CiuicError) -> Reply:
    """Return the reply that has the client raise this error again."""
    kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in ERRORS), "RemoteUnreachable")
    message = error.reason if isinstance(error, DamagedRemote) else error.message
    size_bytes = error.size_bytes if isinstance(error, TooLargeObject) else 0
    return Reply(error=kind, message=message, hint=error.hint, size_bytes=size_bytes)


def raised(reply: Reply, name: str) -> CiuicError:
    """Return the error of a reply, which is about the object or prefix ``name``."""
    made = ERRORS.get(reply.error)
    if made is None:
        # A newer server's.
        return RemoteUnreachable(reply.message or f"the server failed with {reply.error[:60]}")
    return made(reply, name)


def read_frame(read: Callable[[int], bytes]) -> Frame | None:
    """Return the next frame; None at the end of the stream.

    Args:
        read: Returns exactly so many bytes, fewer only at the end.

    Raises:
        Damaged: this is none.
    """
    start = read(HEAD.size)
    if not start:
        return None
    if len(start) < HEAD.size:
        raise Damaged("the stream ended within a frame")
    number, kind, length = HEAD.unpack(start)
    if kind not in (MESSAGE, BODY, ALIVE) or length > MAX_FRAME_BYTES:
        raise Damaged(f"not a frame: kind {kind}, {length} bytes")
    payload = read(length) if length else b""
    if len(payload) < length:
        raise Damaged("the stream ended within a frame")
    return Frame(number, kind, payload)


def read_exactly(fd: int, length: int, goes_on: Callable[[float], bool]) -> bytes:
    """Return so many bytes; fewer at the end.

    Args:
        fd: pipe.
        length: number of bytes.
        goes_on: asked each second in which nothing comes, with the seconds since something did; False ends the wait.
    """
    parts = []
    last = time.monotonic()
    while length:
        if not readable(fd, 1.0):
            if not goes_on(time.monotonic() - last):
                break
            continue
        part = os.read(fd, length)
        if not part:
            break
        last = time.monotonic()
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_frame(fd: int, number: int, kind: int, payload: bytes | bytearray | memoryview) -> None:
    """Write a frame whole. OSError."""
    rest = [memoryview(HEAD.pack(number, kind, len(payload))), memoryview(payload)]
    while rest:
        sent = os.writev(fd, rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][sent:]


def pieces(parts: Sequence[bytes | bytearray | memoryview]) -> list[memoryview]:
    """Return the parts in pieces of at most `PIECE_BYTES`, one for each frame."""
    found = []
    for part in parts:
        view = memoryview(part).cast("B")
        found += [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
    return found
