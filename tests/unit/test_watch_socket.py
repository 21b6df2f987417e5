"""The socket on which trainers make themselves known: whom it takes, what it refuses, and that nothing stays open."""

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
from support.live import wait_for
from support.peers import connected, send_descriptors
from support.served_watch import ServedWatch

from ciuic import acquaintance
from ciuic.acquaintance import Acquaintance
from ciuic.daemon.trainers import MOST_OF_A_USER
from ciuic.errors import Busy, CiuicError, Unreachable, UsageError
from ciuic.processes import start_ticks
from ciuic.readiness import receive_answer
from ciuic.watch_client import Hello, introduce, watch_socket
from ciuic.watch_page import Page

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


def test_what_is_no_trainer_is_refused_and_nothing_stays_open(served: ServedWatch) -> None:
    """Other descriptors, none, too many, pages that are none, names that no terminal should get, bytes that mean nothing."""
    page = Page()
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
        wait_for("the end of the connections", lambda: open_fds() <= before, 30)
    os.close(null)
    assert served.names() == ["me"]


def test_one_user_has_so_many_places(served: ServedWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has used his up is refused, and his descriptors are closed."""
    monkeypatch.setattr("ciuic.daemon.trainers.MOST", 1)
    with life() as mine:
        introduce(served.path, ME, [mine], seconds=30).close()
        child = subprocess.Popen(["sleep", "60"])
        other = os.pidfd_open(child.pid)
        try:
            before = open_fds()
            with pytest.raises(Busy):
                introduce(served.path, ME, [other], seconds=30)
            wait_for("the end of the connection", lambda: open_fds() <= before, 30)
        finally:
            child.kill()
            child.wait()
            os.close(other)
    assert MOST_OF_A_USER < 512


def test_a_daemon_that_comes_later_or_again_is_told(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is no error; one that comes is told, and the next one too; the last words wait for it."""
    monkeypatch.setattr("ciuic.acquaintance.UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr("ciuic.acquaintance.KNOWN_SECONDS", 0.05)
    page = Page()
    troubles: list[CiuicError] = []
    with life() as mine:
        known = Acquaintance(
            lambda: str(short_tmp / "watch.sock"), ME, [mine, page.fd], on_trouble=troubles.append
        )
        known.start()
        known.last_words(30)  # there was none: this ends when it is known that there is none
        for _ in range(2):
            with ServedWatch(short_tmp) as served:
                deadline = threading.Event()
                while served.names() != ["me"]:
                    assert not deadline.wait(0.02)
                known.last_words(30)
        assert {type(trouble) for trouble in troubles} == {Unreachable}


def test_the_last_words_wait_for_the_next_daemon_before_its_end_was_noticed(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daemon and trainer were killed together, and the thread that watches the daemon has not run since."""
    monkeypatch.setattr("ciuic.acquaintance.KNOWN_SECONDS", 0.05)
    has_run, until_gone = threading.Event(), acquaintance._until_gone

    def noticed_late(connection: socket.socket) -> None:
        has_run.wait()
        until_gone(connection)

    monkeypatch.setattr(acquaintance, "_until_gone", noticed_late)
    page = Page()
    with life() as mine:
        known = Acquaintance(lambda: str(short_tmp / "watch.sock"), ME, [mine, page.fd])
        with ServedWatch(short_tmp) as served:
            known.start()
            wait_for("the trainer", lambda: served.names() == ["me"], 30)
            known.last_words(30)
        words = threading.Thread(target=known.last_words, args=[60])
        words.start()
        words.join(0.2)
        assert words.is_alive()
        with ServedWatch(short_tmp):
            has_run.set()
            words.join(30)
            assert not words.is_alive()


def test_the_socket_is_where_the_configuration_says(tmp_path: Path) -> None:
    """In the runtime directory; in the usual one where there is no configuration that could be read."""
    file = tmp_path / "ciuic.toml"
    file.write_text('[daemon]\nruntime_dir = "/run/other"\n')
    assert watch_socket({"CIUIC_CONFIG": str(file)}) == "/run/other/watch.sock"
    file.write_text("[daemon")
    assert watch_socket({"CIUIC_CONFIG": str(file)}) == "/run/ciuic/watch.sock"
    assert watch_socket({"CIUIC_CONFIG": str(tmp_path / "none")}) == "/run/ciuic/watch.sock"


def test_a_refusal_is_read_although_the_daemon_hung_up_on_what_was_sent() -> None:
    """The daemon refuses and closes before it has read the question: the caller learns why."""
    ours, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"a question that nobody reads")
        daemons.send(b"refused")
        daemons.close()
        assert receive_answer(ours, 100) == b"refused"
