"""Find the processes that keep a mount busy, and the files below a directory that programs have open or mapped.

A program goes on with the file that it opened: what it writes after another file took the name is below no name. So it can be told
later which of the files found were replaced.

Guarantees: bounded in time, also beside a mount that hangs: of what programs have open the text of /proc and O_PATH descriptors are
read, never the file itself, and no name at or below another mount is looked up; a search that is held up all the same is given up
and goes on in a thread that nobody waits for. Processes that may not be examined are left out: other users' need root. Files are compared by name and inode, so that a
process of another mount namespace, where the name means another file, is not taken for a user of it. ciuic's own overlay workers,
which hold files on behalf of programs, are left out of the files.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic.system import mountinfo

MAX_SEARCH_SECONDS: Final = 2.0
_DELETED: Final = b" (deleted)"
_OWN_MODULES: Final = (b"ciuic.fuse_layer", b"ciuic.daemon", b"ciuic.lazy")

Tops = Sequence[tuple[bytes, bytes]]
"""Directories that are searched: the path without symbolic links, and as it was given."""


class OpenFile(msgspec.Struct, frozen=True, order=True):
    """A file that a process has open or mapped."""

    path: bytes
    """Name below the directory as it was given."""
    pid: int
    program: str
    link: str
    """Link of the descriptor below the process's directory in /proc, or ``maps``."""
    text: bytes
    """Name as the kernel reports it."""
    how: str = "reading"
    """One of `HOW`."""
    uid: int = -1
    """User of the process."""


HOW: Final = ("writing", "mapped", "reading", "cwd")
"""Use of a file by a process, the worst first: open for writing, mapped, open for reading, the working directory."""


def find_open_files(
    directories: Sequence[bytes],
    *,
    max_seconds: float = MAX_SEARCH_SECONDS,
    proc: Path = Path("/proc"),
) -> list[OpenFile]:
    """Return the open and mapped files and the working directories at or below directories, one of each process and name, by name.

    Args:
        directories: Absolute paths of directories or files; symbolic links above the last component are followed.
        max_seconds: Longest search; what was found until then is returned.
        proc: Mount point of proc.
    """
    tops = [
        (os.path.join(os.path.realpath(os.path.dirname(top)), os.path.basename(top)), top)
        for top in directories
        if os.path.lexists(top)
    ]
    if not tops:
        return []
    end = time.monotonic() + max_seconds
    found: dict[tuple[bytes, int], OpenFile] = {}
    # A process that waits for a hung mount may hold what a read of its maps or of its command line waits for.
    search = threading.Thread(target=_search, args=(tops, found, end, proc), name="open files", daemon=True)
    search.start()
    search.join(max_seconds)
    return sorted(dict(found).values())


def _search(tops: Tops, found: dict[tuple[bytes, int], OpenFile], end: float, proc: Path) -> None:
    mounts = mountinfo.read(proc / "self")
    # Not looked into by a restore either.
    beyond = {
        mount.mount_point
        for mount in mounts
        for real, _ in tops
        if mount.mount_point.startswith(real.rstrip(b"/") + b"/")
    }
    for name in os.listdir(proc):
        if time.monotonic() > end:
            return
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # It has ended, or belongs to another user.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for one in _of_process(proc / name, int(name), tops, beyond):
                known = found.get((one.path, one.pid))
                if known is None or HOW.index(one.how) < HOW.index(known.how):
                    found[one.path, one.pid] = one


def replaced(files: Sequence[OpenFile], proc: Path = Path("/proc")) -> list[OpenFile]:
    """Return those that their programs still have, and whose names now lead elsewhere or nowhere."""
    return [one for one in files if _is_unlinked(proc / str(one.pid), one)]


def _is_unlinked(process: Path, one: OpenFile) -> bool:
    try:
        if one.link != "maps":
            return os.readlink(os.fsencode(process / one.link)) == one.text + _DELETED
        name = one.text + _DELETED
        return any(text == name for _, text in _mapped(process, [(name, name)]))
    except OSError:
        return False


