"""A command in a directory, without a network where that is possible, with limits of time and memory.

Guarantees: no process of the command's group is left on return, however it ended. Of all processes it is the first to end where
memory runs out. Run by root it has the given user's rights and no capabilities, and can gain none. What it prints goes to standard
error, because the caller's standard output is for results.

References:
    unshare(1), setpriv(1), network_namespaces(7), capabilities(7), proc_pid_oom_score_adj(5), setrlimit(2)
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.system.child_process import as_user, find_program, leave_keyring

# The loopback device of a new network namespace is down. $1 is ip(8), the others are the command.
_SCRIPT: Final = '"$1" link set lo up 2>/dev/null; shift; exec "$@"'
# Highest score: the first that the kernel ends where memory runs out.
_OOM_SCORE: Final = b"1000"
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
    command: str,
    directory: Path,
    env: Mapping[str, str],
    timeout_seconds: float | None,
    *,
    user: tuple[int, int] | None = None,
) -> CommandEnd:
    """Run a command by the shell, in an empty network namespace where that is permitted, and end what is left of it.

    Args:
        command: Command line for sh(1).
        directory: Its working directory.
        env: Its environment.
        timeout_seconds: Time after which it is ended; None: never.
        user: Uid and gid whose rights it has, without capabilities; None: those of this process. Needs root.
    """
    argv, env = ["/bin/sh", "-c", command], dict(env)
    if user is not None:
        argv, env = as_user(argv, env, *user)
    # A user who is not root may make one in a user namespace, unless that is forbidden.
    own = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    unshare = [find_program("unshare"), *own, "--net"]
    had_network = not _works([*unshare, "/bin/true"])
    if not had_network:
        argv = [*unshare, "/bin/sh", "-c", _SCRIPT, "sh", find_program("ip"), *argv]
    began = time.monotonic()
    process = subprocess.Popen(
        argv,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        preexec_fn=_limits(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2),
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


def _limits(memory_bytes: int) -> Callable[[], None]:
    """Return what the child calls before it runs a program: parent-death signal, data limit, highest OOM score."""
    # Loaded here: between fork and exec nothing may be imported.
    libc, leave = ctypes.CDLL(None), leave_keyring()

    def apply() -> None:
        leave()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or hard > memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        # Read-only in some containers: then it has the score of its parent.
        with suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, _OOM_SCORE)
            os.close(fd)

    return apply


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
