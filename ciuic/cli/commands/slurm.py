"""``ciuic slurm``: run the command of a Slurm job so that the job comes back after a preemption, and take its snapshots.

Guarantees of ``run``: the command gets each signal once (`RelayedCommand`), and its exit status is ours; the job is
requeued only where it was told to end, did not end well, is still running for Slurm, and has been requeued fewer times
than the limit; what fails by its own fault is never requeued. That no snapshot, restore or requeue succeeds is said, and
keeps no command from running.

Leaves the saving of a training's state to its SnapshotManager: what is done here is for the files of protected directories.

A scheduler sends a signal to a job's first process alone, or to all its processes, and a process that receives one is not told
which (`RelayedCommand`). A sentinel stands beside the command, a child that tells which signals reached it: what it got too, the
command has already, and a second SIGTERM would interrupt the end of a program that ends in order (torchrun).

A signal that reached this process alone is passed on to the command; where the command neither catches, blocks nor
ignores SIGUSR1 or SIGUSR2, whose default is to kill, it gets SIGTERM in their place. A command that is stopped is continued.
The exit code is that of a shell: 128 and the signal where one ended the command.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

import click

from ciuic.cli.shared.messages import complain, shown, shown_text, warn
from ciuic.cli.shared.options import DIRECTORY, FrameCommand, FrameGroup
from ciuic.cli.shared.output import note, out
from ciuic.cli.shared.session import Session, current
from ciuic.errors import Busy, CiuicError, ConfigError, NotPermitted, Unreachable, UsageError
from ciuic.system.poll import readable
from ciuic.system.slurm import SlurmJob, check_directory, directory_in_comment, job_tags, jobs_on_node
from ciuic.system.state_home import state_home

_TOLD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals of a scheduler to all processes of a job come one by one, within milliseconds; a busy machine lets the sentinel wait.
_SENTINEL_SECONDS: Final = 1.0
# Time within which a signal here and one at the sentinel are the same one, on however busy a machine.
_SAME_SECONDS: Final = 5.0


class RelayedCommand:
    """Command that was started, with the signal handlers of this process. A context manager; for the main thread."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Install the handlers and start the command in the current directory.

        Args:
            words: the program and its arguments.
            env: its environment.

        Raises:
            OSError: it cannot be started.
        """
        self.told: signal.Signals | None = None
        """First signal that told this process that it is to end."""
        self.told_at = 0.0
        """Its time on the clock of `time.monotonic`."""
        self._arrived: list[int] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous: dict[int, object] = {}
        for number in (*_TOLD, signal.SIGCONT):
            # What is ignored stays ignored: nohup(1).
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        self._previous_wake = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._sentinel = _Sentinel()
        self._elsewhere: dict[int, float] = {}
        """Signals that reached the sentinel and not yet this process, with their times."""
        self._alone: dict[int, float] = {}
        """Signals that were passed on because the sentinel had not got them."""
        try:
            self._process = subprocess.Popen(words, env=dict(env), cwd=os.getcwd())
        except OSError:
            self.close()
            raise
        self._pidfd = os.pidfd_open(self._process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(self._sentinel.told, select.POLLIN)

    def __enter__(self) -> RelayedCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the signal handlers; the command goes on."""
        signal.set_wakeup_fd(self._previous_wake)
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._sentinel.close()
        for fd in (self._wake_read, self._wake_write, getattr(self, "_pidfd", -1)):
            if fd >= 0:
                os.close(fd)

    def wait(self, until: Callable[[], float | None]) -> int | None:
        """Pass on signals until the command has ended; return its exit code, or None at a time that is asked for.

        Args:
            until: returns the time of the monotonic clock at which to return; None for no such time.
        """
        while True:
            self._relay()
            limit = until()
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return None
            # A signal that comes before the call has written to the pipe, so that none is slept over.
            ready = self._poll.poll(None if left is None else left * 1000 + 1)
            if any(fd == self._wake_read for fd, _ in ready):
                os.read(self._wake_read, 4096)
            if any(fd == self._sentinel.told for fd, _ in ready):
                self._hear_sentinel()
            if any(fd == self._pidfd for fd, _ in ready):
                code = self._process.wait()
                return 128 - code if code < 0 else code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def _relay(self) -> None:
        # Exchanged before it is read: a signal that comes in between is in one list or in the other.
        taken, self._arrived = self._arrived, []
        arrived = list(dict.fromkeys(taken))
        for number in map(signal.Signals, arrived):
            if number != signal.SIGCONT and self.told is None:
                self.told, self.told_at = number, time.monotonic()
        end = time.monotonic() + _SENTINEL_SECONDS
        for number in map(signal.Signals, arrived):
            if number == signal.SIGCONT or not self._has_sentinel_got(number, end):
                self._process.send_signal(self._kind_of(number))

    def _has_sentinel_got(self, number: int, end: float) -> bool:
        """Return whether a signal has reached the sentinel too, waiting for that until a time."""
        while True:
            self._hear_sentinel()
            if time.monotonic() - self._elsewhere.pop(number, -_SAME_SECONDS) < _SAME_SECONDS:
                return True
            left = end - time.monotonic()
            if left <= 0 or not readable(self._sentinel.told, left):
                self._alone[number] = time.monotonic()
                return False

    def _hear_sentinel(self) -> None:
        """Take note of the signals that the sentinel tells of."""
        now = time.monotonic()
        try:
            numbers = self._sentinel.heard()
        except EOFError:
            # What is killed without a word has no notice either: from now on signals are passed on.
            with suppress(KeyError):
                self._poll.unregister(self._sentinel.told)
            return
        for number in numbers:
            # One that was passed on already, because it reached the sentinel late.
            if now - self._alone.pop(number, -_SAME_SECONDS) >= _SAME_SECONDS:
                self._elsewhere[number] = now

    def _kind_of(self, number: signal.Signals) -> signal.Signals:
        """Return the signal that the command is to get for one of this process."""
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            return number
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return number
        bit = 1 << (number - 1)
        masks = [
            line.split() for line in status.splitlines() if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:"))
        ]
        return number if any(int(mask, 16) & bit for _, mask in masks) else signal.SIGTERM