def _of_process(process: Path, pid: int, tops: Tops, beyond: set[bytes]) -> Iterator[OpenFile]:
    words = (process / "cmdline").read_bytes().split(b"\0")
    if any(word.startswith(_OWN_MODULES) for word in words):
        return
    program, uid = "", -1
    for link, text, inode, how in (
        *_descriptors(process, tops),
        *(("maps", text, ino, "mapped") for ino, text in _mapped(process, tops)),
        *_working_directory(process, tops),
    ):
        real, top = _top_of(text, tops) or (b"", b"")
        if real and not _is_beyond(text, real, beyond) and _inode(text, how == "cwd") == inode:
            if not program:
                program = (process / "comm").read_bytes().rstrip(b"\n").decode("utf-8", "backslashreplace")
                uid = os.stat(process).st_uid
            yield OpenFile(top + text[len(real) :], pid, program, link, text, how, uid)


def _top_of(text: bytes, tops: Tops) -> tuple[bytes, bytes] | None:
    """Return the first directory at or below which a name is, as (without symbolic links, as given)."""
    for real, top in tops:
        if text == real or text.startswith(real.rstrip(b"/") + b"/"):
            return real, top
    return None


def _is_beyond(text: bytes, top: bytes, beyond: set[bytes]) -> bool:
    """Return whether a name is at or below something that is mounted below ``top``."""
    while beyond and len(text) > len(top):
        if text in beyond:
            return True
        text = os.path.dirname(text)
    return False


def _descriptors(process: Path, tops: Tops) -> Iterator[tuple[str, bytes, int, str]]:
    directory = os.fsencode(process / "fd")
    for name in os.listdir(directory):
        # Closed meanwhile, or a name longer than the kernel reports.
        with suppress(OSError):
            text = os.readlink(directory + b"/" + name)
            # Only of those in question is more read: a machine has tens of thousands.
            if _top_of(text, tops):
                number = name.decode("ascii")
                inode, flags = _facts(process / "fdinfo" / number)
                how = "reading" if flags & os.O_ACCMODE == os.O_RDONLY else "writing"
                yield f"fd/{number}", text, inode, how


def _working_directory(process: Path, tops: Tops) -> Iterator[tuple[str, bytes, int, str]]:
    with suppress(OSError):
        text = os.readlink(os.fsencode(process / "cwd"))
        if not _top_of(text, tops):
            return
        fd = os.open(process / "cwd", os.O_PATH)
        try:
            yield "cwd", text, _facts(Path(f"/proc/self/fdinfo/{fd}"))[0], "cwd"
        finally:
            os.close(fd)


def _facts(path: Path) -> tuple[int, int]:
    """Return (inode, flags) of a descriptor; -1 for an inode that the kernel does not tell."""
    inode, flags = -1, 0
    for line in path.read_bytes().split(b"\n"):
        if line.startswith(b"ino:"):
            inode = int(line[4:])
        elif line.startswith(b"flags:"):
            flags = int(line[6:], 8)
    return inode, flags


def _mapped(process: Path, tops: Tops) -> Iterator[tuple[int, bytes]]:
    """Yield (inode, name) of mapped files, of those below the directories at least."""
    maps = (process / "maps").read_bytes()
    # Of all control characters in a file's name the kernel escapes the newline alone. Searched first: hardly any program has
    # mapped such a file, and most map a hundred others.
    if not any(real.replace(b"\n", b"\\012") in maps for real, _ in tops):
        return
    # Not splitlines(), for other control characters.
    for line in maps.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/"):
            yield int(fields[4]), fields[5].replace(b"\\012", b"\n")


def _inode(path: bytes, is_dir: bool) -> int:
    """Return the inode of a regular file, or of a directory; -2 for anything else."""
    try:
        status = os.lstat(path)
    except OSError:
        return -2
    return status.st_ino if (stat.S_ISDIR if is_dir else stat.S_ISREG)(status.st_mode) else -2


class MountUser(msgspec.Struct, frozen=True):
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
        fd = os.open(process / name, os.O_PATH)
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
