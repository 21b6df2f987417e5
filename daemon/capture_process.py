"""Running one capture process, from its job to its last word.

Guarantees: a capture runs in a session of its own, inherits the backing descriptors it is given and nothing else; its
progress is passed on as it comes; its end is one value, also when it was killed. Cancelling ends it: asked first, killed
if it does not listen. A capture whose overlay session has ended is killed at once, because what it reads from then on
would not be exact. Leaves to others: when to run one, and what to do about its end (coordinator.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import structlog
import trio

from ciuic.daemon.capture_job import (
    EXIT_INTERRUPTED,
    CaptureJob,
    Done,
    Failed,
    Progress,
    decode_message,
    encode_job,
)
from ciuic.daemon.runtime import process_start_ticks
from ciuic.daemon.worker_process import child_environment, describe_exit, mark_expendable

TERMINATE_GRACE_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20
CAPTURE_COMMAND = (sys.executable, "-m", "ciuic.daemon.capture")
log = structlog.get_logger(__name__)

CODE_KILLED = -1
"""Failed.code of a capture that ended without a last word."""


class CaptureProcess:
    """One run. ``run`` once; ``kill`` from anywhere in the trio thread."""

    def __init__(self, *, cwd: Path, command: Sequence[str] = CAPTURE_COMMAND) -> None:
        self.pid = 0
        self._cwd = cwd
        self._command = list(command)
        self._process: trio.Process | None = None
        self._kill_reason = ""

    async def run(
        self,
        job: CaptureJob,
        fds: Sequence[int],
        *,
        on_start: Callable[[int], None],
        on_progress: Callable[[Progress], None],
    ) -> Done | Failed:
        """Runs ``job``; ``fds`` keep their numbers in the process. ``on_start`` gets the pid before the job is sent."""
        process = await trio.lowlevel.open_process(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(fds),
            start_new_session=True,
            cwd=str(self._cwd),
            env=child_environment(),
        )
        self._process, self.pid = process, process.pid
        mark_expendable(process.pid)
        on_start(process.pid)
        try:
            if self._kill_reason:
                process.kill()
            last = await self._converse(process, encode_job(job), on_progress)
            status = await process.wait()
        except BaseException:
            with trio.CancelScope(shield=True):
                await _end(process)
            raise
        finally:
            self._process = None
        return self._outcome(last, status)

    def kill(self, reason: str) -> None:
        """Ends it now, without asking; ``reason`` becomes its failure's message."""
        self._kill_reason = self._kill_reason or reason
        if self._process is not None:
            self._process.kill()

    async def _converse(
        self, process: trio.Process, job: bytes, on_progress: Callable[[Progress], None]
    ) -> Done | Failed | None:
        assert process.stdin is not None
        assert process.stdout is not None
        last: Done | Failed | None = None
        unreadable = 0
        try:
            async with process.stdin:
                await process.stdin.send_all(job)
        except trio.BrokenResourceError:
            log.warning("capture_did_not_take_its_job", pid=process.pid)
        async with process.stdout:
            async for line in _lines(process.stdout):
                try:
                    message = decode_message(line)
                except msgspec.DecodeError as error:
                    unreadable += 1
                    if unreadable == 1:
                        text = line[:200].decode(errors="replace")
                        log.warning(
                            "capture_message_unreadable", pid=process.pid, error=str(error), line=text
                        )
                    continue
                if isinstance(message, Progress):
                    on_progress(message)
                else:
                    last = message
        return last

    def _outcome(self, last: Done | Failed | None, status: int) -> Done | Failed:
        if isinstance(last, Done) and status == 0:
            return last
        if self._kill_reason:
            return Failed(error=self._kill_reason, code=EXIT_INTERRUPTED)
        if isinstance(last, Failed):
            return last
        return Failed(
            error=f"the capture process ended without a word ({describe_exit(status)})",
            hint="its own lines in the daemon's log say why; the kernel's log tells if memory ran out",
            code=CODE_KILLED,
        )


async def _end(process: trio.Process) -> None:
    """SIGTERM lets it leave the repository tidy; SIGKILL is safe too, only slower to clean up after."""
    if process.returncode is None:
        process.terminate()
    with trio.move_on_after(TERMINATE_GRACE_SECONDS):
        await process.wait()
        return
    log.warning("capture_killed", pid=process.pid)
    process.kill()
    with trio.move_on_after(
        TERMINATE_GRACE_SECONDS
    ):  # in uninterruptible I/O it dies later; its signal is delivered
        await process.wait()


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    buffer = bytearray()
    async for data in stream:
        buffer += data
        *complete, rest = buffer.split(b"\n")
        for line in complete:
            if line:
                yield bytes(line)
        buffer = bytearray(rest)
        if len(buffer) > MAX_LINE_BYTES:
            raise ValueError("a line of the capture process is too long")


def signal_pidfd(pidfd: int, number: signal.Signals) -> bool:
    """False when the process has gone."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


async def wait_for_stranger(pid: int, started_ticks: int, *, kill: bool = False) -> None:
    """Returns when the process, which a predecessor started, has ended. Nothing happens if the number is another's by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if process_start_ticks(pid) != started_ticks:
            return
        if kill:
            signal_pidfd(pidfd, signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
