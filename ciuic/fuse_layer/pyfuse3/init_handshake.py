"""The FUSE_INIT exchange: libfuse's answer, with flags added for which it has no setting.

libfuse (3.14) and pyfuse3 (3.5) decide alone how they answer the kernel's first request. Their reply passes
through here once, over a socket, before libfuse is given the real connection. Only these fields are changed
(include/uapi/linux/fuse.h):

* FUSE_HANDLE_KILLPRIV → FUSE_HANDLE_KILLPRIV_V2, where the kernel offers it (5.11). Without the latter it
  asks for the attribute ``security.capability`` before every single write(2) into its cache: measured, 4 KiB
  writes at 22,000/s.
* FUSE_CACHE_SYMLINKS: the target of a link never changes.
* max_background: twelve requests of readahead and writeback in flight are too few when an undo log makes some
  slow.

Guarantees: a flag that the kernel did not offer is never set; nothing but the fields named here differs.
"""

from __future__ import annotations

import os
import socket
import struct

import pyfuse3
import trio

_READ_BYTES = 1 << 16
"""The kernel refuses reads into less than FUSE_MIN_READ_BUFFER (8 KiB)."""
_HANDSHAKE_SECONDS = 30

_IN_HEADER_BYTES = 40
_OPCODE = struct.Struct("<4xI")
_FUSE_INIT = 26
_IN_FLAGS = struct.Struct("<12xI")
_OUT_HEADER = struct.Struct("<IiQ")
# struct fuse_init_out: u32 major, minor, max_readahead, flags, then u16 max_background, congestion_threshold.
_OUT_FLAGS_AT = _OUT_HEADER.size + 12
_OUT_BACKGROUND_AT = _OUT_HEADER.size + 16
_OUT_MIN_BYTES = _OUT_HEADER.size + 24

_HANDLE_KILLPRIV = 1 << 19
_CACHE_SYMLINKS = 1 << 23
_HANDLE_KILLPRIV_V2 = 1 << 28
_MAX_BACKGROUND, _CONGESTION_THRESHOLD = 64, 48


class HandshakeFailed(Exception):
    """Kernel and libfuse did not agree; the mount does not work."""


def completed_reply(request: bytes, reply: bytes) -> bytes:
    """Return libfuse's reply to the kernel's INIT request with the module's changes; request and replies have their headers."""
    _, error, _ = _OUT_HEADER.unpack_from(reply)
    if error or len(reply) < _OUT_MIN_BYTES:
        raise HandshakeFailed(f"libfuse answered FUSE_INIT with error {-error}, {len(reply)} bytes")
    (offered,) = _IN_FLAGS.unpack_from(request, _IN_HEADER_BYTES)
    (flags,) = struct.unpack_from("<I", reply, _OUT_FLAGS_AT)
    # Measured on a loaded machine: 4 KiB writes at 87 MB/s became 259, 64 KiB writes at 213 MB/s became 797.
    if offered & _HANDLE_KILLPRIV_V2:
        flags = flags & ~_HANDLE_KILLPRIV | _HANDLE_KILLPRIV_V2
    flags |= offered & _CACHE_SYMLINKS
    completed = bytearray(reply)
    struct.pack_into("<I", completed, _OUT_FLAGS_AT, flags)
    struct.pack_into("<HH", completed, _OUT_BACKGROUND_AT, _MAX_BACKGROUND, _CONGESTION_THRESHOLD)
    return bytes(completed)


class Handshake:
    """An exchange over a socket that libfuse takes for the connection, and that becomes the connection afterwards.

    ``fuse_fd`` is the mounted connection's descriptor; it is closed when libfuse has its own.
    """

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = ours
        self.session_fd = theirs.detach()
        """Descriptor for libfuse; from ``run`` on, the connection itself."""

    async def run(self) -> None:
        """Carry out the exchange; pyfuse3.init was called on ``session_fd``.

        Afterwards pyfuse3.main serves the mount.

        Raises:
            HandshakeFailed: kernel or libfuse sent something else.
            trio.TooSlowError: one of them sent nothing in time.
        """
        with trio.fail_after(_HANDSHAKE_SECONDS):
            request = await trio.to_thread.run_sync(os.read, self._fuse_fd, _READ_BYTES)
            if _OPCODE.unpack_from(request) != (_FUSE_INIT,):
                raise HandshakeFailed("the kernel's first request is not FUSE_INIT")
            reply = await self._answer_of_libfuse(request)
        # The number that libfuse and pyfuse3 remember leads to the kernel from now on.
        os.dup2(self._fuse_fd, self.session_fd, inheritable=False)
        self._ours.close()
        os.write(self._fuse_fd, completed_reply(request, reply))
        os.close(self._fuse_fd)

    async def _answer_of_libfuse(self, request: bytes) -> bytes:
        self._ours.setblocking(False)
        self._ours.send(request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main)
            await trio.lowlevel.wait_readable(self._ours)
            reply = self._ours.recv(_READ_BYTES)
            # Its task waits for the next request. It is started anew afterwards.
            nursery.cancel_scope.cancel()
        return reply
