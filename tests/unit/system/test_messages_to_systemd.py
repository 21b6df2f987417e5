"""Tests of the messages to systemd, as it receives them, and of a log that cannot be written."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.system.logs import LogStream
from ciuic.system.sd_daemon import Notifier, take_stored_fds


@pytest.fixture
def manager(short_tmp: Path) -> Iterator[socket.socket]:
    """Return the service manager's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(short_tmp / "notify"))
        sock.settimeout(5)
        yield sock


def test_states_are_sent_one_datagram_each(manager: socket.socket) -> None:
    """States are sent as datagrams of sd_notify(3), and a status cannot add a second assignment."""
    notifier = Notifier(str(manager.getsockname()))
    notifier.ready("2 roots\nREADY=0")
    notifier.watchdog()
    notifier.status("fine")
    notifier.stopping("bye")
    assert [manager.recv(999) for _ in range(4)] == [
        b"READY=1\nSTATUS=2 roots READY=0",
        b"WATCHDOG=1",
        b"STATUS=fine",
        b"STOPPING=1\nSTATUS=bye",
    ]
    notifier.close()


def test_a_stored_descriptor_travels_with_its_name(manager: socket.socket, tmp_path: Path) -> None:
    """FDSTORE carries a duplicate of the descriptor under its name."""
    notifier = Notifier(str(manager.getsockname()))
    fd = os.open(tmp_path, os.O_PATH)
    notifier.store("control", fd)
    text, fds, _, _ = socket.recv_fds(manager, 999, 4)
    assert text == b"FDSTORE=1\nFDNAME=control\nFDPOLL=0"
    assert os.path.samestat(os.fstat(fds[0]), os.fstat(fd))
    notifier.unstore("control")
    assert manager.recv(999) == b"FDSTOREREMOVE=1\nFDNAME=control"
    for each in (fd, *fds):
        os.close(each)
    notifier.close()


def test_the_variables_are_not_passed_on(manager: socket.socket) -> None:
    """The variables are removed, so workers and captures cannot notify in the daemon's name."""
    environment = {
        "NOTIFY_SOCKET": manager.getsockname(),
        "WATCHDOG_USEC": "6000000",
        "WATCHDOG_PID": "5",
        "X": "y",
    }
    notifier = Notifier.from_environment(environment, 5)
    assert environment == {"X": "y"}
    assert notifier.watchdog_seconds == 6.0
    notifier.close()


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "6"}],
)
def test_no_watchdog_is_no_watchdog(environment: dict[str, str]) -> None:
    """An absent, zero or unreadable watchdog setting, or one of another process, means no watchdog."""
    assert Notifier.from_environment(environment, 5).watchdog_seconds is None


def test_without_a_manager_nothing_happens() -> None:
    """Every call is a no-op without a service manager, as in a terminal."""
    notifier = Notifier()
    notifier.ready("x")
    notifier.store("a", 0)
    assert not notifier.active


def test_a_manager_that_does_not_read_never_blocks(manager: socket.socket) -> None:
    """A full or vanished notification socket is logged and does not block the daemon."""
    notifier = Notifier(str(manager.getsockname()))
    for _ in range(2000):
        notifier.watchdog()
    os.unlink(manager.getsockname())
    notifier.status("still here")
    notifier.close()


def test_stored_descriptors_come_back_by_name(tmp_path: Path) -> None:
    """Descriptors are taken in order from number 3 and marked close-on-exec; the variables are removed."""
    pid = os.fork()
    if pid == 0:
        try:
            first, second = os.open(tmp_path, os.O_RDONLY), os.open("/", os.O_RDONLY)
            expected = (os.fstat(first).st_ino, os.fstat(second).st_ino)
            high = [os.dup2(fd, 40 + index, True) for index, fd in enumerate((first, second))]
            for index, fd in enumerate(high):
                os.dup2(fd, 3 + index, True)
            environment = {
                "LISTEN_FDS": "2",
                "LISTEN_PID": str(os.getpid()),
                "LISTEN_FDNAMES": "control:root",
            }
            stored = take_stored_fds(environment, os.getpid())
            good = (
                stored == {"control": 3, "root": 4}
                and (os.fstat(3).st_ino, os.fstat(4).st_ino) == expected
                and not os.get_inheritable(3)
                and environment == {}
            )
            os._exit(0 if good else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_processs_descriptors_are_not_ours() -> None:
    """Descriptors for the LISTEN_PID of another process are not taken, and the variables are removed."""
    environment = {"LISTEN_FDS": "2", "LISTEN_PID": "1"}
    assert take_stored_fds(environment, 5) == {}
    assert environment == {}


def test_a_reader_that_is_gone_costs_the_lines_alone() -> None:
    """A pipe without a reader loses lines without an exception."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as raw:
        log = LogStream(io.TextIOWrapper(raw, line_buffering=True))
        for _ in range(3):
            log.write("line\n")
            log.flush()
        assert not log.isatty()


def test_lines_reach_a_reader() -> None:
    """Lines reach a reader as they were written."""
    file = io.StringIO()
    log = LogStream(file)
    assert log.write("line\n") == 5
    log.flush()
    assert file.getvalue() == "line\n"
