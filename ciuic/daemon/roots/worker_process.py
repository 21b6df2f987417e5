"""Overlay worker processes: started by this daemon, or adopted from a previous one.

Guarantees: a worker is identified by a pidfd, so its end is seen whichever process started it, and its pid
cannot be confused with another's; it runs in a session of its own and inherits no descriptor but its own, so
that neither the terminal nor the end nor a restart of the daemon reaches it. Leaves to others: when to start,
restart and stop (supervisor.py), what is mounted (mount_hooks.py).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import structlog
import trio

import ciuic
from ciuic.errors import CiuicError
from ciuic.fuse_layer.journal.succession import SERVED_ELSEWHERE
from ciuic.fuse_layer.prefork.client import ForkedProcess, SpareProcess
from ciuic.fuse_layer.prefork.messages import FIRST_PASSED_FD
from ciuic.protocol.passthrough_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES
from ciuic.protocol.worker_client import WorkerControlClient, WorkerRefused, WorkerUnreachable, peer_pid
from ciuic.protocol.worker_frames import CutReply, NameCounts, WatchedNames, WorkerStatus
from ciuic.system.child_process import environment, module_command
from ciuic.system.poll import readable
from ciuic.system.processes import describe_exit

# A worker is ready within milliseconds when it is forked, and in some tenths of a second when an interpreter
# starts.
_READY_TIMEOUT_SECONDS = 30.0
# A request may wait for the disk below the root.
_CONTROL_TIMEOUT_SECONDS = 30.0
# To the first questions: the job waits meanwhile.
_FIRST_ANSWER_SECONDS = 10.0
# A worker that is adopted answers at once, or hangs.
_ADOPTION_SECONDS = 5.0
LINGER_GRACE_SECONDS = 10 * 365 * 86400.0
"""Time for which a detached worker serves the handles of a job that goes on: in effect until they close."""
_T = TypeVar("_T")
_Child = subprocess.Popen[bytes] | ForkedProcess
log = structlog.get_logger(__name__)

# Control calls have a limiter of their own: workers that hang must not use up the threads that everything
# else needs.
_control_threads = trio.CapacityLimiter(64)


class WorkerClient(Protocol):
    """The calls of the control channel (architecture.md, section 3).

    WorkerControlClient is one, and so is a test's fake.
    """

    def status(self) -> WorkerStatus: ...
    def alive(self) -> None: ...
    def backing_fd(self) -> int: ...
    def undo_fd(self) -> int: ...
    def session_fd(self) -> int: ...
    def hand_over(self) -> None: ...
    def writers(self) -> list[bytes]: ...
    def name_events(self, wanted: WatchedNames) -> NameCounts: ...
    def prepare(self, timeout_seconds: float) -> bool: ...
    def hold(self, timeout_seconds: float) -> None: ...
    def cut(self) -> CutReply: ...
    def release(self) -> None: ...
    def committed(self, epoch: int) -> None: ...
    def abort(self, epoch: int) -> None: ...
    def stop(self, grace_seconds: float) -> bool: ...
    def stay(self) -> None: ...
    def snapshots_directory(self, thread: int) -> int: ...
    def close(self) -> None: ...


class WorkerDied(CiuicError):
    """The worker ended before it was ready."""


class ServedElsewhere(WorkerDied):
    """The session that the worker was to go on with is served by another worker."""


class WorkerOptions(NamedTuple):
    """Options of a worker's command line."""

    root: str
    socket: Path
    driver: str
    block_bytes: int
    undo_limit_bytes: int
    plain: bool = False
    """Serve without tracking: for a root whose workers keep dying."""
    tracked_names: tuple[str, ...] = DEFAULT_TRACKED_NAMES
    mapped_names: tuple[str, ...] = DEFAULT_MAPPED_NAMES
    """Names of files whose data must pass through the worker (open_rules.py)."""
    captures_trace: bool = False
    """Captures have CAP_SYS_PTRACE, and so reach the descriptors of a worker that is not dumpable."""


