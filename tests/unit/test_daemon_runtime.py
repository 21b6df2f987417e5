"""One daemon at a time, sockets with the right owner and mode, and a journal for the successor."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from ciuic.daemon.runtime import CutRecord, PendingRecord, RuntimeDirectory, bind_control_socket
from ciuic.errors import Busy


def test_the_second_daemon_is_refused_and_told_of_the_first(short_tmp: Path) -> None:
    """While one daemon lives another may not start; the message names its pid."""
    first, second = RuntimeDirectory(short_tmp / "run"), RuntimeDirectory(short_tmp / "run")
    first.acquire()
    with pytest.raises(Busy, match=str(os.getpid())):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_killed_daemon_leaves_no_lock(short_tmp: Path) -> None:
    """The lock goes with the process; the file it leaves behind stops nobody."""
    pid = os.fork()
    if pid == 0:
        RuntimeDirectory(short_tmp / "run").acquire()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (short_tmp / "run/daemon.lock").exists()
    runtime = RuntimeDirectory(short_tmp / "run")
    runtime.acquire()
    runtime.release()
    assert not (short_tmp / "run").exists()


def test_release_leaves_a_lingering_workers_socket(short_tmp: Path) -> None:
    """What is not ours stays, and the directory with it."""
    runtime = RuntimeDirectory(short_tmp / "run")
    runtime.acquire()
    runtime.worker_socket("/a").touch()
    runtime.release()
    assert os.listdir(short_tmp / "run") == [runtime.worker_socket("/a").name]


def test_the_journal_survives_and_garbage_is_no_journal(short_tmp: Path) -> None:
    """What one daemon wrote the next one reads; what cannot be read counts as nothing."""
    runtime = RuntimeDirectory(short_tmp)
    assert runtime.read_pending() == []
    records = [
        PendingRecord(id="cs-1", time_ns=1, cuts=[CutRecord(path="/ä", session="s", epoch=3)], tags=["t"])
    ]
    runtime.write_pending(records)
    assert RuntimeDirectory(short_tmp).read_pending() == records
    (short_tmp / "pending.json").write_text("[{")
    assert runtime.read_pending() == []


def test_the_socket_is_for_root_alone_or_for_the_group(short_tmp: Path) -> None:
    """0600, or 0660 with the group."""
    with bind_control_socket(short_tmp / "a", None):
        assert stat.S_IMODE((short_tmp / "a").stat().st_mode) == 0o600
    group = os.getgid()
    with bind_control_socket(short_tmp / "b", group):
        facts = (short_tmp / "b").stat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o660, group)


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(short_tmp: Path) -> None:
    """A killed daemon's socket is in nobody's way; one that is answered stops the start."""
    path = short_tmp / "c.sock"
    first = bind_control_socket(path, None)
    with pytest.raises(Busy):
        bind_control_socket(path, None)
    first.close()
    bind_control_socket(path, None).close()


def test_a_kept_listener_answers_who_connected_meanwhile(short_tmp: Path) -> None:
    """With the descriptor that systemd kept, a command that asked during the restart gets its answer."""
    path = short_tmp / "c.sock"
    before = bind_control_socket(path, None)
    kept = os.dup(before.fileno())
    before.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with bind_control_socket(path, None, kept) as listener:
            connection, _ = listener.accept()
            connection.sendall(b"x")
            connection.close()
        assert client.recv(1) == b"x"


def test_directories_of_a_socket_elsewhere_can_be_entered(short_tmp: Path) -> None:
    """They are made where they are missing, for the group that may use the socket; the socket is the owner's alone at first."""
    path = short_tmp / "made/below/control.sock"
    with bind_control_socket(path, None, None):
        modes = [stat.S_IMODE(at.stat().st_mode) for at in (path.parents[1], path.parent, path)]
    assert modes == [0o755, 0o755, 0o600]


def test_a_kept_listener_of_another_path_is_not_used(short_tmp: Path) -> None:
    """After the configuration moved the socket, the kept one is dropped and a new one made."""
    old = bind_control_socket(short_tmp / "old", None)
    kept = os.dup(old.fileno())
    old.close()
    with bind_control_socket(short_tmp / "new", None, kept) as listener:
        assert listener.getsockname() == str(short_tmp / "new")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)
