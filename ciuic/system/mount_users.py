"""Find the processes that keep a mount busy: by working or root directory, an open file, or a mapping.

Guarantees: only the text of /proc and O_PATH descriptors are used, so that a mount that hangs does not block the search. Processes
that may not be examined are left out: other users' need root.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ciuic.system import mountinfo


class MountUser(NamedTuple):
    """A process that is in a mount."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def mount_users(path: str | bytes, *, files: bool = True, proc: Path = Path("/proc")) -> list[MountUser]:
    """Return the processes in the topmost mount at ``path``, in the order of their pids; the caller itself is left out.

    Args:
        path: absolute path without symbolic links.
        files: also those that only have a file open or mapped.
        proc: mount point of proc.
    """
    found = mountinfo.mounts_at(os.path.normpath(os.fsencode(path)), mountinfo.read(proc / "self"))
    if not found:
        return []
    mount = found[-1]
    device = b"%02x:%02x" % mount.device
    users = []
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        process = proc / str(pid)
        # It has ended, or belongs to another user.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if pid != os.getpid() and (
                _works_in(process, mount.mount_id)
                or (files and (_has_open(process, mount.mount_id) or _maps(process, device)))
            ):
                comm = (process / "comm").read_bytes().rstrip(b"\n")
                users.append(MountUser(pid, comm.decode("utf-8", "backslashreplace")))
    return users


def describe(users: list[MountUser], *, most: int = 5) -> str:
    """Return the processes in words, the first few by name; empty without any."""
    shown = ", ".join(map(str, users[:most]))
    return shown + (f" and {len(users) - most} more" if len(users) > most else "")


def _works_in(process: Path, mount_id: int) -> bool:
    for name in ("cwd", "root"):
        fd = os.open(process / name, os.O_PATH | os.O_CLOEXEC)
        try:
            if _is_on(Path(f"/proc/self/fdinfo/{fd}"), mount_id):
                return True
        finally:
            os.close(fd)
    return False


def _has_open(process: Path, mount_id: int) -> bool:
    for number in os.listdir(process / "fdinfo"):
        # Closed meanwhile.
        with suppress(FileNotFoundError):
            if _is_on(process / "fdinfo" / number, mount_id):
                return True
    return False


def _is_on(fdinfo: Path, mount_id: int) -> bool:
    return b"mnt_id:\t%d\n" % mount_id in fdinfo.read_bytes()


def _maps(process: Path, device: bytes) -> bool:
    # Not splitlines(): of all control characters in a file's name the kernel escapes the newline alone.
    for line in (process / "maps").read_bytes().split(b"\n"):
        fields = line.split(None, 4)
        if len(fields) > 3 and fields[3] == device:
            return True
    return False