class OverlayWorker:
    """A live worker. `close` closes the daemon's descriptors of it and leaves the process alone."""

    def __init__(
        self,
        pid: int,
        backing_fd: int,
        session: str,
        connect: Callable[[], WorkerClient],
        *,
        child: _Child | None = None,
        adopted: bool = False,
        session_fd: int | None = None,
        undo_fd: int | None = None,
        set_aside: Sequence[bytes] = (),
        plain: bool = False,
        version: str = ciuic.__version__,
    ) -> None:
        """Take over the descriptors, in every case.

        Raises:
            WorkerDied: the process has ended, and was collected.
        """
        self.pid = pid
        try:
            # Works for a worker that a predecessor started just as for a child. The predecessor's pid comes
            # from SO_PEERCRED of the control socket, not from a file that may be stale.
            self.pidfd = os.pidfd_open(pid)
        except OSError as error:
            # A session does not end while one of its descriptors is open here.
            for fd in (backing_fd, session_fd, undo_fd):
                if fd is not None:
                    os.close(fd)
            raise WorkerDied(f"the overlay worker with process number {pid} has ended") from error
        self.backing_fd = backing_fd
        self.session = session
        self.adopted = adopted
        self.session_fd = session_fd
        """The worker's connection with the kernel, with which a successor can go on; None where none can."""
        self.undo_fd = undo_fd
        """The directory of the worker's undo log, for captures; None from a worker that does not hand it
        out."""
        self.set_aside = tuple(set_aside)
        """New names of what the owner of the root had put where the worker's state belongs."""
        self.plain = plain
        """True if it tracks nothing, so that no snapshot has its root."""
        self.version = version
        self.connect = connect
        """Returns a new connection each time: a hold belongs to its connection."""
        self._child = child
        self._client = connect()
        self.closed = False

    async def ask(self, call: Callable[[WorkerClient], _T]) -> _T:
        """Make one call on the standing connection, in a thread that is abandoned on cancellation."""
        return await trio.to_thread.run_sync(
            call, self._client, abandon_on_cancel=True, limiter=_control_threads
        )

    async def wait(self) -> int | None:
        """Wait for the end of the process, and return its exit status (negative: signal).

        Return None for a worker that is not a child.
        """
        await trio.lowlevel.wait_readable(self.pidfd)
        return self._child.wait() if self._child is not None else None

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        # Readable also while its parent, which may be another process, has not collected it.
        return not readable(self.pidfd)

    def session_is_over(self) -> bool:
        """Return whether the kernel has ended the connection: the mount is gone, and no file is open in it.

        Return False where it is not known.
        """
        if self.session_fd is None:
            return False
        poll = select.poll()
        poll.register(self.session_fd, 0)
        # The kernel reports POLLERR for a connection that it has ended, whatever was asked for.
        return any(events & select.POLLERR for _, events in poll.poll(0))

    def terminate(self) -> None:
        """Have the worker stop as its `stop` request would (SIGTERM)."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
        except ProcessLookupError:
            log.debug("worker_already_gone", pid=self.pid)

    def kill(self) -> None:
        """Kill the worker (SIGKILL)."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("worker_already_gone", pid=self.pid)

    def close(self) -> None:
        """Close the connection and the descriptors. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self._client.close()
        for fd in (self.pidfd, self.backing_fd, self.session_fd, self.undo_fd):
            if fd is not None:
                os.close(fd)
        if self._child is not None and self._child.poll() is None:
            # It may serve open handles and outlive the daemon by design; without a return code Popen would
            # warn of a running child.
            self._child.returncode = 0


async def start_worker(
    options: WorkerOptions,
    backing_fd: int,
    session_fd: int | None = None,
    *,
    spare: SpareProcess | None = None,
) -> OverlayWorker:
    """Start a worker and wait until it serves.

    Args:
        options: the worker's options.
        backing_fd: descriptor of the backing directory, which is taken over in every case.
        session_fd: connection of a predecessor to go on with; it stays the caller's.
        spare: process that has everything imported already and forks the worker, so that the job does not
            wait for an interpreter.

    Raises:
        ServedElsewhere: another worker serves the session.
        WorkerDied: the worker ended first, or was not ready in time and was killed; its own log says why.
    """
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            # In a thread: the process that forks the worker may still be starting.
            child = await trio.to_thread.run_sync(
                _become_worker, spare, options, backing_fd, ready_write, session_fd, limiter=_control_threads
            )
        finally:
            # The worker alone has this end now, so that the pipe ends when the worker does.
            os.close(ready_write)
        try:
            await _wait_ready(ready_read, child, options.root)
            client = WorkerControlClient(options.socket, timeout_seconds=_FIRST_ANSWER_SECONDS)
            answers = await trio.to_thread.run_sync(_first_questions, client, limiter=_control_threads)
        except BaseException:
            child.kill()
            await _reap(child)
            raise
    except BaseException:
        os.close(backing_fd)
        raise
    finally:
        os.close(ready_read)
    return OverlayWorker(
        child.pid,
        backing_fd,
        answers.status.session,
        _connector(options.socket),
        child=child,
        session_fd=answers.session_fd,
        undo_fd=answers.undo_fd,
        set_aside=answers.status.set_aside,
        plain=answers.status.plain,
    )


def _become_worker(
    spare: SpareProcess | None,
    options: WorkerOptions,
    backing_fd: int,
    ready_fd: int,
    session_fd: int | None,
) -> _Child:
    fds = (backing_fd, ready_fd) if session_fd is None else (backing_fd, ready_fd, session_fd)
    if spare is not None:
        arguments = _arguments(options, *(FIRST_PASSED_FD + index for index in range(len(fds))))
        child = spare.become(arguments, fds)
        if child is not None:
            return child
        # A worker that this daemon started would lack capabilities, and files that it creates would belong to
        # root.
        if spare.service:
            raise WorkerDied(
                f"{spare.service} does not answer, so there is no process that could become the overlay worker of {options.root}",
                hint="systemctl status ciuic-workers.socket ciuic-workers.service",
            )
    # Not a trio process, which cannot outlive its parent without a warning.
    return subprocess.Popen(
        module_command("ciuic.fuse_layer.worker", *_arguments(options, *fds)),
        pass_fds=fds,
        # Standard error is the daemon's: workers log to it.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A Ctrl-C in the daemon's terminal is not meant for the job's file system.
        start_new_session=True,
        # Never below a root, which a worker must not reach by name.
        cwd=str(options.socket.parent),
        env=environment(),
    )


def successor_arguments(options: WorkerOptions) -> list[str]:
    """Return the arguments of a worker that is forked to go on with a session.

    Backing, ready and session descriptor from FIRST_PASSED_FD on.
    """
    return list(_arguments(options, FIRST_PASSED_FD, FIRST_PASSED_FD + 1, FIRST_PASSED_FD + 2))


class _Answers(NamedTuple):
    """Status and descriptors of a worker that serves; a descriptor is None where the worker refuses it."""

    status: WorkerStatus
    session_fd: int | None
    undo_fd: int | None


def _first_questions(client: WorkerControlClient) -> _Answers:
    """Ask a worker for what the daemon keeps of it; closes the client."""
    with client:
        status = client.status()
        session_fd = _unless_refused(client.session_fd)
        try:
            return _Answers(status, session_fd, _unless_refused(client.undo_fd))
        except BaseException:
            if session_fd is not None:
                os.close(session_fd)
            raise


def _unless_refused(ask: Callable[[], int]) -> int | None:
    try:
        # A worker of pyfuse3 has no session that could go on; one of an older version does not know every
        # request.
        return ask()
    except WorkerRefused:
        return None


def ask_session(socket_path: Path) -> tuple[int, int] | None:
    """Return the session and backing descriptors of the worker on ``socket_path``; the caller closes them.

    Return None where none answers, or it has no session that could go on.
    """
    with WorkerControlClient(socket_path, timeout_seconds=_ADOPTION_SECONDS) as client:
        try:
            session_fd = client.session_fd()
        except (WorkerUnreachable, WorkerRefused):
            return None
        try:
            return session_fd, client.backing_fd()
        except (WorkerUnreachable, WorkerRefused):
            os.close(session_fd)
            return None


def stop_workers(sockets: Iterable[Path]) -> None:
    """Have the workers on these sockets unmount as soon as nobody is in their overlays, wherever these are now. Blocks.

    One that does not answer is left alone.
    """
    for path in sockets:
        with suppress(CiuicError), WorkerControlClient(path, timeout_seconds=_ADOPTION_SECONDS) as client:
            client.stop(LINGER_GRACE_SECONDS)


def adopt_worker(socket_path: Path) -> OverlayWorker | None:
    """Return the worker that answers on `socket_path`, with a descriptor of its backing directory.

    Return None if none answers.
    """
    pid = peer_pid(socket_path)
    if pid is None:
        return None
    client = WorkerControlClient(socket_path, timeout_seconds=_ADOPTION_SECONDS)
    fds: list[int] = []
    try:
        with client:
            backing_fd = client.backing_fd()
            fds.append(backing_fd)
            answers = _first_questions(client)
    # Whether its mount is dead as well is for `detach_dead` to find out.
    except WorkerUnreachable:
        for fd in fds:
            os.close(fd)
        return None
    try:
        return OverlayWorker(
            pid,
            backing_fd,
            answers.status.session,
            _connector(socket_path),
            adopted=True,
            session_fd=answers.session_fd,
            undo_fd=answers.undo_fd,
            set_aside=answers.status.set_aside,
            plain=answers.status.plain,
            version=answers.status.version,
        )
    except WorkerDied:
        return None


def _connector(socket_path: Path) -> Callable[[], WorkerClient]:
    return lambda: WorkerControlClient(socket_path, timeout_seconds=_CONTROL_TIMEOUT_SECONDS)


def _arguments(
    options: WorkerOptions, backing_fd: int, ready_fd: int, session_fd: int | None = None
) -> Sequence[str]:
    return [
        *("--root", options.root),
        *("--backing-fd", str(backing_fd)),
        *("--control", str(options.socket)),
        *("--driver", options.driver),
        *("--block-size", str(options.block_bytes)),
        *("--undo-limit", str(options.undo_limit_bytes)),
        # The separator is the character that no name has. With "=" an empty list, and a pattern that begins
        # with "-", is a value.
        f"--tracked-names={'/'.join(options.tracked_names)}",
        f"--mapped-names={'/'.join(options.mapped_names)}",
        *("--ready-fd", str(ready_fd)),
        *(("--session-fd", str(session_fd)) if session_fd is not None else ()),
        *(("--plain",) if options.plain else ()),
        *(("--captures-trace",) if options.captures_trace else ()),
    ]


async def _wait_ready(ready_read: int, child: _Child, root: str) -> None:
    # trio waits for readability, and the read after that must not block.
    os.set_blocking(ready_read, False)
    with trio.move_on_after(_READY_TIMEOUT_SECONDS):
        await trio.lowlevel.wait_readable(ready_read)
        if os.read(ready_read, 16) == b"ready\n":
            return
        # The pipe was closed without the word: the worker has ended, or is ending.
        status = await _reap(child)
        if status == SERVED_ELSEWHERE:
            raise ServedElsewhere(f"another overlay worker serves {root}", hint="ciuic status says which")
        raise WorkerDied(
            f"the overlay worker of {root} ended before it was ready ({describe_exit(status)})",
            hint="see its last lines in the daemon's log",
        )
    raise WorkerDied(
        f"the overlay worker of {root} was not ready within {_READY_TIMEOUT_SECONDS:.0f} s",
        hint="see its last lines in the daemon's log",
    )


async def _reap(child: _Child) -> int | None:
    """Return the exit status of a process that is ending.

    Return None if it does not end in 5 s (uninterruptible I/O). Not cancelled.
    """
    # Shielded: the exit status says whether another worker serves, and a zombie would be left otherwise.
    with trio.move_on_after(5, shield=True):
        return await trio.to_thread.run_sync(child.wait, abandon_on_cancel=True)
    return None
