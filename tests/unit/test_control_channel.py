"""The worker control channel: frames, client and server together, over a real unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.control_client import ControlClient, WorkerRefused, WorkerUnreachable, is_timeout
from ciuic.fuse_layer.control_frames import FrameError, receive_frame, send_frame
from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.gate import Gate


class FakeCut(NamedTuple):
    epoch: int
    cut_ns: int
    hold_us: int


class FakeCore:
    """The control half of the core: a real gate, and a note of what was asked."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.epoch = 1
        self.asked: list[tuple[str, object]] = []
        self.stopped = threading.Event()

    def status(self) -> Mapping[str, Any]:
        return {"session": "ab" * 16, "epoch": self.epoch, "pending": [3, 4], "unheard_of": 1}

    def prepare_cut(self, timeout_seconds: float) -> None:
        self.asked.append(("prepare_cut", timeout_seconds))

    def writers(self) -> list[bytes]:
        return [b"log\xff\n|", b"a/b"]

    def hold(self, timeout_seconds: float) -> int:
        return self.gate.hold(timeout_seconds)

    def cut(self) -> FakeCut:
        token = self.hold(20)
        cut = self.cut_held(token)
        self.release_hold(token)
        self.seal(cut.epoch)
        return cut

    def cut_held(self, token: int) -> FakeCut:
        self.gate.extend(token, 20)
        self.epoch += 1
        return FakeCut(self.epoch - 1, 1_700_000_000_000_000_000, 12)

    def release_hold(self, token: int) -> None:
        self.gate.release(token)

    def seal(self, epoch: int) -> None:
        self.asked.append(("seal while held" if self.gate.held else "seal", epoch))

    def committed(self, epoch: int) -> None:
        self.asked.append(("committed", epoch))

    def abort(self, epoch: int) -> None:
        if epoch == 99:
            raise ValueError("no such epoch")
        self.asked.append(("abort", epoch))

    def stop(self, grace_seconds: float) -> None:
        self.asked.append(("stop", grace_seconds))
        self.stopped.set()


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def socket_path(tmp_path: Path, core: FakeCore) -> Iterator[str]:
    path = os.fspath(tmp_path / "worker.sock")
    backing = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    server = ControlServer(
        core, path, backing_fd=backing, on_stop=core.stop, extra_status=lambda: {"driver": "pyfuse3"}
    )
    server.start()
    yield path
    server.close()
    os.close(backing)


@pytest.fixture
def client(socket_path: str) -> Iterator[ControlClient]:
    with ControlClient(socket_path, timeout_seconds=20) as client:
        yield client


def test_prepare_reaches_the_core(client: ControlClient, core: FakeCore) -> None:
    """The moment that unseen writers are given arrives in seconds."""
    assert client.prepare(2.0)
    assert core.asked == [("prepare_cut", 2.0)]


