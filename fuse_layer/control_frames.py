"""Frames of the worker control channel: u32 little-endian length, then msgpack of a map (architecture.md section 3).

Guarantees: a frame is read whole or not at all; a descriptor sent with a frame is received with that frame and with no
other; paths of any length can be bound and connected. What the maps mean is left to the server and the client.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec

MAX_REQUEST_BYTES = 64 << 10
MAX_REPLY_BYTES = 256 << 20
"""``writers`` names every file open for writing: a hundred thousand long paths still fit."""

USE_OF_HOLD_SECONDS: Final = 1.0
"""Time for which a worker goes on holding after it made a cut: the other roots are cut and all are released within it."""

_LENGTH = struct.Struct("<I")
_MAX_FDS = 4
_SUN_PATH_BYTES = 108


class Abandoned(msgspec.Struct, frozen=True):
    """A sealed epoch that was given up before it was captured."""

    epoch: int
    reason: str = ""
    time_ns: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself; fields as in architecture.md section 3. Unknown fields are ignored."""

    session: str = ""
    epoch: int = 0
    pending: tuple[int, ...] = ()
    since: int = 0
    dirty_bytes: int = 0
    dirty_inodes: int = 0
    undo_bytes: int = 0
    open_files: int = 0
    driver: str = ""
    driver_why: str = ""
    passthrough: bool = False
    filtered: bool = False
    """Whether system calls that a worker has no use for are refused (seccomp_profiles.py)."""
    mounted_ns: int = 0
    abandoned: tuple[Abandoned, ...] = ()
    requests: int = 0
    waited_us: int = 0
    """Time in which at least one request was waiting (waits.py)."""
    survives: bool = False
    """Whether a successor can go on with its session."""
    version: str = ""
    """Of ciuic."""
    set_aside: tuple[bytes, ...] = ()
    """New names, in the root, of what bore the reserved name and was not made by ciuic."""


class CutReply(msgspec.Struct, frozen=True, kw_only=True):
    """The epoch a cut sealed, its wall-clock time, and how long changing operations were held."""

    epoch: int
    cut_ns: int
    hold_us: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A request to give a range of a file the extents of the descriptor that comes with it."""

    device: str
    """major:minor of the mount through which the asker has the file open for writing."""
    node: int
    """The file's inode number there."""
    source_offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    length: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class FrameError(Exception):
    """The peer sent something that is not a frame, or went away in the middle of one."""


def send_frame(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one frame; ``fds`` travel with its first byte. OSError when the peer is gone."""
    body = msgspec.msgpack.encode(dict(message))
    data = memoryview(_LENGTH.pack(len(body)) + body)
    sent = 0
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
    sock.sendall(data[sent:])


def receive_frame(
    sock: socket.socket, limit_bytes: int, on_fd: Callable[[int], None] | None = None
) -> dict[str, Any] | None:
    """The next frame, or None when the peer closed between frames.

    Descriptors that came with it are given to ``on_fd``, close-on-exec; without ``on_fd`` they are closed.
    FrameError for a frame that is too long, incomplete, or not a map.
    """
    fds: list[int] = []
    try:
        head = _receive_exactly(sock, _LENGTH.size, fds)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > limit_bytes:
            raise FrameError(f"frame of {length} bytes, the limit is {limit_bytes}")
        body = _receive_exactly(sock, length, fds) if length else b""
        if body is None:
            raise FrameError("the peer closed in the middle of a frame")
        message = _decode(body)
        while on_fd is not None and fds:
            on_fd(fds.pop(0))
        return message
    finally:
        for fd in fds:
            os.close(fd)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.msgpack.decode(body, type=dict[str, Any])
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # the last two come through it unchanged
        raise FrameError(f"not a msgpack map: {error}") from error


def _receive_exactly(sock: socket.socket, size: int, fds: list[int]) -> bytes | None:
    """``size`` bytes; None when the peer closed before the first one."""
    parts = bytearray()
    while len(parts) < size:
        data = _receive_some(sock, min(size - len(parts), 1 << 20), fds)
        if not data:
            if parts:
                raise FrameError("the peer closed in the middle of a frame")
            return None
        parts += data
    return bytes(parts)


def _receive_some(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    room = socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize)
    # MSG_CMSG_CLOEXEC: a capture process forked at this moment must not inherit the descriptor.
    data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
            fds.extend(received)
    return data


@contextmanager
def socket_address(path: str) -> Iterator[str]:
    """An address for bind and connect that stands for ``path``, also where it exceeds the 107 bytes of sun_path."""
    if len(os.fsencode(path)) < _SUN_PATH_BYTES:
        yield path
        return
    directory = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def connect(sock: socket.socket, path: str, timeout_seconds: float) -> None:
    """Connects, waiting so long for a listener whose queue is full; the timeout stays on the socket. TimeoutError, OSError.

    A socket with a timeout is a non-blocking one to the kernel, which then refuses with EAGAIN at once.
    """
    whole = max(1, int(timeout_seconds))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, 0))
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except BlockingIOError as error:
        raise TimeoutError(error.errno, "too many others wait to be answered") from error
    sock.settimeout(timeout_seconds)
