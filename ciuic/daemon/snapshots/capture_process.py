"""Run one capture process, from its job to its last message.

Guarantees: a capture runs in a session of its own and has the backing descriptors that it is given and no
others; it is forked by a process that has imported everything already where there is one (standby.py: 0.2 s
less), and started anew elsewhere; its progress is passed on as it comes; its end is one value, also when it
was killed. Cancelling sends it SIGTERM, and SIGKILL when it does not end. A capture whose overlay session has
ended is killed at once, because what it reads from then on would not be exact; one that a killed daemon had
started and whose overlay sessions all live may finish its snapshot. Leaves to capturing.py: when to run one, and
what follows its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import trio

from ciuic.daemon.base.child_processes import (
    EXPENDABLE_OOM_SCORE_ADJ,
    mark_expendable,
    send_urgency,
)
from ciuic.daemon.base.runtime import PendingRecord, RuntimeDirectory
from ciuic.daemon.capture.job import (
    EXIT_INTERRUPTED,
    CaptureJob,
    CaptureProgress,
    Done,
    Failed,
    decode_message,
    encode_job,
)
from ciuic.fuse_layer.prefork.client import ForkedProcess, SpareProcess
from ciuic.fuse_layer.prefork.messages import FIRST_PASSED_FD
from ciuic.protocol.worker_client import peer_pid
from ciuic.system.child_process import environment, module_command
from ciuic.system.processes import describe_exit, start_ticks
from ciuic.system.urgency import Urgency

# A capture ends between two steps of its work after SIGTERM.
_TERMINATE_GRACE_SECONDS = 10.0
# `Done` names up to a thousand unreadable entries, each with a path of up to 4 KiB.
_MAX_LINE_BYTES = 16 << 20
_CAPTURE_MODULE = "ciuic.daemon.capture.process"

# Failed.code of a capture that ended without a last message.
CODE_KILLED = -1
log = structlog.get_logger(__name__)


class _Process(Protocol):
    """The part of trio.Process that is used here."""

    pid: int
    stdin: trio.abc.SendStream | None
    stdout: trio.abc.ReceiveStream | None

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Captures:
    """Factory of capture processes.

    Keeps the process ready that forks them: 40 MB resident, most of it shared with each capture.
    """

    def __init__(self, cwd: Path, prefix: Sequence[str] = ()) -> None:
        """Prepare to start captures.

        Args:
            cwd: working directory of the captures.
            prefix: words before each command (process_priority.py).
        """
        self._cwd = cwd
        self._command = [*prefix, *module_command(_CAPTURE_MODULE)]
        self._spare = SpareProcess(
            cwd,
            environment(),
            "ciuic.daemon.capture.forked",
            prefix=prefix,
            oom_score_adj=EXPENDABLE_OOM_SCORE_ADJ,
        )

    def new(self) -> CaptureProcess:
        """Return a capture process that was not started yet."""
        return CaptureProcess(cwd=self._cwd, command=self._command, spare=self._spare)

    def prepare(self) -> None:
        """Start the process that forks captures, so that the first capture need not wait for it.

        Blocks for milliseconds.
        """
        self._spare.prepare()

    def close(self) -> None:
        """End the process that forks captures, and wait for its end. Blocks."""
        self._spare.close()


class CaptureProcess:
    """Capture process. Call `run` once; `kill` and `urge` at any time, from the trio thread."""

    def __init__(self, *, cwd: Path, command: Sequence[str] = (), spare: SpareProcess | None = None) -> None:
        self.pid = 0
        self._cwd = cwd
        self._command = list(command or module_command(_CAPTURE_MODULE))
        self._spare = spare
        self._process: _Process | None = None
        self._kill_reason = ""
        # The whole job has been sent, so that what is sent now is a line of its own.
        self._has_job = False

    async def run(
        self,
        job: CaptureJob,
        fds: Sequence[int],
        *,
        on_start: Callable[[int], None],
        on_progress: Callable[[CaptureProgress], None],
        on_done: Callable[[Done], Awaitable[None]] | None = None,
    ) -> Done | Failed:
        """Run a job to its end. On return the process has ended and has released the repository.

        Args:
            job: job that names `fds` by their numbers in this process.
            fds: descriptors to pass on.
            on_start: called with the pid before the job is sent.
            on_progress: called with each progress message.
            on_done: called when the snapshot is committed, which is before the process ends.

        Raises:
            OSError: the process cannot be started.
        """
        process: _Process | None = None
        if self._spare is not None:
            # Starting an interpreter takes 0.2 s of processor time for each snapshot, a fork 3 ms
            # (docs/decisions/snapshot-of-nothing.md).
            process = await _fork(self._spare, fds)
        if process is not None:
            job = _renumbered(job, fds)
        else:
            process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=tuple(fds),
                # A capture outlives a killed daemon and finishes its snapshot.
                start_new_session=True,
                cwd=str(self._cwd),
                env=environment(),
            )
        self._process, self.pid = process, process.pid
        mark_expendable(process.pid)
        on_start(process.pid)
        try:
            # `kill` was called before there was a process.
            if self._kill_reason:
                process.kill()
            last = await self._converse(process, encode_job(job), on_progress, on_done)
            status = await process.wait()
        except BaseException:
            # Shielded: a process that runs on would write to the repository, and its epochs are given back
            # now.
            with trio.CancelScope(shield=True):
                await _end(process)
            raise
        finally:
            self._process = None
        return self._outcome(last, status)

    def kill(self, reason: str) -> None:
        """Kill the process now; `reason` becomes the message of its failure."""
        self._kill_reason = self._kill_reason or reason
        if self._process is not None:
            self._process.kill()

    def urge(self, urgency: Urgency) -> bool:
        """Send the process a new urgency.

        Return False before the process has its job, when it has ended, or does not read.
        """
        stdin = self._process.stdin if self._process is not None and self._has_job else None
        return isinstance(stdin, trio.lowlevel.FdStream) and send_urgency(stdin.fileno(), urgency)

    async def _converse(
        self,
        process: _Process,
        job: bytes,
        on_progress: Callable[[CaptureProgress], None],
        on_done: Callable[[Done], Awaitable[None]] | None,
    ) -> Done | Failed | None:
        assert process.stdin is not None
        assert process.stdout is not None
        last: Done | Failed | None = None
        unreadable = 0
        try:
            await process.stdin.send_all(job)
            self._has_job = True
        except trio.BrokenResourceError:
            log.warning("capture_did_not_take_its_job", pid=process.pid)
        # Standard input stays open after the job, for `urge`.
        async with process.stdin, process.stdout:
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
                if isinstance(message, CaptureProgress):
                    on_progress(message)
                # What follows `Done` changes nothing: the snapshot is committed.
                elif not isinstance(last, Done):
                    last = message
                    if isinstance(message, Done) and on_done is not None:
                        await on_done(message)
        return last

    def _outcome(self, last: Done | Failed | None, status: int) -> Done | Failed:
        if isinstance(last, Done):
            if status:
                log.warning("capture_ended_badly", pid=self.pid, id=last.id, end=describe_exit(status))
            return last
        if self._kill_reason:
            return Failed(error=self._kill_reason, code=EXIT_INTERRUPTED)
        if isinstance(last, Failed):
            return last
        return Failed(
            error=f"the capture process ended without a result ({describe_exit(status)})",
            hint="see its last lines in the daemon's log; the kernel's log says whether memory ran out",
            code=CODE_KILLED,
        )


class _Forked:
    """A capture process that was forked by the spare process instead of started."""

    def __init__(self, process: ForkedProcess, job_fd: int, messages_fd: int) -> None:
        self.pid = process.pid
        self.stdin: trio.abc.SendStream | None = trio.lowlevel.FdStream(job_fd)
        self.stdout: trio.abc.ReceiveStream | None = trio.lowlevel.FdStream(messages_fd)
        self._process = process

    @property
    def returncode(self) -> int | None:
        # The process that forked it is its parent and passes its status on.
        return self._process.poll()

    async def wait(self) -> int:
        await trio.lowlevel.wait_readable(self._process.pidfd)
        return await trio.to_thread.run_sync(self._process.wait)

    def terminate(self) -> None:
        _signal_pidfd(self._process.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        _signal_pidfd(self._process.pidfd, signal.SIGKILL)


async def _fork(spare: SpareProcess, fds: Sequence[int]) -> _Forked | None:
    """Fork a capture process that waits for its job. Return None where none can be forked."""
    job_read, job_write = os.pipe2(os.O_CLOEXEC)
    words_read, words_write = os.pipe2(os.O_CLOEXEC)

    def forked() -> ForkedProcess | None:
        # The kernel may have killed it when memory ran out.
        spare.prepare()
        return spare.become(arguments, (job_read, words_write, *fds))

    arguments = [str(FIRST_PASSED_FD), str(FIRST_PASSED_FD + 1)]
    process: ForkedProcess | None = None
    try:
        # In a thread, because the spare process may still be starting. The thread is not abandoned on
        # cancellation: a process that was forked must become known.
        process = await trio.to_thread.run_sync(forked)
    finally:
        os.close(job_read)
        os.close(words_write)
        if process is None:
            os.close(job_write)
            os.close(words_read)
    return None if process is None else _Forked(process, job_write, words_read)


def _renumbered(job: CaptureJob, fds: Sequence[int]) -> CaptureJob:
    """Return the job with the descriptor numbers that `_fork` has given them in the capture process."""
    numbers = {fd: FIRST_PASSED_FD + 2 + index for index, fd in enumerate(fds)}
    roots = (
        msgspec.structs.replace(
            root,
            backing_fd=numbers.get(root.backing_fd, root.backing_fd),
            undo_fd=numbers.get(root.undo_fd, root.undo_fd),
        )
        for root in job.roots
    )
    return msgspec.structs.replace(job, roots=tuple(roots))


async def _end(process: _Process) -> None:
    """End a capture by SIGTERM, or by SIGKILL when it does not end in time."""
    # SIGTERM lets it leave the repository tidy. SIGKILL is safe too, but what it leaves takes longer to clean
    # up.
    if process.returncode is None:
        process.terminate()
    with trio.move_on_after(_TERMINATE_GRACE_SECONDS):
        await process.wait()
        return
    log.warning("capture_killed", pid=process.pid)
    process.kill()
    # A process in uninterruptible I/O dies later; the signal is delivered, so that there is nothing more to
    # do.
    with trio.move_on_after(_TERMINATE_GRACE_SECONDS):
        await process.wait()


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[bytes]:
    buffer = bytearray()
    async for data in stream:
        buffer += data
        *complete, rest = buffer.split(b"\n")
        for line in complete:
            if line:
                yield bytes(line)
        # The last part is the beginning of a line that has not come completely yet.
        buffer = bytearray(rest)
        if len(buffer) > _MAX_LINE_BYTES:
            raise ValueError("a line of the capture process is too long")


def _signal_pidfd(pidfd: int, number: signal.Signals) -> bool:
    """Send a signal to a process. Return False when it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


