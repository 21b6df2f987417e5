"""Tests of the keeper, in this process: out of descriptors, and with workers that hang."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from ciuic.fuse_layer.prefork import keeper, messages, service
from ciuic.fuse_layer.prefork.keeper import Keeper


class _Waiting:
    """A listener whose connections cannot be accepted, as in a process out of descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries > 20:
            pytest.fail("nothing but the listener is looked at")
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_connection_that_cannot_be_accepted_keeps_no_session_waiting(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper ends with an unmounted session and a dead daemon, though a caller cannot be accepted."""
    monkeypatch.setattr(service, "_PAUSE_SECONDS", 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = _Waiting(messages.listen_for_daemons(short_tmp))
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(process.pid)
    held = Keeper(cast(socket.socket, listener), theirs)
    with ours, caller:
        caller.connect(listener.getsockname())
        request = {"do": "keep", "root": "/nowhere", "control": "/none", "arguments": [], "pid": process.pid}
        socket.send_fds(ours, [json.dumps(request).encode()], [pidfd, pidfd, pidfd])
        ours.shutdown(socket.SHUT_WR)
        assert held.serve() is None
    os.close(pidfd)
    process.wait(30)


@pytest.mark.parametrize("watched", [0, 1])
def test_a_successor_that_cannot_be_watched_leaves_nothing_open(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, watched: int
) -> None:
    """A keeper out of descriptors watches a successor later, and has leaked none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held = Keeper(messages.listen_for_daemons(short_tmp), theirs)
    worker, successor = (subprocess.Popen(["sleep", "100"]) for _ in range(2))
    request = {"do": "keep", "root": "/r", "control": "/none", "arguments": [], "pid": worker.pid}
    pidfd = os.pidfd_open(worker.pid)
    assert held._do(request, [pidfd, pidfd, pidfd]) == (True, [])
    os.close(pidfd)
    left, real = [watched], os.pidfd_open

    def open_pidfd(pid: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid)

    monkeypatch.setattr(messages, "fork", lambda: successor.pid)
    monkeypatch.setattr(os, "pidfd_open", open_pidfd)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        held._start(held._kept["/r"])
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before + watched
    assert os.path.exists(f"/proc/{successor.pid}") == bool(watched)
    held._do({"do": "end"}, [])
    held._let_go()
    ours.close()
    for process in (worker, successor):
        process.kill()
        process.wait(30)


_LISTENING = """
import signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
for _ in range(int(sys.argv[2])):
    connection = listener.accept()[0]
    connection.recv(100)
    connection.send(b"alive")
if sys.argv[2] == "0":
    signal.pause()
"""


@pytest.mark.parametrize(("answers", "status"), [(0, -signal.SIGKILL), (5, 0)])
def test_a_worker_that_hangs_is_ended_while_there_is_no_daemon(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, answers: int, status: int
) -> None:
    """Without a daemon the keeper kills a worker that answers no three probes in a row, and no other."""
    monkeypatch.setattr(keeper, "_PROBE_SECONDS", 0.2 if answers else 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control = short_tmp / "w.sock"
    with subprocess.Popen(
        [sys.executable, "-c", _LISTENING, control, str(answers)], stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        pidfd = os.pidfd_open(worker.pid)
        held = Keeper(messages.listen_for_daemons(short_tmp), theirs)
        request = {"do": "keep", "root": "/none", "control": str(control), "arguments": [], "pid": worker.pid}
        assert held._do(request, [pidfd, pidfd, pidfd]) == (True, [])
        os.close(pidfd)
        ours.close()
        # It ends with the session of a root that is not mounted, which is looked at when the worker has ended.
        assert held.serve() is None
        assert worker.wait(30) == status
