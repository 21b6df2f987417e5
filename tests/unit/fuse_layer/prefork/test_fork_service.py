"""Tests of the process started by systemd to fork workers: for any number of daemons, and for root only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.second_user import MADE_UP, run_as
from support.until import until

from ciuic.daemon.roots.worker_process import WorkerDied, WorkerOptions, _become_worker
from ciuic.fuse_layer.prefork import messages
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.fuse_layer.prefork.messages import WORKER
from ciuic.fuse_layer.prefork.service import Forker
from ciuic.system.child_process import environment
from ciuic.system.poll import readable

_REFUSED = 2
"""Exit status of a worker with a command line that it does not understand (argparse)."""
# As systemd starts it: the listening socket is descriptor 3, LISTEN_PID is the process itself.
_ACTIVATED = "import os, sys; os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); os.dup2(int(sys.argv[1]), 3); os.execv(sys.executable, [sys.executable, '-m', 'ciuic.fuse_layer.standby', sys.argv[2]])"


@pytest.fixture
def service(short_tmp: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    path, watchdog = (
        short_tmp / "workers.sock",
        {"NOTIFY_SOCKET": f"{short_tmp}/notify", "WATCHDOG_USEC": "300000"},
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", _ACTIVATED, str(listener.fileno()), WORKER],
            pass_fds=(listener.fileno(),), env={**environment(), **watchdog}, cwd="/", stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        # A daemon gives up on a service that does not answer in time, as one that is still starting on a busy machine.
        with closing(_spare(path)) as first:
            until("the service's start", first.await_ready)
        yield path, process
    finally:
        process.kill()
        process.wait(30)


def _spare(path: Path) -> SpareProcess:
    return SpareProcess(Path("/"), {}, service=str(path))


def test_concurrent_daemons_get_their_own_workers(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """Daemons beside each other get their workers, whose ends are reported and descriptors not shared."""
    path, _ = service
    with closing(_spare(path)) as other:
        with closing(_spare(path)) as one:
            for spare in (one, other, one):
                reader, writer = os.pipe()
                worker = spare.become(["--nonsense"], [writer])
                os.close(writer)
                with open(reader, "rb") as shared:
                    assert worker is not None
                    assert shared.read() == b""
                assert worker.wait() == _REFUSED
        assert other.become(["--nonsense"], []) is not None


def test_a_worker_whose_daemon_is_gone_is_collected(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """A worker whose daemon has gone is reaped, and its exit status can still be asked.

    As a zombie, it would count as alive for a daemon that adopted it.
    """
    path, process = service
    gone = _spare(path)
    worker = gone.become(["--nonsense"], [])
    assert worker is not None
    gone.close()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until("the end of the worker", lambda: str(worker.pid) not in children.read_text().split())
    following = _spare(path)
    following.prepare()
    assert following.status_of(worker.pid) == _REFUSED
    following.close()


def test_a_worker_that_ends_before_its_daemon_looks_keeps_its_status(
    service: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon gets the exit status of a worker that was collected before the daemon could watch it."""
    path, process = service
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    open_pidfd = os.pidfd_open

    def late(pid: int) -> int:
        until("the end of the worker", lambda: str(pid) not in children.read_text().split())
        return open_pidfd(pid)

    with closing(_spare(path)) as spare:
        monkeypatch.setattr(os, "pidfd_open", late)
        worker = spare.become(["--nonsense"], [])
        assert worker is not None
        assert readable(worker.pidfd)
        assert worker.wait() == _REFUSED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_only_root_is_answered(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """A connection of a user other than root is closed without a fork, whatever the socket's mode."""
    path, process = service
    path.chmod(0o666)
    for parent in (path.parent, path.parent.parent):
        parent.chmod(0o711)
    script = (
        "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20); s.connect(sys.argv[1])\n"
        "try:\n    s.send(b'[]'); print(s.recv(10))\nexcept (BrokenPipeError, ConnectionResetError):\n    print(b'')\n"
    )
    assert run_as(MADE_UP, script, str(path)).stdout.strip() == "b''"
    assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() == ""
    assert process.poll() is None


def test_garbage_and_a_vanished_asker_end_nothing(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """A message that is no request, and a connection closed before its answer, leave the others served."""
    path, process = service
    for message in (b"{", b'{"a": 1}', b"[1, 2]", b"null", b"\xff"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.settimeout(20)
            one.connect(str(path))
            one.send(message)
            assert one.recv(100) == b""
    spare = _spare(path)
    assert spare.become(["--nonsense"], []) is not None
    assert process.poll() is None
    spare.close()


def test_no_worker_is_started_without_the_service(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """The daemon starts no worker itself without the service, and names the unit to look at.

    The daemon may lack the privileges of a worker.
    """
    path, process = service
    spare = _spare(path)
    spare.prepare()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not spare.await_ready()
    options = WorkerOptions("/nowhere", Path("/nowhere.sock"), "auto", 4096, 4096)
    with pytest.raises(WorkerDied, match="does not answer") as refused:
        _become_worker(spare, options, 0, 1, None)
    assert "ciuic-workers.service" in refused.value.hint


def test_abandoned_request_forks_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose daemon stopped waiting forks no worker, as a second of one session would do harm."""
    monkeypatch.setattr(messages, "fork", lambda: pytest.fail("forked"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener, daemon, connection:
        forker = Forker(listener)
        forker._connections[connection.fileno()] = connection
        forker._poll.register(connection)
        daemon.send(json.dumps(["--nonsense"]).encode())
        daemon.close()
        assert forker._answer(connection) is None
        assert forker._connections == {}


def test_worker_whose_pid_cannot_be_reported_is_ended() -> None:
    """A worker is ended when its daemon disconnected between fork and answer."""
    process = subprocess.Popen(["sleep", "100"])
    daemon, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon.close()
    with connection, pytest.raises(OSError, match="Broken pipe"):
        messages.answer_or_end(connection, process.pid)
    assert process.wait(30) == -signal.SIGKILL


def test_service_feeds_the_watchdog(service: tuple[Path, subprocess.Popen[bytes]]) -> None:
    """The watchdog message is sent regularly, also without requests (WATCHDOG_USEC)."""
    path, _ = service
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path.with_name("notify")))
        manager.settimeout(30)
        assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
