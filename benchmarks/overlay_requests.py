"""Processor time of one request in the worker, without a kernel: the driver reads requests from a socket and answers them there.

    python -m benchmarks.overlay_requests

Of `make bench`, which measures what a program sees, most is the way between two processes; this is what the worker's own code takes of it,
and what a change of that code or of its interpreter changes. The file system is the one of TMPDIR.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Negotiated

_FILES: Final = 3000
_ROUNDS: Final = 5
_BUFFER_BYTES: Final = 1 << 20
_REPLY_BYTES: Final = 1 << 16
_LISTING_BYTES: Final = 32 << 10
"""Room that the kernel gives a reply with names."""
_RELEASE: Final = struct.Struct("=QIIQ")
_GETATTR: Final = struct.Struct("=IIQ")
_CAPABILITY: Final = p.GETXATTR_IN.pack(0, 0) + b"security.capability\0"
_ENTRY_BYTES: Final = 128
"""Size of struct fuse_entry_out, behind which a reply to CREATE has the handle."""
_CHANGES: Final = {
    "SETATTR of a time": p.FATTR_MTIME,
    "SETATTR of the owner": p.FATTR_UID | p.FATTR_GID,
    "SETATTR of the mode": p.FATTR_MODE,
}
"""Attributes that tar sets on each open file, with one request each."""
_CREATE_FLAGS: Final = os.O_WRONLY | os.O_CREAT


class _Caller:
    """A program's side of a connection: sends a request, has the session carry it out and reads the reply."""

    def __init__(self, directory: str) -> None:
        self._backing_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        # Without the thread that takes full files into the archive, which works beside the requests.
        journal = JournalWriter(Path(f"{directory}.journal"), full_bytes=1 << 40)
        negotiated = Negotiated(40, 0)
        journal.begin(*negotiated)
        self._core = OverlayCore(self._backing_fd, session="0" * 32, journal=journal)
        self._served, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._session: Any = KernelDriver(
            self._core, self._served.fileno(), negotiated, journal=journal
        ).session
        self._server = type("Server", (), {"busy": 0, "expects_body": False, "body": None})()
        self._session._owner = self._server
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._unique = 2

    def request(self, opcode: int, node: int, body: bytes) -> bytes:
        self._unique += 2
        head = p.IN_HEADER.pack(
            p.IN_HEADER.size + len(body), opcode, self._unique, node, 0, 0, os.getpid(), 0, 0
        )
        self._socket.send(head + body)
        self._session._one(self._server, self._view)
        # A notification, which has no number of a request, comes before the answer.
        while not p.OUT_HEADER.unpack_from(reply := self._socket.recv(_REPLY_BYTES))[2]:
            pass
        if error := p.OUT_HEADER.unpack_from(reply)[1]:
            raise OSError(-error, os.strerror(-error))
        return reply[p.OUT_HEADER.size :]

    def lacks(self, node: int) -> None:
        """Ask for an attribute that the file does not have, as the kernel does before a write and a chown(2)."""
        with suppress(OSError):
            self.request(p.GETXATTR, node, _CAPABILITY)

    def nothing(self) -> None:
        """Send and receive what a request and a reply take, with nothing done in between."""
        self._socket.send(b"x" * 60)
        os.readv(self._served.fileno(), [self._view])
        self._served.send(b"y" * 144)
        self._socket.recv(_REPLY_BYTES)

    def close(self) -> None:
        self._core.close()
        os.close(self._backing_fd)
        self._served.close()
        self._socket.close()


class _Listing:
    """Listing of a directory, by a process of its own for each object."""

    def __init__(self, caller: _Caller, node: int, count: int) -> None:
        self._caller = caller
        self._node = node
        self._count = count

    def microseconds(self) -> float:
        """Return the processor time of listing the directory, for each name."""
        began = time.process_time()
        (handle,) = struct.unpack_from("=Q", self._caller.request(p.OPENDIR, self._node, bytes(8)))
        offset = 0
        while reply := self._caller.request(
            p.READDIRPLUS, self._node, p.READ_IN.pack(handle, offset, _LISTING_BYTES, 0, 0, 0, 0)
        ):
            at = 0
            while at < len(reply):
                _, offset, length, _ = p.DIRENT.unpack_from(reply, at + _ENTRY_BYTES)
                at += _ENTRY_BYTES + p.DIRENT.size + length + -length % 8
        self._caller.request(p.RELEASEDIR, self._node, _RELEASE.pack(handle, 0, 0, 0))
        return (time.process_time() - began) / self._count * 1e6

    def look_up(self, names: Iterable[bytes]) -> None:
        """Look names up, as a process does that wants attributes."""
        for name in names:
            self._caller.request(p.LOOKUP, self._node, name + b"\0")


