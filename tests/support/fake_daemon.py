"""Stand-ins for workers, store and capture, to test the daemon's own decisions without mounts.

The documents of the control socket are served by a small HTTP server.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import trio

from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.runtime import RuntimeDirectory
from ciuic.daemon.base.settings import RootSettings, Settings
from ciuic.daemon.capture.job import CaptureJob, CaptureProgress, Done, Failed
from ciuic.daemon.roots.supervisor import RootSupervisor
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.daemon.snapshots.capturing import Context
from ciuic.daemon.snapshots.requests import Snapshots
from ciuic.errors import Unreachable
from ciuic.fuse_layer.system.mounts import MovedMounts
from ciuic.protocol.worker_frames import CutReply, NameCounts, WatchedNames, WorkerStatus
from ciuic.repository.promised import Promise
from ciuic.system.bypass import Bypasser, BypassingMount
from ciuic.system.open_files import MountUser
from ciuic.system.urgency import Urgency
from ciuic.types import SnapshotId


class FakeOverlay:
    """Control half of one worker: epochs, and a record of requests in order."""

    def __init__(
        self, name: str = "", *, fail_on: Collection[str] = (), log: list[str] | None = None
    ) -> None:
        self.name = name
        self.fail_on = set(fail_on)
        self.log = log if log is not None else []
        self.epoch = 1
        self.pending: list[int] = []
        self.held = False
        self.in_use = False
        """Somebody is in the mount, so that a stop does not unmount it."""
        self.committed: list[int] = []
        self.aborted: list[int] = []
        self.prepared_seconds: list[float] = []

    def do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}".strip())
        if what in self.fail_on:
            raise Unreachable(f"{self.name} does not answer to {what}")


class FakeClient:
    """Connection to a FakeOverlay."""

    def __init__(self, overlay: FakeOverlay, session: str = "s") -> None:
        self.overlay = overlay
        self._session = session

    def status(self) -> WorkerStatus:
        self.overlay.do("status")
        return WorkerStatus(
            session=self._session, epoch=self.overlay.epoch, pending=tuple(self.overlay.pending)
        )

    def backing_fd(self) -> int:
        return os.open("/", os.O_PATH)

    def prepare(self, timeout_seconds: float) -> bool:
        self.overlay.prepared_seconds.append(timeout_seconds)
        if "prepare" in self.overlay.fail_on:
            raise Unreachable(f"{self.overlay.name} does not answer to prepare")
        return True

    def writers(self) -> list[bytes]:
        return []

    def name_events(self, wanted: WatchedNames) -> NameCounts:
        return NameCounts(counts=(0,) * len(wanted.rules), epoch=1)

    def hold(self, timeout_seconds: float) -> None:
        self.overlay.do("hold")
        self.overlay.held = True

    def cut(self) -> CutReply:
        self.overlay.do("cut")
        epoch = self.overlay.epoch
        self.overlay.epoch += 1
        self.overlay.pending.append(epoch)
        return CutReply(epoch=epoch, cut_ns=1_000_000_000 * epoch, hold_us=50)

    def release(self) -> None:
        self.overlay.held = False
        self.overlay.do("release")

    def committed(self, epoch: int) -> None:
        self.overlay.do("committed")
        # A worker ignores epochs that it does not know.
        if epoch in self.overlay.pending:
            self.overlay.pending.remove(epoch)
            self.overlay.committed.append(epoch)

    def alive(self) -> None:
        self.overlay.do("alive")

    def abort(self, epoch: int) -> None:
        self.overlay.do("abort")
        if epoch in self.overlay.pending:
            self.overlay.pending.remove(epoch)
            self.overlay.aborted.append(epoch)

    def stop(self, grace_seconds: float) -> bool:
        self.overlay.do("stop")
        return not self.overlay.in_use

    def stay(self) -> None:
        self.overlay.do("stay")

    def close(self) -> None:
        self.overlay.held = False


def sleeping_process() -> subprocess.Popen[bytes]:
    """Start a process that does nothing until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


class FakeWorker(OverlayWorker):
    """A real process (so that pidfds work) with a fake control channel."""

    def __init__(self, overlay: FakeOverlay, session: str) -> None:
        child = sleeping_process()
        super().__init__(
            child.pid,
            os.open("/", os.O_PATH),
            session,
            lambda: cast("WorkerClient", FakeClient(overlay, session)),
            child=child,
        )
        self.overlay = overlay
        self.child = child
        self._ended = False

    def kill(self) -> None:
        if self._ended:
            return
        self._ended = True
        # Not through Popen, which has forgotten a process after it was released.
        os.kill(self.pid, signal.SIGKILL)
        if self.child.returncode is None:
            self.child.wait()
        else:
            os.waitpid(self.pid, 0)


