"""The worker control channel: frames, client and server together, over a real unix socket."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.tracking.gate import Gate
from ciuic.protocol.worker_client import WorkerControlClient, WorkerRefused, WorkerUnreachable
from ciuic.protocol.worker_frames import FrameError, receive_frame, send_frame


class FakeCut(NamedTuple):
    epoch: int
    cut_ns: int
    hold_us: int


class FakeCore:
    """The control half of the core: a real gate, and a record of the calls."""

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
def client(socket_path: str) -> Iterator[WorkerControlClient]:
    with WorkerControlClient(socket_path, timeout_seconds=20) as client:
        yield client


def test_prepare_reaches_the_core(client: WorkerControlClient, core: FakeCore) -> None:
    """The time given to passthrough writers reaches the core in seconds."""
    assert client.prepare(2.0)
    assert core.asked == [("prepare_cut", 2.0)]


def test_a_worker_that_cannot_prepare_is_no_error(
    client: WorkerControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older worker that does not know `prepare` is no error, as it has no passthrough writers."""
    ask = client._ask
    monkeypatch.setattr(client, "_ask", lambda do, **fields: ask("unheard of", **fields))
    assert not client.prepare(2.0)


def test_status_carries_core_and_driver_fields(client: WorkerControlClient) -> None:
    """Fields of core and driver arrive in one value; fields of a newer worker are ignored."""
    status = client.status()
    assert (status.session, status.epoch, status.pending, status.driver) == ("ab" * 16, 1, (3, 4), "pyfuse3")


def test_paths_are_bytes(client: WorkerControlClient) -> None:
    """Names that are not UTF-8 are transferred unchanged."""
    assert client.writers() == [b"log\xff\n|", b"a/b"]


def test_the_backing_descriptor_arrives_and_is_not_inherited(
    client: WorkerControlClient, tmp_path: Path
) -> None:
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
    """Only the socket's owner may connect."""
    assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600


def test_cut_within_a_hold(client: WorkerControlClient, core: FakeCore) -> None:
    """The gate is held from hold to release on one connection, and the epoch is sealed after it."""
    client.hold(20)
    assert core.gate.held
    assert client.cut().epoch == 1
    assert core.gate.held
    assert core.asked == []
    client.release()
    assert not core.gate.held
    assert core.asked == [("seal", 1)]


def test_a_cut_alone_is_sealed_when_it_is_answered(client: WorkerControlClient, core: FakeCore) -> None:
    """A cut without a hold on its connection holds, releases and seals by itself."""
    assert client.cut().epoch == 1
    assert core.asked == [("seal", 1)]


def test_an_epoch_is_sealed_also_when_the_daemon_dies_before_the_release(
    client: WorkerControlClient, core: FakeCore, socket_path: str
) -> None:
    """An epoch cut under a hold is sealed when the connection ends, so a later daemon can capture it."""
    client.hold(20)
    client.cut()
    client.close()
    with WorkerControlClient(socket_path, timeout_seconds=20) as other:
        other.hold(20)
        other.release()
    assert ("seal", 1) in core.asked


def test_a_hold_ends_with_its_connection(
    client: WorkerControlClient, core: FakeCore, socket_path: str
) -> None:
    """The gate opens when the connection of its hold ends, so a daemon that dies does not stop the job."""
    client.hold(60)
    client.close()
    with WorkerControlClient(socket_path, timeout_seconds=20) as other:
        # Wait for the first hold's end; without one this would fail after 20 s.
        other.hold(20)
        other.release()
    assert not core.gate.held


def test_a_cut_after_the_hold_ran_out_is_refused(client: WorkerControlClient, core: FakeCore) -> None:
    """A cut after its hold ran out is refused as a timeout, as it would be later than cuts of other roots."""
    client.hold(0.001)
    # The cut enters only once the hold is over.
    with core.gate:
        pass
    with pytest.raises(WorkerRefused) as caught:
        client.cut()
    assert caught.value.errno == errno.ETIMEDOUT
    assert core.epoch == 1


def test_a_hold_waits_in_vain_for_an_operation_that_does_not_end(
    client: WorkerControlClient, core: FakeCore
) -> None:
    """A hold fails as a timeout and opens the gate when an operation does not leave it."""
    with core.gate, pytest.raises(WorkerRefused) as caught:
        client.hold(0.05)
    assert caught.value.errno == errno.ETIMEDOUT
    assert not core.gate.held


def test_commit_abort_and_stop_reach_the_core(client: WorkerControlClient, core: FakeCore) -> None:
    """Each request calls its method with its argument before the reply comes."""
    client.committed(7)
    client.abort(8)
    client.stop(2.5)
    assert core.asked == [("committed", 7), ("abort", 8), ("stop", 2.5)]


def test_a_failing_request_is_answered_and_the_connection_goes_on(client: WorkerControlClient) -> None:
    """A defect behind one request is an error for its caller alone, and the connection continues."""
    with pytest.raises(WorkerRefused, match="no such epoch"):
        client.abort(99)
    assert client.status().epoch == 1


