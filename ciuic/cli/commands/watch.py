"""``ciuic watch``: has the daemon watch a training that does not make itself known (SnapshotManager does).

Guarantees: a command that is run under it runs as it would without, daemon or not, and its exit status is ours; signals that are
sent to us are its own, unless ``--restart-hung`` ends ranks below it that hang. A process that is named by its pid is
that process and no later one with its number.

We are the parent of a command, because a parent is told how it ended, on every kernel. It is in our process group, so that a terminal's ^C and ^Z
reach it as ever; what is sent to us alone is passed on. Should we be killed, the daemon watches the command all the same.

Ranks of a command that hang are found by their heartbeat pages, shown, and ended so that the launcher starts them again (`HungRanks`).

A rank is a process below the watched command that has made a SnapshotManager, and so a heartbeat page
(`ciuic.protocol.heartbeat_page`), which is opened by its link in /proc/PID/fd. It hangs when it has made steps and then
none for the limit or for twice the longest pause of any rank before, whichever is longer. Time does not count in which this process did
not run, nor in which any rank saves, restores, is stopped (a debugger) or has closed its manager: the others wait for it.

Guarantees: signals go to ranks alone, by pidfd. A rank that goes on before it is ended is left alone, and so is a training that
hangs again and again without a step beyond.

Leaves the restart to the launcher (torchrun, the script of a Slurm job), and the emergency snapshot to the daemon, which reads
on the page of the watched command that it hangs. Sees the ranks of this host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median, median_low
from typing import Final, NamedTuple

import click

from ciuic.cli.shared.messages import complain
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import note
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotFound, NotPermitted, Unreachable
from ciuic.printable import one_line, shown_name
from ciuic.protocol.heartbeat_page import (
    PAGE_NAME,
    STACKS_SIGNAL,
    Goodbye,
    HeartbeatPage,
    check_page,
    read_page,
    read_stacks,
)
from ciuic.protocol.watch_client import MAX_TEXT_CHARACTERS, SOCKET_NAME, Hello, Registration, introduce
from ciuic.system import processes
from ciuic.system.poll import readable
from ciuic.units import plural

LOOK_SECONDS: Final = 1.0
_SCAN_SECONDS: Final = 5.0
"""Pause between two looks for ranks, which read all of /proc."""
_PAUSES: Final = 2
_SLOW: Final = 1.5
_MIN_STEPS: Final = 8
_STEPS: Final = 64
# faulthandler writes a line at a time: a few milliseconds for a hundred threads.
_STACKS_SECONDS: Final = 1.0
# The daemon looks once a second, gathers incidents for 0.2 s, and cuts.
_SNAPSHOT_SECONDS: Final = 5.0
# Below the 30 seconds of torchrun, whose agent ends the ranks of other hosts meanwhile.
_GRACE_SECONDS: Final = 10.0
_MAX_IN_VAIN: Final = 3
"""Ends without a step beyond the last hang: a batch that hangs each time must not use up the launcher's restarts."""


class Pulse(NamedTuple):
    """One rank at one moment."""

    process: tuple[int, int]
    """Pid and start time in clock ticks."""
    label: str
    beats: int
    """Beats of managers that are not closed."""
    step: int
    beat_ns: int
    excused: bool
    """It saves, restores, is stopped or is done, and other ranks may wait for it."""


class _Known:
    def __init__(self, pulse: Pulse) -> None:
        self.last = pulse
        self.silent_seconds = 0.0
        self.step_seconds: deque[float] = deque(maxlen=_STEPS)
        self.is_slow = False


