"""Tests of the trainers' socket: what it accepts and refuses, and that no descriptor stays open."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from support.served_sockets import ServedWatch
from support.socket_callers import connected, send_descriptors
from support.until import until

from ciuic.daemon.trainers.registry import MAX_TRAINERS_OF_A_USER
from ciuic.errors import Busy, CiuicError, Unreachable, UsageError
from ciuic.protocol import watch_client
from ciuic.protocol.heartbeat_page import HeartbeatPage
from ciuic.protocol.watch_client import Hello, Registration, introduce, watch_socket
from ciuic.system.poll import receive_queued
from ciuic.system.processes import start_ticks

ME = Hello(name="me", where="/w", kind="library", pid=os.getpid(), start_ticks=start_ticks(os.getpid()))


@pytest.fixture
def served(short_tmp: Path) -> Iterator[ServedWatch]:
    with ServedWatch(short_tmp) as one:
        yield one


@contextmanager
def life() -> Iterator[int]:
    fd = os.pidfd_open(os.getpid())
    yield fd
    os.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_bad_registrations_are_refused_and_closed(served: ServedWatch) -> None:
    """Wrong or too many descriptors, bad pages, unsafe names and garbage are refused and closed."""
    page = HeartbeatPage()
    null = os.open("/dev/null", os.O_RDWR)
    with life() as mine:
        introduce(served.path, ME, [mine, page.fd], seconds=30).close()
        before = open_fds()
        for hello, fds in (
            (ME, [null]),
            (ME, [page.fd]),
            (ME, [mine, null]),
            (ME, [mine, mine]),
            (ME, [mine, page.fd, null, null]),
            (msgspec.structs.replace(ME, name=""), [mine]),
            (msgspec.structs.replace(ME, name="\x1b[2J"), [mine]),
            (msgspec.structs.replace(ME, where="x" * 5000), [mine]),
            (msgspec.structs.replace(ME, heartbeat_seconds=float("nan")), [mine]),
            (msgspec.structs.replace(ME, kind="file"), [mine]),
        ):
            with pytest.raises(UsageError):
                introduce(served.path, hello, fds, seconds=30)
        for data in (b"\xc1", b"\x81\xa4type\xa5Hello", b"\x91" * 10_000, os.urandom(500)):
            with connected(served.path) as caller:
                assert send_descriptors(caller, data, [null, mine])
                assert b"Refused" in caller.recv(1 << 16)
        until("the end of the connections", lambda: open_fds() <= before)
    os.close(null)
    assert served.names() == ["me"]


def test_user_has_a_limited_number_of_slots(served: ServedWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user beyond the number of its slots is refused, and the descriptors are closed."""
    monkeypatch.setattr("ciuic.daemon.trainers.registry.MAX_TRAINERS", 1)
    with life() as mine:
        introduce(served.path, ME, [mine], seconds=30).close()
        child = subprocess.Popen(["sleep", "60"])
        other = os.pidfd_open(child.pid)
        try:
            before = open_fds()
            with pytest.raises(Busy):
                introduce(served.path, ME, [other], seconds=30)
            until("the end of the connection", lambda: open_fds() <= before)
        finally:
            child.kill()
            child.wait()
            os.close(other)
    assert MAX_TRAINERS_OF_A_USER < 512


def test_trainer_registers_with_later_daemons(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer registers with a daemon that comes later and with the next; its last words wait for it."""
    monkeypatch.setattr("ciuic.protocol.watch_client.UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr("ciuic.protocol.watch_client.KNOWN_SECONDS", 0.05)
    page = HeartbeatPage()
    troubles: list[CiuicError] = []
    with life() as mine:
        known = Registration(
            lambda: str(short_tmp / "watch.sock"), ME, [mine, page.fd], on_trouble=troubles.append
        )
        known.start()
        # The call returns once it is known that there is no daemon.
        known.wait_until_known(30)
        for _ in range(2):
            with ServedWatch(short_tmp) as served:
                deadline = threading.Event()
                while served.names() != ["me"]:
                    assert not deadline.wait(0.02)
                known.wait_until_known(30)
        assert {type(trouble) for trouble in troubles} == {Unreachable}


def test_the_last_words_wait_for_the_next_daemon_before_its_end_was_noticed(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last words of a trainer killed with its daemon wait for the next daemon.

    The thread that watches the daemon has not run since, so its end was not noticed.
    """
    monkeypatch.setattr("ciuic.protocol.watch_client.KNOWN_SECONDS", 0.05)
    has_run, until_gone = threading.Event(), watch_client._until_gone

    def noticed_late(connection: socket.socket) -> None:
        has_run.wait()
        until_gone(connection)

    monkeypatch.setattr(watch_client, "_until_gone", noticed_late)
    page = HeartbeatPage()
    with life() as mine:
        known = Registration(lambda: str(short_tmp / "watch.sock"), ME, [mine, page.fd])
        with ServedWatch(short_tmp) as served:
            known.start()
            until("the trainer", lambda: served.names() == ["me"])
            known.wait_until_known(30)
        words = threading.Thread(target=known.wait_until_known, args=[60])
        words.start()
        words.join(0.2)
        assert words.is_alive()
        with ServedWatch(short_tmp):
            has_run.set()
            words.join(30)
            assert not words.is_alive()


def test_the_socket_is_where_the_configuration_says(tmp_path: Path) -> None:
    """The socket is in the configured runtime directory, or the default one without configuration."""
    file = tmp_path / "ciuic.toml"
    file.write_text('[daemon]\nruntime_dir = "/run/other"\n')
    assert watch_socket({"CIUIC_CONFIG": str(file)}) == "/run/other/watch.sock"
    file.write_text("[daemon")
    assert watch_socket({"CIUIC_CONFIG": str(file)}) == "/run/ciuic/watch.sock"
    assert watch_socket({"CIUIC_CONFIG": str(tmp_path / "none")}) == "/run/ciuic/watch.sock"


def test_a_refusal_is_read_although_the_daemon_closed_the_connection() -> None:
    """A refusal is read although the daemon closed the connection before it read the request."""
    ours, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"a question that nobody reads")
        daemons.send(b"refused")
        daemons.close()
        assert receive_queued(lambda: ours.recv(100)) == b"refused"