def _timed(work: Callable[[Any], Any], over: Iterable[Any]) -> tuple[float, list[Any]]:
    """Return the microseconds of processor time of one call, and what the calls returned."""
    began = time.process_time()
    found = [work(one) for one in over]
    return (time.process_time() - began) / len(found) * 1e6, found


def _round(directory: str) -> dict[str, float]:
    """Return the microseconds of each request."""
    caller = _Caller(directory)
    names = [b"f%d" % number for number in range(_FILES)]
    times: dict[str, float] = {}
    try:
        reply = caller.request(p.MKDIR, ROOT_ID, p.MKDIR_IN.pack(0o755, 0o22) + b"d\0")
        directory_id = struct.unpack_from("=Q", reply)[0]
        times["nothing (the way of a request)"], _ = _timed(lambda _: caller.nothing(), names)
        times["LOOKUP of a free name"], _ = _timed(
            lambda name: caller.request(p.LOOKUP, directory_id, name + b"\0"), names
        )
        times["CREATE"], made = _timed(
            lambda name: caller.request(
                p.CREATE, directory_id, p.CREATE_IN.pack(_CREATE_FLAGS, 0o644, 0o22, 0) + name + b"\0"
            ),
            names,
        )
        opened = [
            (struct.unpack_from("=Q", one)[0], struct.unpack_from("=Q", one, _ENTRY_BYTES)[0]) for one in made
        ]
        for change, valid in _CHANGES.items():
            body = p.SETATTR_IN.pack(valid, 0, 0, 0, 0, 0, 10**9, 0, 0, 5, 0, 0o640, 0, 0, 0, 0)
            times[change], _ = _timed(lambda one: caller.request(p.SETATTR, one[0], body), opened)  # noqa: B023
        times["GETXATTR"], _ = _timed(lambda one: caller.lacks(one[0]), opened)
        times["RELEASE"], _ = _timed(
            lambda one: caller.request(p.RELEASE, one[0], _RELEASE.pack(one[1], 0, 0, 0)), opened
        )
        body = p.SETATTR_IN.pack(p.FATTR_ATIME | p.FATTR_MTIME, *(0,) * 8, 5, 0, 0, 0, 0, 0, 0)
        times["SETATTR of times, closed"], _ = _timed(
            lambda one: caller.request(p.SETATTR, one[0], body), opened
        )
        times["LOOKUP"], _ = _timed(lambda name: caller.request(p.LOOKUP, directory_id, name + b"\0"), names)
        times["GETATTR"], _ = _timed(
            lambda one: caller.request(p.GETATTR, one[0], _GETATTR.pack(0, 0, 0)), opened
        )
        times["GETATTR of the directory"], _ = _timed(
            lambda _: caller.request(p.GETATTR, directory_id, _GETATTR.pack(0, 0, 0)), names
        )
        # Until a further change of the directory would show in its times (core/directories.py).
        names_of = _Listing(caller, directory_id, len(names))
        times["READDIRPLUS of names, each"] = names_of.microseconds()
        names_of.look_up(names[:8])
        times["READDIRPLUS with attributes, each"] = names_of.microseconds()
        times["UNLINK"], _ = _timed(lambda name: caller.request(p.UNLINK, directory_id, name + b"\0"), names)
    finally:
        caller.close()
    return times


def main() -> int:
    """Print the least of some rounds: the rest of the machine only adds to it."""
    gc.disable()
    with tempfile.TemporaryDirectory() as top:
        rounds = [_round(tempfile.mkdtemp(dir=top)) for _ in range(_ROUNDS)]
    for name in rounds[0]:
        print(f"{name:34} {min(one[name] for one in rounds):7.1f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
