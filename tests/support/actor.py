"""Actor process that runs file system operations as a real user, with its groups, umask, limits and locks.

    with Actor(ALICE) as alice:
        alice.do(top, "mkdir", ("name", 0o755))      ("done", None)

Handles belong to the process and are kept apart by directory, so that one actor can do the same on two sides.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle  # noqa: TID251  between processes of one test
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from support.sides import Side, outcome

_LEAVE_SECONDS = 5


class User(NamedTuple):
    """User of an actor; the first group is the primary one."""

    uid: int
    groups: tuple[int, ...]


ROOT = User(0, (0,))
ALICE = User(21001, (21001, 22001, 22002))
BOB = User(21002, (21002, 22002))
CAROL = User(21003, (21001,))
NOBODY = User(65534, (65534,))


class Actor:
    """Client's end of one actor process. One thread at a time may use it."""

    def __init__(self, user: User = ROOT) -> None:
        self.user = user
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.actor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        self._call("become", user)

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, top: Path | str, what: str, args: tuple[Any, ...] = (), umask: int = 0o022) -> Any:
        """Carry out one operation of a Side on ``top``; return its outcome."""
        return self._call("do", os.fspath(top), what, args, umask)

    def start(self, top: Path | str, what: str, args: tuple[Any, ...] = (), umask: int = 0o022) -> None:
        """Start one operation of a Side on ``top``; ``result`` waits for its outcome."""
        self._send("do", os.fspath(top), what, args, umask)

    def result(self) -> Any:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)

    def start_call(self, function: Callable[..., Any], *args: Any) -> None:
        """Have the process call a function of an importable module; ``result`` waits for its result."""
        self._send("call", function.__module__, function.__name__, args)

    def limit_file_size(self, size_bytes: int) -> None:
        """Set RLIMIT_FSIZE; SIGXFSZ is counted and not fatal (``signals``)."""
        self._call("limit", size_bytes)

    def signals(self) -> int:
        """Return how many SIGXFSZ came since the last call."""
        count: int = self._call("signals")
        return count

    def close_all(self) -> None:
        """Close every handle on every side."""
        self._call("close_all")

    def kill(self, number: int) -> None:
        self._process.send_signal(number)

    def _send(self, *message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def _call(self, *message: Any) -> Any:
        self._send(*message)
        return self.result()

    def __enter__(self) -> Actor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class _Server:
    def __init__(self) -> None:
        self._sides: dict[str, Side] = {}
        self._signals = 0

    def become(self, user: User) -> None:
        os.setgroups(user.groups)
        os.setresgid(user.groups[0], user.groups[0], user.groups[0])
        os.setresuid(user.uid, user.uid, user.uid)

    def do(self, top: str, what: str, args: tuple[Any, ...], umask: int) -> Any:
        os.umask(umask)
        side = self._sides.get(top)
        if side is None:
            side = self._sides[top] = Side(Path(top))
        return outcome(side, what, args)

    def call(self, module: str, function: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(importlib.import_module(module), function)(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def limit(self, size_bytes: int) -> None:
        signal.signal(signal.SIGXFSZ, self._count)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1

    def signals(self) -> int:
        seen, self._signals = self._signals, 0
        return seen

    def close_all(self) -> None:
        for side in self._sides.values():
            side.close_all()
        self._sides.clear()


def main() -> None:
    """Carry out commands from standard input until it ends."""
    server = _Server()
    assert threading.active_count() == 1
    while True:
        try:
            name, *args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = getattr(server, name)(*args)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
