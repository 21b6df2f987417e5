"""Tests of the daemon's lock, of its sockets' owner and mode, and of the journal for its successor."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest

from ciuic.daemon.base import runtime as runtime_module
from ciuic.daemon.base.runtime import CutRecord, PendingRecord, RuntimeDirectory, bind_control_socket
from ciuic.errors import Busy


def test_second_daemon_is_refused_with_the_pid_of_the_first(short_tmp: Path) -> None:
    """A second daemon is refused while the first lives, and the message names the first's pid."""
    first, second = RuntimeDirectory(short_tmp / "run"), RuntimeDirectory(short_tmp / "run")
    first.acquire()
    with pytest.raises(Busy, match=str(os.getpid())):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_killed_daemon_leaves_no_lock(short_tmp: Path) -> None:
    """The lock ends with a killed daemon, and the file it leaves does not stop the next."""
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


@pytest.mark.parametrize("ends", ["before flock", "before open", "after flock fails"])
def test_a_lock_file_that_was_removed_locks_nothing(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path, ends: str
) -> None:
    """A daemon that starts while another one ends locks the file that the next one will find.

    The removed file would exclude nobody: a third daemon would make a new one.
    """
    ending, starting, third = (RuntimeDirectory(short_tmp / "run") for _ in range(3))
    ending.acquire()
    flock, open_file, tries = fcntl.flock, os.open, []

    def flock_late(fd: int, how: int) -> None:
        tries.append(fd)
        if ends == "before flock" and len(tries) == 1:
            ending.release()
        try:
            flock(fd, how)
        finally:
            if ends == "after flock fails":
                ending.release()

    def open_late(path: Path, *arguments: int) -> int:
        if ends == "before open":
            ending.release()
        return open_file(path, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(runtime_module.fcntl, "flock", flock_late)
        patched.setattr(runtime_module.os, "open", open_late)
        starting.acquire()
    with pytest.raises(Busy, match=str(os.getpid())):
        third.acquire()
    starting.release()
    assert not (short_tmp / "run").exists()


def test_locking_ends_where_others_remove_the_file_all_the_time(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path
) -> None:
    """A file that never stays is an error, and leaves no descriptor open."""
    monkeypatch.setattr(runtime_module.fcntl, "flock", lambda fd, how: (short_tmp / "daemon.lock").unlink())
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Busy, match="start and end"):
        RuntimeDirectory(short_tmp).acquire()
    assert os.listdir("/proc/self/fd") == before


def test_release_leaves_a_lingering_workers_socket(short_tmp: Path) -> None:
    """Release leaves the socket of a lingering worker, and the directory that holds it."""
    runtime = RuntimeDirectory(short_tmp / "run")
    runtime.acquire()
    runtime.worker_socket("/a").touch()
    runtime.release()
    assert os.listdir(short_tmp / "run") == [runtime.worker_socket("/a").name]


def test_the_journal_survives_and_garbage_is_no_journal(short_tmp: Path) -> None:
    """A daemon reads its predecessor's journal, also of an earlier version, and an unreadable journal counts as none."""
    runtime = RuntimeDirectory(short_tmp)
    assert runtime.read_pending() == []
    records = [
        PendingRecord(id="cs-1", time_ns=1, cuts=[CutRecord(path="/ä", session="s", epoch=3)], tags=["t"])
    ]
    runtime.write_pending(records)
    assert RuntimeDirectory(short_tmp).read_pending() == records
    (earlier,) = msgspec.json.decode((short_tmp / "pending.json").read_bytes())
    earlier |= {"retaken": "its worker ended", "promised_ns": 5}
    (short_tmp / "pending.json").write_bytes(msgspec.json.encode([earlier]))
    assert runtime.read_pending() == records
    (short_tmp / "pending.json").write_text("[{")
    assert runtime.read_pending() == []


def test_the_socket_is_for_root_alone_or_for_the_group(short_tmp: Path) -> None:
    """The socket has mode 0600, or 0660 with the configured group."""
    with bind_control_socket(short_tmp / "a", None):
        assert stat.S_IMODE((short_tmp / "a").stat().st_mode) == 0o600
    group = os.getgid()
    with bind_control_socket(short_tmp / "b", group):
        facts = (short_tmp / "b").stat()
        assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o660, group)


def test_a_dead_socket_is_replaced_and_a_live_one_is_not(short_tmp: Path) -> None:
    """The socket of a killed daemon is replaced, and one that is answered stops the start."""
    path = short_tmp / "c.sock"
    first = bind_control_socket(path, None)
    with pytest.raises(Busy):
        bind_control_socket(path, None)
    first.close()
    bind_control_socket(path, None).close()


def test_kept_listener_answers_connections_made_during_a_restart(short_tmp: Path) -> None:
    """A command that connected during a restart is answered through the descriptor kept by systemd."""
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
    """Missing directories of the socket are made with mode 0755; the socket starts with mode 0600."""
    path = short_tmp / "made/below/control.sock"
    with bind_control_socket(path, None, None):
        modes = [stat.S_IMODE(at.stat().st_mode) for at in (path.parents[1], path.parent, path)]
    assert modes == [0o755, 0o755, 0o600]


def test_a_kept_listener_of_another_path_is_not_used(short_tmp: Path) -> None:
    """A kept listener of a path that is no longer configured is closed, and a new one made."""
    old = bind_control_socket(short_tmp / "old", None)
    kept = os.dup(old.fileno())
    old.close()
    with bind_control_socket(short_tmp / "new", None, kept) as listener:
        assert listener.getsockname() == str(short_tmp / "new")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept)
