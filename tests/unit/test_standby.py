"""The process that is kept ready: it forks workers, says how they ended, and is missed by nobody when it is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.child_process import environment
from ciuic.fuse_layer.standby import SpareProcess

_REFUSED = 2
"""Of a worker with a command line that it does not understand (argparse)."""


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[SpareProcess]:
    made = SpareProcess(tmp_path, environment())
    made.prepare()
    try:
        yield made
    finally:
        made.close()


def test_it_forks_one_worker_after_the_other_and_says_how_each_ended(spare: SpareProcess) -> None:
    """Each gets its arguments and descriptors, and descriptors stay with nobody else: their pipe ends with the worker."""
    for _ in range(2):
        reader, writer = os.pipe()
        worker = spare.become(["--nonsense"], [writer])
        os.close(writer)
        assert worker is not None
        assert os.read(reader, 1) == b""
        os.close(reader)
        assert worker.wait() == _REFUSED
        assert worker.poll() == _REFUSED
        worker.kill()  # it has ended: nobody else is hit


def test_when_it_was_killed_there_is_no_worker_until_the_next_is_ready(spare: SpareProcess) -> None:
    """Whoever needs a worker then starts one without it."""
    assert spare._child is not None
    os.kill(spare._child.pid, signal.SIGKILL)
    assert spare.become(["--nonsense"], []) is None
    spare.prepare()
    worker = spare.become(["--nonsense"], [])
    assert worker is not None
    assert worker.wait() == _REFUSED


def test_it_says_when_it_is_ready(spare: SpareProcess) -> None:
    """After that a fork waits for no import; one that was killed meanwhile is replaced first."""
    assert spare.await_ready()
    assert spare._child is not None
    os.kill(spare._child.pid, signal.SIGKILL)
    assert spare.await_ready()
    worker = spare.become(["--nonsense"], [])
    assert worker is not None
    assert worker.wait() == _REFUSED


def test_it_works_where_descriptors_have_high_numbers(spare: SpareProcess) -> None:
    """select(2) ends at 1024."""
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
