"""Whether others may change what a path leads to: owner and mode of a file and of every directory on the way, as sshd checks them.

Guarantees: a path without a flaw can be renamed, replaced or written by root and this process's own user alone, so it means the same
thing at every later use. Symbolic links are followed one by one, and each directory that they lead through is checked. Where an
ACL is present the group bits of the mode are its mask (acl(5)), so that an entry for a named user counts as well. Leaves to others
what is done about a flaw.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final, NamedTuple

_OTHERS_MAY_WRITE: Final = 0o022
_MAX_LINKS: Final = 40
"""As many as the kernel follows (path_resolution(7))."""


class Flaw(NamedTuple):
    """The first file or directory on a path that others may change."""

    path: str
    uid: int
    mode: int
    """Type and permissions, as ``st_mode``."""
    reason: str

    @property
    def found(self) -> str:
        """Which file it is, its owner and its mode, and what is wrong with that."""
        kind = "directory" if stat.S_ISDIR(self.mode) else "link" if stat.S_ISLNK(self.mode) else "file"
        return (
            f"{kind} {self.path} (owner uid {self.uid}, mode {stat.S_IMODE(self.mode):04o}) is {self.reason}"
        )

    @property
    def remedy(self) -> str:
        """Commands that mend it."""
        import shlex  # not for the commands that find nothing wrong

        name = shlex.quote(self.path)
        if stat.S_ISLNK(self.mode):
            return f"chown -h root:root {name}"
        return f"chown root:root {name}; chmod go-w {name}"


def find_flaw(path: str | os.PathLike[str], *, owners: Iterable[int] = ()) -> Flaw | None:
    """The first flaw on the way to ``path`` or in itself; None if there is none.

    What does not exist yet has no flaw of its own. A directory with the sticky bit, such as /tmp, is accepted on the way: its
    entries can be renamed by their owners alone, and each entry's owner is checked.

    Args:
        owners: uids that may own files and directories on the way, besides root and this process's own.

    Raises:
        OSError: a component could not be examined.
    """
    trusted = {0, os.geteuid(), *owners}
    pending = os.path.abspath(path).split("/")[::-1]
    current, links = "/", 0
    flaw = _flaw_of(current, os.lstat(current), trusted, is_last=not any(pending))
    while pending and flaw is None:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = os.path.dirname(current)  # it has no link in it: its parent is the one in its name
            continue
        here = os.path.join(current, name)
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return None
        flaw = _flaw_of(here, status, trusted, is_last=not pending)
        if not stat.S_ISLNK(status.st_mode):
            current = here
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(here)
        current = "/" if target.startswith("/") else current
        pending.extend(target.split("/")[::-1])
    return flaw


def _flaw_of(path: str, status: os.stat_result, trusted: set[int], *, is_last: bool) -> Flaw | None:
    if status.st_uid not in trusted:
        return Flaw(path, status.st_uid, status.st_mode, "owned by another user")
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS_MAY_WRITE:
        return None  # the mode of a link means nothing
    if status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode) and not is_last:
        return None
    return Flaw(path, status.st_uid, status.st_mode, "writable by others")
