"""One overlay worker as a process: started by us, or found alive after a predecessor.

Guarantees: a worker is known by pidfd, so its end is seen whoever started it and its number cannot be mistaken; it runs
in a session of its own and holds nothing of ours but its backing descriptor, so that neither our terminal, our death nor
our restart reaches it. Leaves to others: when to start, restart and stop (supervisor.py), what is mounted (recovery.py).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import structlog
import trio

import ciuic
from ciuic.child_process import environment, module_command
from ciuic.errors import CiuicError, UsageError
from ciuic.fuse_layer.control_client import ControlClient, WorkerRefused, WorkerUnreachable, peer_pid
from ciuic.fuse_layer.control_frames import CutReply, WorkerStatus
from ciuic.fuse_layer.standby import FIRST_PASSED_FD, WORKER, ForkedProcess, SpareProcess
from ciuic.open_names import DEFAULT_MAPPED_NAMES, DEFAULT_TRACKED_NAMES

SYSTEMD_VARIABLES = (
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
)
"""Variables by which systemd passes sockets to a process (sd_listen_fds(3)) and asks it for notifications (sd_notify(3))."""
READY_TIMEOUT_SECONDS = 30.0
CONTROL_TIMEOUT_SECONDS = 30.0
EXPENDABLE_OOM_SCORE_ADJ = "500"
T = TypeVar("T")
Child = subprocess.Popen[bytes] | ForkedProcess
log = structlog.get_logger(__name__)

# Control calls wait in threads of their own: workers that hang must not use up the threads that everything else needs.
_control_threads = trio.CapacityLimiter(64)


class WorkerClient(Protocol):
    """The calls of the control channel (architecture.md, section 3); ControlClient is one, and so is a test's fake."""

    def status(self) -> WorkerStatus: ...
    def alive(self) -> None: ...
    def backing_fd(self) -> int: ...
    def undo_fd(self) -> int: ...
    def session_fd(self) -> int: ...
    def hand_over(self) -> None: ...
    def writers(self) -> list[bytes]: ...
    def prepare(self, timeout_seconds: float) -> bool: ...
    def hold(self, timeout_seconds: float) -> None: ...
    def cut(self) -> CutReply: ...
    def release(self) -> None: ...
    def committed(self, epoch: int) -> None: ...
    def abort(self, epoch: int) -> None: ...
    def stop(self, grace_seconds: float) -> None: ...
    def close(self) -> None: ...


class WorkerDied(CiuicError):
    """The worker ended before it was ready."""


class WorkerOptions(NamedTuple):
    """What a worker is told on its command line."""

    root: str
    socket: Path
    driver: str
    block_bytes: int
    undo_limit_bytes: int
    plain: bool = False
    """Serve, and track nothing: for a root whose workers keep dying."""
    tracked_names: tuple[str, ...] = DEFAULT_TRACKED_NAMES
    mapped_names: tuple[str, ...] = DEFAULT_MAPPED_NAMES
    """Names of files whose data must not pass the worker by (open_rules.py)."""
    captures_trace: bool = False
    """Captures have CAP_SYS_PTRACE, and reach the descriptors of a worker that is not dumpable."""


