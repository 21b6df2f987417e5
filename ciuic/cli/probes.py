"""Probes of directories that may not answer, each by a child process within a time limit.

Guarantees: no probe takes longer than its limit, whatever the file system does, and neither does the end of this process. A
directory that has not answered once is not asked again.

A finding is ok, a warning or a problem; the latter two have a remedy.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

from ciuic.cli.shared.messages import shown_text
from ciuic.errors import CiuicError
from ciuic.system.poll import readable, wait_until

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """``check`` is a stable name; ``remedy`` says what to do, empty when nothing need be done."""

    check: str
    level: Level
    message: str
    remedy: str = ""


def ok(check: str, message: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding to look at, with its remedy."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that needs the operator, with its remedy."""
    return Finding(check, "problem", message, remedy)


# A disk that is busy answers in well under a second; an operator waits for these at most once for each root.
ANSWER_SECONDS: Final = 5.0
_REAP_PAUSE_SECONDS: Final = 0.005


class NoAnswer(CiuicError):
    """A directory did not answer within the time limit."""


class Probes:
    """Probes of one run of doctor; remembers which directories do not answer."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._seconds = seconds
        self._silent: set[str] = set()

    def findings(self, place: Path | str, run: Callable[[], Iterable[Finding]]) -> list[Finding]:
        """Return the findings of a check that touches ``place``. Raises NoAnswer, and OSError and CiuicError as the check does."""
        return [Finding(*row) for row in self._ask(str(place), lambda: list(run()))]

    def answers(self, place: Path | str) -> bool:
        """Return True if stat(2) of the directory succeeds in time."""
        try:
            self._ask(str(place), lambda: os.stat(place).st_mode)
        except (CiuicError, OSError):
            return False
        return True

    def _ask(self, place: str, run: Callable[[], Any]) -> Any:
        if place not in self._silent:
            try:
                return in_time(run, self._seconds)
            except NoAnswer:
                self._silent.add(place)
        raise NoAnswer(
            f"{shown_text(place)} did not answer within {self._seconds:g} s",
            hint="see the finding on the root",
        )


def not_looked_at(check: str, error: NoAnswer) -> Finding:
    """Return the finding of a check that a directory did not answer."""
    return warning(check, f"not looked at: {error.message}", error.hint)


def in_time(run: Callable[[], Any], seconds: float) -> Any:
    """Return what ``run`` returns in a child, in the form of JSON. Raises NoAnswer, and its OSError and CiuicError."""
    deadline = time.monotonic() + seconds
    read_end, write_end = os.pipe()
    try:
        child = _fork()
        # A process and not a thread: the wait for a file system that hangs cannot be interrupted, and a process
        # with such a thread never ends.
        if child == 0:
            _answer(run, write_end)
    finally:
        os.close(write_end)
    try:
        # Without any data it was killed, for lack of memory for instance.
        document = json.loads(_read(read_end, deadline) or b"null")
    except BaseException:
        # After ^C, too. Not waited for: it ends when the kernel lets go of it, which may be never.
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(read_end)
    _reap(child, deadline)
    if not isinstance(document, dict):
        raise CiuicError("the process that asked ended without an answer")
    if "errno" in document:
        raise OSError(document["errno"], document["error"])
    if "error" in document:
        raise CiuicError(document["error"], hint=document["hint"])
    return document["found"]


def _fork() -> int:
    with warnings.catch_warnings():
        # From Python 3.12 on: this program has one thread; only tests run it in a process with several.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _answer(run: Callable[[], Any], write_end: int) -> NoReturn:
    """Run the question in the child, and end it."""
    try:
        os.setsid()
        # A child that hangs must hold no pipe open whose end somebody waits for, such as that of
        # `ciuic doctor | less`.
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.closerange(3, write_end)
        os.closerange(write_end + 1, os.sysconf("SC_OPEN_MAX"))
        try:
            document = {"found": run()}
        except OSError as error:
            document = {"errno": error.errno, "error": error.strerror}
        except CiuicError as error:
            document = {"error": error.message, "hint": error.hint}
        except Exception as error:
            document = {"error": f"{type(error).__name__}: {error}", "hint": ""}
        # ASCII, in which json writes any path: it is one whole document or none.
        data = json.dumps(document).encode()
        while data:
            data = data[os.write(write_end, data) :]
    finally:
        # Nothing of the parent's (buffers, exit functions, the caller's frames) is this process's to end.
        os._exit(0)


def _read(fd: int, deadline: float) -> bytes:
    found = b""
    while readable(fd, max(0.0, deadline - time.monotonic())):
        data = os.read(fd, 1 << 16)
        if not data:
            return found
        found += data
    raise NoAnswer("no answer in time")


def _reap(child: int, deadline: float) -> None:
    # Within the limit, too: the child may hang in closing its files.
    wait_until(lambda: os.waitpid(child, os.WNOHANG)[0], deadline - time.monotonic(), _REAP_PAUSE_SECONDS)
