"""Tests of the kernel driver's handlers on arbitrary bytes: an answer or a refusal, nothing else."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.overlay_core import Attr, OverlayCore
from ciuic.fuse_layer.core.passthrough_core import DriverHooks
from ciuic.fuse_layer.fuse_protocol import FuseRequest, MalformedRequest
from ciuic.fuse_layer.kernel import session
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Negotiated
from ciuic.fuse_layer.state.passthrough_state import RecentChanges

FLAGS = [0, p.SETXATTR_EXT, p.WRITEBACK_CACHE, p.PASSTHROUGH | p.SETXATTR_EXT]
OPCODES = sorted(
    {value for name, value in vars(p).items() if name.isupper() and isinstance(value, int) and 0 < value < 64}
)
MANY = settings(max_examples=20 * settings().max_examples)


class StubCore:
    """Refuses everything, or answers everything, after reading all arguments."""

    def __init__(self, *, answers: bool, fd: int) -> None:
        self._answers, self._fd = answers, fd
        self.pending = True
        # The groups of operations, too.
        self.nodes = self.names = self.files = self.attributes = self.directories = self
        self.recent = RecentChanges()

    def connect(self, driver: DriverHooks) -> None:
        """Never call them."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object, **more: object) -> object:
            if not self._answers:
                raise OSError(5, name)
            return self._answer(name)

        return call

    def _answer(self, name: str) -> object:
        st_ = os.fstat(self._fd)
        attr = cast(Any, Attr)(**dict.fromkeys(Attr._fields, 1) | {"st": st_, "node": 7, "nlink": 1})
        answers: dict[str, object] = {
            "create": (attr, 3), "tmpfile": (attr, 3), "descriptor": self._fd, "open": 3, "opendir": 4, "dot": 1,
            "readlink": b"target", "read": b"data", "read_nowait": None, "write": 1, "lseek": 0, "copy_file_range": 0,
            "listxattr": [b"user.a"], "getxattr": b"v", "statfs": os.fstatvfs(self._fd), "readdir": [(b"n", attr, 1)], "list_names": [(b"n", 7, 0o100644, 1)],
            "kill_setgid": None, "remember": None, "forget": None, "release": None, "releasedir": None, "flush": None,
            "statx": None,
        }  # fmt: skip
        return answers.get(name, attr)


@pytest.fixture(scope="module")
def null() -> Iterator[int]:
    fd = os.open("/dev/null", os.O_RDWR)
    yield fd
    os.close(fd)


def request(opcode: int, node: int, extension: int) -> FuseRequest:
    return FuseRequest(opcode, 2, node, 0, 0, 1, extension * 8)


bodies = st.one_of(
    st.binary(max_size=200),
    st.tuples(st.lists(st.integers(0, (1 << 64) - 1), max_size=12), st.binary(max_size=40)).map(
        lambda parts: struct.pack(f"<{len(parts[0])}Q", *parts[0]) + parts[1]
    ),
    st.tuples(st.integers(0, 12), st.binary(max_size=40)).map(
        lambda parts: bytes(8 * parts[0]) + parts[1] + b"\0"
    ),
)


@MANY
@given(
    st.sampled_from(OPCODES),
    bodies,
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 20),
    st.sampled_from(FLAGS),
    st.booleans(),
)
def test_any_bytes_for_every_request(
    null: int, opcode: int, body: bytes, node: int, extension: int, flags: int, answers: bool
) -> None:
    """Handlers answer with bytes, or raise OSError, Malformed or struct.error, which become an errno."""
    driver = KernelDriver(cast(OverlayCore, StubCore(answers=answers, fd=null)), null, Negotiated(45, flags))
    handler = driver._handlers().get(opcode)
    if handler is None or (opcode == p.STATX and answers):
        return
    try:
        reply = handler(request(opcode, node, extension), memoryview(body))
    except (OSError, MalformedRequest, struct.error):
        return
    assert reply is None or isinstance(reply, (bytes, bytearray, memoryview, list))


@MANY
@given(st.sampled_from(OPCODES), bodies, st.booleans())
def test_the_session_makes_an_errno_of_everything(null: int, opcode: int, body: bytes, answers: bool) -> None:
    """The session turns every exception into EINVAL, EIO or the core's own errno."""
    core = StubCore(answers=answers, fd=null)
    driver = KernelDriver(cast(OverlayCore, core), null, Negotiated(45, 0))
    handler = driver._handlers().get(opcode)
    if handler is None:
        return
    # Tracebacks would take most of the time.
    with mock.patch.object(session, "log"):
        number, reply = driver.session._carried_out(handler, request(opcode, 1, 0), memoryview(body))
    assert number == 0 or reply == b""
    assert 0 <= number < 4096


def test_every_reply_has_the_size_that_the_kernel_expects(null: int) -> None:
    """The reply to a request with one structure as answer has the size that the kernel expects."""
    driver = KernelDriver(cast(OverlayCore, StubCore(answers=True, fd=null)), null, Negotiated(45, 0))
    handlers = driver._handlers()
    entry, opened = 128, 16
    wanted = {
        p.LOOKUP: entry, p.GETATTR: 104, p.SETATTR: 104, p.SYMLINK: entry, p.MKNOD: entry, p.MKDIR: entry, p.LINK: entry,
        p.OPEN: opened, p.CREATE: entry + opened, p.TMPFILE: entry + opened, p.STATFS: 80, p.WRITE: 8, p.LSEEK: 8,
        p.OPENDIR: opened, p.COPY_FILE_RANGE: 8, p.COPY_FILE_RANGE_64: 8, p.GETXATTR: 8, p.LISTXATTR: 8, p.UNLINK: 0,
        p.RELEASE: 0, p.FSYNC: 0, p.RENAME: 0,
    }  # fmt: skip
    bodies = {
        p.LOOKUP: b"n\0", p.UNLINK: b"n\0", p.SYMLINK: b"n\0t\0", p.MKNOD: p.MKNOD_IN.pack(stat.S_IFIFO, 0, 0, 0) + b"n\0",
        p.MKDIR: p.MKDIR_IN.pack(0o755, 0) + b"n\0", p.LINK: p.LINK_IN.pack(3) + b"n\0",
        p.RENAME: p.RENAME_IN.pack(1) + b"a\0b\0",
        p.CREATE: p.CREATE_IN.pack(os.O_WRONLY, 0o644, 0, 0) + b"n\0",
        p.TMPFILE: p.CREATE_IN.pack(os.O_RDWR, 0o644, 0, 0) + b"\0",
        p.WRITE: p.WRITE_IN.pack(3, 0, 1, 0, 0, 0, 0) + b"x",
        p.GETXATTR: p.GETXATTR_IN.pack(0, 0) + b"user.a\0",
    }  # fmt: skip
    for opcode, size in wanted.items():
        reply = handlers[opcode](request(opcode, 1, 0), memoryview(bodies.get(opcode, bytes(88))))
        assert len(reply) == size, opcode