class Worker:
    """A live worker. ``close`` gives up our descriptors; the process is not touched by it."""

    def __init__(
        self,
        pid: int,
        backing_fd: int,
        session: str,
        connect: Callable[[], WorkerClient],
        *,
        child: Child | None = None,
        adopted: bool = False,
        session_fd: int | None = None,
        undo_fd: int | None = None,
        set_aside: Sequence[bytes] = (),
        version: str = ciuic.__version__,
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.backing_fd = backing_fd
        self.session = session
        self.adopted = adopted
        self.session_fd = session_fd
        """The worker's connection with the kernel; with it a successor goes on. None where none can."""
        self.undo_fd = undo_fd
        """The directory of the worker's undo log, for captures; None from a worker that does not hand it out."""
        self.set_aside = tuple(set_aside)
        """New names of what the owner of the root had put where the worker's state belongs."""
        self.version = version
        self.connect = connect
        """A new connection each time: a hold belongs to its connection."""
        self._child = child
        self._client = connect()
        self.closed = False

    async def ask(self, call: Callable[[WorkerClient], T]) -> T:
        """Makes one call on the standing connection in a thread, abandoned if we are cancelled meanwhile."""
        return await trio.to_thread.run_sync(
            call, self._client, abandon_on_cancel=True, limiter=_control_threads
        )

    async def wait(self) -> int | None:
        """Returns when the process has ended: its exit status (negative: signal), None for a worker not our child."""
        await trio.lowlevel.wait_readable(self.pidfd)
        return self._child.wait() if self._child is not None else None

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return False
        return self._child is None or self._child.poll() is None

    def session_is_over(self) -> bool:
        """Whether the kernel has ended the connection: the mount is gone, and nothing is open in it. False where it cannot be told."""
        if self.session_fd is None:
            return False
        poll = select.poll()
        poll.register(self.session_fd, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))

    def terminate(self) -> None:
        """Asks it to stop as its ``stop`` request would (SIGTERM)."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
        except ProcessLookupError:
            log.debug("worker_already_gone", pid=self.pid)

    def kill(self) -> None:
        """Ends it at once (SIGKILL)."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("worker_already_gone", pid=self.pid)

    def close(self) -> None:
        """Closes connection and descriptors; a second time it does nothing."""
        if self.closed:
            return
        self.closed = True
        self._client.close()
        for fd in (self.pidfd, self.backing_fd, self.session_fd, self.undo_fd):
            if fd is not None:
                os.close(fd)
        if self._child is not None and self._child.poll() is None:
            # It serves handles that are still open and outlives us by design; Popen must not complain of that.
            self._child.returncode = 0


async def start_worker(
    options: WorkerOptions,
    backing_fd: int,
    session_fd: int | None = None,
    *,
    spare: SpareProcess | None = None,
) -> Worker:
    """Starts a worker over ``backing_fd`` and waits until it serves. Takes ``backing_fd`` over in every case.

    ``session_fd``: the connection of a predecessor to go on with; it stays the caller's. ``spare``: a process that has
    everything imported already forks the worker, which saves the job the wait for it.

    WorkerDied when it ends first or is not ready in time (it is killed then); its own log says why.
    """
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            # In a thread: who is to fork it may be starting itself.
            child = await trio.to_thread.run_sync(
                _become_worker, spare, options, backing_fd, ready_write, session_fd, limiter=_control_threads
            )
        finally:
            os.close(ready_write)
        try:
            await _wait_ready(ready_read, child, options.root)
            client = ControlClient(options.socket, timeout_seconds=CONTROL_TIMEOUT_SECONDS)
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
    return Worker(
        child.pid,
        backing_fd,
        answers.status.session,
        _connector(options.socket),
        child=child,
        session_fd=answers.session_fd,
        undo_fd=answers.undo_fd,
        set_aside=answers.status.set_aside,
    )


def _become_worker(
    spare: SpareProcess | None,
    options: WorkerOptions,
    backing_fd: int,
    ready_fd: int,
    session_fd: int | None,
) -> Child:
    fds = (backing_fd, ready_fd) if session_fd is None else (backing_fd, ready_fd, session_fd)
    if spare is not None:
        arguments = _arguments(options, *(FIRST_PASSED_FD + index for index in range(len(fds))))
        child = spare.become(arguments, fds)
        if child is not None:
            return child
        if (
            spare.service
        ):  # started by us it would lack capabilities: files that it makes would belong to root
            raise WorkerDied(
                f"{spare.service} does not answer, so there is no process that could become the overlay worker of {options.root}",
                hint="systemctl status ciuic-workers.socket ciuic-workers.service",
            )
    # trio's own process type cannot outlive its parent quietly.
    return subprocess.Popen(
        module_command("ciuic.fuse_layer.worker", *_arguments(options, *fds)),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in our terminal is not meant for the job's file system
        cwd=str(options.socket.parent),  # never below a root, which a worker must not touch by name
        env=environment(),
    )