class FakeStore:
    """Committed epochs in memory."""

    def __init__(self) -> None:
        self.path = Path("/nowhere")
        self.epochs: dict[tuple[str, str, int], str] = {}
        self.promises: dict[str, Promise] = {}
        self.count = 0

    def ensure(self, root_fds: Sequence[int] = ()) -> None:
        pass

    def new_id(self, taken: frozenset[str]) -> SnapshotId:
        self.count += 1
        return SnapshotId(f"cs-{self.count:06x}")

    def promise(self, promise: Promise) -> None:
        self.promises[promise.id] = promise

    def keep_promise(self, snapshot_id: str) -> None:
        self.promises.pop(snapshot_id, None)

    def lose(self, promise: Promise) -> None:
        self.promises[promise.id] = promise

    def open_promises(self, known: Collection[str]) -> list[Promise]:
        return [one for one in self.promises.values() if not one.reason and one.id not in known]

    def has_all(self, roots: Sequence[str]) -> bool:
        return all(any(root == known for known, _, _ in self.epochs) for root in roots)

    def snapshot_of_epoch(self, root: str, session: str, epoch: int) -> Any:
        found = self.epochs.get((root, session, epoch))
        return FakeInfo(SnapshotId(found)) if found else None

    def roots_of(self, snapshot_id: str) -> frozenset[str]:
        return frozenset(root for (root, _, _), id_ in self.epochs.items() if id_ == snapshot_id)


class FakeInfo(NamedTuple):
    id: SnapshotId
    time_ns: int = 0
    new_bytes: int = 7
    size_bytes: int = 9
    tags: tuple[str, ...] = ()


Outcome = Done | Failed | Exception
Behaviour = Callable[[CaptureJob], Outcome]


def done(job: CaptureJob) -> Done:
    return Done(
        id=job.id,
        new_bytes=5,
        size_bytes=10,
        files=1,
        entries=2,
        files_read=1,
        bytes_read=5,
        modes={},
        seconds=0.1,
    )


class FakeCapture:
    """Capture that answers by ``behaviours``, one per run, the last one for ever; a gate can hold it back."""

    def __init__(self, store: FakeStore, behaviours: Sequence[Behaviour], jobs: list[CaptureJob]) -> None:
        self.pid = 0
        self._store = store
        self._behaviours = behaviours
        self._jobs = jobs
        self.gate: trio.Event | None = None
        self.progress: CaptureProgress | None = None
        self.killed = ""
        self.urged: list[Urgency] = []

    async def run(
        self,
        job: CaptureJob,
        fds: Sequence[int],
        *,
        on_start: Callable[[int], None],
        on_progress: Callable[[CaptureProgress], None],
        on_done: Callable[[Done], Awaitable[None]],
    ) -> Done | Failed:
        behaviour = self._behaviours[min(len(self._jobs), len(self._behaviours) - 1)]
        self._jobs.append(job)
        self.pid = os.getpid()
        on_start(self.pid)
        for fd in fds:
            os.fstat(fd)
        if self.gate is not None:
            await self.gate.wait()
        await trio.lowlevel.checkpoint()
        if self.progress is not None:
            on_progress(self.progress)
        if self.killed:
            return Failed(error=self.killed, code=130)
        outcome = behaviour(job)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, Done):
            absent = {root.path for root in outcome.left_out}
            for root in (root for root in job.roots if root.path not in absent):
                self._store.epochs[(os.fsdecode(root.path), root.session, root.epoch)] = job.id
            await on_done(outcome)
        return outcome

    def urge(self, urgency: Urgency) -> bool:
        self.urged.append(urgency)
        return True

    def kill(self, reason: str) -> None:
        self.killed = reason
        if self.gate is not None:
            self.gate.set()


class NoMounts:
    """MountHooks that return prepared workers."""

    def __init__(self, workers: Sequence[OverlayWorker | Exception]) -> None:
        self.workers = list(workers)
        self.detached = 0
        self.mounted = True
        self.found: list[Bypasser] = []
        self.found_mounts: list[BypassingMount] = []
        self.in_it: list[MountUser] = []
        self.successions: list[bool] = []
        """One entry per succession: True if the successor was to track nothing."""
        self.forgotten = 0
        """Number of requests to all other holders to release a session."""
        self.held: list[str] = []
        """Sessions that are kept for a later supervisor."""

    async def establish(self, settings: RootSettings) -> OverlayWorker:
        await trio.lowlevel.checkpoint()
        if not self.workers:
            await trio.sleep_forever()
        worker = self.workers.pop(0)
        if isinstance(worker, Exception):
            raise worker
        self.mounted = True
        return worker

    async def recover(self, settings: RootSettings) -> OverlayWorker | None:
        await trio.lowlevel.checkpoint()
        return None

    async def prepare_successor(self) -> None:
        await trio.lowlevel.checkpoint()

    async def succeed(self, settings: RootSettings, dead: OverlayWorker, *, plain: bool) -> OverlayWorker:
        self.successions.append(plain)
        return await self.establish(settings)

    def hold(self, root: str, worker: OverlayWorker) -> None:
        self.held.append(worker.session)

    async def forget(self, root: str) -> None:
        await trio.lowlevel.checkpoint()
        self.forgotten += 1

    async def detach_dead(self, root: str) -> None:
        await trio.lowlevel.checkpoint()
        self.detached += 1
        self.mounted = False

    async def is_mounted(self, root: str) -> bool:
        await trio.lowlevel.checkpoint()
        return self.mounted

    async def has_mounts_inside(self, root: str) -> bool:
        return False

    async def move_mounts_inside(self, root: str, backing_fd: int) -> MovedMounts:
        await trio.lowlevel.checkpoint()
        return MovedMounts(root, backing_fd)

    async def unmounted(self, root: str) -> None:
        while self.mounted:  # noqa: ASYNC110  a test takes it away
            await trio.sleep(0.01)

    async def users(self, root: str) -> list[MountUser]:
        await trio.lowlevel.checkpoint()
        return self.in_it

    async def bypassing(
        self, root: str, ignore_pids: Collection[int], only_pids: Collection[int] | None
    ) -> list[Bypasser]:
        await trio.lowlevel.checkpoint()
        return self.found

    async def bypassing_mounts(self, root: str, ignore_pids: Collection[int]) -> list[BypassingMount]:
        await trio.lowlevel.checkpoint()
        return self.found_mounts


