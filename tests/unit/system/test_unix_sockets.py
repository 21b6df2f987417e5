"""Tests of what all Unix sockets of ciuic share, and of the client of those that speak HTTP."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ciuic.protocol.socket_http import Connection
from ciuic.system.unix_sockets import bind, connect, credentials, listener_of, receive, rights, socket_address


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.mark.parametrize("asked", [0, 1, 2, 3])
def test_descriptors_are_close_on_exec_and_bounded(asked: int) -> None:
    """Received descriptors are closed on exec, and there are no more than there is room for."""
    ours, theirs = _pair()
    with ours, theirs:
        theirs.sendmsg([b"x"], rights([0] * asked))
        data, fds, _ = receive(ours, 10, 2)
    assert data == b"x"
    assert len(fds) == min(asked, 2)
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_flags_are_obeyed() -> None:
    """MSG_DONTWAIT returns at once; socket.recv_fds ignores it."""
    ours, theirs = _pair()
    with ours, theirs, pytest.raises(BlockingIOError):
        receive(ours, 10, 2, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("length", [10, 150])
def test_a_path_of_any_length(short_tmp: Path, length: int) -> None:
    """A new socket replaces a stale one, has mode 0600, and `listener_of` finds its process."""
    directory = short_tmp / ("d" * length)
    directory.mkdir()
    path = os.fspath(directory / "socket")
    assert listener_of(path) is None
    with socket_address(path) as address:
        bind(address, socket.SOCK_STREAM).close()
        assert listener_of(path) is None
        bound = bind(address, socket.SOCK_STREAM)
    with bound as listener, socket.socket(socket.AF_UNIX) as caller:
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        listener.listen()
        found = listener_of(path)
        assert found == (os.getpid(), os.geteuid(), os.getegid())
        connect(caller, path, 1.0)
        assert credentials(caller) == found


def test_a_user_with_a_large_number_is_known() -> None:
    """Ids are unsigned: those from 2**31 on are users, too, as of containers."""
    uid = 3_000_000_000
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.setresuid(uid, uid, uid)
            here, _there = socket.socketpair()
            os.write(write, repr(credentials(here).uid).encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        found = said.read()
    os.waitpid(child, 0)
    assert found == str(uid)


def test_a_full_queue_is_waited_for(short_tmp: Path) -> None:
    """A caller waits where others have filled the queue of the listener, and takes nobody for absent."""
    path = os.fspath(short_tmp / "socket")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            later = pool.submit(Connection, path, connect_seconds=60)
            with pytest.raises(TimeoutError):
                later.result(0.3)
            listener.accept()[0].close()
            with later.result():
                listener.accept()[0].close()