def successor_arguments(options: WorkerOptions) -> list[str]:
    """Arguments of a worker that is forked to go on with a session: backing, ready and session descriptor from FIRST_PASSED_FD on."""
    return list(_arguments(options, FIRST_PASSED_FD, FIRST_PASSED_FD + 1, FIRST_PASSED_FD + 2))


def exec_standby() -> NoReturn:
    """Replace this process by one that forks workers for a daemon that asks on the socket passed by systemd."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        raise UsageError(
            "expected a listening socket from systemd (LISTEN_PID), got none",
            hint="systemctl start ciuic-workers.socket; `ciuic daemon` alone needs no such process",
        )
    os.chdir("/")
    command = module_command("ciuic.fuse_layer.standby", WORKER)
    told = {name: os.environ[name] for name in SYSTEMD_VARIABLES if name in os.environ}
    os.execve(command[0], command, {**environment(), **told})


class _Answers(NamedTuple):
    """Status and descriptors of a worker that serves; a descriptor is None where the worker refuses it."""

    status: WorkerStatus
    session_fd: int | None
    undo_fd: int | None


def _first_questions(client: ControlClient) -> _Answers:
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
        return ask()
    except WorkerRefused:
        return None


def adopt_worker(socket_path: Path, *, timeout_seconds: float = 5.0) -> Worker | None:
    """The worker that answers on ``socket_path``, with a descriptor of its backing directory; None if nobody answers."""
    pid = peer_pid(socket_path)
    if pid is None:
        return None
    client = ControlClient(socket_path, timeout_seconds=timeout_seconds)
    fds: list[int] = []
    try:
        with client:
            backing_fd = client.backing_fd()
            fds.append(backing_fd)
            answers = _first_questions(client)
    except WorkerUnreachable:
        for fd in fds:
            os.close(fd)
        return None
    return Worker(
        pid,
        backing_fd,
        answers.status.session,
        _connector(socket_path),
        adopted=True,
        session_fd=answers.session_fd,
        undo_fd=answers.undo_fd,
        set_aside=answers.status.set_aside,
        version=answers.status.version,
    )


def _connector(socket_path: Path) -> Callable[[], WorkerClient]:
    return lambda: ControlClient(socket_path, timeout_seconds=CONTROL_TIMEOUT_SECONDS)


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
        # Divided by what no name has in it; the sign makes an empty list, and a pattern that begins with "-", a value.
        f"--tracked-names={'/'.join(options.tracked_names)}",
        f"--mapped-names={'/'.join(options.mapped_names)}",
        *("--ready-fd", str(ready_fd)),
        *(("--session-fd", str(session_fd)) if session_fd is not None else ()),
        *(("--plain",) if options.plain else ()),
        *(("--captures-trace",) if options.captures_trace else ()),
    ]


async def _wait_ready(ready_read: int, child: Child, root: str) -> None:
    os.set_blocking(ready_read, False)
    with trio.move_on_after(READY_TIMEOUT_SECONDS):
        await trio.lowlevel.wait_readable(ready_read)
        if os.read(ready_read, 16) == b"ready\n":
            return
        status = await _reap(child)  # the pipe closed: it has ended, or is ending
        raise WorkerDied(
            f"the overlay worker of {root} ended before it was ready ({describe_exit(status)})",
            hint="its own lines in the daemon's log say why",
        )
    raise WorkerDied(
        f"the overlay worker of {root} was not ready within {READY_TIMEOUT_SECONDS:.0f} s",
        hint="its own lines in the daemon's log say why",
    )


async def _reap(child: Child) -> int | None:
    """The exit status of a process that is ending; None if it takes its time (uninterruptible I/O). Not cancelled."""
    with trio.move_on_after(5, shield=True):
        return await trio.to_thread.run_sync(child.wait, abandon_on_cancel=True)
    return None


def mark_expendable(pid: int) -> None:
    """When memory runs out, this process goes first: it says so too, but not before it has loaded everything it needs."""
    with suppress(OSError):  # it has ended, or /proc is not what it should be
        Path(f"/proc/{pid}/oom_score_adj").write_text(EXPENDABLE_OOM_SCORE_ADJ)


def describe_exit(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "status unknown"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
