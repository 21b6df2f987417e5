"""Running a command under the daemon's eyes: what ``ciuic watch -- COMMAND`` does.

We are its parent, because a parent is told how it ended, on every kernel. It is in our process group, so that a terminal's ^C and ^Z
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

from ciuic import processes
from ciuic.acquaintance import Acquaintance
from ciuic.cli.output import complain
from ciuic.errors import CiuicError, NotFound, NotPermitted, Unreachable
from ciuic.watch_client import Hello
from ciuic.watch_page import Goodbye, Page

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
_LOOK_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 5.0


def run(
    words: Sequence[bytes],
    *,
    name: str,
    socket: Callable[[], str],
    heartbeat_file: Path | None = None,
    heartbeat_seconds: float = 0.0,
) -> int:
    """Runs it to its end; its exit status, 128 + signal if it was killed. NotFound, NotPermitted when it cannot be run."""
    waited = {signal.SIGCHLD, *_PASSED_ON}
    # From before there is a child to pass them on to; what waits is passed on then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        child = _start(words, before)
        try:
            page = Page()
            life = processes.life_of(child.pid)
        except OSError as error:  # no memory, an old kernel: it runs all the same
            complain(f"not watched: {error.strerror or error}")
            return _pass_on_until_end(child, waited)
        if heartbeat_file is not None:
            threading.Thread(target=_listen, args=(page, heartbeat_file), daemon=True).start()
        known = Acquaintance(
            socket, _hello(child.pid, name, heartbeat_seconds), [life, page.fd], on_trouble=_complain
        )
        known.start()
        status = _pass_on_until_end(child, waited, page)
        if status not in (0, 128 + signal.SIGINT):
            known.last_words(_LAST_SECONDS)
        return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hello(pid: int, name: str, heartbeat_seconds: float) -> Hello:
    where = os.getcwd()
    return Hello(
        name=name if name.isprintable() else "command",
        where=where if where.isprintable() else "",
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
        return subprocess.Popen(list(words), preexec_fn=as_it_was)
    except FileNotFoundError:
        raise NotFound(f"there is no program {command}") from None
    except PermissionError:
        raise NotPermitted(f"{command} may not be run") from None


def _pass_on_until_end(
    child: subprocess.Popen[bytes], waited: set[signal.Signals], page: Page | None = None
) -> int:
    while True:
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            break
        got = signal.sigtimedwait(waited, _LOOK_SECONDS)
        if got is not None and got.si_signo != signal.SIGCHLD and got.si_code != _SENT_BY_KERNEL:
            os.kill(child.pid, got.si_signo)
    killed = found.si_code != os.CLD_EXITED
    status = 128 + found.si_status if killed else found.si_status
    if page is not None:  # before it is reaped: then the daemon goes by what the page says
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


def _listen(page: Page, file: Path) -> None:
    """In a thread of its own: the file's disk may hang."""
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
