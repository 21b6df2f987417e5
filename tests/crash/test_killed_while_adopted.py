"""Daemon, worker and keeper that are killed or stopped at each request between them: no call of the job fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
import trio
from support import injection
from support.holders import Holders
from support.overlay import DRIVER, Overlay
from support.site import Site
from support.site import kernel_site as kernel_site
from support.until import until

from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots import mount_hooks, sessions, worker_process
from ciuic.daemon.roots.mount_hooks import RealMounts
from ciuic.daemon.roots.sessions import SessionStore
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerOptions
from ciuic.protocol.worker_client import peer_pid
from ciuic.system.poll import readable
from ciuic.system.sd_daemon import Notifier

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(DRIVER != "kernel", reason="sessions outlive the workers of the kernel driver alone"),
]

_ANSWER_SECONDS = 25
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


class Job:
    """A program that works below a root, with a file that it keeps open."""

    def __init__(self, root: Path) -> None:
        self.written = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _JOB, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self) -> None:
        """Have the next calls made."""
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)
        self.written += 1

    def check(self) -> None:
        """Compare what they return with a plain directory's."""
        assert self._process.stdout is not None
        assert readable(self._process.stdout.fileno(), _ANSWER_SECONDS), "the job hangs"
        assert self._process.stdout.readline() == f"wrote {self.written}\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Bench:
    """A root with a job in it, whose worker dies at chosen requests."""

    def __init__(self, overlay: Overlay, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overlay, self.control = overlay, control
        self.job = Job(overlay.root)
        self.before_request: Callable[[int], None] = lambda number: None
        self.requests = 0
        self.workers: list[OverlayWorker] = []

        def before(do: str) -> None:
            number, self.requests = self.requests, self.requests + 1
            self.before_request(number)

        injection.count_requests(before, monkeypatch.setattr)

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
        """Send a signal to the worker that listens."""
        pid = peer_pid(self.control)
        assert pid is not None
        injection.send(pid, number)

    def check_job(self) -> None:
        self.job.begin()
        self.job.check()

    def close(self) -> None:
        self.job.close()
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
    step = 0 if is_held else 2
    while True:
        sent: list[int] = []
        adopted = peer_pid(bench.control)

        def inject(
            number: int, step: int = step, sent: list[int] = sent, adopted: int | None = adopted
        ) -> None:
            # Its successor, on a machine too busy for the adoption, is what the supervisor watches over.
            if number == step and not sent and peer_pid(bench.control) == adopted:
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
        if sent:
            step += 1
        elif peer_pid(bench.control) == adopted:
            break
    assert step >= 3


class Holding:
    """A root with a job in it, whose daemon, worker or keeper get a signal at chosen requests."""

    def __init__(self, site: Site) -> None:
        self.site, self.root = site, site.root("a")
        self.control = RuntimeDirectory(site.top / "run").worker_socket(str(self.root))
        self.holders = Holders(site, self.root)
        self.plan = site.top / "plan"
        site.impatient = True
        site.environment = {injection.PLAN: str(self.plan)}
        site.start()
        self.holders.complete()
        self.device = os.stat(self.root).st_dev
        self.job = Job(self.root)
        self.check_job()

    def check_job(self) -> None:
        self.job.begin()
        self.job.check()

    def daemon_state(self) -> str:
        """Return the state of the daemon's process: T where it is stopped, Z where it has ended."""
        assert self.site.process is not None
        return Path(f"/proc/{self.site.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _until(self, event: str, since: int) -> None:
        """Wait until the daemon logs an event, is stopped or has ended."""

        def happened() -> bool:
            return event in self.site.log.read_text()[since:] or self.daemon_state() in "TZ"

        until(event, happened)

    def start(self) -> None:
        since = self._logged()
        self.site.process = self.site.launch()
        self._until("daemon_ready", since)

    def _logged(self) -> int:
        return len(self.site.log.read_text())

    def begin(self, step: str) -> None:
        """Have the daemon do what the step is named after."""
        if step in ("starting", "upgrading"):
            self.site.kill()
            if step == "upgrading":
                self.site.environment[injection.VERSION] = "next"
            try:
                self.start()
            finally:
                self.site.environment.pop(injection.VERSION, None)
        elif step == "stopping":
            assert self.site.process is not None
            self.site.process.send_signal(signal.SIGTERM)
            until("the daemon's end", lambda: self.daemon_state() in "TZ")
        else:
            roots = self.site.roots
            for self.site.roots in ([path for path in roots if path != self.root], roots):
                if self.daemon_state() in "TZ":
                    continue
                assert self.site.process is not None
                since = self._logged()
                self.site.write_config()
                self.site.process.send_signal(signal.SIGHUP)
                self._until("configuration_reloaded", since)

    def inject(self, step: str, number: int, targets: Sequence[str], name: str) -> bool:
        """Send a signal at a request of a step; return whether there was such a request."""
        self.plan.write_text(
            json.dumps(
                {
                    "step": number,
                    "targets": targets,
                    "signal": getattr(signal, name),
                    "control": str(self.control),
                    "runtime": str(self.site.top / "run"),
                }
            )
        )
        self.begin(step)
        until(
            "three holders, or the daemon's end",
            lambda: self.daemon_state() in "TZ" or len(self.holders.pids()) == 3,
        )
        was_sent = False
        try:
            self.plan.unlink()
        except FileNotFoundError:
            was_sent = True
            if "daemon" in targets:
                until("the daemon's end", lambda: self.daemon_state() in "TZ")
        self.job.begin()
        if self.daemon_state() == "T":
            # As systemd's watchdog does.
            self.site.kill()
            self.start()
        elif self.daemon_state() == "Z":
            assert self.site.process is not None
            self.site.process.wait()
            self.site.process = None
        self.job.check()
        if self.site.process is None:
            self.start()
        self.check_job()
        self.holders.complete()
        until("one keeper", lambda: len(injection.keeper_pids(self.site.top / "run")) == 1)
        assert self.site.overlays(self.root) == 1
        assert os.stat(self.root).st_dev == self.device
        return was_sent


@pytest.fixture
def holding(site: Site) -> Iterator[Holding]:
    made = Holding(site)
    try:
        yield made
    finally:
        made.job.close()
    made.site.stop()
    until("the keeper's end", lambda: not injection.keeper_pids(site.top / "run"))


_STEPS = ("starting", "upgrading", "stopping", "reloading")
_PAIRS = ("worker keeper", "daemon worker", "daemon keeper")
_STRIDE = int(os.environ.get("CIUIC_TEST_STRIDE", "4"))
"""Distance of the requests at which the long tail sends its signals; 1: at every one."""


@pytest.mark.parametrize("step", ["stopping", "reloading"])
def test_a_worker_killed_at_any_request_costs_the_job_nothing(holding: Holding, step: str) -> None:
    """The job's open file and new calls succeed whichever request of a stop or a reload kills the worker."""
    assert _injected(holding, step, ["worker"], "SIGKILL", 0, 1) >= 3


@pytest.mark.full
@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize(
    ("targets", "name"),
    [
        *((target, name) for target in ("daemon", "worker", "keeper") for name in ("SIGKILL", "SIGSTOP")),
        *((pair, "SIGKILL") for pair in _PAIRS),
    ],
)
def test_any_two_that_end_at_any_request_cost_the_job_nothing(
    holding: Holding, step: str, name: str, targets: str
) -> None:
    """The job's open file and new calls succeed whichever request kills one or two of daemon, worker and keeper, or stops one."""
    # Of the two that a daemon that was killed leaves, none may die before the next one has taken the session.
    first = 2 if step in ("starting", "upgrading") and targets == "worker keeper" else 0
    # Each combination begins at another request.
    first += len(targets + name + step) % _STRIDE
    _injected(holding, step, targets.split(), name, first, _STRIDE)


def _injected(holding: Holding, step: str, targets: Sequence[str], name: str, first: int, stride: int) -> int:
    """Inject at each of the requests of a step, and return the number of the one that it did not have."""
    for number in count(first, stride):
        if not holding.inject(step, number, targets, name):
            return number
    raise AssertionError
