"""Unix sockets that any user may connect to: where they are, the caller's credentials from the kernel, and what is safe to receive.

Every user may connect to such a socket and queue descriptors on it. Closing a descriptor of another user can block for ever:
close(2) of a file on that user's own FUSE mount waits for its server to answer FLUSH, uninterruptibly; the last close of a TCP
socket with SO_LINGER waits for its data to be sent. The kernel closes descriptors in a process that receives them without room for
them (recv(2)), and in one that closes the socket on which they are queued. Both were tried on Linux 6.18: recvmsg(2) and exit left
the process in state D, recv(2) and close(2) each waited for SO_LINGER; MSG_PEEK without a control buffer returned at once, with
MSG_CTRUNC.

Guarantees: nothing in this module receives or closes a descriptor of another user. The module does not import trio, because the
receiver process uses it, too.

References: unix(7), socket(7); SO_PEERGROUPS of Linux 4.13, SO_PASSRIGHTS of Linux 6.16 (include/uapi/asm-generic/socket.h).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, error_of
from ciuic.system.ownership import find_flaw
from ciuic.system.unix_sockets import bind, credentials

_SO_PEERGROUPS: Final = 59
_SO_PASSRIGHTS: Final = 83
_CREDENTIALS_ROOM: Final = socket.CMSG_SPACE(struct.calcsize("3i"))
_GROUP_BYTES: Final = 4
# The largest buffer that Python's getsockopt offers: 256 groups.
_USUAL_GROUPS_BYTES: Final = 1024
# NGROUPS_MAX of the kernel.
_MAX_GROUPS_BYTES: Final = 65536 * _GROUP_BYTES
MAX_BACKLOG: Final = 4096
"""Length of the listen queue; the kernel caps it at net.core.somaxconn, which is 4096 since Linux 5.4.

It is as long as possible because a flood of connections has to fill it before others are refused.
"""
_libc = ctypes.CDLL(None, use_errno=True)


class Caller(NamedTuple):
    """The process at the other end of a connection, as it was when it connected."""

    uid: int
    groups: frozenset[int]
    """Effective and supplementary groups."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Answer of the daemon to a question that it refuses."""

    reason: str
    hint: str = ""
    code: int = 1
    """Exit code of cli.md."""

    @classmethod
    def of(cls, error: CiuicError) -> Refused:
        """Return the answer that has the caller raise this error again."""
        return cls(error.message, error.hint, error.exit_code)

    def raised(self) -> CiuicError:
        """Return the error as the class that has its exit code."""
        return error_of(self.code, self.reason, hint=self.hint)


class Queued(enum.Enum):
    """Kind of the next message on a connection."""

    NOTHING = enum.auto()
    """Empty queue."""
    END = enum.auto()
    """The peer has closed, and everything that it sent was received."""
    MESSAGE = enum.auto()
    """A message without descriptors, which is safe to receive."""
    DESCRIPTORS = enum.auto()
    """A message with descriptors: receiving it, or closing the connection, may block for ever."""


def listen(path: Path, *, mode: int, backlog: int = MAX_BACKLOG) -> socket.socket:
    """Return a non-blocking SOCK_SEQPACKET listener at ``path``. OSError.

    Where the kernel can refuse descriptors, none can be sent on it. A socket of that name is replaced, so the caller must hold the
    lock of the runtime directory.
    """
    listener = bind(os.fspath(path), socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        # Before listen(2): a connection inherits the option when it is made, not when it is accepted.
        allow_descriptors(listener, allowed=False)
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
    # Each message then comes with its sender's credentials, by which `queued` tells an empty message from the end.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return connection


def allow_descriptors(sock: socket.socket, *, allowed: bool) -> bool:
    """Let the peer of ``sock`` send descriptors, or have its sendmsg(2) fail with EPERM.

    Returns:
        False where the kernel has no such option (before Linux 6.16).
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(allowed))
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return False
    return True


def caller_of(connection: socket.socket) -> Caller:
    """Return the peer's credentials from SO_PEERCRED and SO_PEERGROUPS. OSError."""
    _, uid, gid = credentials(connection)
    return Caller(uid, frozenset({gid, *_groups(connection)}))


def queued(connection: socket.socket) -> Queued:
    """Look at the next message without receiving it. For connections of `accept`. OSError when the connection is broken."""
    try:
        # The buffer has room for the credentials that `accept` asked for and for nothing else, so no descriptor is installed. The
        # kernel takes and drops a reference, and the references in the queue keep the files open.
        data, ancillary, flags, _ = connection.recvmsg(
            1, _CREDENTIALS_ROOM, socket.MSG_PEEK | socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        return Queued.NOTHING
    if flags & socket.MSG_CTRUNC:
        return Queued.DESCRIPTORS
    return Queued.MESSAGE if data or ancillary else Queued.END


def is_safe_to_close(connection: socket.socket) -> bool:
    """Refuse further messages, discard those that are queued, and return whether none of them has descriptors."""
    try:
        # From now on the peer's send fails, so that the queue only shrinks.
        connection.shutdown(socket.SHUT_RD)
    except OSError as error:
        # ENOTCONN: the peer has disconnected already, and nothing more can arrive.
        if error.errno != errno.ENOTCONN:
            return False
    while True:
        try:
            found = queued(connection)
            if found is not Queued.MESSAGE:
                return found is not Queued.DESCRIPTORS
            connection.recv(1, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            # Raised once, when the peer closed without reading what we sent; the queue is still there.
            continue
        except OSError:
            return False


def _groups(connection: socket.socket) -> list[int]:
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _USUAL_GROUPS_BYTES)
    except OSError as error:
        # Linux before 4.13: the group of SO_PEERCRED is all that the kernel tells.
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


_DEFAULT: Final = "/run/ciuic"
_CONFIG: Final = "/etc/ciuic/ciuic.toml"


def runtime_dir(environment: Mapping[str, str]) -> str:
    """Return the runtime directory of the daemon whose configuration is in force; the default if none can be read."""
    # Imported here: processes that import this module need not call the function.
    import tomli

    path = environment.get("CIUIC_CONFIG") or _CONFIG
    try:
        # A file that another user may write: the daemon does not read it either.
        if os.geteuid() == 0 and find_flaw(path) is not None:
            return _DEFAULT
        with open(path, "rb") as file:
            document: Any = tomli.load(file)
        found = document["daemon"]["runtime_dir"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        # KeyError: the flat format has no such key.
        return _DEFAULT
    return found if isinstance(found, str) else _DEFAULT
