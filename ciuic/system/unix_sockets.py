"""Unix sockets: bind, connect by any path, know who is at the other end, and pass descriptors.

Guarantees: a socket's name never admits others than its user before its mode says so; received descriptors are close-on-exec.

References: unix(7), socket(7), cmsg(3).
"""

from __future__ import annotations

# `socket` makes enumerations of all numbers and imports selectors (2 ms): it is imported where a socket of its class is made.
import _socket
import array
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import socket

# Size of sun_path, unix(7); the last byte is the terminating null.
_SUN_PATH_BYTES: Final = 108
_CREDENTIALS: Final = struct.Struct("iII")
_PROBE_SECONDS: Final = 2.0


class Credentials(NamedTuple):
    """The process at the other end when it connected, or called listen(2)."""

    pid: int
    uid: int
    gid: int


class Received(NamedTuple):
    """Result of recvmsg(2)."""

    data: bytes
    fds: list[int]
    flags: int


@contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Provide an address for bind and connect that leads to ``path``, even if it exceeds the 107 bytes of sun_path."""
    if len(os.fsencode(path)) < _SUN_PATH_BYTES:
        yield path
        return
    # A short path through a descriptor of the directory leads to the same socket.
    directory = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def bind(path: str, kind: socket.SocketKind, *, backlog: int | None = None) -> socket.socket:
    """Return a socket with the name ``path``, 0600, in place of one that a dead process may have left there. OSError.

    A path that exceeds sun_path is refused: the socket would not know its own name (getsockname(2)). Nobody can connect before
    listen(2), so that the caller may give it another mode until then. With a ``backlog`` it listens on return.
    """
    import socket

    bound = socket.socket(socket.AF_UNIX, kind)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        # Before bind(2), which gives the name this mode from its first moment.
        os.fchmod(bound.fileno(), 0o600)
        bound.bind(path)
        if backlog is not None:
            bound.listen(backlog)
    except BaseException:
        bound.close()
        raise
    return bound


def connect(sock: _socket.socket, path: str, timeout_seconds: float) -> None:
    """Connect, waiting up to ``timeout_seconds`` for a listener whose queue is full; the timeout stays on the socket.

    Raises:
        TimeoutError: the queue stayed full.
        OSError: no process listens, or the socket may not be opened.
    """
    # Python makes a socket with a timeout non-blocking, and the kernel refuses a non-blocking connect with EAGAIN at once when the
    # queue is full. So the socket stays blocking while it connects, with a send timeout (socket(7), SO_SNDTIMEO).
    # 0 would mean no timeout.
    whole = max(1, int(timeout_seconds))
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDTIMEO, struct.pack("@ll", whole, 0))
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except BlockingIOError as error:
        raise TimeoutError(error.errno, "the queue of the listening socket is full") from error
    sock.settimeout(timeout_seconds)


def listener_of(path: str) -> Credentials | None:
    """Return the process that listens at ``path``; None where none does.

    Raises:
        TimeoutError: its queue is full.
        OSError: the socket may not be opened.
    """
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            # Answered by the kernel alone: a connection that is not accepted yet has the credentials of the
            # process that called listen(2) (unix(7)), so that a process that hangs is found too.
            connect(probe, path, _PROBE_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        return credentials(probe)


def credentials(connection: _socket.socket) -> Credentials:
    """Return the process at the other end (SO_PEERCRED). OSError."""
    packed = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(packed))


# Not socket.send_fds and socket.recv_fds, which ignore their flags (Python 3.10 to 3.13).
def rights(fds: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    """Return the control message of sendmsg(2) that passes these descriptors; none for none."""
    return [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def room_for(count: int) -> int:
    """Return the size of the buffer of recvmsg(2) that takes so many descriptors; the kernel closes further ones."""
    return _socket.CMSG_LEN(count * array.array("i").itemsize)


def descriptors_in(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that recvmsg(2) received, which are the caller's."""
    found = array.array("i")
    for level, kind, packed in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            # A control message that was cut off may end within a number.
            found.frombytes(packed[: len(packed) - len(packed) % found.itemsize])
    return list(found)


def receive(connection: socket.socket, size: int, max_fds: int, flags: int = 0) -> Received:
    """Receive up to ``size`` bytes, with at most ``max_fds`` descriptors, which are the caller's. OSError."""
    # Close-on-exec: a process that is forked and runs another program at this moment must not inherit a descriptor.
    data, ancillary, found, _ = connection.recvmsg(size, room_for(max_fds), flags | _socket.MSG_CMSG_CLOEXEC)
    return Received(data, descriptors_in(ancillary), found)
