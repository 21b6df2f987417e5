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

# The loopback device of a new network namespace is down. $1 is ip(8), $2 the command.
_SCRIPT: Final = '"$1" link set lo up 2>/dev/null; exec /bin/sh -c "$2"'
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


def run_isolated(
    command: str, directory: Path, env: Mapping[str, str], timeout_seconds: float | None
) -> CommandEnd:
    """Run a command by the shell, in an empty network namespace where that is permitted, and end what is left of it.

    Args:
        command: Command line for sh(1).
        directory: Its working directory.
        env: Its environment.
        timeout_seconds: Time after which it is ended; None: never.
    """
    # A user who is not root may make one in a user namespace, unless that is forbidden.
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    unshare = [find_program("unshare"), *user, "--net"]
    had_network = not _works([*unshare, "/bin/true"])
    own_network = [*unshare, "/bin/sh", "-c", _SCRIPT, "sh", find_program("ip"), command]
    began = time.monotonic()
    process = subprocess.Popen(
        ["/bin/sh", "-c", command] if had_network else own_network,
        cwd=directory,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        preexec_fn=_ends_with_parent(signal.SIGKILL),
    )
    timed_out = False
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        _end_group(process)
    status = process.returncode
    return CommandEnd(
        128 - status if status < 0 else status, time.monotonic() - began, timed_out, had_network
    )


def _ends_with_parent(number: int) -> Callable[[], object]:
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