class _Sentinel:
    """Child that tells which signals reach it, and ends with its parent."""

    def __init__(self) -> None:
        read, self._life = os.pipe2(os.O_CLOEXEC)
        self.told, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Descriptor from which `heard` reads."""
        # None may come before the child is able to tell of it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                signal.set_wakeup_fd(write, warn_on_full_buffer=False)
                for number in _TOLD:
                    signal.signal(number, lambda *_: None)
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                os.close(self._life)
                # Ends when the parent's end of the pipe is closed, also by its death.
                os.read(read, 1)
            finally:
                os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(read)
        os.close(write)

    def heard(self) -> bytes:
        """Return the numbers of the signals that have reached it since the last call; EOFError if it was killed."""
        try:
            if numbers := os.read(self.told, 4096):
                return numbers
        except BlockingIOError:
            return b""
        raise EOFError("the sentinel was killed")

    def close(self) -> None:
        os.close(self._life)
        os.waitpid(self._pid, 0)
        os.close(self.told)


# Longest wait for a turn among the snapshots of one user.
_TURN_SECONDS: Final = 120.0
_DEFAULT_GRACE: Final = 60.0
_DEFAULT_REQUEUES: Final = 100
# For the requeue itself, which ends the job.
_END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.2
_LAST_MESSAGE: Final = "at the end of the job"
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NOT_FOUND, _NOT_RUN = 127, 126
_TOLD_STATUS: Final = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
"""Status of a command whose step was told by ``--signal=USR1@…``, which this process is not."""
_DIRECTORIES = click.option(
    "-p",
    "--path",
    "paths",
    multiple=True,
    metavar="DIR",
    type=DIRECTORY,
    help="A directory of the job, protected by the daemon; may be given several times.",
)


@click.group("slurm", cls=FrameGroup)
def command() -> None:
    """Jobs of Slurm that come back where they were (docs/slurm.md)."""


@command.command("snapshot", cls=FrameCommand)
@_DIRECTORIES
def snapshot_command(paths: tuple[bytes, ...]) -> None:
    """Take a snapshot of the job's directories, tagged with the job, and print its id when it is durable.

    Any user may have snapshots of directories that are theirs.
    """
    if not paths:
        raise UsageError("which directories? Name them with -p")
    out(_take(current(), paths, "slurm snapshot"))


# Not interspersed: options behind the command's name are the command's own.
@command.command("run", cls=FrameCommand, context_settings={"allow_interspersed_args": False})
@_DIRECTORIES
@click.option(
    "--grace",
    "grace_seconds",
    type=click.FloatRange(min=1),
    default=_DEFAULT_GRACE,
    show_default=True,
    metavar="SECONDS",
    help="Time between the first signal and the end of the job: that of --signal, or GraceTime of the partition.",
)
@click.option(
    "--max-requeues",
    type=click.IntRange(min=0),
    default=_DEFAULT_REQUEUES,
    show_default=True,
    metavar="N",
    help="Do not requeue a job that was started again so many times.",
)
@click.argument("words", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED)
def run_command(
    paths: tuple[bytes, ...], grace_seconds: float, max_requeues: int, words: tuple[str, ...]
) -> None:
    """Run the COMMAND of a Slurm job, and requeue the job when it was told to end before it was done.

    Before: a DIR of -p that is empty is restored from a remote that has a snapshot of this job. After a signal: the command is given
    time to save, then a snapshot of each DIR is taken. Ends with the exit code of COMMAND.
    """
    session = current()
    job = SlurmJob.of(os.environ)
    if job is None:
        warn("SLURM_JOB_ID is not set, so this is no Slurm job: nothing is requeued")
    else:
        for path in paths:
            _restore(session, job, path, os.geteuid(), lazily=os.geteuid() == 0)
    session.exit_code = _Run(session, job, paths, grace_seconds, max_requeues).run(words)


@command.command("prolog", cls=FrameCommand)
def prolog_command() -> None:
    """Protect the directory that a job names in its comment, as Slurm's Prolog; needs root.

    It is named so: sbatch --comment=ciuic=/data/run. It must belong to the job's user. One that is empty is restored from a
    remote that has a snapshot of this job. A job that names none is left alone.
    """
    from ciuic.cli.commands.protect import protect
    from ciuic.config import writable_file
    from ciuic.config.owed_snapshots import keep_protected

    session = current()
    try:
        record = _record(_job())
        # For any job: a node may see no other one that names a directory.
        _forget_lost_jobs(session, record.parent)
        named = _named_directory()
    except (CiuicError, OSError) as error:
        # Whatever a user writes there: it must not take the node away from others, by CIUIC_SLURM_STRICT.
        complain(f"the directory that the job names is not protected: {error}")
        return
    if named is None:
        return
    job, path = named
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with _turn(record.parent):
            # The configuration as other hooks have left it.
            session = Session(config_option=session.config_option)
            is_new = path not in [root.path for root in session.config.roots]
            # Before the directory is protected: a root that nobody would take back is worse than a record of none.
            _write(record, str(path) if is_new or _is_recorded(record.parent, path) else "")
            if keep_protected(writable_file(session.config_option), str(path)):
                _write(record, str(path))
                # A daemon may have ended its protection since the configuration was read.
                session, is_new = Session(config_option=session.config_option), True
            if is_new:
                protect(session, [path])
    except BaseException as error:
        _undo(session, record, path)
        if not _is_about_directory(error):
            raise
        complain(f"the directory that the job names is not protected: {error}")
        return
    # Not in a mount: the user could exchange what leads there, between the steps of making one.
    _restore(session, job, os.fsencode(path), int(os.environ["SLURM_JOB_UID"]), lazily=False)


@command.command("epilog", cls=FrameCommand)
def epilog_command() -> None:
    """Take a last snapshot of a job's directory, and stop protecting it, as Slurm's Epilog; needs root.

    It stays protected where it was before the job, and where another job on this node uses it. Where no daemon answers, the
    next one does both when it starts.
    """
    session = current()
    job = _job()
    record = _record(job)
    try:
        recorded = record.read_text().removesuffix("\n")
    except FileNotFoundError:
        return  # the job named no directory, or the prolog failed
    try:
        if named := recorded or _named_before():
            note(f"{_take(session, [os.fsencode(named)], _LAST_MESSAGE)} is stored")
    except Unreachable:
        _owe(session, record, named, ends=bool(recorded))
        recorded = ""
    except CiuicError as error:
        if not _is_about_directory(error):
            raise
        complain(f"there is no last snapshot of the directory that the job named: {error}")
    finally:
        _end(session, record, recorded)


@contextmanager
def _turn(records: Path) -> Iterator[None]:
    """Let one prolog or epilog of a node at a time decide whether its directory is another job's, too, and act on it."""
    fd = os.open(records, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # What is killed gives its turn back.
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _end(session: Session, record: Path, recorded: str) -> None:
    """End the protection of a job's directory, unless another job on this node uses it; then remove the record.

    A record that is left, by a kill or an error, is ended by the next prolog.
    """
    from ciuic.cli.commands.protect import end_protection

    with _turn(record.parent):
        if recorded and not _is_recorded(record.parent, Path(recorded), besides=record):
            # In silence: what a prolog prints is for the job that begins, and this may be another user's.
            end_protection(session, [Path(recorded)])
        record.unlink(missing_ok=True)


def _named_before() -> str:
    """Return the directory that was protected before the job named it; empty if it is not there any more."""
    try:
        return str((_named_directory() or ("", ""))[1])
    except CiuicError as error:
        complain(f"there is no last snapshot of the directory that the job named: {error}")
        return ""


def _is_about_directory(error: BaseException) -> bool:
    """Return whether an error is about what a user has named, or moved since, so that no node may be drained for it."""
    from ciuic.config import NoDirectory

    # Told by its class, and not by another look at the directory: its owner may move it there and back all the time.
    is_gone = isinstance(error, (NoDirectory, FileNotFoundError, NotADirectoryError))
    return is_gone or (isinstance(error, UsageError) and not isinstance(error, ConfigError))


def _undo(session: Session, record: Path, path: Path) -> None:
    """End what a prolog began that fails: its root leaves the configuration, or else the record stays, and the epilog ends it."""

    def configured() -> Session | None:
        # The configuration as it is now: what failed may have written it, or not.
        now = Session(config_option=session.config_option)
        return now if path in [root.path for root in now.config.roots] else None

    try:
        found = configured()
        _end(found or session, record, "" if found is None else record.read_text().removesuffix("\n"))
    except (CiuicError, OSError) as error:
        complain(f"{shown_text(str(path))}: {error}")
        # The overlay alone may be left, of which the daemon lets go.
        with suppress(CiuicError):
            if configured() is None:
                record.unlink(missing_ok=True)
        # Otherwise the record says what this prolog began, if anything.


def _owe(session: Session, record: Path, named: str, *, ends: bool) -> None:
    """Leave a job's last snapshot, and the end of its directory's protection, to the daemon that is started next.

    Raises:
        Unreachable: the directory is not served by what a daemon has left.
    """
    from ciuic.config import is_ciuic_mount, writable_file
    from ciuic.config.owed_snapshots import OwedSnapshot, keep_protected, owe_snapshot
    from ciuic.system import mountinfo

    configured = [str(root.path) for root in session.config.roots]
    root = next((one for one in configured if f"{named}/".startswith(f"{one}/")), "")
    # Where no daemon runs at all nothing was protected, and roots would gather in the configuration.
    if not root or not is_ciuic_mount(root, mountinfo.read()):
        raise Unreachable(f"no daemon answers, and {shown_text(named)} is not protected")
    file = writable_file(session.config_option)
    with _turn(record.parent):
        owe_snapshot(
            file, OwedSnapshot(root=root, message=_LAST_MESSAGE, tags=list(job_tags()), unprotects=ends)
        )
        record.unlink(missing_ok=True)
        stays = not ends or (_is_recorded(record.parent, Path(named)) and keep_protected(file, root))
    note(
        f"no daemon answers: one that is started takes the last snapshot of {shown_text(root)}"
        + ("" if stays else ", and stops protecting it")
    )


def _job() -> SlurmJob:
    job = SlurmJob.of(os.environ)
    if job is None:
        raise UsageError("SLURM_JOB_ID is not set: this is for Slurm's Prolog and Epilog")
    if os.geteuid() != 0:
        raise NotPermitted("this is for Slurm's Prolog and Epilog, which run as root")
    return job


def _named_directory() -> tuple[SlurmJob, Path] | None:
    """Return the job and the directory that it names; None if it names none.

    Raises:
        CiuicError: root may not treat this directory as the user's.
    """
    job = _job()
    if not (path := directory_in_comment(job.comment(os.environ))):
        return None
    uid = os.environ.get("SLURM_JOB_UID", "")
    if not uid.isdecimal():
        raise UsageError("SLURM_JOB_UID is not set: whose job is it?")
    check_directory(path, int(uid))
    return job, Path(path)


def _record(job: SlurmJob) -> Path:
    """Return the file that says which directory a job on this node has had protected; empty where it was protected before."""
    # Nodes may share this directory: a job of another one is not lost because this one has none of its number.
    node = os.environ.get("SLURMD_NODENAME", "")
    # Durable: after a power failure the configuration still has the directory.
    return state_home("slurm") / (node if _NODE.fullmatch(node) else "") / job.id


def _write(record: Path, path: str) -> None:
    """Write a record, durably, as the configuration that it answers for is."""
    from ciuic.system.disk import Disk

    Disk().replace_file(record, f"{path}\n".encode())


def _forget_lost_jobs(session: Session, records: Path) -> None:
    """Stop protecting directories of jobs that have ended without an Epilog, or whose Epilog was killed."""
    # Before Slurm is asked: a job that begins meanwhile has a record, and is not among what Slurm has told.
    recorded = [one for one in records.iterdir() if one.name.isdecimal()] if records.is_dir() else []
    if not recorded:
        return
    try:
        here = jobs_on_node(os.environ["SLURMD_NODENAME"])
    except (KeyError, CiuicError) as error:
        complain(f"directories of jobs that are lost stay protected: {error}")
        return
    for record in [one for one in recorded if one.name not in here]:
        # Said, and no reason to keep another job from this node.
        try:
            path = record.read_text().removesuffix("\n")
            is_root = path and Path(path) in [root.path for root in session.config.roots]
            _end(session, record, path if is_root else "")
        except FileNotFoundError:
            continue  # its Epilog was late
        except CiuicError:
            # Without its name and the reason, which name another user's directory.
            complain(f"the directory of lost job {record.name} may still be mounted (ciuic status)")


def _is_recorded(directory: Path, path: Path, *, besides: Path | None = None) -> bool:
    """Return whether a job on this node has had a directory protected; ``besides`` is the record of one that does not count."""
    for record in directory.iterdir():
        with suppress(FileNotFoundError):  # its job has ended meanwhile
            if record != besides and record.name.isdecimal() and record.read_text() == f"{path}\n":
                return True
    return False


class _Run:
    """One run of a job's command."""

    def __init__(
        self,
        session: Session,
        job: SlurmJob | None,
        paths: Sequence[bytes],
        grace_seconds: float,
        max_requeues: int,
    ) -> None:
        self._session = session
        self._job = job
        self._paths = paths
        self._grace_seconds = grace_seconds
        self._max_requeues = max_requeues

    def run(self, words: Sequence[str]) -> int:
        """Run the command to its end, and do what follows; return its exit code."""
        try:
            started = RelayedCommand(words, os.environ)
        except OSError as error:
            complain(f"{shown_text(words[0])} cannot be run: {error.strerror}")
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN

        with started as running:

            def after(share: float) -> float | None:
                return None if running.told is None else running.told_at + self._grace_seconds * share

            # Half of the time is the command's. What goes on then is saved as it is, beside it.
            code = running.wait(lambda: after(0.5))
            told_at = running.told_at if running.told is not None else time.monotonic()
            if code == 0:
                return 0
            if running.told is None and code not in _TOLD_STATUS and not self._is_preempted():
                return code or 0
            deadline = told_at + max(self._grace_seconds - _END_SECONDS, self._grace_seconds / 2)
            self._save(deadline)
            if code is None:
                code = running.wait(lambda: deadline)
            # A command that uses the signal to save, and goes on, is ended by the requeue.
            if code != 0:
                self._requeue()
            return running.wait(lambda: None) if code is None else code  # type: ignore[return-value]

    def _is_preempted(self) -> bool:
        """Return whether Slurm has told the steps of the job, and not this process, that the job is to end."""
        if self._job is None:
            return False
        try:
            return self._job.ask().is_preempted
        except CiuicError as error:
            complain(f"it is not known whether the job was preempted: {error}")
            return False

    def _save(self, deadline: float) -> None:
        """Take a snapshot of the directories, and wait until it is durable, or until the deadline."""
        if not self._paths:
            return

        def take() -> None:
            try:
                note(f"{_take(self._session, self._paths, 'before the job is requeued')} is stored")
            except CiuicError as error:
                complain(f"no snapshot of the job's directories: {error}")

        # A daemon that hangs must not cost the requeue: the thread is left behind.
        taking = threading.Thread(target=take, name="ciuic-slurm-snapshot", daemon=True)
        taking.start()
        taking.join(max(1.0, deadline - time.monotonic()))
        if taking.is_alive():
            complain("the snapshot of the job's directories is not stored yet; the daemon goes on with it")

    def _requeue(self) -> None:
        if self._job is None or not self._job.is_first_process:
            return
        try:
            # A job that the user has cancelled, or that Slurm has requeued by itself, stays as it is.
            if (state := self._job.ask().state) != "RUNNING":
                note(f"job {self._job.id} is {state or 'gone'} for Slurm: it is not requeued")
                return
            if self._job.restarts >= self._max_requeues:
                complain(
                    f"job {self._job.id} was started again {self._job.restarts} times: it is not requeued "
                    f"(--max-requeues {self._max_requeues})"
                )
                return
            note(f"job {self._job.id} is requeued")
            self._job.requeue()
        except CiuicError as error:
            complain(f"job {self._job.id} is not requeued: {error}")


def _take(session: Session, paths: Sequence[bytes], message: str) -> str:
    """Take a snapshot of directories, as an administrator or as the user that they belong to; return its id when it is durable."""
    tags, names = job_tags(), [os.fsdecode(path) for path in paths]
    try:
        roots = _roots(session, names)
        state = session.control.take_snapshot(message=message, tags=tags, roots=roots, wait=True)
    except NotPermitted:
        return _take_as_user(names, message, tags)
    return state.id


def _roots(session: Session, names: Sequence[str]) -> list[str]:
    """Return the protected roots in which directories are."""
    known = [root.path for root in session.control.status().roots]
    return list(
        dict.fromkeys(
            next((root for root in known if f"{name}/".startswith(f"{root}/")), name) for name in names
        )
    )


def _take_as_user(names: Sequence[str], message: str, tags: Sequence[str]) -> str:
    from ciuic.protocol.pairing import (
        ANSWER_SECONDS,
        LOOK_SECONDS,
        Files,
        Taken,
        answer,
        ask,
        pair_socket,
        states_of,
    )

    path = pair_socket(os.environ)
    # Many jobs of one user may be preempted at once, of which the daemon takes some in each half minute.
    give_up_at = time.monotonic() + _TURN_SECONDS
    while True:
        try:
            with ask(path, Files(roots=tuple(names), message=message, tags=tuple(tags))) as connection:
                taken = answer(connection, ANSWER_SECONDS)
            break
        except Busy:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(1)
    if not isinstance(taken, Taken):
        raise Unreachable("the daemon answered something else than was asked")
    while (state := states_of(path, (taken.id,), LOOK_SECONDS).states.get(taken.id)) != "committed":
        if state not in ("pending", "capturing"):
            raise CiuicError(f"{taken.id} is {state or 'not known to the daemon'}")
        time.sleep(_POLL_SECONDS)
    return taken.id


def _restore(session: Session, job: SlurmJob, path: bytes, uid: int, *, lazily: bool) -> None:
    """Restore an empty directory of a user from a remote that has a snapshot of this job."""
    try:
        with os.scandir(path) as entries:
            if next(entries, None) is not None:
                return
    except FileNotFoundError:
        pass  # restored below
    except OSError as error:
        complain(f"{shown(path)} is not restored: {error.strerror}")
        return
    try:
        remotes = session.config.remotes
    except CiuicError as error:
        note(f"{shown(path)} is empty, and no remote is known: {error}")
        return
    for remote in remotes:
        found = _newest(session, remote.url, job, path)
        # Any user may have snapshots of directories of their own tagged with any job.
        if found and not _belonged_to(session, remote.url, found, path, uid):
            complain(f"{shown(path)} of {found} did not belong to user {uid}: it is not restored")
            continue
        if found and _restored(session, remote.url, found, path, lazily=lazily):
            note(f"{shown(path)} is restored from {found} of {remote.name}")
            return


def _newest(session: Session, url: str, job: SlurmJob, path: bytes) -> str:
    """Return the id of the newest snapshot of this job that has a directory; empty if there is none."""
    root, tag = os.fsdecode(path), f"slurm-job={job.id}"
    said = _ciuic(session, url, "list", "--root", root, "--tag", tag, "-n", "1", "--machine-readable")
    if said.returncode:
        complain(f"{url} could not be read: {said.stderr.strip()}")
    return said.stdout.partition("|")[0].strip()


def _belonged_to(session: Session, url: str, snapshot: str, path: bytes, uid: int) -> bool:
    """Return whether a directory of a snapshot was this user's."""
    said = _ciuic(session, url, "show", snapshot, os.fsdecode(path), "--json")
    try:
        return said.returncode == 0 and json.loads(said.stdout)["uid"] == uid
    except (ValueError, LookupError, TypeError):
        return False


def _restored(session: Session, url: str, snapshot: str, path: bytes, *, lazily: bool) -> bool:
    words = ("restore", "-s", snapshot, "-p", os.fsdecode(path))
    # In a mount behind which the files follow; where that cannot be (in a protected directory), the files themselves.
    lazily = lazily and not os.path.ismount(path)
    said = _ciuic(session, url, *words, "--lazy") if lazily else None
    if said is None or said.returncode:
        said = _ciuic(session, url, *words)
    if said.returncode:
        complain(f"{shown(path)} is not restored: {said.stderr.strip()}")
    return said.returncode == 0


def _ciuic(session: Session, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ciuic on a remote, in a process of its own: a store's client does not survive the fork of a lazy restore."""
    from ciuic.system.child_process import environment, module_command

    config = () if session.config_option is None else ("--config", os.fspath(session.config_option))
    secrets = {name: value for name, value in os.environ.items() if name.startswith("CIUIC_REMOTE_")}
    return subprocess.run(
        module_command("ciuic", *config, "--repo", url, *words),
        # It opens a remote, whose keys its variables may name.
        env={**environment(), **secrets},
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
