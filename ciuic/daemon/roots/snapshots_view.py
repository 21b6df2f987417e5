"""Process that shows the snapshots of a root at `.snapshots` in it: started, watched and started again.

Guarantees: nothing that the job does waits for it, and nothing of a root depends on it. What its end leaves behind answers with an error,
inside `.snapshots` alone, until the next process has mounted. A name of the root's owner is left alone, and looked at every few seconds. A
daemon that restarts leaves the process serving.

A root in which a view is mounted is in use: `end` comes before its worker is asked to unmount it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import structlog
import trio

from ciuic import SNAPSHOTS_DIR_NAME
from ciuic.daemon.base.child_processes import mark_expendable, restart_pause_seconds
from ciuic.daemon.base.events import Alerts
from ciuic.daemon.roots.view_process import NAME_TAKEN, UNSUPPORTED, ViewJob
from ciuic.daemon.roots.worker_process import OverlayWorker, WorkerClient
from ciuic.errors import CiuicError
from ciuic.fuse_layer.system import mounts
from ciuic.system.child_process import environment, module_command
from ciuic.system.processes import describe_exit

VIEW_MODULE: Final = "ciuic.daemon.roots.view_process"
ViewState = Literal["off", "starting", "mounted", "name taken", "unsupported", "failed"]
# Longest pause after one that had mounted.
_DIED_SECONDS: Final = 1.0
# A process that served for so long ends a row of failures.
_STABLE_SECONDS: Final = 10.0
# Failures in a row after which an alert says so.
_TOLD_AFTER: Final = 4
_DETACH_SECONDS: Final = 5.0
# Pause between two looks at the settings.
_LOOK_SECONDS: Final = 1.0
# Pause after which a name of the owner's is looked at again, and a worker asked again that has no such directory.
_TAKEN_SECONDS: Final = 5.0
_UNSUPPORTED_SECONDS: Final = 60.0
log = structlog.get_logger(__name__)


class ViewPlan(NamedTuple):
    """Settings of the views of all roots."""

    job: Callable[[str], ViewJob | None]
    """Returns the job for a root; None where nothing is to be shown."""
    cwd: Path
    command: Sequence[str] = ()
    """Command of a process; empty: the module."""


def _hide(client: WorkerClient) -> None:
    os.close(client.snapshots_directory(0))


class SnapshotsView:
    """View of one root; `run` is its task. Belongs to the trio thread."""

    def __init__(self, root: str, plan: ViewPlan, alerts: Alerts) -> None:
        self._root = root
        self._plan = plan
        self._alerts = alerts
        self.state: ViewState = "off"
        self.leaving = False
        """True if the process is to serve on after `run`."""

    async def run(self, worker: Callable[[], OverlayWorker | None]) -> None:
        """Keep the view mounted until cancelled; ``worker`` returns the one that serves the root."""
        failures = 0
        try:
            while True:
                job, serving = self._plan.job(self._root), worker()
                if job is None or serving is None:
                    if job is None and self.state != "off":
                        await self.end(serving)
                    await trio.sleep(_LOOK_SECONDS)
                    continue
                if self.state == "off":
                    self.state = "starting"
                began = trio.current_time()
                try:
                    if await trio.to_thread.run_sync(_is_taken, serving):
                        status: int | None = NAME_TAKEN
                    else:
                        status = await self._serve(job)
                except OSError as error:
                    log.warning("view_not_started", root=self._root, error=str(error))
                    status = 1
                except Exception:
                    # A defect here must not end the root's supervisor.
                    log.exception("view_not_started", root=self._root)
                    status = 1
                if status in (NAME_TAKEN, UNSUPPORTED):
                    self.state = "name taken" if status == NAME_TAKEN else "unsupported"
                    failures = 0
                    self._alerts.clear(f"view:{self._root}")
                    await trio.sleep(_TAKEN_SECONDS if status == NAME_TAKEN else _UNSUPPORTED_SECONDS)
                    continue
                failures = 0 if trio.current_time() - began >= _STABLE_SECONDS else failures
                failures += 1
                pause = restart_pause_seconds(failures)
                # One that had mounted leaves an error behind for those who look: that should be short.
                pause = min(pause, _DIED_SECONDS) if self.state == "mounted" else pause
                self._failed(status, failures)
                await trio.sleep(pause)
        finally:
            self._alerts.clear(f"view:{self._root}")

    def _failed(self, status: int | None, failures: int) -> None:
        self.state = "failed"
        log.info("view_ended", root=self._root, status=describe_exit(status), failures=failures)
        if failures >= _TOLD_AFTER:
            self._alerts.report(
                f"view:{self._root}",
                f"the snapshots of {self._root} cannot be shown in its {os.fsdecode(SNAPSHOTS_DIR_NAME)}: the process that "
                f"serves them keeps ending ({describe_exit(status)})",
                hint="the log has its last lines; snapshots, restores and the job are not concerned",
                root=self._root,
                severity="warning",
            )

    async def end(self, worker: OverlayWorker | None) -> None:
        """Take the view away, after the end of `run` or of its process, so that the root can be unmounted."""
        self.state = "off"
        # A worker that hangs may keep the walk to the view waiting; it cannot be asked to unmount either.
        with trio.move_on_after(_DETACH_SECONDS), suppress(CiuicError, OSError):
            await trio.to_thread.run_sync(mounts.detach_view, self._root, abandon_on_cancel=True)
            if worker is not None:
                await worker.ask(_hide)

    async def _serve(self, job: ViewJob) -> int | None:
        """Run a process until it ends, and return its status; end it where the job is another by now."""
        process = await trio.to_thread.run_sync(self._start, job)
        assert process.stdout is not None
        pidfd = os.pidfd_open(process.pid)
        try:
            with process.stdout:
                os.set_blocking(process.stdout.fileno(), False)
                await trio.lowlevel.wait_readable(process.stdout.fileno())
                if process.stdout.read(16) == b"ready\n":
                    self.state = "mounted"
                    self._alerts.clear(f"view:{self._root}")
            while process.poll() is None:
                with trio.move_on_after(_LOOK_SECONDS):
                    await trio.lowlevel.wait_readable(pidfd)
                if self._plan.job(self._root) != job:
                    break
            return process.poll() or 0
        finally:
            os.close(pidfd)
            if self.leaving:
                # It outlives the daemon by design; without a return code Popen would warn of a running child.
                process.returncode = process.poll() or 0
            else:
                process.kill()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(process.wait)

    def _start(self, job: ViewJob) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._plan.command or module_command(VIEW_MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=str(self._plan.cwd),
            env=environment(),
        )
        mark_expendable(process.pid)
        assert process.stdin is not None
        # It may have ended already; its exit status says how.
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
        return process


def _is_taken(worker: OverlayWorker) -> bool:
    try:
        os.stat(SNAPSHOTS_DIR_NAME, dir_fd=worker.backing_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
