"""Tests of the process kept ready to fork workers: their descriptors, and what happens without it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import leftovers
from support.until import until

from ciuic.fuse_layer import standby
from ciuic.fuse_layer.prefork import messages
from ciuic.fuse_layer.prefork.client import SpareProcess
from ciuic.system.child_process import environment

_REFUSED = 2
"""Exit status of a worker with a command line that it does not understand (argparse)."""


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[SpareProcess]:
    made = SpareProcess(tmp_path, environment())
    made.prepare()
    try:
        yield made
    finally:
        made.close()


def test_workers_are_forked_one_after_the_other(spare: SpareProcess) -> None:
    """Each forked worker gets its arguments and descriptors, and its end is reported.

    Descriptors stay with no other process: a worker's pipe ends with it.
    """
    for _ in range(2):
        reader, writer = os.pipe()
        worker = spare.become(["--nonsense"], [writer])
        os.close(writer)
        assert worker is not None
        assert os.read(reader, 1) == b""
        os.close(reader)
        assert worker.wait() == _REFUSED
        assert worker.poll() == _REFUSED
        # The worker has ended, so no other process is hit.
        worker.kill()


def test_killed_process_forks_no_worker_until_it_is_replaced(spare: SpareProcess) -> None:
    """A fork fails after the process was killed, until the next one is ready.

    A worker starts without it meanwhile.
    """
    assert spare._child is not None
    os.kill(spare._child.pid, signal.SIGKILL)
    assert spare.become(["--nonsense"], []) is None
    spare.prepare()
    worker = spare.become(["--nonsense"], [])
    assert worker is not None
    assert worker.wait() == _REFUSED


def test_process_reports_that_it_is_ready(spare: SpareProcess) -> None:
    """Once it reports ready a fork waits for no import, and one killed meanwhile is replaced first."""
    assert spare.await_ready()
    assert spare._child is not None
    os.kill(spare._child.pid, signal.SIGKILL)
    assert spare.await_ready()
    worker = spare.become(["--nonsense"], [])
    assert worker is not None
    assert worker.wait() == _REFUSED


def test_descriptors_with_high_numbers_work(spare: SpareProcess) -> None:
    """Descriptors beyond 1024, the limit of select(2), work."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while held[-1] < 1100:
            held.append(os.dup(held[-1]))
        worker = spare.become(["--nonsense"], [])
        assert worker is not None
        assert worker.wait() == _REFUSED
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_FIRST = 700
"""First number of these tests: above all that this process has open, below the usual limit of 1024."""


@settings(deadline=None)
@given(st.lists(st.integers(_FIRST - 10, _FIRST + 40), unique=True, max_size=30))
@example(list(range(_FIRST + 29, _FIRST - 1, -1)))
@example([_FIRST + 1, _FIRST])
@example([_FIRST])
def test_descriptors_get_their_numbers_whatever_they_had(numbers: list[int]) -> None:
    """Each descriptor is found under its new number and no longer under its old one, in any arrangement."""
    wanted = []
    try:
        for number in numbers:
            made = os.memfd_create("passed")
            wanted.append(os.fstat(made).st_ino)
            os.dup2(made, number, inheritable=False)
            os.close(made)
        standby._renumber(numbers, _FIRST)
        targets = range(_FIRST, _FIRST + len(numbers))
        assert [os.fstat(fd).st_ino for fd in targets] == wanted
        assert not any(os.get_inheritable(fd) for fd in targets)
        # What else this process has open may be closed meanwhile, by the garbage collector say.
        found = [fd for fd, name in leftovers.descriptors().items() if name.startswith("/memfd:passed")]
        assert sorted(found) == list(targets)
    finally:
        os.closerange(_FIRST - 10, _FIRST + 80)


# The forking process has a program of ours that prints what it finds under the first and last numbers.
_PROGRAM = """
import os, sys, types
from ciuic.fuse_layer import standby
from ciuic.fuse_layer.prefork import messages
def main(arguments):
    first = messages.FIRST_PASSED_FD
    found = [os.fstat(first + index).st_ino for index in range(int(arguments[0]))]
    os.write(first, repr(found).encode())
    return 0
sys.modules["program"] = types.ModuleType("program")
sys.modules["program"].main = main
sys.exit(standby.main("program"))
"""


def test_a_process_is_given_as_many_descriptors_as_a_request_holds() -> None:
    """A forked process finds every descriptor of the largest request in its place."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=theirs, env=environment()) as forker:
        theirs.close()
        fds = [os.memfd_create("passed") for _ in range(messages.MAX_FDS)]
        try:
            socket.send_fds(ours, [b'["%d"]' % len(fds)], fds)
            ours.settimeout(60)
            assert int(ours.recv(100)) > 0
            until("the forked process", lambda: os.fstat(fds[0]).st_size > 0)
            found = os.pread(fds[0], 1 << 16, 0)
            assert found == repr([os.fstat(fd).st_ino for fd in fds]).encode()
        finally:
            for fd in fds:
                os.close(fd)
            ours.close()
        assert forker.wait(60) == 0
