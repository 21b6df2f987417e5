"""``ciuic watch``: has the daemon watch a training that does not make itself known (SnapshotManager does).

Guarantees: a command that is run under it runs as it would without, daemon or not, and its exit status is ours; signals that are
sent to us are its own, unless ``--restart-hung`` ends ranks below it that hang (`ciuic.cli.hung_ranks`). A process that is named by its pid is
that process and no later one with its number.

We are the parent of a command, because a parent is told how it ended, on every kernel. It is in our process group, so that a terminal's ^C and ^Z
reach it as ever; what is sent to us alone is passed on. Should we be killed, the daemon watches the command all the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from ciuic.cli.hung_ranks import HungRanks
from ciuic.cli.shared.messages import complain
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotFound, NotPermitted, Unreachable
from ciuic.printable import shown_name
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatPage
from ciuic.protocol.watch_client import MAX_TEXT_CHARACTERS, SOCKET_NAME, Hello, Registration, introduce
from ciuic.system import processes

_ANSWER_SECONDS: Final = 10.0


# Not interspersed: options behind the command's name are the command's own.
@click.command("watch", cls=FrameCommand, context_settings={"allow_interspersed_args": False})
@click.option("--pid", type=click.IntRange(min=2), metavar="N", help="Watch this process, and return.")
@click.option("--name", default="", metavar="TEXT", help="What to call it; otherwise as its program.")
@click.option(
    "--heartbeat-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The command writes to it while it lives.",
)
@click.option("--heartbeat", default="", metavar="TIME", help="How old that file may become, such as 15m.")
@click.option(
    "--restart-hung",
    default="",
    metavar="TIME",
    help="Log the stacks of the command's ranks when one has made no step for so long, such as 30m, and end them, so that the launcher starts them again.",
)
@click.option(
    "--forget", default="", metavar="NAME", help="Watch it (name or pid) no more, and let its alert go."
)
@click.argument("words", nargs=-1, metavar="[COMMAND]...", type=click.UNPROCESSED)
def command(
    pid: int | None,
    name: str,
    heartbeat_file: Path | None,
    heartbeat: str,
    restart_hung: str,
    forget: str,
    words: tuple[str, ...],
) -> int:
    """Run a command, or take a running process, and have the daemon watch it.

    If it fails, is killed or hangs, the daemon takes a snapshot tagged "emergency", raises an alert and runs the alert
    command. Trainings that use SnapshotManager are watched without this.
    """
    if sum((pid is not None, bool(forget), bool(words))) != 1:
        raise click.UsageError("give one of them: --pid, --forget, or a command to run")
    if bool(heartbeat) != (heartbeat_file is not None) or (heartbeat and not words):
        raise click.UsageError("--heartbeat and --heartbeat-file go together, and with a command")
    if restart_hung and (heartbeat or not words):
        raise click.UsageError("--restart-hung goes with a command, and without --heartbeat")
    if name and not name.isprintable():
        raise click.UsageError("a name has printable characters only")
    session = current()
    if forget:
        session.control.forget_trainer(forget)
        return 0
    if pid is not None:
        _watch_process(session, pid, name)
        return 0

    return run(
        [os.fsencode(word) for word in words],
        name=name or os.path.basename(words[0]),
        socket=lambda: watch_socket(session),
        heartbeat_file=heartbeat_file,
        heartbeat_seconds=_seconds(heartbeat, "--heartbeat"),
        hung_seconds=_seconds(restart_hung, "--restart-hung"),
    )


def _seconds(text: str, option: str) -> float:
    from ciuic.units import parse_duration

    try:
        return float(parse_duration(text)) if text else 0.0
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error


def watch_socket(session: Session) -> str:
    """Return the watch socket of the configured daemon; the default where the configuration may not be read."""
    try:
        return str(session.config.runtime_dir / SOCKET_NAME)
    except CiuicError:
        return f"/run/ciuic/{SOCKET_NAME}"


def _watch_process(session: Session, pid: int, name: str) -> None:
    try:
        # The pidfd first: the daemon goes by it, whatever process has the number later.
        life = processes.life_of(pid)
    except ProcessLookupError:
        raise NotFound(f"there is no process {pid}") from None
    try:
        hello = Hello(
            name=name[:MAX_TEXT_CHARACTERS] or _program_of(pid),
            where=place_of(pid),
            kind="pid",
            pid=pid,
            start_ticks=processes.start_ticks(pid),
        )
        # Closed at once: after its answer the daemon needs nothing more of the caller.
        introduce(watch_socket(session), hello, [life], seconds=_ANSWER_SECONDS).close()
    finally:
        os.close(life)
    note(f"process {pid} is watched as {shown_name(hello.name)}; `ciuic status` shows it")


def _program_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        text = ""
    return text if text and text.isprintable() else f"pid-{pid}"


_PASSED_ON: Final = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGQUIT,
)
_SENT_BY_KERNEL: Final = 0x80
"""SI_KERNEL: a terminal, which has told the whole group."""
# As often as the daemon reads the page.
_LOOK_SECONDS: Final = 1.0
# The longest that the end of a failed command is held up for a daemon that is being restarted.
_LAST_SECONDS: Final = 5.0


def run(
    words: Sequence[bytes],
    *,
    name: str,
    socket: Callable[[], str],
    heartbeat_file: Path | None = None,
    heartbeat_seconds: float = 0.0,
    hung_seconds: float = 0.0,
) -> int:
    """Run the command to its end and return its exit status, 128 + signal if it was killed. Raises NotFound or NotPermitted.

    Ranks below it that have made no step for ``hung_seconds`` are ended; 0: never.
    """
    waited = {signal.SIGCHLD, *_PASSED_ON}
    # Blocked, and taken with sigtimedwait(2): a handler would run between any two lines. From before there is
    # a child to pass them on to; what waits is passed on then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        # Before the command is started, as everything that may fail: from then on only its status counts.
        where = place_of(os.getpid())
        child = _start(words, before)
        try:
            page = HeartbeatPage()
            # The kernel gives the pid to no other process before the child is reaped, at the end.
            life = processes.life_of(child.pid)
            hello = _hello(child.pid, name, where, heartbeat_seconds)
        except OSError as error:  # no memory, an old kernel, no /proc: it runs all the same
            complain(f"not watched: {error.strerror or error}")
            return _pass_on_until_end(child, waited)
        if heartbeat_file is not None:
            # A daemon thread, which may hang with its disk and must not keep the process from ending.
            threading.Thread(target=_listen, args=(page, heartbeat_file), daemon=True).start()
        known = Registration(socket, hello, [life, page.fd], on_trouble=_complain)
        known.start()
        if hung_seconds:
            ranks = HungRanks(child.pid, hung_seconds, page, known.is_known)
            threading.Thread(target=ranks.run, daemon=True).start()
        status = _pass_on_until_end(child, waited, page)
        # A failure is to be reported, and the command may have ended before the first registration. ^C and
        # success are not waited for.
        if status not in (0, 128 + signal.SIGINT):
            known.wait_until_known(_LAST_SECONDS)
        return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def place_of(pid: int) -> str:
    """Return the current directory of a process in the form that the daemon accepts; "" if it cannot be shown."""
    try:
        text = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        # Another user's process, or one that has ended.
        return ""
    # The end of a long path: it tells directories apart better than their common beginning, and the daemon
    # refuses longer texts. SnapshotManager cuts its directory in the same way.
    return text[-MAX_TEXT_CHARACTERS:] if text.isprintable() else ""


def _hello(pid: int, name: str, where: str, heartbeat_seconds: float) -> Hello:
    # A name that the daemon would refuse must not leave the command unwatched.
    return Hello(
        name=name[:MAX_TEXT_CHARACTERS] if name and name.isprintable() else "command",
        where=where,
        kind="command",
        pid=pid,
        start_ticks=processes.start_ticks(pid),
        heartbeat_seconds=heartbeat_seconds,
    )


def _start(words: Sequence[bytes], mask: set[signal.Signals] | set[int]) -> subprocess.Popen[bytes]:
    def as_it_was() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    command = os.fsdecode(words[0])
    try:
        # The child inherits the blocked signals over exec(2), and would never hear of them.
        return subprocess.Popen(list(words), preexec_fn=as_it_was)
    except FileNotFoundError:
        raise NotFound(f"there is no program {command}") from None
    except PermissionError:
        raise NotPermitted(f"{command} may not be run") from None


def _pass_on_until_end(
    child: subprocess.Popen[bytes], waited: set[signal.Signals], page: HeartbeatPage | None = None
) -> int:
    while True:
        # WNOWAIT leaves it a zombie until the page is written. WNOHANG at each turn: SIGCHLD also comes when
        # the command stops or goes on, and sigtimedwait(2) is where this process waits.
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            break
        got = signal.sigtimedwait(waited, _LOOK_SECONDS)
        # What the terminal sends has reached the command as well, which is in the same group.
        if got is not None and got.si_signo != signal.SIGCHLD and got.si_code != _SENT_BY_KERNEL:
            os.kill(child.pid, got.si_signo)
    killed = found.si_code != os.CLD_EXITED
    status = 128 + found.si_status if killed else found.si_status
    # Before it is reaped: then the daemon goes by what the page says.
    if page is not None:
        if status in (0, 128 + signal.SIGINT):
            page.say_goodbye(Goodbye.CLOSED)
        else:
            text = (
                f"was killed by {processes.signal_name(found.si_status)}"
                if killed
                else f"ended with status {status}"
            )
            page.say_goodbye(Goodbye.FAILED, text)
    child.wait()
    return status


def _listen(page: HeartbeatPage, file: Path) -> None:
    """Read the daemon's file, in a thread of its own because the disk may hang."""
    # What was written before the command began is no sign of life of it.
    last = _time_of(file)
    while True:
        time.sleep(_LOOK_SECONDS)
        now = _time_of(file)
        if now != last:
            last = now
            page.beat()


def _time_of(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _complain(error: CiuicError) -> None:
    if isinstance(error, Unreachable):
        complain(f"not watched yet: {error.message}")
    else:
        complain(f"not watched: {error.message}" + (f"; {error.hint}" if error.hint else ""))
