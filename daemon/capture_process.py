"""Running one capture process, from its job to its last word.

Guarantees: a capture runs in a session of its own, has the backing descriptors it is given and nothing else; it is forked by
a process that has imported everything already where there is one (standby.py: 0.2 s less), and started anew elsewhere; its
progress is passed on as it comes; its end is one value, also when it was killed. Cancelling ends it: asked first, killed
if it does not listen. A capture whose overlay session has ended is killed at once, because what it reads from then on
would not be exact. Leaves to others: when to run one, and what to do about its end (snapshots.py).
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

from ciuic.child_process import environment, module_command
from ciuic.daemon.capture_job import (
    EXIT_INTERRUPTED,
    CaptureJob,
    Done,
    Failed,
    Progress,
    decode_message,
    encode_job,
)
from ciuic.daemon.terms import send_terms
from ciuic.daemon.worker_process import (
    EXPENDABLE_OOM_SCORE_ADJ,
    describe_exit,
    mark_expendable,
)
from ciuic.fuse_layer.standby import FIRST_PASSED_FD, ForkedProcess, SpareProcess
from ciuic.processes import start_ticks
from ciuic.urgency import Urgency

TERMINATE_GRACE_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20
CAPTURE_MODULE = "ciuic.daemon.capture"
log = structlog.get_logger(__name__)

CODE_KILLED = -1
"""Failed.code of a capture that ended without a last word."""


class _Process(Protocol):
    """What is used of a trio.Process."""

    pid: int
    stdin: trio.abc.SendStream | None
    stdout: trio.abc.ReceiveStream | None

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Captures:
    """Makes them, and keeps the process ready that forks them (40 MB resident, of which it shares most with each capture)."""

    def __init__(self, cwd: Path, prefix: Sequence[str] = ()) -> None:
        """``prefix`` goes before each command, as slices.py has it."""
        self._cwd = cwd
        self._command = [*prefix, *module_command(CAPTURE_MODULE)]
        self._spare = SpareProcess(
            cwd,
            environment(),
            "ciuic.daemon.capture_forked",
            prefix=prefix,
            oom_score_adj=EXPENDABLE_OOM_SCORE_ADJ,
        )

    def new(self) -> CaptureProcess:
        return CaptureProcess(cwd=self._cwd, command=self._command, spare=self._spare)

    def prepare(self) -> None:
        """So that the first one need not wait. Blocks, not for long."""
        self._spare.prepare()

    def close(self) -> None:
        """Nothing is kept ready any more. Blocks until that process has ended."""
        self._spare.close()


class CaptureProcess:
    """One run. ``run`` once; ``kill`` and ``urge`` from anywhere in the trio thread."""

    def __init__(self, *, cwd: Path, command: Sequence[str] = (), spare: SpareProcess | None = None) -> None:
        self.pid = 0
        self._cwd = cwd
        self._command = list(command or module_command(CAPTURE_MODULE))
        self._spare = spare
        self._process: _Process | None = None
        self._kill_reason = ""
        self._has_job = False
        """The job is sent whole: what is sent now is a line of its own."""

    async def run(
        self,
        job: CaptureJob,
        fds: Sequence[int],
        *,
        on_start: Callable[[int], None],
        on_progress: Callable[[Progress], None],
        on_done: Callable[[Done], Awaitable[None]] | None = None,
    ) -> Done | Failed:
        """Runs ``job``, which names ``fds`` by their numbers here. ``on_start`` gets the pid before the job is sent,
        ``on_done`` its last word when the snapshot is committed. On return the process has ended, and let go of the
        repository.
        """
        process: _Process | None = None
        if self._spare is not None:
            process = await _fork(self._spare, fds)
        if process is not None:
            job = _renumbered(job, fds)
        else:
            process = await trio.lowlevel.open_process(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=tuple(fds),
                start_new_session=True,
                cwd=str(self._cwd),
                env=environment(),
            )
        self._process, self.pid = process, process.pid
        mark_expendable(process.pid)
        on_start(process.pid)
        try:
            if self._kill_reason:
                process.kill()
            last = await self._converse(process, encode_job(job), on_progress, on_done)
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

    def urge(self, urgency: Urgency) -> bool:
        """Send new terms; whether they are on their way. Not before the process has its job, nor when it has ended."""
        stdin = self._process.stdin if self._process is not None and self._has_job else None
        return isinstance(stdin, trio.lowlevel.FdStream) and send_terms(stdin.fileno(), urgency)

    async def _converse(
        self,
        process: _Process,
        job: bytes,
        on_progress: Callable[[Progress], None],
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
        # Standard input stays open for what follows the job: `urge`.
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
                if isinstance(message, Progress):
                    on_progress(message)
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
            error=f"the capture process ended without a word ({describe_exit(status)})",
            hint="its own lines in the daemon's log say why; the kernel's log tells if memory ran out",
            code=CODE_KILLED,
        )


class _Forked:
    """A capture that the spare process has forked."""

    def __init__(self, process: ForkedProcess, job_fd: int, words_fd: int) -> None:
        self.pid = process.pid
        self.stdin: trio.abc.SendStream | None = trio.lowlevel.FdStream(job_fd)
        self.stdout: trio.abc.ReceiveStream | None = trio.lowlevel.FdStream(words_fd)
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        await trio.lowlevel.wait_readable(self._process.pidfd)
        return await trio.to_thread.run_sync(self._process.wait)

    def terminate(self) -> None:
        signal_pidfd(self._process.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        signal_pidfd(self._process.pidfd, signal.SIGKILL)


async def _fork(spare: SpareProcess, fds: Sequence[int]) -> _Forked | None:
    """A capture that waits for its job; None where none can be forked."""
    job_read, job_write = os.pipe2(os.O_CLOEXEC)
    words_read, words_write = os.pipe2(os.O_CLOEXEC)

    def forked() -> ForkedProcess | None:
        spare.prepare()  # it may have ended, for want of memory
        return spare.become(arguments, (job_read, words_write, *fds))

    arguments = [str(FIRST_PASSED_FD), str(FIRST_PASSED_FD + 1)]
    process: ForkedProcess | None = None
    try:
        # In a thread: who is to fork it may be starting itself. Not abandoned: what has been forked must become known.
        process = await trio.to_thread.run_sync(forked)
    finally:
        os.close(job_read)
        os.close(words_write)
        if process is None:
            os.close(job_write)
            os.close(words_read)
    return None if process is None else _Forked(process, job_write, words_read)


def _renumbered(job: CaptureJob, fds: Sequence[int]) -> CaptureJob:
    """The same for a process in which the descriptors have the numbers that ``_fork`` has given them."""
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
        if start_ticks(pid) != started_ticks:
            return
        if kill:
            signal_pidfd(pidfd, signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