def test_a_worker_that_cannot_prepare_is_no_error(
    client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older worker answers that it does not know the request: it has no writers that it does not see."""
    ask = client._ask
    monkeypatch.setattr(client, "_ask", lambda do, **fields: ask("unheard of", **fields))
    assert not client.prepare(2.0)


def test_status_carries_core_and_driver_fields(client: ControlClient) -> None:
    """Fields of core and driver arrive in one value; fields of a newer worker are ignored."""
    status = client.status()
    assert (status.session, status.epoch, status.pending, status.driver) == ("ab" * 16, 1, (3, 4), "pyfuse3")


def test_paths_are_bytes(client: ControlClient) -> None:
    """Names that are no text travel unchanged."""
    assert client.writers() == [b"log\xff\n|", b"a/b"]


def test_the_backing_descriptor_arrives_and_is_not_inherited(client: ControlClient, tmp_path: Path) -> None:
    """The descriptor leads to the same directory, is O_PATH, and closes on exec."""
    fd = client.backing_fd()
    try:
        assert os.fstat(fd).st_ino == os.stat(tmp_path).st_ino
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fsync(fd)
    finally:
        os.close(fd)


def test_the_socket_is_private(socket_path: str) -> None:
    """Nobody but its owner may connect."""
    assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600


def test_cut_within_a_hold(client: ControlClient, core: FakeCore) -> None:
    """hold, cut, release on one connection: the gate is held until the release, and the sealed file comes after it."""
    client.hold(20)
    assert core.gate.held
    assert client.cut().epoch == 1
    assert core.gate.held
    assert core.asked == []
    client.release()
    assert not core.gate.held
    assert core.asked == [("seal", 1)]


def test_a_cut_alone_is_sealed_when_it_is_answered(client: ControlClient, core: FakeCore) -> None:
    """Without a hold of its own connection a cut holds, lets go and seals by itself."""
    assert client.cut().epoch == 1
    assert core.asked == [("seal", 1)]


def test_an_epoch_is_sealed_also_when_the_daemon_dies_before_the_release(
    client: ControlClient, core: FakeCore, socket_path: str
) -> None:
    """What was cut under a hold gets its sealed file when the connection ends: a later daemon captures it."""
    client.hold(20)
    client.cut()
    client.close()
    with ControlClient(socket_path, timeout_seconds=20) as other:
        other.hold(20)
        other.release()
    assert ("seal", 1) in core.asked


def test_a_hold_ends_with_its_connection(client: ControlClient, core: FakeCore, socket_path: str) -> None:
    """A daemon that dies between hold and release does not stop the job: the gate opens when its connection ends."""
    client.hold(60)
    client.close()
    with ControlClient(socket_path, timeout_seconds=20) as other:
        other.hold(20)  # waits for the first hold's end; would fail after 20 s if that never came
        other.release()
    assert not core.gate.held


def test_a_cut_after_the_hold_ran_out_is_refused(client: ControlClient, core: FakeCore) -> None:
    """The cut would not be one instant with those of other roots: it is refused as a timeout and the epoch stays."""
    client.hold(0.001)
    with core.gate:  # entered only once the hold is over
        pass
    with pytest.raises(WorkerRefused) as caught:
        client.cut()
    assert is_timeout(caught.value)
    assert core.epoch == 1


def test_a_hold_waits_in_vain_for_an_operation_that_does_not_end(
    client: ControlClient, core: FakeCore
) -> None:
    """When an operation stays inside the gate the hold fails as a timeout and leaves the gate open."""
    with core.gate, pytest.raises(WorkerRefused) as caught:
        client.hold(0.05)
    assert is_timeout(caught.value)
    assert not core.gate.held


def test_commit_abort_and_stop_reach_the_core(client: ControlClient, core: FakeCore) -> None:
    """Each request calls its method with its argument before the reply comes."""
    client.committed(7)
    client.abort(8)
    client.stop(2.5)
    assert core.asked == [("committed", 7), ("abort", 8), ("stop", 2.5)]


def test_a_failing_request_is_answered_and_the_connection_goes_on(client: ControlClient) -> None:
    """A bug behind one request is an error for its caller alone."""
    with pytest.raises(WorkerRefused, match="no such epoch"):
        client.abort(99)
    assert client.status().epoch == 1


@pytest.mark.parametrize(
    "request_map",
    [{"do": "dance"}, {}, {"do": "hold"}, {"do": "committed", "epoch": "1"}, {"do": "stop", "grace_s": -1}],
)
def test_wrong_requests_are_refused(socket_path: str, request_map: dict[str, object]) -> None:
    """Unknown requests and wrong fields get an answer that says no."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(20)
        sock.connect(socket_path)
        send_frame(sock, request_map)
        reply = receive_frame(sock, 1000)
    assert reply is not None
    assert reply["ok"] is False
    assert reply["errno"] in (errno.EINVAL, errno.EOPNOTSUPP)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\x03\x00\x00\x00\xc1\xc1\xc1", b"\x01\x00\x00\x00\x05", b"\x09\x00"]
)
def test_garbage_ends_its_connection_alone(socket_path: str, client: ControlClient, garbage: bytes) -> None:
    """Lengths out of bounds, bytes that are no map and half frames close that connection; others go on."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(20)
        sock.connect(socket_path)
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert client.status().epoch == 1


@given(st.binary(max_size=300), st.sampled_from([None, b"\x81\xa2do", b"\x82\xa2do\xa4hold\xaatimeout_ms"]))
def test_no_frame_whatever_its_body_hurts_the_worker(data: bytes, start: bytes | None) -> None:
    """Random bodies, whole or as the rest of a request, are a map or a FrameError, never another exception."""
    body = (start or b"") + data
    here, there = socket.socketpair()
    with here, there:
        here.sendall(struct.pack("<I", len(body)) + body)
        with contextlib.suppress(FrameError):
            message = receive_frame(there, 1000)
            assert message is not None
            assert all(isinstance(key, str) for key in message)


def test_nesting_without_end_is_an_error_of_the_frame() -> None:
    """msgspec raises RecursionError there, which is none of its own errors."""
    body = b"\x81\xa1a" * 20_000
    here, there = socket.socketpair()
    with here, there:
        threading.Thread(target=here.sendall, args=(struct.pack("<I", len(body)) + body,)).start()
        with pytest.raises(FrameError):
            receive_frame(there, 1 << 20)


def test_a_worker_out_of_descriptors_answers_again_when_there_are_some(
    tmp_path: Path, core: FakeCore
) -> None:
    """accept(2) fails with EMFILE for a while; whoever asked meanwhile is answered afterwards."""
    server = ControlServer(core, os.fspath(tmp_path / "w"), backing_fd=0, on_stop=core.stop)
    real, tries = server._listener, threading.Semaphore(0)

    class Exhausted:
        failures = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                tries.release()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real.accept()

        def shutdown(self, how: int) -> None:
            real.shutdown(how)

        def close(self) -> None:
            real.close()

    server._listener = Exhausted()  # type: ignore[assignment]
    server.start()
    client = ControlClient(os.fspath(tmp_path / "w"), timeout_seconds=20)
    try:
        for _ in range(3):
            assert tries.acquire(timeout=20)
        assert client.status().epoch == 1
    finally:
        client.close()
        server.close()


def test_a_worker_that_went_away_is_unreachable_and_its_successor_is_found(
    tmp_path: Path, core: FakeCore
) -> None:
    """After the server ends, requests raise WorkerUnreachable; the same client reaches a new server at the path."""
    path = os.fspath(tmp_path / "w.sock")
    client = ControlClient(path, timeout_seconds=20)
    with pytest.raises(WorkerUnreachable):
        client.status()
    for _ in range(2):
        server = ControlServer(core, path, backing_fd=0, on_stop=core.stop)
        server.start()
        assert client.status().epoch == 1
        server.close()
        with pytest.raises(WorkerUnreachable):
            client.status()
    client.close()


def test_socket_paths_of_any_length(tmp_path: Path, core: FakeCore) -> None:
    """A path longer than sun_path is bound and connected."""
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    path = os.fspath(directory / "worker.sock")
    server = ControlServer(core, path, backing_fd=0, on_stop=core.stop)
    server.start()
    with ControlClient(path, timeout_seconds=20) as client:
        assert client.status().epoch == 1
    server.close()


def test_one_client_serves_several_threads(client: ControlClient) -> None:
    """Requests from many threads over one connection are not mixed up."""
    failures: list[BaseException] = []

    def ask(mine: int) -> None:
        try:
            for _ in range(50):
                assert client.writers() == [b"log\xff\n|", b"a/b"]
                assert client.status().epoch == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


MESSAGES = st.dictionaries(
    st.text(max_size=8),
    st.one_of(st.binary(max_size=300), st.integers(-(2**63), 2**63 - 1), st.lists(st.binary(max_size=9))),
    max_size=5,
)


@given(message=MESSAGES, pieces=st.lists(st.integers(1, 7), min_size=1, max_size=20))
def test_frames_survive_any_splitting(message: dict[str, Any], pieces: list[int]) -> None:
    """A frame that arrives in arbitrary pieces is the message that was sent, and the end after it is an end."""
    body = msgspec.msgpack.encode(message)
    data = struct.pack("<I", len(body)) + body
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def feed() -> None:
            rest, turn = data, 0
            while rest:
                size = pieces[turn % len(pieces)] * (1 + turn // 50)
                theirs.sendall(rest[:size])
                rest, turn = rest[size:], turn + 1
            theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=feed)
        thread.start()
        assert receive_frame(ours, 1 << 20) == message
        assert receive_frame(ours, 1 << 20) is None
        thread.join()


@given(message=MESSAGES.filter(bool), cut=st.integers(1, 1 << 20))
def test_an_incomplete_frame_is_an_error(message: dict[str, Any], cut: int) -> None:
    """A peer that dies in the middle of a frame is told from one that closes between frames."""
    body = msgspec.msgpack.encode(message)
    data = struct.pack("<I", len(body)) + body
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 1 + cut % (len(data) - 1)])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError):
            receive_frame(ours, 1 << 20)


def test_descriptors_nobody_asked_for_are_closed() -> None:
    """A peer cannot fill our descriptor table: what comes with a frame that expects none is closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            send_frame(theirs, {"a": 1}, [0, 1])
            assert receive_frame(ours, 100) == {"a": 1}
        assert len(os.listdir("/proc/self/fd")) == before
