"""Unix sockets that strangers connect to: who calls, by the kernel's word, and what of theirs is safe to touch.

Anybody may connect to such a socket and queue descriptors on it. Closing a descriptor of a stranger can block for ever: close(2) of a
file on the stranger's own FUSE mount waits for its server to answer FLUSH, uninterruptibly; the last close of a TCP socket with
SO_LINGER waits for its data to be sent. The kernel closes descriptors in the process that receives them without room for them
(recv(2)), and in the one that closes the socket on which they are queued. Both were tried on Linux 6.18: recvmsg(2) and exit left the
process in state D, recv(2) and close(2) each waited for SO_LINGER; MSG_PEEK without a control buffer returned at once, with MSG_CTRUNC.

Guarantees: nothing in this module receives or closes a descriptor of a stranger. Free of trio: also for the receiver process.

References: unix(7), socket(7); SO_PEERGROUPS of Linux 4.13, SO_PASSRIGHTS of Linux 6.16 (include/uapi/asm-generic/socket.h).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final, NamedTuple

_SO_PEERGROUPS: Final = 59
_SO_PASSRIGHTS: Final = 83
_CREDENTIALS: Final = struct.Struct("3i")
_CREDENTIALS_ROOM: Final = socket.CMSG_SPACE(_CREDENTIALS.size)
_GROUP_BYTES: Final = 4
_USUAL_GROUPS_BYTES: Final = 1024
"""The largest buffer that Python's getsockopt offers: 256 groups."""
_MAX_GROUPS_BYTES: Final = 65536 * _GROUP_BYTES
"""NGROUPS_MAX of the kernel."""
MAX_BACKLOG: Final = 4096
"""The kernel caps it at net.core.somaxconn, which is 4096 since Linux 5.4. A flood of connections has to fill it first."""
_libc = ctypes.CDLL(None, use_errno=True)


class Caller(NamedTuple):
    """The process at the other end of a connection, as it was when it connected."""

    uid: int
    groups: frozenset[int]
    """Effective and supplementary groups."""


class Queued(enum.Enum):
    """What waits on a connection."""

    NOTHING = enum.auto()
    END = enum.auto()
    """The peer has gone, and all that it sent was received."""
    MESSAGE = enum.auto()
    """Safe to receive: no descriptor is with it."""
    DESCRIPTORS = enum.auto()
    """A message with descriptors: receiving it, or closing the connection, may block for ever."""


def listen(path: Path, *, mode: int, backlog: int = MAX_BACKLOG) -> socket.socket:
    """Return a non-blocking SOCK_SEQPACKET listener at ``path``, on which no descriptors can be sent where the kernel can refuse them.

    A socket of that name is replaced: call it with the runtime directory locked. OSError.
    """
    listener = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    )
    try:
        # Before the name exists: connections inherit it when they are made, not when they are accepted.
        allow_descriptors(listener, allowed=False)
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(mode)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Accept a connection, non-blocking. OSError."""
    connection, _ = listener.accept()
    connection.setblocking(False)
    # Each message then comes with its sender's credentials, which tells an empty message from the end: `queued` looks at that.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return connection


def allow_descriptors(sock: socket.socket, *, allowed: bool) -> bool:
    """Let the peer of ``sock`` send descriptors, or have its sendmsg(2) fail with EPERM; False where the kernel has no such switch."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(allowed))
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def caller_of(connection: socket.socket) -> Caller:
    """Return the peer's credentials from SO_PEERCRED and SO_PEERGROUPS. OSError."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(credentials)
    return Caller(uid, frozenset({gid, *_groups(connection)}))


def queued(connection: socket.socket) -> Queued:
    """Look at the next message without receiving it. For connections of `accept`. OSError when the connection is broken."""
    try:
        # There is room for the credentials that `accept` asked for and for nothing else, so no descriptor is installed: the kernel
        # only counts references up and down, and those in the queue keep the files open.
        data, ancillary, flags, _ = connection.recvmsg(
            1, _CREDENTIALS_ROOM, socket.MSG_PEEK | socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        return Queued.NOTHING
    if flags & socket.MSG_CTRUNC:
        return Queued.DESCRIPTORS
    return Queued.MESSAGE if data or ancillary else Queued.END


def is_safe_to_close(connection: socket.socket) -> bool:
    """Refuse further messages, throw away those that are queued, and return whether none of them has descriptors."""
    try:
        connection.shutdown(
            socket.SHUT_RD
        )  # from now on the peer's send fails, so that the queue only shrinks
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # hung up on already: nothing more can come
            return False
    while True:
        try:
            found = queued(connection)
            if found is not Queued.MESSAGE:
                return found is not Queued.DESCRIPTORS
            connection.recv(1, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            continue  # told once, when the peer closed without reading what we sent; the queue is still there
        except OSError:
            return False


def _groups(connection: socket.socket) -> list[int]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _USUAL_GROUPS_BYTES)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return []
        if error.errno != errno.ERANGE:
            raise
        packed = _all_groups(connection)
    return [number for (number,) in struct.iter_unpack("I", packed)]


def _all_groups(connection: socket.socket) -> bytes:
    buffer = ctypes.create_string_buffer(_MAX_GROUPS_BYTES)
    length = ctypes.c_uint32(_MAX_GROUPS_BYTES)
    found = _libc.getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, buffer, ctypes.byref(length)
    )
    if found != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw[: length.value]
