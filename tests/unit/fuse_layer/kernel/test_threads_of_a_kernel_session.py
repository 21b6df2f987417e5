"""Tests of the session's threads over a socket pair in place of /dev/fuse: turns, answers, ends."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.until import until

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.fuse_protocol import FuseRequest, MalformedRequest
from ciuic.fuse_layer.kernel import session as kernel_session
from ciuic.fuse_layer.kernel.session import KernelSession, Reply, UnsupportedProtocol, negotiate
from ciuic.fuse_layer.system.latency_gauge import LatencyGauge

_PATIENCE_SECONDS = 30
ANSWER, WAIT = 1001, 1002


class Kernel:
    """The kernel's end: sends requests and takes answers; closing it ends the connection like an unmount."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sock, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(_PATIENCE_SECONDS)
        self.fd = self._server_end.fileno()
        real = os.readv

        def readv(fd: int, buffers: list[memoryview]) -> int:
            length = real(fd, buffers)
            if fd == self.fd and not length:
                raise OSError(errno.ENODEV, "unmounted")
            return length

        patch.setattr(os, "readv", readv)
        self.refused = 0
        """Number of next answers that are refused with EINVAL."""
        for name in ("write", "writev"):
            patch.setattr(os, name, self._refusing(getattr(os, name)))

    def _refusing(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def written(fd: int, answer: Any) -> int:
            if fd == self.fd and self.refused:
                self.refused -= 1
                raise OSError(errno.EINVAL, "refused")
            return write(fd, answer)

        return written

    def send(self, opcode: int, unique: int, body: bytes = b"") -> None:
        self.sock.send(
            p.IN_HEADER.pack(p.IN_HEADER.size + len(body), opcode, unique, 1, 0, 0, 1, 0, 0) + body
        )

    def answer(self) -> tuple[int, int, bytes]:
        """Return unique, errno and body of an answer."""
        data = self.sock.recv(1 << 20)
        length, error, unique = p.OUT_HEADER.unpack_from(data)
        assert length == len(data)
        return unique, -error, data[p.OUT_HEADER.size :]

    def unmount(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()
        self._server_end.close()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    made = Kernel(monkeypatch)
    yield made
    made.close()


@pytest.fixture
def serve(kernel: Kernel) -> Iterator[Callable[..., KernelSession]]:
    sessions = []

    def begin(
        handlers: Mapping[int, Callable[[FuseRequest, memoryview], Reply]],
        unread: Mapping[int, Callable[[FuseRequest, Reply], None]] | None = None,
    ) -> KernelSession:
        session = KernelSession(kernel.fd, handlers, refused={}, unread=unread or {})
        sessions.append(session)
        session.begin()
        return session

    yield begin
    kernel.unmount()
    for session in sessions:
        session.wait()
    until("the end of the session's threads", lambda: not _threads(), _PATIENCE_SECONDS)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fuse")]


def echo(request: FuseRequest, data: memoryview) -> Reply:
    return bytes(data)


def test_every_request_is_answered_once_and_with_its_own(
    kernel: Kernel, serve: Callable[..., KernelSession]
) -> None:
    """A thousand requests are answered once each with their own body."""
    session = serve({ANSWER: echo})
    for unique in range(2, 1002):
        kernel.send(ANSWER, unique, b"%d" % unique)
        assert kernel.answer() == (unique, 0, b"%d" % unique)
    assert session.requests == 1000


def test_failures_become_errnos(kernel: Kernel, serve: Callable[..., KernelSession]) -> None:
    """An OSError becomes its errno, malformed input EINVAL, others EIO and unknown requests ENOSYS."""

    def failing(error: Exception) -> Callable[[FuseRequest, memoryview], Reply]:
        def handler(request: FuseRequest, data: memoryview) -> Reply:
            raise error

        return handler

    cases: dict[int, tuple[Exception, int]] = {
        1: (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        2: (OSError("without a number"), errno.EIO),
        3: (MalformedRequest("no"), errno.EINVAL),
        4: (struct.error("no"), errno.EINVAL),
        5: (ValueError("no"), errno.EIO),
    }
    serve({opcode: failing(error) for opcode, (error, _) in cases.items()} | {ANSWER: echo})
    for opcode, (_, number) in cases.items():
        kernel.send(opcode, opcode * 2)
        assert kernel.answer() == (opcode * 2, number, b"")
    kernel.send(999, 100)
    assert kernel.answer() == (100, errno.ENOSYS, b"")
    kernel.send(ANSWER, 102, b"well")
    assert kernel.answer() == (102, 0, b"well")


@pytest.mark.parametrize("says_so", [True, False])
def test_waiting_handler_delays_no_other_request(
    kernel: Kernel, serve: Callable[..., KernelSession], says_so: bool
) -> None:
    """A handler that waits gives up its turn, or the watch takes it, and all requests are answered."""
    gate = threading.Event()

    def wait(request: FuseRequest, data: memoryview) -> Reply:
        if says_so:
            session.hand_on()
        assert gate.wait(_PATIENCE_SECONDS)
        return b"waited"

    session = serve({ANSWER: echo, WAIT: wait})
    for unique in range(2, 22, 2):
        kernel.send(WAIT, unique)
    for unique in range(100, 140, 2):
        kernel.send(ANSWER, unique, b"quick")
        assert kernel.answer() == (unique, 0, b"quick")
    gate.set()
    answers = sorted(kernel.answer() for _ in range(10))
    assert answers == [(unique, 0, b"waited") for unique in range(2, 22, 2)]
    until(
        "the end of threads that are too many",
        lambda: len(session._servers) <= kernel_session._SPARE_THREADS + 2,
        _PATIENCE_SECONDS,
    )


@settings(max_examples=10)
@given(st.lists(st.sampled_from(["answer", "wait", "hand on", "fail", "none"]), max_size=60))
def test_any_mixture_is_answered_once_each(kinds: list[str]) -> None:
    """Any mixture of quick, slow, failing and unanswered requests is answered once each."""
    opcodes = {"answer": ANSWER, "wait": WAIT, "hand on": 1003, "fail": 1004, "none": p.FORGET}
    with pytest.MonkeyPatch.context() as patch:
        kernel = Kernel(patch)
        pause = threading.Event()

        def wait(request: FuseRequest, data: memoryview) -> Reply:
            pause.wait(0.005)
            return b""

        def hand_on(request: FuseRequest, data: memoryview) -> Reply:
            session.hand_on()
            return wait(request, data)

        def fail(request: FuseRequest, data: memoryview) -> Reply:
            raise OSError(errno.EACCES, "no")

        session = KernelSession(
            kernel.fd, {ANSWER: echo, WAIT: wait, 1003: hand_on, 1004: fail, p.FORGET: lambda request, data: None}, refused={}, unread={}
        )  # fmt: skip
        session.begin()
        for number, kind in enumerate(kinds, 1):
            kernel.send(opcodes[kind], 2 * number)
        expected = {
            2 * number: errno.EACCES if kind == "fail" else 0
            for number, kind in enumerate(kinds, 1)
            if kind != "none"
        }
        found = {}
        for _ in expected:
            unique, number, _ = kernel.answer()
            assert unique not in found
            found[unique] = number
        assert found == expected
        kernel.unmount()
        session.wait()
        until("the end of the session's threads", lambda: not _threads(), _PATIENCE_SECONDS)
        kernel.close()


def test_the_time_that_requests_wait_is_counted_and_published(
    kernel: Kernel, serve: Callable[..., KernelSession], tmp_path: Path
) -> None:
    """The time requests wait for a disk is published, and counted once however many wait.

    Requests that are answered at once count none.
    """
    end = threading.Event()

    def waiting(request: FuseRequest, data: memoryview) -> Reply:
        end.wait(_PATIENCE_SECONDS)
        return b""

    session = serve({ANSWER: echo, WAIT: waiting})
    published = tmp_path / "waits"
    session.latency.publish(str(published))
    for unique in range(2, 102):
        kernel.send(ANSWER, unique)
        kernel.answer()
    began = time.monotonic()
    for unique in (200, 201, 202):
        kernel.send(WAIT, unique)
    until("half a second of waiting", lambda: session.latency.microseconds > 500_000, _PATIENCE_SECONDS)
    assert session.latency.microseconds <= (time.monotonic() - began) * 1e6
    end.set()
    for _ in range(3):
        kernel.answer()
    until("the published figure", lambda: _published(published) == session.latency.microseconds, 5)
    assert _published(published) >= 500_000
    session.latency.unpublish()
    assert not published.exists()


def _published(path: Path) -> int:
    return int.from_bytes(path.read_bytes(), "little")


def test_waiting_time_is_counted_without_a_runtime_directory(tmp_path: Path) -> None:
    """The waiting time is counted although a full or missing runtime directory cannot take it."""
    waits = LatencyGauge()
    waits.publish(str(tmp_path / "nowhere" / "waits"))
    assert not waits.saw(frozenset({1}), 0.003)
    assert waits.saw(frozenset({1, 2}), 0.003)
    assert not waits.saw(frozenset({3}), 0.003)
    assert waits.microseconds == 3000
    waits.lasted(10.0, 10.5)
    waits.lasted(10.25, 11.0)
    assert waits.microseconds == 1_003_000
    waits.unpublish()


def test_an_answer_that_is_refused_becomes_an_error(
    kernel: Kernel, serve: Callable[..., KernelSession]
) -> None:
    """The caller gets EIO when the kernel refuses an answer, and what the answer had opened is closed."""
    undone = []
    serve({ANSWER: echo}, {ANSWER: lambda request, reply: undone.append(reply)})
    kernel.refused = 1
    kernel.send(ANSWER, 2, b"of a wrong size")
    assert kernel.answer() == (2, errno.EIO, b"")
    kernel.send(ANSWER, 4)
    assert kernel.answer() == (4, 0, b"")
    assert undone == [b"of a wrong size"]


def test_failed_undoing_still_answers_the_caller(kernel: Kernel, serve: Callable[..., KernelSession]) -> None:
    """The caller still gets EIO when undoing fails, and the next request its answer."""

    def undo(request: FuseRequest, reply: Reply) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    serve({ANSWER: echo}, {ANSWER: undo})
    kernel.refused = 1
    kernel.send(ANSWER, 2, b"of a wrong size")
    assert kernel.answer() == (2, errno.EIO, b"")
    kernel.send(ANSWER, 4)
    assert kernel.answer() == (4, 0, b"")


def test_the_end_of_the_connection_ends_the_wait(kernel: Kernel, serve: Callable[..., KernelSession]) -> None:
    """The session is over when the connection ends, as by an unmount."""
    session = serve({ANSWER: echo})
    assert not session.is_over
    kernel.unmount()
    session.wait()
    assert session.is_over


def _init(major: int, minor: int, flags: int) -> bytes:
    body = p.INIT_IN.pack(major, minor, 0, flags & 0xFFFFFFFF) + p.INIT_IN_EXT.pack(flags >> 32)
    return p.IN_HEADER.pack(p.IN_HEADER.size + len(body), p.INIT, 2, 0, 0, 0, 1, 0, 0) + body


@pytest.mark.parametrize(
    ("minor", "offered", "wants", "passthrough", "writeback", "resends"),
    [
        (45, p.INIT_EXT | p.PASSTHROUGH | p.HAS_RESEND | p.WRITEBACK_CACHE, True, True, False, True),
        (45, p.INIT_EXT | p.PASSTHROUGH | p.HAS_RESEND | p.WRITEBACK_CACHE, False, False, True, True),
        (38, p.INIT_EXT | p.WRITEBACK_CACHE, True, False, True, False),
        (31, p.WRITEBACK_CACHE, True, False, True, False),
        # Without INIT_EXT nothing above 32 bits counts.
        (31, p.WRITEBACK_CACHE | p.PASSTHROUGH, True, False, True, False),
    ],
)
def test_negotiation_asks_only_for_what_is_offered(
    kernel: Kernel, minor: int, offered: int, wants: bool, passthrough: bool, writeback: bool, resends: bool
) -> None:
    """Negotiation asks only for what is offered, and answers with 64 bytes.

    Without passthrough it asks for the kernel's write cache, and never beside it for opens that truncate.
    """
    offered |= p.ATOMIC_O_TRUNC
    kernel.sock.send(_init(7, minor, offered))
    agreed = negotiate(kernel.fd, passthrough=wants)
    assert (agreed.passthrough, agreed.writeback, agreed.resends) == (passthrough, writeback, resends)
    assert bool(agreed.flags & p.ATOMIC_O_TRUNC) == passthrough
    assert agreed.minor == minor
    _, number, body = kernel.answer()
    assert number == 0
    assert len(body) == 64
    fields = p.INIT_OUT.unpack(body)
    assert (fields[3] | fields[10] << 32) & ~offered == 0
    # The field is max_stack_depth.
    assert fields[11] == int(passthrough)


def test_negotiation_refuses_old_kernels(kernel: Kernel) -> None:
    """A newer major version is asked for ours, and an old kernel, or no INIT, is refused."""
    kernel.sock.send(_init(8, 1, 0))
    kernel.sock.send(_init(7, 45, 0))
    assert negotiate(kernel.fd, passthrough=True).minor == 45
    assert kernel.answer()[2][:4] == struct.pack("<I", 7)
    for refused in (_init(7, 27, 0), _init(6, 99, 0), p.IN_HEADER.pack(40, p.GETATTR, 2, 1, 0, 0, 1, 0, 0)):
        kernel.sock.send(refused)
        with pytest.raises(UnsupportedProtocol):
            negotiate(kernel.fd, passthrough=True)