class HangWatch:
    """Judges the pulses of ranks. Takes the clock from its caller."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._longest_seconds = 0.0
        self._ranks: dict[tuple[int, int], _Known] = {}
        self._looked: float | None = None

    def look(self, pulses: Sequence[Pulse], now: float) -> str:
        """Return which ranks hang, and since when; "" if none does.

        Args:
            pulses: all ranks that live.
            now: monotonic clock in seconds.
        """
        # The host was suspended, or this process was stopped with the job.
        elapsed = 0.0 if self._looked is None else min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        self._ranks = {one.process: self._ranks.get(one.process) or _Known(one) for one in pulses}
        is_excused = any(one.excused for one in pulses)
        for pulse in pulses:
            known = self._ranks[pulse.process]
            last, known.last = known.last, pulse
            if pulse.beats != last.beats:
                self._longest_seconds = max(self._longest_seconds, known.silent_seconds)
                known.silent_seconds = 0.0
                if last.beats and pulse.step > last.step:
                    known.step_seconds.append((pulse.beat_ns - last.beat_ns) / 1e9 / (pulse.step - last.step))
            else:
                # Not before the first beat: torch may compile for an hour.
                known.silent_seconds = (
                    0.0 if is_excused or not pulse.beats else known.silent_seconds + elapsed
                )
        limit = max(self._limit_seconds, _PAUSES * self._longest_seconds)
        hung = [one for one in self._ranks.values() if one.silent_seconds >= limit]
        # In a collective the ranks that wait are one step ahead of the one that is missing.
        return "; ".join(_describe(one) for one in sorted(hung, key=lambda one: one.last.step)[:4]) + (
            f"; and {len(hung) - 4} more" if len(hung) > 4 else ""
        )

    def new_stragglers(self) -> list[str]:
        """Describe ranks that have become slower than 1.5 times the median of the ranks, each once."""
        usual = {
            one.last.label: median(one.step_seconds)
            for one in self._ranks.values()
            if len(one.step_seconds) >= _MIN_STEPS
        }
        # The lower one of two: with their mean no rank could be slower than twice the other.
        middle = median_low(usual.values()) if usual else 0.0
        found = []
        for known in self._ranks.values():
            seconds = usual.get(known.last.label, 0.0)
            if seconds > _SLOW * middle and not known.is_slow:
                found.append(
                    f"{known.last.label} is slow: {seconds:.3g} s a step, {seconds / middle:.1f} times the median of {len(usual)} ranks"
                )
            known.is_slow = known.is_slow or seconds > _SLOW * middle
        return found


def _describe(known: _Known) -> str:
    text = (
        f"{known.last.label} has made no step for {known.silent_seconds:.0f} s after step {known.last.step}"
    )
    usual = median(known.step_seconds) if known.step_seconds else 0.0
    return f"{text}, {known.silent_seconds / usual:.0f} times its median" if usual else text


class Rank(NamedTuple):
    """A living rank, with descriptors that `close` closes."""

    pid: int
    ticks: int
    life: int
    pages: tuple[int, ...]
    label: str

    def pulse(self) -> Pulse | None:
        """Return how it is; None if it has ended."""
        fields = processes.stat_fields(self.pid)
        if readable(self.life, 0) or not fields:
            return None
        open_ = [
            one
            for one in map(read_page, self.pages)
            if one.goodbye not in (Goodbye.CLOSED, Goodbye.PREEMPTED)
        ]
        return Pulse(
            process=(self.pid, self.ticks),
            label=self.label,
            beats=sum(one.beats for one in open_),
            step=max((one.step for one in open_), default=0),
            beat_ns=max((one.beat_ns for one in open_), default=0),
            excused=not open_ or any(one.busy for one in open_) or fields[0] in "Tt",
        )

    def ask_for_stacks(self) -> dict[int, int]:
        """Ask for the stacks of its threads; return where on its pages they will begin."""
        pages = {page: os.fstat(page).st_size for page in self.pages if read_page(page).dumps}
        # Without a handler the signal would end it.
        if pages and processes.catches(self.pid, STACKS_SIGNAL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.life, STACKS_SIGNAL)
        return pages

    def close(self) -> None:
        """Close its descriptors."""
        for fd in (self.life, *self.pages):
            os.close(fd)


def find_ranks(top: int) -> list[Rank]:
    """Return the process ``top`` and those below it that have a heartbeat page of their own."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        # With hidepid=1 those of other users are named and nothing else.
        with suppress(PermissionError):
            if name.isdigit() and (fields := processes.stat_fields(int(name))):
                children.setdefault(int(fields[1]), []).append(int(name))
    below = [top]
    for pid in below:
        below += children.get(pid, ())
    ranks = []
    for pid in below:
        with suppress(ProcessLookupError):
            life = processes.life_of(pid)
            rank = Rank(pid, processes.start_ticks(pid), life, _pages_of(pid), _label_of(pid))
            # Looked at last: as long as it lives, all of that is of the process of the pidfd.
            if rank.pages and not readable(life, 0):
                ranks.append(rank)
            else:
                rank.close()
    return ranks


def _pages_of(pid: int) -> tuple[int, ...]:
    pages: dict[int, int] = {}
    # In a container it has another one.
    own_pid = processes.own_pid(pid)
    # The process may end at any time, and another user's shows nothing.
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as links:
        for link in links:
            with suppress(FileNotFoundError):
                if os.readlink(link.path) == f"/memfd:{PAGE_NAME} (deleted)":
                    page = os.open(link.path, os.O_RDONLY | os.O_NONBLOCK)
                    number = os.fstat(page).st_ino
                    # A mapping has a descriptor of its own; forked workers and the writer process have the page as well.
                    if number not in pages and _is_page_of(page, own_pid):
                        pages[number] = page
                    else:
                        os.close(page)
    return tuple(pages.values())


