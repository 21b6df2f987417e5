"""Frames of the worker control channel: u32 little-endian length, then msgpack of a map (architecture.md section 3).

Guarantees: a frame is read whole or not at all. A descriptor sent with a frame is received with that frame and with no other.
The path of a root's socket follows from the root, so that it can be found from the
mount point. The server (fuse_layer/control_server.py) and the client (worker_client.py) define what the maps mean.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import xxhash

from ciuic.structs import decode_msgpack
from ciuic.system.unix_sockets import receive, rights

MAX_REQUEST_BYTES = 64 << 10
MAX_REPLY_BYTES = 256 << 20
"""Limit of a reply: ``writers`` names every file open for writing, and a hundred thousand long paths still fit."""

USE_OF_HOLD_SECONDS: Final = 1.0
"""Time for which a worker keeps holding after its cut, so that the other roots can be cut and all be released within it."""

_LENGTH = struct.Struct("<I")
# A frame carries one descriptor at most. The kernel closes those for which there is no room.
_MAX_FDS = 4


class AbandonedEpochStatus(msgspec.Struct, frozen=True):
    """A sealed epoch that was given up before it was captured."""

    epoch: int
    reason: str = ""
    time_ns: int = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a worker; fields as in architecture.md section 3. Unknown fields are ignored."""

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
    """True if seccomp refuses system calls that a worker does not need (system/syscall_profiles.py)."""
    mounted_ns: int = 0
    abandoned: tuple[AbandonedEpochStatus, ...] = ()
    requests: int = 0
    waited_us: int = 0
    """Time during which at least one request was waiting (latency_gauge.py)."""
    survives: bool = False
    """True if a successor can continue its session."""
    version: str = ""
    """Version of ciuic."""
    set_aside: tuple[bytes, ...] = ()
    """New names, in the root, of files that had the reserved name and were not made by ciuic."""
    plain: bool = False
    """True if it tracks nothing, because the workers before it kept dying."""
    renewed: int = 0
    """Number of times that its state directory was made anew because another program had deleted it."""


class CutReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``cut``: the sealed epoch, its wall-clock time, and how long changing operations were held."""

    epoch: int
    cut_ns: int
    hold_us: int = 0


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Request to give a range of a file the extents of the descriptor that comes with it."""

    device: str
    """Device ("major:minor") of the mount through which the caller has the file open for writing."""
    node: int
    """Inode number of the file on that mount."""
    source_offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    length: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


MAX_NAME_RULES = 64
"""Limit of the names that a worker compares each changed name with."""


class WatchedNames(msgspec.Struct, frozen=True, kw_only=True):
    """Request to count what happens to names."""

    rules: Annotated[
        tuple[
            tuple[Literal["renamed", "appears", "closed"], Annotated[str, msgspec.Meta(max_length=255)]], ...
        ],
        msgspec.Meta(max_length=MAX_NAME_RULES),
    ]
    """(What happens, shell pattern of the name)."""
    dirty: bool = False
    """The reply is to have the dirty bytes."""


class NameCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to it: counts by rule since the last request, the current epoch, and its dirty bytes."""

    counts: tuple[int, ...]
    lost: tuple[int, ...] = ()
    """Files with such names that were removed before any cut had them."""
    epoch: int
    dirty_bytes: int = 0


class FrameError(Exception):
    """The peer sent something that is not a frame, or closed the connection within a frame."""


def send_frame(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one frame; ``fds`` are sent with its first byte. OSError when the peer has closed the connection."""
    body = msgspec.msgpack.encode(dict(message))
    data = memoryview(_LENGTH.pack(len(body)) + body)
    # Descriptors go with the first sendmsg(2), which may send a part of the frame only.
    sent = sock.sendmsg([data], rights(fds)) if fds else 0
    sock.sendall(data[sent:])


def receive_frame(
    sock: socket.socket, limit_bytes: int, on_fd: Callable[[int], None] | None = None
) -> dict[str, Any] | None:
    """Receive the next frame; return None when the peer closed the connection between frames.

    Args:
        sock: connected stream socket.
        limit_bytes: longest frame accepted.
        on_fd: receives each descriptor that came with the frame, close-on-exec; without it they are closed.

    Raises:
        FrameError: the frame is too long, incomplete, or not a map.
    """
    fds: list[int] = []
    try:
        head = _receive_exactly(sock, _LENGTH.size, fds)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        # Checked before anything of that size is allocated.
        if length > limit_bytes:
            raise FrameError(f"frame of {length} bytes, the limit is {limit_bytes}")
        body = _receive_exactly(sock, length, fds) if length else b""
        if body is None:
            raise FrameError("the peer closed the connection within a frame")
        message = _decode(body)
        while on_fd is not None and fds:
            on_fd(fds.pop(0))
        return message
    finally:
        # Descriptors of a frame that was refused, or that the caller did not ask for.
        for fd in fds:
            os.close(fd)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        return decode_msgpack(body, dict[str, Any])
    except msgspec.DecodeError as error:
        raise FrameError(f"not a msgpack map: {error}") from error


def _receive_exactly(sock: socket.socket, size: int, fds: list[int]) -> bytes | None:
    """Receive ``size`` bytes; return None when the peer closed before the first one."""
    parts = bytearray()
    while len(parts) < size:
        # A megabyte at a time: recvmsg(2) of Python allocates the whole buffer before anything has arrived,
        # and a frame may announce 256 MiB that never come.
        data, received, _ = receive(sock, min(size - len(parts), 1 << 20), _MAX_FDS)
        fds += received
        if not data:
            if parts:
                raise FrameError("the peer closed the connection within a frame")
            return None
        parts += data
    return bytes(parts)


def _root_key(root: str | bytes) -> str:
    """Return 16 hexadecimal digits that name a root in file names. Not secret; collisions are refused when roots are added."""
    # A hash, because the path of a root may be longer than a socket's name can be (108 bytes, unix(7)).
    return xxhash.xxh3_64_hexdigest(os.fsencode(root))


def worker_socket(runtime_dir: Path, root: str | bytes) -> Path:
    """Return the path of the control socket of the root's worker (docs/architecture.md, section 3)."""
    return runtime_dir / f"worker-{_root_key(root)}.sock"
