"""Workers that are killed or stopped at each step of their adoption by the next daemon: no call of the job fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from support.overlay import DRIVER, Overlay

from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.base.systemd import Notifier
from ciuic.daemon.roots import mount_hooks, sessions, worker_process
from ciuic.daemon.roots.mount_hooks import RealMounts
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerOptions
from ciuic.protocol.worker_client import WorkerControlClient, peer_pid

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(DRIVER != "kernel", reason="sessions outlive the workers of the kernel driver alone"),
]

_JOB = """
import os, sys
log = os.open(sys.argv[1] + "/log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
for line in sys.stdin:
    try:
        os.write(log, b"x")
        os.close(os.open(sys.argv[1] + "/new", os.O_CREAT | os.O_RDWR))
        os.unlink(sys.argv[1] + "/new")
        print("wrote", os.fstat(log).st_size, flush=True)
    except OSError as error:
        print(error, flush=True)
"""


class Bench:
    """A root with a job in it, whose worker dies at chosen requests."""

    def __init__(self, overlay: Overlay, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overlay, self.control = overlay, control
        self.job = subprocess.Popen(
            [sys.executable, "-c", _JOB, str(overlay.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.written = 0
        self.before_request: Callable[[int], None] = lambda number: None
        self.requests = 0
        self.workers: list[OverlayWorker] = []
        real = WorkerControlClient._ask

        def ask(client: WorkerControlClient, do: str, **rest: Any) -> Any:
            number, self.requests = self.requests, self.requests + 1
            self.before_request(number)
            return real(client, do, **rest)

        monkeypatch.setattr(WorkerControlClient, "_ask", ask)

    def establish(self, stored: dict[str, int]) -> OverlayWorker:
        """Serve the root as the next daemon does."""
        self.requests = 0
        options = WorkerOptions(str(self.overlay.root), self.control, "kernel", 4096, 1 << 30)
        hooks = RealMounts(lambda settings: options, lambda root: (), kept=SessionStore(Notifier(), stored))
        worker = trio.run(hooks.establish, RootSettings(options.root))
        self.workers.append(worker)
        assert not stored
        return worker

    def send(self, number: int) -> None:
        """Send a signal to the worker that listens, and wait until it has taken effect."""
        pid = peer_pid(self.control)
        assert pid is not None
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, number)
            if number == signal.SIGKILL:
                trio.run(trio.lowlevel.wait_readable, pidfd)
        finally:
            os.close(pidfd)

    def check_job(self) -> None:
        """Compare what the job's next calls return with a plain directory's."""
        assert self.job.stdin is not None
        assert self.job.stdout is not None
        print("go", file=self.job.stdin, flush=True)
        self.written += 1
        assert self.job.stdout.readline() == f"wrote {self.written}\n"

    def close(self) -> None:
        self.job.kill()
        self.job.communicate()
        for worker in self.workers:
            if not worker.closed:
                worker.kill()
                worker.close()


@pytest.fixture
def bench(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    root, control = short_tmp / "root", short_tmp / "w.sock"
    root.mkdir()
    with Overlay(root, control) as overlay:
        made = Bench(overlay, control, monkeypatch)
        try:
            made.check_job()
            yield made
        finally:
            made.close()
            overlay.kill()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_worker_that_ends_at_any_step_of_its_adoption_costs_the_job_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, is_held: bool
) -> None:
    """The job's open file and new calls succeed whichever request of the adoption kills or stops the worker.

    Its session is held by a keeper, or was asked of the worker in the first two requests.
    """
    monkeypatch.setattr(worker_process, "_ADOPTION_SECONDS", 0.3)
    monkeypatch.setattr(mount_hooks, "_PROBE_TIMEOUT_SECONDS", 0.3)
    worker = bench.establish({})
    device = os.stat(bench.overlay.root).st_dev
    for step in count(0 if is_held else 2):
        sent: list[int] = []

        def inject(number: int, step: int = step, sent: list[int] = sent) -> None:
            if number == step and not sent:
                sent.append(number)
                bench.send(getattr(signal, name))

        bench.before_request = inject
        stored: dict[str, int] = {}
        if is_held:
            assert worker.session_fd is not None
            root = str(bench.overlay.root)
            stored[sessions._name("session", root)] = os.dup(worker.session_fd)
            stored[sessions._name("backing", root)] = os.dup(worker.backing_fd)
        worker.close()
        worker = bench.establish(stored)
        bench.check_job()
        assert os.stat(bench.overlay.root).st_dev == device
        if not sent:
            break
    assert step >= 3