class Bench:
    """Snapshots over fake roots, with a record of every report."""

    def __init__(self, runtime: Path, *, behaviours: Sequence[Behaviour] = (done,)) -> None:
        self.time_ns = 10**18
        self.events = EventBus(lambda: self.time_ns)
        self.alerts = Alerts(self.events, lambda: self.time_ns)
        self.store = FakeStore()
        self.jobs: list[CaptureJob] = []
        self.captures: list[FakeCapture] = []
        self.behaviours = list(behaviours)
        self.gates: list[trio.Event | None] = []
        self.progress: CaptureProgress | None = None
        """Progress that each capture reports before it ends."""
        self.roots: dict[str, RootSupervisor] = {}
        self.runtime = RuntimeDirectory(runtime)
        self.workers: list[FakeWorker] = []
        self.mounts: dict[str, NoMounts] = {}
        self.flushed: list[str] = []
        self.flush = self._flush
        """Flush of one root; a test may replace it."""
        self.on_urgency: Callable[[], None] = lambda: None
        self.on_scheduled_lost: Callable[[], None] = lambda: None
        self.snapshots = Snapshots(
            Context(
                settings=lambda: Settings(
                    socket=runtime / "c", runtime_dir=runtime, repository=Path("/nowhere")
                ),
                roots=lambda: self.roots,
                store=lambda: self.store,  # type: ignore[arg-type, return-value]
                runtime=self.runtime,
                alerts=self.alerts,
                events=self.events,
                now_ns=lambda: self.time_ns,
                host="host",
                new_capture=self._new_capture,  # type: ignore[arg-type]
                flush=lambda root, worker: self.flush(root, worker),
                on_urgency=lambda: self.on_urgency(),
                on_scheduled_lost=lambda: self.on_scheduled_lost(),
            )
        )

    def _new_capture(self) -> FakeCapture:
        capture = FakeCapture(self.store, self.behaviours, self.jobs)
        capture.progress = self.progress
        capture.gate = self.gates.pop(0) if self.gates else None
        self.captures.append(capture)
        return capture

    async def _flush(self, root: str, worker: OverlayWorker) -> bool:
        await trio.lowlevel.checkpoint()
        self.flushed.append(root)
        return True

    def add_root(self, path: str, overlay: FakeOverlay, session: str = "s") -> FakeWorker:
        """Add a mounted root."""

        async def on_session(path: str, worker: OverlayWorker) -> None:
            await trio.lowlevel.checkpoint()

        worker = FakeWorker(overlay, session)
        self.workers.append(worker)
        self.mounts[path] = NoMounts([])
        supervisor = RootSupervisor(
            RootSettings(path),
            self.mounts[path],
            alerts=self.alerts,
            events=self.events,
            on_session=on_session,
            on_session_lost=self.snapshots.session_lost,
        )
        supervisor.worker, supervisor.state = worker, "mounted"
        self.roots[path] = supervisor
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.close()


Answer = Callable[[Any], tuple[int, Any]]


def hang_up(_: object) -> tuple[int, Any]:
    """Close the connection in the middle of an answer, as a killed daemon does."""
    raise ConnectionResetError


class FakeDaemon:
    """Server on a unix socket that returns the test's ``answers`` and keeps the ``requests``."""

    def __init__(self, socket: Path) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, Any]] = []
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                # The caller, or `hang_up`, has closed the connection.
                with suppress(ConnectionError):
                    super().handle()

            def do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                key = f"{self.command} {self.path}"
                daemon.requests.append((key, body))
                code, document = daemon.answers[key](body)
                payload = msgspec.json.encode(document)
                self.send_response(code)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_DELETE = do  # noqa: N815 - the names that http.server looks for

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: object) -> None:
                """Drop the access log, which tests do not need."""

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.server = Server(str(socket), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