async def wait_for_stranger(pid: int, started_ticks: int, *, kill: bool = False) -> None:
    """Wait for the end of a process that a previous daemon started.

    Args:
        pid: number of the process.
        started_ticks: field 22 of its /proc/<pid>/stat; a process with another value is not waited for.
        kill: kill the process first.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # After the pidfd is open, so that the process cannot be replaced between this look and the signal.
        if start_ticks(pid) != started_ticks:
            return
        if kill:
            _signal_pidfd(pidfd, signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)


async def end_orphaned_captures(records: list[PendingRecord], runtime: RuntimeDirectory) -> None:
    """Kill captures of a predecessor that lost an overlay session.

    Everything that they read from now on would not be exact.

    Call it before anything is detached or mounted. A capture whose workers all live may finish its snapshot.
    """
    for record in records:
        if not record.capture_pid:
            continue
        sockets = [runtime.worker_socket(cut.path) for cut in record.cuts]
        # In a thread: a socket whose queue is full keeps the question waiting for up to two seconds.
        alive = await trio.to_thread.run_sync(lambda sockets=sockets: all(map(peer_pid, sockets)))  # type: ignore[misc]
        if not alive:
            log.warning("orphaned_capture_killed", id=record.id, pid=record.capture_pid)
            await wait_for_stranger(record.capture_pid, record.capture_started_ticks, kill=True)