def _is_page_of(page: int, own_pid: int) -> bool:
    try:
        check_page(page)
        return read_page(page).pid == own_pid
    except ValueError:
        return False


def _label_of(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
        rank = variables.get(b"RANK", variables.get(b"SLURM_PROCID", b""))
        if rank.isdigit():
            return f"rank {int(rank)} (pid {pid})"
    return f"pid {pid}"


class HungRanks:
    """Watch of one command. `run` is its thread."""

    def __init__(
        self,
        command: int,
        limit_seconds: float,
        page: HeartbeatPage,
        has_daemon: Callable[[], bool],
    ) -> None:
        """Watch the ranks below a command.

        Args:
            command: pid of the command.
            limit_seconds: time without a step that counts as a hang.
            page: page of the command, on which the daemon reads that it hangs.
            has_daemon: returns whether a daemon watches the command.
        """
        self._command = command
        self._page = page
        self._has_daemon = has_daemon
        self._watch = HangWatch(limit_seconds)
        self._ranks: list[Rank] = []
        self._scan_at = 0.0
        self._hangs = False
        self._ended_at, self._in_vain = -1, 0

    def run(self) -> None:
        """Look every second, for as long as the process lives."""
        try:
            while True:
                time.sleep(LOOK_SECONDS)
                self._look()
        except Exception as error:
            # The command goes on as it would without us.
            complain(f"ciuic: its ranks are not watched any more: {error!r}")

    def _look(self) -> None:
        if time.monotonic() >= self._scan_at:
            self._close()
            self._ranks = find_ranks(self._command)
            self._scan_at = time.monotonic() + _SCAN_SECONDS
        pulses, reason = self._judge()
        for text in self._watch.new_stragglers():
            complain(f"ciuic: {text}")
        if self._hangs and not reason and any(one.beats for one in pulses):
            # The daemon takes a beat for the end of the hang.
            self._hangs = False
            self._page.say_hung("")
            self._page.beat()
        elif reason and not self._hangs:
            self._hangs = True
            self._page.say_hung(reason)
            self._restart(reason, max(one.step for one in pulses))

    def _judge(self) -> tuple[list[Pulse], str]:
        pulses = [pulse for rank in self._ranks if (pulse := rank.pulse()) is not None]
        return pulses, self._watch.look(pulses, time.monotonic())

    def _restart(self, reason: str, step: int) -> None:
        """Show the stacks of all ranks, let the daemon take its snapshot, and end the ranks."""
        complain(f"ciuic: hangs: {reason}")
        self._show_stacks()
        if self._has_daemon():
            complain("ciuic: the daemon is asked for an emergency snapshot of the protected directories")
            time.sleep(_SNAPSHOT_SECONDS)
        else:
            complain("ciuic: no emergency snapshot of files: no daemon watches this command")
        if not self._judge()[1]:
            complain("ciuic: it goes on, and is left alone")
            return
        self._in_vain = self._in_vain + 1 if step <= self._ended_at else 1
        self._ended_at = max(step, self._ended_at)
        if self._in_vain > _MAX_IN_VAIN:
            complain(
                f"ciuic: left as it is: it was started again {_MAX_IN_VAIN} times, and never got beyond step {step}"
            )
            return
        complain(f"ciuic: ends {plural(len(self._ranks), 'rank')}, for the launcher to start again")
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
        if left := self._living():
            complain(
                f"ciuic: not ended by SIGKILL, as in a system call that hangs: {', '.join(one.label for one in left)}"
            )
        # Those that are started in their place.
        self._scan_at = 0.0

    def _show_stacks(self) -> None:
        asked = [(rank, rank.ask_for_stacks()) for rank in self._ranks]
        time.sleep(_STACKS_SECONDS)
        for rank, pages in asked:
            found = b"".join(read_stacks(page, start) for page, start in pages.items())
            complain(f"ciuic: stacks of {rank.label}" + ("" if found else ": not to be had"))
            for line in found.decode("utf-8", "replace").splitlines():
                complain(f"  {one_line(line)}")

    def _living(self) -> list[Rank]:
        return [rank for rank in self._ranks if not readable(rank.life, 0)]

    def _signal(self, number: signal.Signals) -> None:
        end = time.monotonic() + _GRACE_SECONDS
        for rank in self._living():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.life, number)
        for rank in self._living():
            readable(rank.life, max(0.0, end - time.monotonic()))

    def _close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._ranks = []


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
