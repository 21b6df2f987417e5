"""A command that gets the signals that are meant for it, each once, from whoever got them in its place.

A scheduler sends a signal to a job's first process alone, or to all its processes, and a process that receives one is not told
which. A sentinel stands beside the command, a child that tells which signals reached it: what it got too, the
command has already, and a second SIGTERM would interrupt the end of a program that ends in order (torchrun).

Guarantees: a signal that reached this process alone is passed on to the command; where the command neither catches, blocks nor
ignores SIGUSR1 or SIGUSR2, whose default is to kill, it gets SIGTERM in their place. A command that is stopped is continued.
The exit code is that of a shell: 128 and the signal where one ended the command.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

from ciuic.system.poll import readable

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