@pytest.mark.parametrize(
    "request_map",
    [{"do": "dance"}, {}, {"do": "hold"}, {"do": "committed", "epoch": "1"}, {"do": "stop", "grace_s": -1}],
)
def test_wrong_requests_are_refused(socket_path: str, request_map: dict[str, object]) -> None:
    """Unknown requests and wrong fields are refused with an answer."""
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
def test_garbage_ends_its_connection_alone(
    socket_path: str, client: WorkerControlClient, garbage: bytes
) -> None:
    """Lengths out of bounds, bytes that are no map and half frames close their connection alone."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(20)
        sock.connect(socket_path)
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert client.status().epoch == 1


@given(st.binary(max_size=300), st.sampled_from([None, b"\x81\xa2do", b"\x82\xa2do\xa4hold\xaatimeout_ms"]))
def test_any_frame_body_is_a_map_or_an_error(data: bytes, start: bytes | None) -> None:
    """Random bodies, whole or as the rest of a request, give a map or a FrameError and nothing else."""
    body = (start or b"") + data
    near, far = socket.socketpair()
    with near, far:
        near.sendall(struct.pack("<I", len(body)) + body)
        with contextlib.suppress(FrameError):
            message = receive_frame(far, 1000)
            assert message is not None
            assert all(isinstance(key, str) for key in message)


def test_nesting_without_end_is_an_error_of_the_frame() -> None:
    """Endless nesting is an error of the frame, although msgspec raises RecursionError for it."""
    body = b"\x81\xa1a" * 20_000
    near, far = socket.socketpair()
    with near, far:
        threading.Thread(target=near.sendall, args=(struct.pack("<I", len(body)) + body,)).start()
        with pytest.raises(FrameError):
            receive_frame(far, 1 << 20)


def test_a_worker_out_of_descriptors_answers_again_when_there_are_some(
    tmp_path: Path, core: FakeCore
) -> None:
    """Callers that come while accept(2) fails with EMFILE are answered afterwards."""
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
    client = WorkerControlClient(os.fspath(tmp_path / "w"), timeout_seconds=20)
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
    """Requests raise WorkerUnreachable after the server ends, and the same client finds its successor."""
    path = os.fspath(tmp_path / "w.sock")
    client = WorkerControlClient(path, timeout_seconds=20)
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


class _Asking:
    """A request in a thread of its own, as of a daemon that has given up waiting for it."""

    def __init__(self, client: WorkerControlClient) -> None:
        self.error: WorkerUnreachable | None = None
        self._client = client
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._client.hold(1)
        except WorkerUnreachable as error:
            self.error = error

    def ended(self) -> str:
        """Return the error of the request, once the thread has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return str(self.error)


def test_close_ends_a_request_that_is_under_way(tmp_path: Path) -> None:
    """Closing waits for no answer of a worker that hangs, and the worker sees the end of the connection at once."""
    path = os.fspath(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = WorkerControlClient(path, timeout_seconds=20)
        for _ in range(2):  # the client can be used again
            asking = _Asking(client)
            connection, _ = listener.accept()
            with connection:
                assert receive_frame(connection, 1 << 16) == {"do": "hold", "timeout_ms": 1000}
                client.close()
                # The request did not end by its timeout, for which `close` would have waited.
                assert asking.ended().endswith("does not answer: the connection was closed")
                assert receive_frame(connection, 1 << 16) is None


def test_close_does_not_wait_for_a_connection_that_is_being_made(tmp_path: Path) -> None:
    """A client that is closed while it waits in the queue of a worker sends its request no more."""
    path = os.fspath(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        client = WorkerControlClient(path, timeout_seconds=20)
        asking = _Asking(client)
        while not client._is_asking:
            time.sleep(0.001)
        client.close()
        listener.accept()[0].close()
        connection, _ = listener.accept()
        with connection:
            assert receive_frame(connection, 1 << 16) is None
        assert "abort" in asking.ended()


def test_socket_paths_of_any_length(tmp_path: Path, core: FakeCore) -> None:
    """A path longer than sun_path can be bound and connected."""
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    path = os.fspath(directory / "worker.sock")
    server = ControlServer(core, path, backing_fd=0, on_stop=core.stop)
    server.start()
    with WorkerControlClient(path, timeout_seconds=20) as client:
        assert client.status().epoch == 1
    server.close()


def test_one_client_serves_several_threads(client: WorkerControlClient) -> None:
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
    """A frame that arrives in arbitrary pieces is the message that was sent, and the end after it an end."""
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
    """A peer that dies in the middle of a frame is an error, unlike one that closes between frames."""
    body = msgspec.msgpack.encode(message)
    data = struct.pack("<I", len(body)) + body
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[: 1 + cut % (len(data) - 1)])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError):
            receive_frame(ours, 1 << 20)


def test_unexpected_descriptors_are_closed() -> None:
    """Descriptors that come with a frame that expects none are closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            send_frame(theirs, {"a": 1}, [0, 1])
            assert receive_frame(ours, 100) == {"a": 1}
        assert len(os.listdir("/proc/self/fd")) == before
