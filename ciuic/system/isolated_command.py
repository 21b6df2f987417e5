"""A command in a directory, without a network where that is possible, with a time limit.

Guarantees: no process of the command's group is left on return, however it ended. What it prints goes to standard error, because the
caller's standard output is for results.

References:
    unshare(1), network_namespaces(7)
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.system.child_process import find_program

# The loopback device of a new network namespace is down. $1 is ip(8), $2 the command, $3 mount(8), and with $4 the directory is
# shown at $5 as well, where the command begins.
_SCRIPT: Final = """
"$1" link set lo up 2>/dev/null
if [ -n "$4" ]; then
    "$3" --bind -- "$4" "$5" && cd -- "$5" || exit 125
fi
exec /bin/sh -c "$2"
"""
# From the request to end until the group is killed.
_END_SECONDS: Final = 5.0
_STDERR: Final = 2
_PR_SET_PDEATHSIG: Final = 1


class CommandEnd(NamedTuple):
    """Outcome of a command."""

    status: int
    """Exit status, or 128 and the number of the signal that ended it."""
    seconds: float
    timed_out: bool
    had_network: bool
    """True if no network namespace could be made."""


class IsolatedCommand:
    """A command that runs by the shell, in an empty network namespace where that is permitted.

    Leaving the block ends what is left of it.
    """

    def __init__(
        self, command: str, directory: Path, env: Mapping[str, str], *, shown_at: Path | None = None
    ) -> None:
        """Start the command.

        Args:
            command: Command line for sh(1).
            directory: Its working directory.
            env: Its environment.
            shown_at: Directory in whose place the command, and no other process, sees its working directory. Needs root.
        """
        # A user who is not root may make one in a user namespace, unless that is forbidden.
        unshare = [
            find_program("unshare"),
            *(() if os.geteuid() == 0 else ("--user", "--map-current-user")),
            "--net",
        ]
        self.had_network = not _works([*unshare, "/bin/true"])
        """True if no network namespace could be made."""
        if shown_at is not None:
            # Without the other one, where that alone is forbidden. No process of it outlives the first.
            net = () if self.had_network else ("--net",)
            own = ("--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child", "--mount-proc")
            unshare = [find_program("unshare"), *net, *own]
        shown = ("", "") if shown_at is None else (str(directory), str(shown_at))
        words = ["/bin/sh", "-c", _SCRIPT, "sh", find_program("ip"), command, find_program("mount"), *shown]
        is_plain = self.had_network and shown_at is None
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command] if is_plain else [*unshare, *words],
            cwd=directory,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,
            preexec_fn=ends_with_parent(signal.SIGKILL),
        )

    def __enter__(self) -> IsolatedCommand:
        """Return the command."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the command."""
        _end_group(self._process)

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._began

    def wait(self, timeout_seconds: float | None) -> int | None:
        """Wait for its end; return the exit status, 128 and the number of the signal that ended it, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        status = self._process.returncode
        return 128 - status if status is not None and status < 0 else status

    def kill(self) -> None:
        """Kill its process group without warning, as a machine that dies does."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_isolated(
    command: str, directory: Path, env: Mapping[str, str], timeout_seconds: float | None
) -> CommandEnd:
    """Run a command as `IsolatedCommand` does, until it ends.

    Args:
        command: Command line for sh(1).
        directory: Its working directory.
        env: Its environment.
        timeout_seconds: Time after which it is ended; None: never.
    """
    with IsolatedCommand(command, directory, env) as running:
        timed_out = running.wait(timeout_seconds) is None
    status = running.wait(0)
    # Both: it has been ended.
    assert status is not None
    return CommandEnd(status, running.seconds, timed_out, running.had_network)


def ends_with_parent(number: int) -> Callable[[], object]:
    """Return what a child has to call before it runs a program, so that it gets this signal when this thread ends (prctl(2))."""
    # Loaded here: between fork and exec nothing may be imported.
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, number)


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, cwd="/", env={}, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
