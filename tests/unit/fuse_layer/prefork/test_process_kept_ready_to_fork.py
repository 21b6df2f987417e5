"""Tests of the process kept ready to fork workers, and of what happens without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

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
